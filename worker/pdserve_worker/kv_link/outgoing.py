"""One end of a KvLink's stream: what is to be sent, until it is closed."""

import asyncio
import contextlib
from typing import TypeVar

from pdserve_common.rpc.send_queue import SendQueue

HANDSHAKE_S = 5.0
# Messages. A peer that reads so slowly is as good as gone.
MAX_UNSENT = 16384

MessageT = TypeVar("MessageT")


class Outgoing(SendQueue[MessageT]):
    """A SendQueue with a `send` and a `close` for any thread; neither blocks."""

    def __init__(self) -> None:
        super().__init__(MAX_UNSENT)
        self._loop = asyncio.get_running_loop()

    def send(self, message: MessageT) -> None:
        """Queue a message, in order; too many close the stream."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: so is the stream
            self._loop.call_soon_threadsafe(self.put, message)

    def close(self, reason: str) -> None:
        """Drop what is not sent and end the stream; the first reason counts."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.abort, reason)
