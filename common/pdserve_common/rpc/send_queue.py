"""What waits to be sent to a peer: in order, and bounded. A full queue is closed: the peer reads
too slowly, and what it lacks cannot be left out.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

MessageT = TypeVar("MessageT")


def _count(message: object) -> int:
    return 1


class SendQueue(Generic[MessageT]):
    """The messages of one stream. Used on the event loop's thread."""

    def __init__(self, max_size: int, size_of: Callable[[MessageT], int] = _count) -> None:
        """Hold at most `max_size` of what `size_of` says of each message; by default they are
        counted.
        """
        self._max_size = max_size
        self._size_of = size_of
        self._size = 0
        self._messages: asyncio.Queue[tuple[MessageT, int] | None] = asyncio.Queue()
        self._closed = asyncio.Event()
        # Empty until it is.
        self.closed_because = ""

    def put(self, message: MessageT) -> None:
        """Queue a message, or close the queue if it does not fit; no-op once it is closed."""
        size = self._size_of(message)
        if self._size + size > self._max_size:
            self.abort(f"too slow: {self._size} behind, at most {self._max_size}")
        elif not self._closed.is_set():
            self._size += size
            self._messages.put_nowait((message, size))

    def abort(self, reason: str) -> None:
        """Drop what is not sent and close; the first reason counts."""
        if not self._closed.is_set():
            self.closed_because = reason
            self._closed.set()
            self._messages.put_nowait(None)

    def finish(self, reason: str = "") -> None:
        """End behind what is queued."""
        self.closed_because = self.closed_because or reason
        self._messages.put_nowait(None)

    async def get(self) -> MessageT | None:
        """Return the next message, None at the end."""
        entry = None if self._closed.is_set() else await self._messages.get()
        if entry is None:
            return None
        message, size = entry
        self._size -= size
        return message

    async def wait_closed(self) -> str:
        """Return why the queue was closed, as soon as it is."""
        await self._closed.wait()
        return self.closed_because
