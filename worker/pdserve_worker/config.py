"""The network side of a worker process."""

from dataclasses import dataclass

from pdserve_common.config import LogLevel, opt
from pdserve_common.tls import TlsConfig
from pdserve_common.validation import id_problem


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
    log_level: LogLevel = opt("info", "What is logged.")

    def __post_init__(self) -> None:
        TlsConfig.__post_init__(self)
        self.check_mutual()
        if self.engine_id is not None and (problem := id_problem("engine_id", self.engine_id)):
            raise ValueError(problem)
        for name in ("port", "metrics_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name} is {getattr(self, name)}, must be 0 to 65535")
        if not self.drain_timeout_s >= 0:
            raise ValueError(f"drain_timeout_s is {self.drain_timeout_s}, must be at least 0")
        if not self.self_check_timeout_s > 0:
            raise ValueError(
                f"self_check_timeout_s is {self.self_check_timeout_s}, must be above 0"
            )
