"""One end of the socket between a worker and its engine process."""

import asyncio
import threading
from collections.abc import Callable
from typing import cast

from pdserve_common.processes.calls import ProtocolError
from pdserve_engine.clients.messages import CODEC, Message

# Above this an end that does not read counts as stalled ...
STALL_BYTES = 1024 * 1024
# ... and the connection ends when it has been for this long, or this much waits for it.
STALL_TIMEOUT_S = 10.0
MAX_UNSENT_BYTES = 64 * 1024 * 1024


class Channel(asyncio.Protocol):
    """Sends and receives messages. `on_message(message, ref)` and, once, `on_lost(reason)` run on
    the event loop's thread; an exception of `on_message` ends the connection.
    """

    _transport: asyncio.Transport

    def __init__(
        self, on_message: Callable[[Message, int], None], on_lost: Callable[[str], None]
    ) -> None:
        """Must run inside the event loop."""
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader = CODEC.reader()
        self._lock = threading.Lock()
        self._unsent: list[bytes] = []  # guarded by _lock
        self._stall: asyncio.TimerHandle | None = None
        self._end = ""
        self._is_lost = False

    @property
    def unsent_bytes(self) -> int:
        """What waits for the other end. On the event loop's thread."""
        with self._lock:
            num_queued = sum(map(len, self._unsent))
        return num_queued + self._transport.get_write_buffer_size()

    def send(self, message: Message, ref: int = 0) -> None:
        """Queue a message, in the order of the calls. Any thread; forgotten if the connection has
        ended. Raises ProtocolError if it is too large.
        """
        frame = CODEC.encode(message, ref)
        with self._lock:
            self._unsent.append(frame)
            is_first = len(self._unsent) == 1
        if is_first:
            self._loop.call_soon_threadsafe(self._flush)

    def close(self) -> None:
        """End the connection when all is sent."""
        self._flush()
        self._transport.close()

    def abort(self, reason: str) -> None:
        """End the connection now."""
        self._end = self._end or reason
        if not self._is_lost:
            self._transport.abort()

    def _flush(self) -> None:
        with self._lock:
            frames, self._unsent = self._unsent, []
        if frames and not self._transport.is_closing():
            self._transport.write(b"".join(frames))
            num_bytes = self._transport.get_write_buffer_size()
            if num_bytes > MAX_UNSENT_BYTES:
                self.abort(f"the other end is {num_bytes} bytes behind")

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=STALL_BYTES)

    def data_received(self, data: bytes) -> None:
        try:
            for message, ref in self._reader.feed(data):
                self._on_message(message, ref)
        except ProtocolError as error:
            self.abort(str(error))

    def pause_writing(self) -> None:
        reason = f"the other end has read nothing for {STALL_TIMEOUT_S:g} s"
        self._stall = self._loop.call_later(STALL_TIMEOUT_S, self.abort, reason)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self.resume_writing()
        self._on_lost(self._end or (str(exc) if exc is not None else "the connection ended"))
