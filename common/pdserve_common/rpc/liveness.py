"""How processes see that their peers live: each says something every HEARTBEAT_S, and who is silent
for longer is dead. gRPC's own pings do not tell: it answers them for a hung event loop, too.
"""

import asyncio
import time
from collections.abc import Callable

from pdserve_common.observability import defects
from pdserve_common.observability.defects import Loop

HEARTBEAT_S = 1.0
# A peer that says nothing for this long is dead.
SILENCE_S = 5.0


async def every(interval_s: float, call: Callable[[], None]) -> None:
    """Call again and again, first after `interval_s`. Raises what `call` does."""
    while True:
        await asyncio.sleep(interval_s)
        call()


def keep_calling(
    loop: Loop, interval_s: float, call: Callable[[], None], *, costs: str
) -> "asyncio.Task[None]":
    """Call again and again, whatever `call` raises, until the task is cancelled."""

    def contained() -> None:
        with defects.contained(loop, costs):
            call()

    return asyncio.create_task(every(interval_s, contained))


class AwakeClock:
    """Seconds for which this process was awake, to measure silence by: what a peer sent while we
    hung is still to be read. Of the time between two ticks at most `interval_s` counts.
    """

    def __init__(self, interval_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._awake_s = 0.0
        self._ticked_at = clock()

    def __call__(self) -> float:
        return self._awake_s + min(self._clock() - self._ticked_at, self._interval_s)

    def tick(self) -> float:
        """Call it every `interval_s`, or more often. Return how long this process hung since."""
        now = self._clock()
        passed_s, self._ticked_at = now - self._ticked_at, now
        self._awake_s += min(passed_s, self._interval_s)
        return max(0.0, passed_s - self._interval_s)


async def sleep_awake(seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Sleep until this process was awake for so long."""
    awake = AwakeClock(HEARTBEAT_S, clock=clock)
    while (left_s := seconds - awake()) > 0:
        await asyncio.sleep(min(left_s, HEARTBEAT_S))
        awake.tick()
