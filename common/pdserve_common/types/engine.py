"""The frozen dataclasses that cross between a front end and an engine, named and shaped as in vLLM
V1.

The engine, its queues and the router speak these; `wire/` turns them into protobuf at the edge.
They hold no torch and no protobuf. Points in time are of this process's monotonic clock; on the
wire they are durations, as it means nothing on another host.
"""

import dataclasses
import enum
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, get_args

import msgspec

from pdserve_common.metrics import stats_fields
from pdserve_common.metrics.buckets import BATCH_BUCKETS, STAGE_BUCKETS
from pdserve_common.types.lora import LoRAAdapter, LoRAAdapters, LoRARequest
from pdserve_common.types.pooling_params import GENERATE, PoolingParams
from pdserve_common.types.sampling_params import SamplingParams


class FinishReason(enum.IntEnum):
    """Why a request ended."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    REPETITION = 5

    def __str__(self) -> str:
        return self.name.lower()


class ErrorCode(enum.IntEnum):
    """The typed errors that can end an accepted request."""

    INTERNAL = 1
    INVALID_ARGUMENT = 2
    OVERLOADED = 3
    NO_WORKER = 4
    KV_TRANSFER_FAILED = 5
    KV_EXPIRED = 6
    DEADLINE_EXCEEDED = 7
    CANCELLED = 8
    ENGINE_DEAD = 9
    DRAINING = 10
    CLIENT_TOO_SLOW = 11
    FAILED_PRECONDITION = 12


class ErrorFault(enum.IntEnum):
    """Who an error is put down to."""

    # Whoever the code says; no EngineError has it.
    UNSPECIFIED = 0
    # The request, or its client: it would fail anywhere.
    REQUEST = 1
    # The process that tells of it.
    WORKER = 2
    # The process that works with the one that tells of it, or the way between the two.
    PEER = 3


_FAULTS: Mapping[ErrorCode, ErrorFault] = {
    ErrorCode.INVALID_ARGUMENT: ErrorFault.REQUEST,
    ErrorCode.DEADLINE_EXCEEDED: ErrorFault.REQUEST,
    ErrorCode.CANCELLED: ErrorFault.REQUEST,
    ErrorCode.CLIENT_TOO_SLOW: ErrorFault.REQUEST,
    ErrorCode.FAILED_PRECONDITION: ErrorFault.REQUEST,
    ErrorCode.KV_TRANSFER_FAILED: ErrorFault.PEER,
    ErrorCode.KV_EXPIRED: ErrorFault.PEER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineError:
    """The typed error of a finished request (finish_reason ERROR)."""

    code: ErrorCode
    message: str
    is_retryable: bool = False
    retry_after_ms: int | None = None
    # Unless it is given that of the code.
    fault: ErrorFault = ErrorFault.UNSPECIFIED

    def __post_init__(self) -> None:
        if self.fault is ErrorFault.UNSPECIFIED:
            object.__setattr__(self, "fault", _FAULTS.get(self.code, ErrorFault.WORKER))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRef:
    """A tensor uploaded beforehand with PutTensor and named by its content hash
    (`tensors.content_hash`).
    """

    content_hash: bytes
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalFeatureSpec:
    """One multimodal item and where its placeholder tokens stand in the prompt. A picture's data is
    uint8 pixels (height, width, 3), RGB, neither rescaled nor normalized.
    """

    modality: str
    # A picture's identifier is the content hash of `data`, hexadecimal.
    identifier: str
    position: int
    length: int
    data: TensorRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPrefixSource:
    """A worker that has the KV of the prompt's start in its prefix cache, and how much of it."""

    engine_id: str
    host: str
    port: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferParams:
    """The handoff part of a request: who computes the KV and who pulls it.

    The router puts it in both legs. On prefill `do_remote_decode` is set and the remote is decode;
    on decode `do_remote_prefill` is set and the remote is prefill.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str = ""
    remote_host: str = ""
    remote_port: int = 0
    # On prefill's leg: prefill reads this prefix before it computes the rest, unless that takes too
    # long.
    prefix_source: KVPrefixSource | None = None


# Structs with tags: a frame between two processes says which one it is.
class Generate(msgspec.Struct, frozen=True, tag=True):
    """The task of a request for tokens."""

    sampling_params: SamplingParams


class Pool(msgspec.Struct, frozen=True, tag=True):
    """The task of a request for one vector."""

    pooling_params: PoolingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """A tokenized, validated request as an engine takes it. Immutable."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    task: Generate | Pool
    mm_features: tuple[MultiModalFeatureSpec, ...] = ()
    eos_token_id: int | None = None
    # time.monotonic() of this process when the request arrived; on the wire it is the age.
    arrival_time: float = field(default_factory=time.monotonic)
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: TensorRef | None = None
    prompt_is_token_ids: tuple[bool, ...] = ()
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0  # lower is first
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    resumable: bool = False
    external_req_id: str | None = None
    # False: the constraint holds behind the marker that ends reasoning, which the other names.
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Mapping[str, str] = field(default_factory=dict)
    kv_transfer_params: KVTransferParams | None = None
    # Raised by the router at each re-drive; outputs of older attempts are dropped (rule K7).
    attempt: int = 0
    # Tokens already delivered by earlier attempts, kept apart from the prompt.
    resume_output_token_ids: tuple[int, ...] = ()
    # time.monotonic() of this process after which the answer is worthless; on the wire the
    # remaining time.
    deadline: float | None = None
    # A request of the same front end with the same prompt, whose KV blocks this one shares once
    # they are there (n > 1). If it is gone, this one is computed like any other.
    fork_of: str | None = None
    # What the answer may be like; changes no token.
    prediction_token_ids: tuple[int, ...] = ()
    # Stands for whoever asks: clients take turns where one's requests would hold up another's.
    client_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsLists:
    """Log-probabilities of some positions: for each the chosen token first, then the top ones.

    With logprobs = k, a position has 1 + k entries; the chosen token may be among the top ones
    again. Ranks count from 1, the most likely token.
    """

    logprob_token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    sampled_token_ranks: tuple[int, ...]

    @classmethod
    def unknown(cls, num_positions: int) -> "LogprobsLists":
        """Positions of which nothing is known: no entries, rank 0."""
        return cls(
            logprob_token_ids=((),) * num_positions,
            logprobs=((),) * num_positions,
            sampled_token_ranks=(0,) * num_positions,
        )

    @classmethod
    def join(cls, parts: Iterable["LogprobsLists"]) -> "LogprobsLists":
        """The positions of all parts, in order; adding many up one by one would be quadratic."""
        parts = tuple(parts)
        return cls(
            logprob_token_ids=tuple(chain.from_iterable(p.logprob_token_ids for p in parts)),
            logprobs=tuple(chain.from_iterable(p.logprobs for p in parts)),
            sampled_token_ranks=tuple(chain.from_iterable(p.sampled_token_ranks for p in parts)),
        )

    def __add__(self, other: "LogprobsLists") -> "LogprobsLists":
        """The positions of both, in order."""
        return LogprobsLists.join((self, other))

    def __getitem__(self, positions: slice) -> "LogprobsLists":
        """Some of the positions."""
        return LogprobsLists(
            logprob_token_ids=self.logprob_token_ids[positions],
            logprobs=self.logprobs[positions],
            sampled_token_ranks=self.sampled_token_ranks[positions],
        )

    def __len__(self) -> int:
        return len(self.sampled_token_ranks)


class EngineCoreEventType(enum.IntEnum):
    """Milestones of a request inside an engine; the KV_ ones are ours."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3
    KV_SESSION_OPENED = 4
    KV_TRANSFER_STARTED = 5
    KV_TRANSFER_FINISHED = 6
    KV_ACCEPTED = 7
    KV_LOST = 8


@dataclass(frozen=True, slots=True)
class EngineCoreEvent:
    """A milestone and the engine's own monotonic time (s); only differences mean something."""

    type: EngineCoreEventType
    timestamp: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStats:
    """Where the time of a request's first token on this engine went (seconds, exclusive stages)."""

    num_prompt_tokens: int
    num_cached_tokens: int
    # From arrival to being scheduled; on prefill with the wait for decode.
    queue_s: float
    prefill_s: float
    # The part of queue_s while decode had no room or no slot; on decode all of it.
    decode_queue_s: float = 0.0
    # Steps that computed some of it.
    num_chunks: int = 0


# What guesses tokens: a client, a text that repeats itself, a draft model.
DraftSource = Literal["prediction", "suffix", "draft_model", "grammar", "cached_request"]
DRAFT_SOURCES: tuple[DraftSource, ...] = get_args(DraftSource)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStats:
    """What has become of drafts of one source."""

    source: str
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferStats:
    """What pulling a request's KV cost, measured on decode (seconds).

    Exclusive, after prefill's last announcement has reached decode: exposed_s, decode_admit_s,
    first_decode_step_s, release_ack_s. transfer_s overlaps with the prefill and with them.
    """

    num_bytes: int
    num_blocks: int
    # READs, one for each chunk that prefill announced.
    num_reads: int
    transport: str
    # Time during which at least one READ was posted.
    transfer_s: float
    # From PrefillDone reaching decode to the last READ having landed.
    exposed_s: float
    # From decode's first own token to prefill's acknowledgement of the last release, which it has
    # to wait for: 0 if that came first.
    release_ack_s: float
    # From the last READ having landed to the request being in the batch.
    decode_admit_s: float = 0.0
    # From then to decode's first own token.
    first_decode_step_s: float = 0.0
    # Prefill's, as it came with PrefillDone.
    prefill_stats: PrefillStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLost:
    """Decode will not get the rest of a request's KV and holds what it has until the router has
    sent another attempt, for HOLD_S from this message on at most (rule K6).
    """

    # From the request's start; their KV is on decode and right, and the next attempt finds it
    # there.
    num_confirmed_tokens: int
    # One of a few words, for metrics.
    reason: str
    message: str


class EngineCoreOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What one step brought for one request. Each token pays for one: a struct is made, compared
    and encoded in a fraction of a dataclass's time.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs: LogprobsLists | None = None
    pooling_output: tuple[float, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: tuple[EngineCoreEvent, ...] = ()
    kv_transfer_params: KVTransferParams | None = None
    trace_headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    prefill_stats: PrefillStats | None = None
    kv_transfer_stats: KVTransferStats | None = None
    routed_experts: tuple[int, ...] = ()
    num_nans_in_logits: int = 0
    # Decode cannot go on by itself; the request is not finished.
    kv_lost: KVLost | None = None
    attempt: int = 0
    # Index of new_token_ids[0] among all output tokens of the request (rule K7).
    first_token_index: int = 0
    error: EngineError | None = None
    # One for each step since the last output in which the request had a draft.
    draft_stats: tuple[DraftStats, ...] = ()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


_SLOTS = "Slots in the batch (max_num_seqs) by state: used or free"
_KV_BLOCKS = "KV blocks by state: used, cached (content can be taken back) or free (has none)"
_SLOT_USAGE = "Used slots / all slots"
_KV_USAGE = "Held KV blocks / all KV blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """The engine's load after a step. Figures say which metric shows them (`stats_fields.py`)."""

    # Slots in the batch.
    num_slots: int = 0
    num_running_reqs: int = stats_fields.gauge("pdserve_requests_running", "Requests in the batch")
    num_waiting_reqs: int = stats_fields.gauge(
        "pdserve_requests_waiting", "Requests not in the batch yet"
    )
    # On prefill because decode is full, on decode itself all but those that wait for prefill.
    num_waiting_for_decode_reqs: int = stats_fields.gauge(
        "pdserve_requests_waiting_for_decode",
        "Of the waiting requests, those that wait for room or a slot on a decode worker",
    )
    num_waiting_for_fsm_reqs: int = stats_fields.gauge(
        "pdserve_requests_waiting_for_fsm",
        "Of the waiting requests, those that wait for their grammar alone (WAITING_FOR_FSM)",
    )
    num_waiting_tokens: int = stats_fields.gauge(
        "pdserve_waiting_tokens",
        "Tokens of waiting requests to be computed, without those that were cached when they came, "
        "and without requests that wait for another worker",
    )
    num_total_blocks: int = 0
    num_free_blocks: int = 0
    # The free blocks with content that a prompt with the same beginning can take back.
    num_cached_blocks: int = stats_fields.gauge("pdserve_kv_blocks", _KV_BLOCKS, state="cached")
    num_open_kv_sessions: int = 0
    prefix_cache_queries: int = stats_fields.counter(
        "pdserve_prefix_cache_queries_total", "Prompt tokens looked up"
    )
    prefix_cache_hits: int = stats_fields.counter(
        "pdserve_prefix_cache_hits_total", "Prompt tokens found"
    )
    num_preemptions: int = stats_fields.counter(
        "pdserve_preemptions_total", "Running requests that lost their blocks"
    )
    num_late_masks: int = stats_fields.counter(
        "pdserve_late_grammar_masks_total",
        "Rows left out of a step because their grammar had not said what may come next",
    )
    num_loras: int = stats_fields.gauge("pdserve_loras", "LoRA adapters in memory")
    num_lora_loads: int = stats_fields.counter("pdserve_lora_loads_total", "LoRA adapters loaded")
    num_lora_evictions: int = stats_fields.counter(
        "pdserve_lora_evictions_total", "LoRA adapters unloaded to make room for others"
    )
    num_lora_steps: int = stats_fields.counter(
        "pdserve_lora_steps_total", "Steps in which some request had a LoRA adapter"
    )
    # In the KV group where they are most.
    num_common_prefix_blocks: int = stats_fields.gauge(
        "pdserve_common_prefix_blocks", "Leading KV blocks that all running requests share"
    )
    step_num_tokens: int = stats_fields.histogram(
        "pdserve_engine_step_tokens", "Tokens computed in a step", buckets=BATCH_BUCKETS
    )
    step_duration_s: float = stats_fields.histogram(
        "pdserve_engine_step_duration_seconds",
        "The model's part of a step: forward pass and sampling",
        buckets=STAGE_BUCKETS,
    )

    # These come from properties.
    DERIVED = (
        ("num_used_slots", stats_fields.Figure("gauge", "pdserve_slots", _SLOTS, "used")),
        ("num_unused_slots", stats_fields.Figure("gauge", "pdserve_slots", _SLOTS, "free")),
        ("slot_usage", stats_fields.Figure("gauge", "pdserve_slot_usage_ratio", _SLOT_USAGE)),
        ("num_used_blocks", stats_fields.Figure("gauge", "pdserve_kv_blocks", _KV_BLOCKS, "used")),
        ("num_empty_blocks", stats_fields.Figure("gauge", "pdserve_kv_blocks", _KV_BLOCKS, "free")),
        ("kv_cache_usage", stats_fields.Figure("gauge", "pdserve_kv_cache_usage_ratio", _KV_USAGE)),
    )

    @property
    def num_used_slots(self) -> int:
        """Probes run beside a full batch."""
        return min(self.num_running_reqs, self.num_slots)

    @property
    def num_unused_slots(self) -> int:
        return self.num_slots - self.num_used_slots

    @property
    def slot_usage(self) -> float:
        return self.num_used_slots / self.num_slots if self.num_slots else 0.0

    @property
    def num_used_blocks(self) -> int:
        return self.num_total_blocks - self.num_free_blocks

    @property
    def num_empty_blocks(self) -> int:
        """Free ones without content."""
        return self.num_free_blocks - self.num_cached_blocks

    @property
    def kv_cache_usage(self) -> float:
        return self.num_used_blocks / self.num_total_blocks if self.num_total_blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilityOutput:
    """The answer to a control call that went through the engine's input queue."""

    call_id: int
    failure_message: str | None = None
    result: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreOutputs:
    """All that one engine step brought to one front end."""

    outputs: tuple[EngineCoreOutput, ...] = ()
    engine_index: int = 0
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = field(default_factory=time.monotonic)
    utility_output: UtilityOutput | None = None
    finished_requests: frozenset[str] = frozenset()
    wave_complete: int | None = None
    start_wave: int | None = None
    # Set once, as the last message of an engine that died.
    engine_dead: EngineError | None = None


class PauseMode(enum.IntEnum):
    """What a pause does to requests that are running or waiting."""

    ABORT = 1
    WAIT = 2
    KEEP = 3


class WorkerRole(enum.IntEnum):
    """What a worker process is for."""

    PREFILL = 1
    DECODE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What GetInfo tells of a worker: enough for a router to validate requests and to pair
    workers.
    """

    engine_id: str
    epoch: str
    role: WorkerRole
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    dtype: str
    kv_compatibility_hash: str
    kv_transport: str
    # "exact": the tokens depend on weights, tokens and seed only; else "consistent".
    determinism: str
    # Workers of equal numerics_id compute bit-identical logits if they are exact.
    numerics_id: str
    version: str
    # Names that SamplingParams.logits_processors may hold.
    logits_processors: tuple[str, ...] = ()
    # What computes: "cpu/avx512bf16", "cpu/avx2", "reference", "triton", "triton.deterministic" or
    # "triton.flash_attn/" and its version.
    kernels: str = ""
    # Blocks of earlier requests are used again.
    has_prefix_caching: bool = True
    # The digest of the tokenizer beside the weights (`tokenizer_digest`); empty if there is none.
    tokenizer_digest: str = ""
    # The digest of what makes another model: checkpoint, dtype, quantization, EOS, logits
    # processors.
    weights_digest: str = ""
    # Milliseconds since 1970, by the worker's clock.
    started_at_ms: int = 0
    # Optional fields of requests and sampling parameters that are served (`Capabilities.fields`).
    served_fields: tuple[str, ...] = ()
    # Prefill workers: it reads a `prefix_source`; decode workers: it may be one.
    has_prefix_pulls: bool = False
    # Processes that each layer is cut over, and stages of them that the layers are cut into.
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    # The zone that its machine is in; empty: not known.
    zone: str = ""
    # LoRA adapters that it holds, and a number that grows with each change of them.
    adapters: tuple[LoRAAdapter, ...] = ()
    adapters_version: int = 0
    # What requests can ask of the model: "generate", or some of POOLING_TASKS.
    tasks: tuple[str, ...] = (GENERATE,)
    # Numbers in a pooling_output without dimensions: hidden size, or labels.
    embedding_size: int = 0
    # Embeddings may be cut to their leading dimensions: to these, or to any number if empty.
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()
    # The tokens whose states are pooled: "last" or "mean"; empty for models that generate.
    pooling_type: str = ""
    # The kinds of mm_features that it takes: "image"; empty for models of text.
    modalities: tuple[str, ...] = ()
    # Its group of data-parallel ranks, each a worker of its own, and which one it is.
    data_parallel_size: int = 1
    data_parallel_rank: int = 0

    @property
    def adapter_digests(self) -> frozenset[str]:
        """The digests of the adapters that it holds."""
        return frozenset(adapter.digest for adapter in self.adapters)

    def with_adapters(self, held: LoRAAdapters) -> "EngineInfo":
        """Return what the worker is with these adapters."""
        return dataclasses.replace(self, adapters=held.adapters, adapters_version=held.version)
