"""Whose requests go to the workers next, while these have enough to do."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve_common.errors import DeadlineExceededError
from pdserve_common.runtime import Runtime


@dataclass(slots=True, eq=False)
class _Waiting:
    """Some work that waits for its turn."""

    number: int
    work: float
    share: float
    turn: "asyncio.Future[None]"


@dataclass(slots=True, eq=False)
class _Tenant:
    """The work of a tenant that waits, as it came."""

    # Where the first of it begins; if none waits, where what has begun ends.
    tag: float = 0.0
    waiting: deque[_Waiting] = field(default_factory=deque)


class FairQueue:
    """Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) in front of a window of work
    that is under way. While there is room in the window nobody waits. The first that waits of each
    tenant is tagged with the time at which it would begin if all tenants had their shares, and the
    least tag is next: who sends little is not behind the long queue of another, and who is alone
    has all of the window. Who leaves has cost its tenant nothing: the next has its tag.
    """

    def __init__(self, window: Callable[[], float], runtime: Runtime) -> None:
        """`window` returns how much work may be under way; what begins last may exceed it."""
        self._window = window
        self._runtime = runtime
        # The work of all who wait.
        self.waiting = 0.0
        self._num_waiting = 0
        self._under_way = 0.0
        self._numbers = itertools.count()
        # The tag of what has begun last, and who has come since somebody waits. The least tag is
        # looked for among all of them: a heap would have to be mended when somebody leaves.
        self._virtual_time = 0.0
        self._tenants: dict[str, _Tenant] = {}

    async def begin(
        self, tenant: str, work: float, *, share: float = 1.0, timeout_s: float | None = None
    ) -> None:
        """Wait for a turn to begin some work, which has to be ended with `end`. Raises
        DeadlineExceededError.
        """
        if not self._num_waiting and self._has_room:
            self._under_way += work
            return
        queue = self._tenants.setdefault(tenant, _Tenant())
        waiting = self._join(queue, work, share)
        try:
            await self._runtime.wait(waiting.turn, timeout_s)
        except asyncio.CancelledError:
            if waiting.turn.done():
                self.end(work)
            else:
                self._remove(queue, waiting)
            raise
        if not waiting.turn.done():
            self._remove(queue, waiting)
            raise DeadlineExceededError("the deadline passed before it was the request's turn")

    def end(self, work: float) -> None:
        """Some work is not under way any more."""
        self._under_way -= work
        while self._num_waiting and self._has_room:
            self._begin_next()
        if not self._num_waiting:
            self._virtual_time = 0.0
            self._tenants.clear()

    @property
    def _has_room(self) -> bool:
        # One alone is let through whatever the window says: its end is the next occasion.
        return not self._under_way or self._under_way < self._window()

    def _join(self, queue: _Tenant, work: float, share: float) -> _Waiting:
        if not queue.waiting:
            queue.tag = max(self._virtual_time, queue.tag)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(next(self._numbers), work, share, turn)
        queue.waiting.append(waiting)
        self.waiting += work
        self._num_waiting += 1
        return waiting

    def _remove(self, queue: _Tenant, waiting: _Waiting) -> None:
        queue.waiting.remove(waiting)
        self.waiting -= waiting.work
        self._num_waiting -= 1

    def _begin_next(self) -> None:
        queue = min(
            (each for each in self._tenants.values() if each.waiting),
            key=lambda each: (each.tag, each.waiting[0].number),
        )
        waiting = queue.waiting[0]
        self._remove(queue, waiting)
        self._virtual_time = queue.tag
        queue.tag += waiting.work / waiting.share
        self._under_way += waiting.work
        waiting.turn.set_result(None)
