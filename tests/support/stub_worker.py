"""What policy knows of a worker, without a link to one."""

from dataclasses import dataclass

from pdserve_common.types.engine import EngineInfo, KVTransferParams, SchedulerStats, WorkerRole
from pdserve_router.workers.worker import WorkerState


@dataclass(eq=False)
class StubWorker:
    """A worker of the router's pool that the test sets as it likes."""

    role: WorkerRole = WorkerRole.DECODE
    address: str = "host:1"
    info: EngineInfo | None = None
    engine_id: str = "d0"
    stats: SchedulerStats | None = None
    num_in_flight: int = 0
    num_routers: int = 1
    is_ready: bool = True
    state: WorkerState = WorkerState.READY

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def kv_transfer_params(self) -> KVTransferParams:
        return KVTransferParams(remote_engine_id=self.engine_id, remote_host="h", remote_port=1)
