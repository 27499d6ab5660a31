"""A rank's process, as its executor sees it."""

from collections.abc import Sequence

from pdserve_common.processes.child import ChildProcess, describe_end
from pdserve_common.processes.connection import Connection
from pdserve_common.processes.frames import FrameCodec
from pdserve_engine.executor.messages import Message

# A rank reads calls all the time: this long nothing but a stopped process takes.
SEND_TIMEOUT_S = 10.0
# A process whose socket has closed is on its way out.
DESCRIBE_TIMEOUT_S = 1.0


class RankProcess:
    """Started by the constructor, on a thread that lives as long: it ends with that thread."""

    def __init__(
        self, rank: int, cores: str, descriptors: Sequence[int], codec: FrameCodec[Message]
    ) -> None:
        """`cores` is a list like 0-3,8, or empty; the process inherits the descriptors."""
        self.rank = rank
        self._child = ChildProcess.start(
            f"rank {rank}",
            "pdserve_engine.executor.rank",
            [cores],
            num_sockets=2,
            pass_fds=descriptors,
        )
        # `steps` is for steps and what comes behind them: StepSockets writes and reads it.
        calls, self.steps = self._child.sockets
        calls.settimeout(SEND_TIMEOUT_S)
        self.calls = Connection(calls, codec)

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        """End it now. Any thread."""
        self._child.kill()

    def describe_end(self) -> str:
        """Say how it has ended; nothing if it has not."""
        status = self._child.wait(DESCRIBE_TIMEOUT_S)
        return "" if status is None else f"it {describe_end(status)}"

    def close(self, timeout_s: float) -> None:
        """Wait for its end, or kill it."""
        self._child.end(timeout_s)
        self._child.close()
