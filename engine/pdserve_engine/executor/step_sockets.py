"""The sockets over which steps go, at the engine's end."""

import contextlib
import select
import socket
import threading
from collections.abc import Iterator, Sequence

from pdserve_common.processes.connection import Connection
from pdserve_common.processes.frames import FrameCodec
from pdserve_engine.executor.messages import Message


class StepSockets:
    """One to each rank. The thread that waits for a step writes and reads itself, as waking another
    up takes longer than all else. Only `wait` waits: a rank that computes does not read. Others may
    send as well, as where ranks do not agree on an adapter.
    """

    def __init__(self, connections: Sequence[socket.socket], codec: FrameCodec[Message]) -> None:
        self._connections = connections
        self._receive = [Connection(each, codec).receive for each in connections]
        # By rank: what it has not taken yet.
        self._unsent = [bytearray() for _ in connections]
        self._send_lock = threading.Lock()
        self._ranks = {connection.fileno(): rank for rank, connection in enumerate(connections)}
        self._poll = select.poll()
        for connection in connections:
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)

    def send(self, rank: int, frame: bytes) -> None:
        """Send what the rank takes at once; `wait` sends the rest. Raises OSError if it is gone."""
        unsent = self._unsent[rank]
        with self._send_lock:
            num_sent = 0 if unsent else self._write(rank, frame)
            if num_sent < len(frame):
                unsent += frame[num_sent:]
                self._poll.modify(self._connections[rank], select.POLLIN | select.POLLOUT)

    def wait(self, timeout_s: float | None) -> list[int]:
        """Return which ranks have said something or are gone, once there are any; none if there are
        none for so long.
        """
        while ready := self._poll.poll(None if timeout_s is None else 1e3 * timeout_s):
            for descriptor, events in ready:
                if events & select.POLLOUT:
                    self._send_rest(self._ranks[descriptor])
            if ranks := [self._ranks[fd] for fd, events in ready if events & ~select.POLLOUT]:
                return ranks
        return []

    def receive(self, rank: int) -> Iterator[tuple[Message, int]]:
        """Yield what a rank has said; there is something. Raises OSError or ProtocolError."""
        return self._receive[rank]()

    def _send_rest(self, rank: int) -> None:
        unsent = self._unsent[rank]
        with self._send_lock:
            with contextlib.suppress(OSError):  # it is gone, which reading tells
                del unsent[: self._write(rank, unsent)]
            if not unsent:
                self._poll.modify(self._connections[rank], select.POLLIN)

    def _write(self, rank: int, data: bytes | bytearray) -> int:
        try:
            return self._connections[rank].send(data)
        except BlockingIOError:
            return 0
