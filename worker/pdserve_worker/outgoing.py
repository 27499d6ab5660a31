"""One end of a KvLink's stream: what is to be sent, until it is closed."""

import asyncio
import contextlib
from typing import Generic, TypeVar

HANDSHAKE_S = 5.0
# A peer that reads so slowly is as good as gone.
MAX_UNSENT = 16384

MessageT = TypeVar("MessageT")


class Outgoing(Generic[MessageT]):
    """The messages of one stream. Any thread may `send` and `close`, neither blocks; the rest, and
    making one, belongs to the event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._unsent: asyncio.Queue[MessageT | None] = asyncio.Queue()
        self._closed = asyncio.Event()
        self.closed_because = ""

    def send(self, message: MessageT) -> None:
        """Queue a message, in order; too many close the stream."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the stream
            self._loop.call_soon_threadsafe(self._put, message)

    def close(self, reason: str) -> None:
        """Drop what is not sent and end the stream; the first reason counts."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, reason)

    async def get(self) -> MessageT | None:
        """Return the next message, None once the stream is to end."""
        return None if self._closed.is_set() else await self._unsent.get()

    async def wait_closed(self) -> str:
        """Return why the stream is to end, as soon as it is."""
        await self._closed.wait()
        return self.closed_because

    def _put(self, message: MessageT) -> None:
        if self._unsent.qsize() >= MAX_UNSENT:
            self._end("too slow")
        elif not self._closed.is_set():
            self._unsent.put_nowait(message)

    def _end(self, reason: str) -> None:
        if not self._closed.is_set():
            self.closed_because = reason
            self._closed.set()
            self._unsent.put_nowait(None)
