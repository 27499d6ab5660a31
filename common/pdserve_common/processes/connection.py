"""Messages between threads of two processes that wait for each other."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any, Generic

from pdserve_common.processes.calls import Call, Handlers, HandlerT, ResultT, answer
from pdserve_common.processes.frames import FrameCodec, MessageT

# More takes longer to allocate than to fill.
RECEIVE_BYTES = 1 << 16


class Connection(Generic[MessageT]):
    """One end of a socket. Any thread may send, one receives; how long, the socket's timeout says.
    What they do raises OSError if the other end is gone or takes its time.
    """

    def __init__(self, end: socket.socket, codec: FrameCodec[MessageT]) -> None:
        self.socket = end
        self._codec = codec
        self._reader = codec.reader()
        self._send_lock = threading.Lock()

    def send(self, message: MessageT, ref: int = 0) -> None:
        self.send_frame(self._codec.encode(message, ref))

    def send_frame(self, frame: bytes) -> None:
        with self._send_lock:
            self.socket.sendall(frame)

    def receive(self) -> Iterator[tuple[MessageT, int]]:
        """Wait, and yield what has come: messages and what they refer to. Raises ProtocolError."""
        data = self.socket.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the connection has ended")
        yield from self._reader.feed(data)

    def messages(self) -> Iterator[tuple[MessageT, int]]:
        """Yield what comes, until the other end is gone. Raises ProtocolError."""
        while True:
            yield from self.receive()

    def call(self, call: Call[ResultT], timeout_s: float) -> ResultT:
        """Return what comes of a call; nobody else receives, and nothing else comes. Raises what
        the call raises, ProtocolError, and TimeoutError, an OSError, after such a silence.
        """
        self.socket.settimeout(timeout_s)
        self.send(call)  # type: ignore[arg-type]
        found, _ = next(self.messages())
        return found.result_of(call)  # type: ignore[attr-defined,no-any-return]


def answer_calls(
    connection: Connection[Any], handlers: Handlers[HandlerT], target: HandlerT
) -> None:
    """Have `target` carry out calls, one after the other, until the other end is gone."""
    with contextlib.suppress(ConnectionError):
        for call, ref in connection.messages():
            connection.send(answer(call, handlers, target), ref)


async def receive_one(end: socket.socket, codec: FrameCodec[MessageT]) -> tuple[MessageT, int]:
    """Wait on the event loop for the only message that comes. Raises ProtocolError, and OSError if
    the other end is gone.
    """
    reader = codec.reader()
    while data := await asyncio.get_running_loop().sock_recv(end, RECEIVE_BYTES):
        for found in reader.feed(data):
            return found
    raise ConnectionResetError("the connection has ended")
