"""The router's flags."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdserve_common.config import opt
from pdserve_router.routing import ROUTING_POLICIES

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The public end of pdserve: takes requests over gRPC and OpenAI-compatible HTTP and sends
    each to a prefill and a decode worker.
    """

    model: str = opt("", "Directory with the model's tokenizer.")
    served_model_name: str | None = opt(
        None, "Name clients ask for; the directory's name if unset."
    )
    prefill: tuple[str, ...] = opt((), "Prefill workers, host:port of their gRPC servers.")
    decode: tuple[str, ...] = opt((), "Decode workers, host:port of their gRPC servers.")
    host: str = opt("0.0.0.0", "Address to listen on.")
    grpc_port: int = opt(50051, "Port of the gRPC API; 0 takes a free one.")
    http_port: int = opt(8000, "Port of the OpenAI-compatible API; 0 takes a free one.")
    metrics_port: int = opt(9090, "Port of /metrics; 0 takes a free one.")
    router_id: str = opt("router", "Stable name of this router, shown to workers and in logs.")
    routing_policy: str = opt(
        "round_robin", f"How workers are chosen: {', '.join(sorted(ROUTING_POLICIES))}."
    )
    disaggregation: bool = opt(True, "Prefill on prefill workers; off: decode workers do it all.")
    max_num_queued_requests: int = opt(
        1024, "Requests that wait for their first token; one more is refused with 429."
    )
    default_deadline_s: float = opt(600.0, "Deadline of requests that bring none.")
    max_deadline_s: float = opt(3600.0, "Longer deadlines are cut to this.")
    client_stall_timeout_s: float = opt(10.0, "A client that reads nothing for so long is cut.")
    max_body_bytes: int = opt(8 * 1024 * 1024, "Larger HTTP bodies are refused with 413.")
    drain_timeout_s: float = opt(30.0, "How long running requests may take after SIGTERM.")
    log_level: LogLevel = opt("info", "What is logged.")

    def __post_init__(self) -> None:
        if not Path(self.model).is_dir() or not self.model:
            raise ValueError(f"model must be a directory with a tokenizer, got {self.model!r}")
        if not self.decode:
            raise ValueError("decode needs at least one worker, host:port")
        for address in (*self.prefill, *self.decode):
            _check_address(address)
        repeated = {a for a in self.workers if self.workers.count(a) > 1}
        if repeated:
            raise ValueError(f"workers are listed twice: {', '.join(sorted(repeated))}")
        if self.routing_policy not in ROUTING_POLICIES:
            known = ", ".join(sorted(ROUTING_POLICIES))
            raise ValueError(f"routing_policy is {self.routing_policy!r}, known are {known}")
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name in ("grpc_port", "http_port", "metrics_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name} is {getattr(self, name)}, must be 0 to 65535")
        for name in (
            "max_num_queued_requests",
            "default_deadline_s",
            "client_stall_timeout_s",
            "max_body_bytes",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be above 0")
        if not self.max_deadline_s >= self.default_deadline_s:
            raise ValueError(
                f"max_deadline_s is {self.max_deadline_s}, must be at least default_deadline_s "
                f"({self.default_deadline_s})"
            )
        if not self.drain_timeout_s >= 0:
            raise ValueError(f"drain_timeout_s is {self.drain_timeout_s}, must be at least 0")

    @property
    def workers(self) -> tuple[str, ...]:
        return (*self.prefill, *self.decode)

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.model).resolve().name


def _check_address(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) <= 65535):
        raise ValueError(f"worker address must be host:port, got {address!r}")
