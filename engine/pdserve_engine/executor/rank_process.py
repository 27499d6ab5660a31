"""A rank's process, as its executor sees it."""

import logging
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence

from pdserve_common import processes
from pdserve_engine.executor.messages import Message
from pdserve_engine.frames import FrameCodec

logger = logging.getLogger(__name__)

# A rank reads calls all the time: this long nothing but a stopped process takes.
SEND_TIMEOUT_S = 10.0
# More takes longer to allocate than to fill.
RECEIVE_BYTES = 1 << 16
# A process whose socket has closed is on its way out.
DESCRIBE_TIMEOUT_S = 1.0


class RankProcess:
    """Started by the constructor, on a thread that lives as long: it ends with that thread."""

    def __init__(
        self, rank: int, cores: str, descriptors: Sequence[int], codec: FrameCodec[Message]
    ) -> None:
        """`cores` is a list like 0-3,8, or empty; the process inherits the descriptors."""
        self.rank = rank
        self._reader = codec.reader()
        self.connection, calls = socket.socketpair()
        self.connection.settimeout(SEND_TIMEOUT_S)
        # For steps and what comes behind them: StepSockets writes and reads it.
        self.steps, steps = socket.socketpair()
        with calls, steps:
            fds = [calls.fileno(), steps.fileno()]
            self._process = processes.spawn(
                "pdserve_engine.executor.rank",
                [*map(str, fds), cores],
                pass_fds=[*fds, *descriptors],
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, frame: bytes) -> None:
        """Raises OSError if it is gone or takes nothing."""
        self.connection.sendall(frame)

    def receive(self) -> Iterator[tuple[Message, int]]:
        """Yield what has come; there is something. Raises OSError, EOFError or ProtocolError."""
        data = self.connection.recv(RECEIVE_BYTES)
        if not data:
            raise EOFError("the connection has ended")
        yield from self._reader.feed(data)

    def kill(self) -> None:
        """End it now. Any thread."""
        self._process.kill()

    def describe_end(self) -> str:
        """Say how it has ended; nothing if it has not."""
        try:
            status = self._process.wait(DESCRIBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return ""
        if status >= 0:
            return f"it ended with status {status}"
        return f"it was ended by {signal.Signals(-status).name}"

    def close(self, timeout_s: float) -> None:
        """Wait for its end, or kill it."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("rank %d does not end and is killed", self.rank)
            self._process.kill()
            self._process.wait()
        self.connection.close()
        self.steps.close()
