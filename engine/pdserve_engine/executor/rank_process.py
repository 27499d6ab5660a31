"""A rank's process, as its executor sees it."""

from collections.abc import Sequence

from pdserve_common.processes.child import ChildProcess, start
from pdserve_common.processes.connection import Connection
from pdserve_common.processes.frames import FrameCodec
from pdserve_engine.executor.messages import Message

# A rank reads calls all the time: this long nothing but a stopped process takes.
SEND_TIMEOUT_S = 10.0


class RankProcess(ChildProcess):
    """Started by the constructor, on a thread that lives as long: it ends with that thread."""

    def __init__(
        self, rank: int, cores: str, descriptors: Sequence[int], codec: FrameCodec[Message]
    ) -> None:
        """`cores` is a list like 0-3,8, or empty; the process inherits the descriptors."""
        module = "pdserve_engine.executor.rank"
        started = start(module, [cores], num_sockets=2, pass_fds=descriptors)
        super().__init__(f"rank {rank}", *started)
        self.rank = rank
        # `steps` is for steps and what comes behind them: StepSockets writes and reads it.
        calls, self.steps = self.sockets
        calls.settimeout(SEND_TIMEOUT_S)
        self.calls = Connection(calls, codec)
