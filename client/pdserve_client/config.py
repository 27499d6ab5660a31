"""The flags of `pdserve up` and `pdserve run`, and what all commands share."""

import argparse
import os
from dataclasses import dataclass
from typing import Literal

from pdserve_common.config import ENV_PREFIX, LogLevel, Transport, build_config, opt
from pdserve_common.observability.tracing_config import check_endpoint, endpoint_opt
from pdserve_common.processes.cores import parse_cores
from pdserve_common.rpc.tls import Tls, TlsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig(TlsConfig):
    """A whole stack on this machine: one router, prefill and decode services, all on loopback."""

    model: str = opt(
        "models/pdserve-tiny",
        "Folder of the model (Hugging Face config and safetensors), or OWNER/NAME on the Hugging "
        "Face hub: downloaded if it is not in the hub's cache.",
    )
    revision: str | None = opt(
        None, "Branch, tag or commit of a model on the hub; its main branch if unset."
    )
    served_model_name: str | None = opt(
        None, "Name clients ask for; unset: OWNER/NAME of a model on the hub, the folder's name."
    )
    prefill: int = opt(1, "Number of prefill services; 0: decode services do it all.")
    decode: int = opt(1, "Number of decode services; a model that pools has none.")
    runner: Literal["generate", "pooling"] | None = opt(
        None, "What services do with the model; unset: as its files say."
    )
    convert: Literal["auto", "none", "embed", "classify"] | None = opt(
        None, "What a model becomes that pools: embed or classify; unset: as its files say."
    )
    prefill_tensor_parallel_size: int = opt(
        1, "Processes that each layer of a prefill service's model is cut over: 1, 2, 4 or 8."
    )
    decode_tensor_parallel_size: int = opt(1, "The same of a decode service's.")
    prefill_pipeline_parallel_size: int = opt(
        1, "Stages of processes that a prefill service's layers are cut into."
    )
    decode_pipeline_parallel_size: int = opt(1, "The same of a decode service's.")
    data_parallel_size: int = opt(
        1, "Services of a group of data-parallel ranks: prefill 2 means two groups of so many."
    )
    prefill_data_parallel_size: int | None = opt(
        None, "The same of prefill services alone; data_parallel_size if unset."
    )
    decode_data_parallel_size: int | None = opt(
        None, "The same of decode services alone; data_parallel_size if unset."
    )
    device: Literal["cpu", "cuda"] = opt("cpu", "Where the models run.")
    dtype: Literal["auto", "bfloat16", "float32"] = opt(
        "auto", "Weights and KV; auto: the model's."
    )
    quantization: Literal["int8", "int4", "fp8"] | None = opt(
        None, "Round weights to 8 or 4 bits while they are loaded."
    )
    lora: tuple[str, ...] = opt(
        (),
        "LoRA adapters to serve, folders as peft writes them: NAME=FOLDER,...; with lora_hub also "
        "NAME=hf://OWNER/NAME@REVISION.",
    )
    lora_root: str | None = opt(
        None, "Folder below which adapters lie that are loaded while serving; unset: none are."
    )
    lora_hub: bool | None = opt(
        None,
        "Load adapters from the Hugging Face hub too, where they are asked for as "
        "hf://OWNER/NAME@REVISION.",
    )
    max_loras: int | None = opt(None, "Adapters in a worker's memory.")
    max_lora_rank: int | None = opt(None, "The highest rank that an adapter may have.")
    engine_process: Literal["auto", "inproc", "subprocess"] | None = opt(
        None, "Run engines in their service's process or in their own; auto: their own on CUDA."
    )
    cpu_cores: str | None = opt(
        None, "Cores that services on CPU share out among themselves, like 0-3,8; unset: all."
    )
    num_threads: int = opt(
        0,
        "Compute threads of each service; 0: one for each of its cores, within the container's CPU "
        "limit.",
    )
    max_model_len: int | None = opt(None, "Prompt and output tokens; the model's limit if unset.")
    kv_cache_memory_mib: int | None = opt(
        None, "Size of each service's KV pool in MiB; the service's own choice if unset."
    )
    kv_offload_host_bytes: int = opt(
        0,
        "Keep copies of full KV blocks in so many bytes of host memory of each service; 0: none.",
    )
    kv_offload_disk_path: str | None = opt(
        None,
        "Keep copies of full KV blocks below this folder, in one for each service, which finds "
        "them after a restart. Unset: nowhere.",
    )
    kv_offload_disk_bytes: int = opt(
        0, "How many bytes of files each service may have below kv_offload_disk_path."
    )
    max_num_seqs: int = opt(64, "Requests in one batch.")
    max_num_batched_tokens: int | None = opt(
        None,
        "Tokens in one step: the chunk size of long prompts; the service's own choice if unset.",
    )
    require_transport: Transport = opt("any", "Refuse to move KV blocks any other way.")
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
    lora_updates: bool | None = opt(
        None, "Serve /v1/load_lora_adapter and /v1/unload_lora_adapter, to all who may use the API."
    )
    lora_scale_out_requests: int | None = opt(
        None,
        "With lora_updates: when each worker that holds an adapter has more requests than this, "
        "the router adds it to another pair that has room; 0: never.",
    )
    api_keys_file: str | None = opt(
        None,
        "File with one API key a line, and its limits behind it (docs/security.md); requests "
        "without one of them are refused.",
    )
    restart: bool = opt(
        True,
        "Start a service of `up` again that ends after it was ready; no: `up` ends with it, for "
        "those who supervise `up` themselves.",
    )
    ready_timeout_s: float = opt(300.0, "How long loading may take.")
    drain_timeout_s: float = opt(30.0, "How long running requests may take after Ctrl-C.")
    otlp_traces_endpoint: str | None = endpoint_opt()
    log_dir: str = opt(".run", "Folder for one log file per process.")
    log_level: LogLevel = opt("info", "What is logged.")

    def __post_init__(self) -> None:
        TlsConfig.__post_init__(self)
        self.check_mutual()
        check_endpoint(self.otlp_traces_endpoint)
        for name in ("decode", "prefill"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 0")
        for name in _SIZES:
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}, must be at least 1")
        if self.require_disaggregation and not self.prefill:
            raise ValueError("require_disaggregation is on, prefill must be at least 1")
        if self.num_threads < 0:
            raise ValueError(f"num_threads is {self.num_threads}, must be at least 0")
        if self.cpu_cores is not None:
            parse_cores(self.cpu_cores)
            if self.device != "cpu":
                raise ValueError(f"cpu_cores is set, device is {self.device}, must be cpu")
        for name in ("grpc_port", "http_port", "metrics_port", "worker_port"):
            if not 0 <= getattr(self, name) <= 65000:
                raise ValueError(f"{name} is {getattr(self, name)}, must be 0 to 65000")

    def num_ranks(self, role: str) -> int:
        """Return how many processes compute for a service of that role."""
        tensor, pipeline = self.parallel_sizes(role).values()
        return tensor * pipeline

    def num_ranks_of_group(self, role: str) -> int:
        """Return the size of a role's groups of data-parallel ranks."""
        size: int | None = getattr(self, f"{role}_data_parallel_size")
        return self.data_parallel_size if size is None else size

    def num_services(self, role: str) -> int:
        """Return how many services of a role there are."""
        num_groups: int = getattr(self, role)
        return num_groups * self.num_ranks_of_group(role)

    def parallel_sizes(self, role: str) -> dict[str, int]:
        """Return a service's own settings of tensor and pipeline parallelism."""
        names = ("tensor_parallel_size", "pipeline_parallel_size")
        return {name: getattr(self, f"{role}_{name}") for name in names}


_SIZES = (
    "data_parallel_size",
    *(
        f"{role}_{kind}_parallel_size"
        for role in ("prefill", "decode")
        for kind in ("tensor", "pipeline", "data")
    ),
)


def tls_of(args: argparse.Namespace) -> Tls | None:
    """Return what a command's TLS flags or the environment say. Raises ValueError or OSError."""
    return build_config(TlsConfig, vars(args), os.environ).load_tls()


def api_key() -> str | None:
    """Return the key that commands show to routers. Not a flag: those can be read by everybody."""
    return os.environ.get(f"{ENV_PREFIX}API_KEY")
