"""The flags of `pdserve up` and `pdserve run`."""

from dataclasses import dataclass
from typing import Literal

from pdserve_common.config import opt


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """A whole stack on this machine: one router, prefill and decode services, all on loopback."""

    model: str = opt(
        "models/pdserve-tiny", "Folder of the model (Hugging Face config and safetensors)."
    )
    prefill: int = opt(1, "Number of prefill services; 0: decode services do it all.")
    decode: int = opt(1, "Number of decode services.")
    device: Literal["cpu", "cuda"] = opt("cpu", "Where the models run.")
    dtype: Literal["auto", "bfloat16", "float32"] = opt(
        "auto", "Weights and KV; auto: the model's."
    )
    engine_process: Literal["auto", "inproc", "subprocess"] | None = opt(
        None, "Run engines in their service's process or in their own; auto: their own on CUDA."
    )
    num_threads: int = opt(0, "Compute threads of each service; 0: the cores shared evenly.")
    max_model_len: int | None = opt(None, "Prompt and output tokens; the model's limit if unset.")
    kv_cache_memory_mib: int | None = opt(
        None, "Size of each service's KV pool in MiB; the service's own choice if unset."
    )
    max_num_seqs: int = opt(64, "Requests in one batch.")
    max_num_batched_tokens: int = opt(512, "Tokens in one step: the chunk size of long prompts.")
    require_transport: Literal["any", "shm", "tcp", "rdma"] = opt(
        "any", "Refuse to move KV blocks any other way."
    )
    require_disaggregation: bool = opt(
        False, "Refuse requests that decode services would have to do alone for want of prefill."
    )
    host: str = opt("127.0.0.1", "Address to listen on.")
    grpc_port: int = opt(50051, "The router's gRPC port; 0: any free one.")
    http_port: int = opt(8000, "The router's HTTP port; 0: any free one.")
    metrics_port: int = opt(
        9090, "The router's /metrics; services take the next ones; 0: any free."
    )
    worker_port: int = opt(
        50061, "gRPC port of the first service, then counting up; 0: any free ones."
    )
    ready_timeout_s: float = opt(300.0, "How long loading may take.")
    drain_timeout_s: float = opt(30.0, "How long running requests may take after Ctrl-C.")
    log_dir: str = opt(".run", "Folder for one log file per process.")
    log_level: str = opt("info", "debug, info, warning or error.")

    def __post_init__(self) -> None:
        if self.decode < 1:
            raise ValueError(f"decode is {self.decode}, must be at least 1")
        if self.prefill < 0:
            raise ValueError(f"prefill is {self.prefill}, must be at least 0")
        if self.require_disaggregation and not self.prefill:
            raise ValueError("require_disaggregation is on, prefill must be at least 1")
        for name in ("grpc_port", "http_port", "metrics_port", "worker_port"):
            if not 0 <= getattr(self, name) <= 65000:
                raise ValueError(f"{name} is {getattr(self, name)}, must be 0 to 65000")
