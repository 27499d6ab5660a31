"""Writes to streams in the order in which they got text, a few in each turn of the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable

# A turn writes to so many (10 us each over HTTP, 40 us over gRPC) before frames of workers and
# first tokens have theirs.
_WRITES_PER_TURN = 32


class WriteQueue:
    """While the event loop keeps up it is empty before a worker's next frame: every token leaves at
    once, alone. While it is behind, a stream's further tokens come before its turn does, and leave
    with those that wait: a write costs as much for four tokens as for one.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def add(self, write: Callable[[], None]) -> None:
        """Have `write`, which must not raise, called soon, behind all that wait."""
        self._waiting.append(write)
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        for _ in range(min(_WRITES_PER_TURN, len(self._waiting))):
            self._waiting.popleft()()
        self._is_scheduled = False
        if self._waiting:
            self._schedule()
