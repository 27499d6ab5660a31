"""What policy knows of a worker, and has it do."""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable

from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import (
    EngineCoreRequest,
    EngineInfo,
    KVTransferParams,
    SchedulerStats,
    WorkerRole,
)
from pdserve_router.workers.circuit_breaker import CircuitBreaker
from pdserve_router.workers.clients.listeners import OutputCallback, TokenCallback, no_token
from pdserve_router.workers.model_version import UNKNOWN


class WorkerState(enum.Enum):
    """What a worker can be used for."""

    CONNECTING = "connecting"
    READY = "ready"
    # Its operator has paused it: requests would wait. It may become ready again.
    PAUSED = "paused"
    DRAINING = "draining"
    # Its stream broke; its requests wait for the next one to adopt them.
    REATTACHING = "reattaching"
    DOWN = "down"


class Worker(ABC):
    """One worker: its state, its load, and the means to run requests there. Everything runs on the
    event loop's thread; nothing blocks.
    """

    def __init__(self, address: str, *, role: WorkerRole, runtime: Runtime) -> None:
        self.address = address
        self.host, _, self._port = address.rpartition(":")
        self.role = role
        self.state = WorkerState.CONNECTING
        self.info: EngineInfo | None = None
        # The model version of what it computes; unknown until it was attached once.
        self.model_version = UNKNOWN
        # Digests of the adapters that its processes had before it started again, and that it has
        # not got back.
        self.forgotten: frozenset[str] = frozenset()
        self.stats: SchedulerStats | None = None
        # Attached to it, this one among them.
        self.num_routers = 1
        # Fed by the pool; a new process begins with a closed one.
        self.breaker = CircuitBreaker(clock=runtime.now)

    def __str__(self) -> str:
        return self.address

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    @property
    def engine_id(self) -> str:
        """The worker's name for itself; empty until it was attached once."""
        return self.info.engine_id if self.info is not None else ""

    @property
    def epoch(self) -> str:
        """Which start of its process this is; empty until it was attached once."""
        return self.info.epoch if self.info is not None else ""

    @property
    def kv_transfer_params(self) -> KVTransferParams:
        """How the other side of a handoff finds this worker."""
        return KVTransferParams(
            remote_engine_id=self.engine_id, remote_host=self.host, remote_port=int(self._port)
        )

    @property
    @abstractmethod
    def num_in_flight(self) -> int:
        """Requests of this router on it."""

    @abstractmethod
    async def wait_until_idle(self) -> None:
        """Return when no request is in flight. As bounded as the requests' deadlines are."""

    @abstractmethod
    def start(self) -> None:
        """Attach, and keep attached."""

    @abstractmethod
    async def close(self) -> None:
        """Leave the worker; requests still on it get their error."""

    @abstractmethod
    def add_request(
        self,
        request: EngineCoreRequest,
        on_output: OutputCallback,
        on_defect: Callable[[], None] = lambda: None,
        *,
        take_token: TokenCallback = no_token,
    ) -> None:
        """Send a request. `on_output` gets the outputs of this attempt, the last one has a
        finish_reason, also when the worker is lost; `on_defect` is called instead once `on_output`
        has raised. A token that comes alone goes to `take_token` first; those that it takes do
        not come as an output. A higher attempt takes the place of the one that runs, which gets no
        end. A paused worker keeps the request until it goes on. Tensors that it names are put
        first. Raises NoWorkerError if the worker takes nothing.
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request; its callback is not called any more. Workers ignore ids they do not know,
        so it may also be called after the last output.
        """
