"""Everything about one engine that can be set. Values found at run time (num_blocks, eos) live
elsewhere.
"""

from dataclasses import dataclass
from typing import Literal

from pdserve_common.config import opt

Device = Literal["cpu", "cuda"]
Transport = Literal["any", "shm", "tcp", "rdma"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler needs to know."""

    max_num_seqs: int
    max_num_batched_tokens: int
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    enable_chunked_prefill: bool = True


# No slots: the services combine this with their network settings by multiple inheritance.
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine."""

    model: str = opt(
        "models/pdserve-tiny", "Folder of the model (Hugging Face config and safetensors)."
    )
    served_model_name: str | None = opt(None, "Name clients ask for; the folder's name if unset.")
    dtype: Literal["auto", "bfloat16", "float32"] = opt(
        "auto", "Weights and KV; auto: the model's."
    )
    device: Device = opt("cpu", "Where the model runs.")
    num_threads: int = opt(0, "Compute threads on CPU; 0: all cores.")
    max_model_len: int | None = opt(None, "Prompt and output tokens; the model's limit if unset.")
    block_size: int = opt(16, "Tokens per KV block.")
    kv_cache_memory_mib: int = opt(256, "Size of the KV pool in MiB.")
    num_blocks: int | None = opt(None, "KV blocks; overrides kv_cache_memory_mib.")
    max_num_seqs: int = opt(64, "Requests in one batch.")
    max_num_batched_tokens: int = opt(512, "Tokens in one step: the chunk size of long prompts.")
    enable_prefix_caching: bool = opt(True, "Share KV blocks between requests with equal prefixes.")
    enable_chunked_prefill: bool = opt(True, "Compute long prompts in several steps.")
    scheduling_policy: Literal["fcfs", "priority"] = opt("fcfs", "Order of the waiting queue.")
    kv_connector: Literal["nixl", "none"] = opt("nixl", "How KV blocks are handed over.")
    require_transport: Transport = opt("any", "Refuse to move KV blocks any other way.")
    kv_session_timeout_s: float = opt(600.0, "P fences a session D has not pulled for so long.")
    kv_transfer_timeout_s: float = opt(5.0, "D gives a READ up after this long without progress.")

    step_timeout_s: float = opt(300.0, "A step that takes longer is hung: the process exits.")

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size is {self.block_size}, must be a power of two")
        for name in ("kv_cache_memory_mib", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        for name in ("max_model_len", "num_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        if self.num_threads < 0:
            raise ValueError(f"num_threads is {self.num_threads}, must be at least 0")
        for name in ("kv_session_timeout_s", "kv_transfer_timeout_s", "step_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be above 0")

    @property
    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            scheduling_policy=self.scheduling_policy,
            enable_chunked_prefill=self.enable_chunked_prefill,
        )
