"""Time, chance and tasks of a process, handed down from where it is assembled. A simulator hands
down its own.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Those of this machine and of the event loop that runs, but for what is given. What needs only
    the time takes `now`, as its `clock`.
    """

    # Seconds; only differences mean something.
    now: Callable[[], float] = time.monotonic
    # Not for secrets.
    rng: random.Random = field(default_factory=random.Random)
    # The event loop has weak references alone.
    _tasks: set["asyncio.Task[Any]"] = field(default_factory=set, init=False, repr=False)

    def now_ns(self) -> int:
        """Return `now` in nanoseconds."""
        return round(self.now() * 1e9)

    async def sleep(self, seconds: float) -> None:
        """Return after so long."""
        await asyncio.sleep(seconds)

    def call_later(
        self, delay_s: float, call: Callable[..., object], *args: object
    ) -> asyncio.TimerHandle:
        """Call once after `delay_s`, unless what this returns is cancelled."""
        return asyncio.get_running_loop().call_later(delay_s, call, *args)

    async def wait(self, future: "asyncio.Future[T]", timeout_s: float | None) -> bool:
        """Wait for a future, which goes on after `timeout_s`; False if it does. None: without
        end.
        """
        done, _ = await asyncio.wait([future], timeout=timeout_s)
        return bool(done)

    def spawn(
        self, coroutine: Coroutine[Any, Any, T], *, name: str | None = None
    ) -> "asyncio.Task[T]":
        """Start a task, and keep it until its end. What it raises and nobody asks for is a defect
        (`defects.watch_event_loop`).
        """
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
