"""Everything about one engine that can be set. Values found at run time (num_blocks, eos) live
elsewhere.
"""

from dataclasses import dataclass
from typing import Literal

from pdserve_common.config import Transport, opt, parse_named_paths
from pdserve_common.model_files.hub_path import HubPath, is_hub_path
from pdserve_common.processes.cores import parse_cores
from pdserve_engine.combinations import check_combination, features_of

Device = Literal["cpu", "cuda"]
Role = Literal["prefill", "decode"]
ModelImpl = Literal["auto", "native", "transformers"]
LoadQuantization = Literal["int8", "int4", "fp8"]
KVCacheDtype = Literal["auto", "fp8"]
AttentionBackend = Literal["flash_attn"]
Speculation = Literal["none", "suffix", "draft_model"]
Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]

# What the kernels of all devices can do.
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64)
# 64 is what attention on CUDA loads at a time.
DEFAULT_BLOCK_SIZE: dict[Device, int] = {"cpu": 16, "cuda": 64}
# A CPU is as fast in chunks of 256, in which a decode beside a prompt waits less, as decode does
# for a prompt's last chunk.
DEFAULT_BATCHED_TOKENS: dict[Device, int] = {"cpu": 256, "cuda": 2048}

# A label's value in Kubernetes has at most so many characters.
MAX_ZONE_CHARS = 63
# Places in the batch besides max_num_seqs, for probes: as many as one router has under way.
NUM_PROBE_SLOTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler needs to know."""

    max_num_seqs: int
    max_num_batched_tokens: int
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    scheduling_mode: Literal["v1", "v0"] = "v1"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 1
    kv_watermark: float = 0.0
    # The stages of the model's pipeline: what a step samples is known to the first stage when it is
    # told.
    num_stages: int = 1
    # The most drafts that a request has in a step.
    num_speculative_tokens: int = 5
    # Steps leave a draft model what they do not need, and say for whom it is worth it.
    has_draft_model: bool = False

    @property
    def max_batch_size(self) -> int:
        """Requests in one batch, probes among them."""
        return self.max_num_seqs + NUM_PROBE_SLOTS

    @property
    def has_chunked_prefill(self) -> bool:
        return self.enable_chunked_prefill and self.scheduling_mode == "v1"


# No slots: the services combine this with their network settings by multiple inheritance.
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine."""

    model: str = opt(
        "models/pdserve-tiny",
        "Folder of the model (Hugging Face config and safetensors), or OWNER/NAME on the Hugging "
        "Face hub.",
    )
    revision: str | None = opt(
        None, "Branch, tag or commit of a model on the hub; its main branch if unset."
    )
    served_model_name: str | None = opt(
        None, "Name clients ask for; unset: OWNER/NAME of a model on the hub, the folder's name."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = opt(
        "auto", "Weights and KV; auto: the model's."
    )
    quantization: LoadQuantization | None = opt(
        None,
        "Round weights while they are loaded: int8 or fp8 (e4m3), a scale for each output, or "
        "int4, one for each 32 weights. Unset: as the checkpoint says.",
    )
    kv_cache_dtype: KVCacheDtype = opt(
        "auto",
        "auto: as dtype; fp8: KV in 8 bits (e4m3), with the checkpoint's k_scale and v_scale if it "
        "has them. On CUDA, for our own models; equal on prefill and decode workers.",
    )
    model_impl: ModelImpl = opt(
        "auto", "Our own code or transformers'; auto: ours for architectures that have it."
    )
    runner: Runner = opt(
        "auto",
        "generate tokens, or pooling: embeddings, classes and scores, on prefill workers; auto: as "
        "the checkpoint's architecture and Sentence-Transformers' files say.",
    )
    convert: Convert = opt(
        "auto",
        "With runner pooling, what the model becomes: embed, or classify, which needs a checkpoint "
        "with a score head; auto: classify for ...ForSequenceClassification, else embed.",
    )
    pooler_config: str | None = opt(
        None,
        "With runner pooling, JSON that replaces what the checkpoint says: pooling_type (LAST or "
        "MEAN), use_activation, is_matryoshka, matryoshka_dimensions; classifier_from_token.",
    )
    device: Device = opt("cpu", "Where the model runs.")
    deterministic: bool = opt(
        False,
        "On CUDA, our own models: the same bits in any batch, by slower kernels. On CPU they have "
        "them in any case.",
    )
    attention_backend: AttentionBackend | None = opt(
        None,
        "On CUDA, whose attention to run: flash_attn, FlashAttention 3, which has to be installed; "
        "it has not run on a GPU yet. Unset: our own.",
    )
    tensor_parallel_size: int = opt(
        1,
        "Cut each layer over so many processes, ranks: 1, 2, 4 or 8; on CUDA a GPU each. For our "
        "own models.",
    )
    pipeline_parallel_size: int = opt(
        1, "Cut the layers into so many stages, processes of their own; on CPU, for our own models."
    )
    data_parallel_size: int = opt(
        1, "How many services serve the model as a group, ranks, so that requests can name one."
    )
    data_parallel_rank: int = opt(0, "Which of them this is, from 0.")
    engine_process: Literal["auto", "inproc", "subprocess"] = opt(
        "auto", "Run the engine in the worker's process or in its own; auto: its own on CUDA."
    )
    cpu_cores: str | None = opt(
        None, "Cores to stay on, like 0-3,8, a compute thread on each; unset: any."
    )
    num_threads: int = opt(
        0, "Compute threads on CPU; 0: one for each core, within the container's CPU limit."
    )
    lora: tuple[str, ...] = opt(
        (),
        "LoRA adapters to serve, folders as peft writes them: NAME=FOLDER,...; with lora_hub also "
        "NAME=hf://OWNER/NAME@REVISION.",
    )
    max_lora_rank: int = opt(64, "The highest rank that an adapter may have.")
    max_loras: int = opt(
        16, "Adapters in memory; to make room the one goes that was not used for longest."
    )
    lora_root: str | None = opt(
        None, "Folder below which adapters lie that are loaded while serving; unset: none are."
    )
    lora_hub: bool = opt(
        False,
        "Load adapters from the Hugging Face hub too, where they are asked for as "
        "hf://OWNER/NAME@REVISION.",
    )
    max_model_len: int | None = opt(
        None, "Prompt and output tokens; unset: the model's limit, or what the KV pool holds."
    )
    block_size: int = opt(0, "Tokens per KV block; 0: 16 on CPU, 64 on CUDA.")
    kv_cache_memory_mib: int | None = opt(
        None,
        "Size of the KV pool in MiB; unset: what a GPU has left, on CPU what a request of "
        "max_model_len takes, 256 to 4096.",
    )
    gpu_memory_utilization: float = opt(0.9, "Share of the GPU's memory that may be taken.")
    num_blocks: int | None = opt(None, "KV blocks; overrides kv_cache_memory_mib.")
    max_num_seqs: int = opt(64, "Requests in one batch.")
    max_num_batched_tokens: int | None = opt(
        None,
        "Tokens in one step: the chunk size of long prompts; unset: 256 on CPU, 2048 on CUDA.",
    )
    enable_prefix_caching: bool = opt(True, "Share KV blocks between requests with equal prefixes.")
    enable_chunked_prefill: bool = opt(True, "Compute long prompts in several steps.")
    scheduling_policy: Literal["fcfs", "priority"] = opt("fcfs", "Order of the waiting queue.")
    scheduling_mode: Literal["v1", "v0"] = opt(
        "v1", "v1: decodes and prompt chunks share a step; v0: whole prompts, apart from decodes."
    )
    long_prefill_token_threshold: int = opt(
        0, "Tokens of one prompt in a step, so that others get their share; 0: no limit."
    )
    max_num_partial_prefills: int = opt(
        1, "Prompts computed in chunks at a time; shorter ones overtake those that wait for it."
    )
    kv_watermark: float = opt(
        0.01, "Share of the KV pool that admitting a request leaves free, against preemptions."
    )
    async_scheduling: bool | None = opt(
        None, "Plan the next step while one runs; unset: on CUDA, as on the CPU it gains nothing."
    )
    speculation: Speculation = opt(
        "none",
        "Who guesses tokens that are computed together with the next one, and count if they are "
        "what is sampled in any case; suffix: what came behind the last tokens before, in the same "
        "request; draft_model: a smaller model beside the model, on decode workers, on CPU. On one "
        "rank.",
    )
    draft_model: str | None = opt(
        None,
        "With speculation draft_model: folder of the draft model, or OWNER/NAME on the hub, that "
        "has the model's tokenizer. Its KV is a part of the KV pool's memory.",
    )
    num_speculative_tokens: int = opt(5, "The most tokens that are guessed at a time.")
    suffix_decoding_max_cached_requests: int = opt(
        0,
        "With speculation, also look in the answers of so many finished requests that had the same "
        "cache salt and adapter; how long an answer takes then tells of others.",
    )
    kv_connector: Literal["nixl", "none"] = opt("nixl", "How KV blocks are handed over.")
    require_transport: Transport = opt("any", "Refuse to move KV blocks any other way.")
    prefix_pulls: bool = opt(
        False,
        "On prefill, read the start of a prompt from another worker's prefix cache where the "
        "router names one; on decode, lend what is cached.",
    )
    prefix_pull_timeout_s: float = opt(
        0.25,
        "Prefill waits so long for such a prefix, and for as long as its bytes take at 1 GB/s.",
    )
    kv_offload_host_bytes: int = opt(
        0,
        "Keep copies of full KV blocks in so many bytes of host memory besides the pool; 0: none. "
        "On one rank, for models whose layers all have full attention.",
    )
    kv_offload_disk_path: str | None = opt(
        None,
        "Keep copies of full KV blocks in this folder, on a disk of this machine, where a worker "
        "finds them after a restart; each worker needs its own. Unset: nowhere.",
    )
    kv_offload_disk_bytes: int = opt(0, "How many bytes of files kv_offload_disk_path may hold.")
    kv_offload_timeout_s: float = opt(
        1.0,
        "A prompt's start is computed if it has not come from there after this long, and the time "
        "of its bytes at 0.5 GB/s.",
    )
    kv_session_timeout_s: float = opt(
        600.0, "Prefill and decode give up a KV session of which nothing was heard for this long."
    )
    kv_transfer_timeout_s: float = opt(
        5.0, "Decode gives a READ up after this long without progress."
    )

    kv_checksums: bool = opt(
        False, "Prefill sends a checksum of each block, decode checks it; for tests, set on both."
    )
    poison_freed_blocks: bool = opt(
        False, "Fill freed KV blocks with NaN: shows any use after free."
    )
    step_timeout_s: float = opt(
        300.0, "When a step counts as hung at the latest: the process exits to be restarted."
    )
    zone: str = opt("", "Zone that this machine is in: routers pair workers of one zone first.")
    log_iterations: bool = opt(False, "Log a line for each step.")
    profile_dir: str | None = opt(None, "Folder for profiles; a temporary one if unset.")

    def __post_init__(self) -> None:
        if self.block_size == 0:
            object.__setattr__(self, "block_size", DEFAULT_BLOCK_SIZE[self.device])
        if self.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise ValueError(f"block_size is {self.block_size}, must be one of {sizes}")
        for name in (
            "max_num_seqs",
            "max_num_partial_prefills",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
            "max_lora_rank",
            "max_loras",
            "num_speculative_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        for name in (
            "max_num_batched_tokens",
            "max_model_len",
            "num_blocks",
            "kv_cache_memory_mib",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
        for name in (
            "long_prefill_token_threshold",
            "suffix_decoding_max_cached_requests",
            "kv_offload_host_bytes",
            "kv_offload_disk_bytes",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 0")
        if not 0 <= self.data_parallel_rank < self.data_parallel_size:
            raise ValueError(
                f"data_parallel_rank is {self.data_parallel_rank}, must be 0 to "
                f"{self.data_parallel_size - 1}, as data_parallel_size is {self.data_parallel_size}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, must be above 0 to 1"
            )
        if len(self.zone) > MAX_ZONE_CHARS:
            raise ValueError(
                f"zone has {len(self.zone)} characters, must have at most {MAX_ZONE_CHARS}"
            )
        if not 0 <= self.kv_watermark < 1:
            raise ValueError(f"kv_watermark is {self.kv_watermark}, must be 0 to below 1")
        if self.num_threads < 0:
            raise ValueError(f"num_threads is {self.num_threads}, must be at least 0")
        if self.cores and self.num_threads > len(self.cores):
            raise ValueError(
                f"num_threads is {self.num_threads}, cpu_cores has {len(self.cores)} cores"
            )
        if self.has_adapters:
            self._check_adapters()
        if self.speculation == "none" and self.suffix_decoding_max_cached_requests:
            raise ValueError(
                "suffix_decoding_max_cached_requests is "
                f"{self.suffix_decoding_max_cached_requests}, must be 0 if speculation is none"
            )
        self._check_draft_model()
        self._check_kv_offload()
        check_combination(features_of(self))
        for name in (
            "kv_session_timeout_s",
            "kv_transfer_timeout_s",
            "kv_offload_timeout_s",
            "step_timeout_s",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be above 0")

    def _check_draft_model(self) -> None:
        if (self.speculation == "draft_model") != (self.draft_model is not None):
            raise ValueError(
                f"speculation is {self.speculation} and draft_model is {self.draft_model}: "
                "draft_model must be set if speculation is draft_model, and only then"
            )

    def _check_kv_offload(self) -> None:
        if (self.kv_offload_disk_path is None) != (self.kv_offload_disk_bytes == 0):
            raise ValueError(
                f"kv_offload_disk_path is {self.kv_offload_disk_path} and kv_offload_disk_bytes is "
                f"{self.kv_offload_disk_bytes}: both must be set, or none"
            )

    def _check_adapters(self) -> None:
        for path in filter(is_hub_path, self.adapter_paths.values()):
            self._check_hub_path(path)
        if len(self.lora) > self.max_loras:
            raise ValueError(
                f"lora has {len(self.lora)} adapters, must be at most {self.max_loras} (max_loras)"
            )

    def _check_hub_path(self, path: str) -> None:
        if not self.lora_hub:
            raise ValueError(f"lora has {path!r}, lora_hub must be true")
        try:
            HubPath.parse(path)
        except ValueError as error:
            raise ValueError(f"lora has {error}") from error

    @property
    def has_adapters(self) -> bool:
        """Does it serve adapters, now or later?"""
        return bool(self.lora) or self.lora_root is not None or self.lora_hub

    @property
    def has_kv_offload(self) -> bool:
        """Are KV blocks kept anywhere else than in the pool?"""
        return self.kv_offload_host_bytes > 0 or self.kv_offload_disk_path is not None

    @property
    def adapter_paths(self) -> dict[str, str]:
        """Where each adapter of `lora` is, by its name. Raises ValueError."""
        return parse_named_paths("lora", self.lora)

    @property
    def cores(self) -> tuple[int, ...]:
        """The cores of `cpu_cores`, none if it is unset."""
        return () if self.cpu_cores is None else parse_cores(self.cpu_cores)

    @property
    def num_ranks(self) -> int:
        """Processes that the model is cut over."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def has_engine_process(self) -> bool:
        """Does the engine run in a process of its own?"""
        if self.num_ranks > 1:
            return False  # the ranks keep the worker's process free of steps
        if self.engine_process == "auto":
            return self.device == "cuda"
        return self.engine_process == "subprocess"

    @property
    def has_async_scheduling(self) -> bool:
        return self.device == "cuda" if self.async_scheduling is None else self.async_scheduling

    @property
    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens
            or DEFAULT_BATCHED_TOKENS[self.device],
            scheduling_policy=self.scheduling_policy,
            scheduling_mode=self.scheduling_mode,
            enable_chunked_prefill=self.enable_chunked_prefill,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_num_partial_prefills=self.max_num_partial_prefills,
            kv_watermark=self.kv_watermark,
            num_stages=self.pipeline_parallel_size,
            num_speculative_tokens=self.num_speculative_tokens,
            has_draft_model=self.draft_model is not None,
        )
