"""The network side of a worker process."""

from dataclasses import dataclass

from pdserve_common.config import LogLevel, opt
from pdserve_common.limits.validation import id_problem
from pdserve_common.observability.tracing_config import check_endpoint, endpoint_opt
from pdserve_common.rpc.tls import TlsConfig
from pdserve_common.types.tensors import MAX_TENSOR_BYTES

# One router has at most half of it, which is to hold any tensor.
MIN_TENSOR_CACHE_BYTES = 2 * MAX_TENSOR_BYTES


# No slots: the services combine this with EngineConfig by multiple inheritance.
@dataclass(frozen=True, kw_only=True)
class WorkerConfig(TlsConfig):
    """Where a worker listens and how it ends."""

    engine_id: str | None = opt(None, "Unique name of this worker; role, host and port if unset.")
    host: str = opt("127.0.0.1", "Address to listen on.")
    port: int = opt(0, "gRPC port; 0: any free one.")
    metrics_port: int = opt(0, "Port of /metrics, /live and /ready; 0: any free one.")
    drain_timeout_s: float = opt(30.0, "On SIGTERM, how long requests and KV sessions may take.")
    self_check_timeout_s: float = opt(
        60.0, "Time limit of the trial generation that a worker runs before it serves."
    )
    tensor_cache_bytes: int = opt(
        256 * 1024 * 1024,
        "Of a model that takes pictures: memory for the pixels that routers put before the "
        "requests that name them. Unused by models of text.",
    )
    otlp_traces_endpoint: str | None = endpoint_opt()
    log_level: LogLevel = opt("info", "What is logged.")

    def __post_init__(self) -> None:
        TlsConfig.__post_init__(self)
        self.check_mutual()
        if self.engine_id is not None and (problem := id_problem("engine_id", self.engine_id)):
            raise ValueError(problem)
        for name in ("port", "metrics_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name} is {getattr(self, name)}, must be 0 to 65535")
        check_endpoint(self.otlp_traces_endpoint)
        if not self.drain_timeout_s >= 0:
            raise ValueError(f"drain_timeout_s is {self.drain_timeout_s}, must be at least 0")
        if self.tensor_cache_bytes < MIN_TENSOR_CACHE_BYTES:
            raise ValueError(
                f"tensor_cache_bytes is {self.tensor_cache_bytes}, must be at least "
                f"{MIN_TENSOR_CACHE_BYTES}"
            )
        if not self.self_check_timeout_s > 0:
            raise ValueError(
                f"self_check_timeout_s is {self.self_check_timeout_s}, must be above 0"
            )
