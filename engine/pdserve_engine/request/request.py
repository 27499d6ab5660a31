"""A request inside the engine: its tokens, its status and how far it is computed."""

import enum
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

from pdserve_common.limits.validation import PROBE_PRIORITY
from pdserve_common.types.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreRequest,
    EngineError,
    FinishReason,
    Generate,
    KVTransferParams,
    Pool,
    PrefillStats,
)
from pdserve_common.types.engine_client import NO_TENSORS, Tensors
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.grammar.native import CompiledGrammar
from pdserve_engine.request.drafts import RequestDrafts
from pdserve_engine.request.handoff import Handoff
from pdserve_engine.request.progress import RequestProgress

# A request that is pooled has these: its answer is all that it brings.
_NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)


class RequestStatus(enum.IntEnum):
    """vLLM V1's states; everything above PREEMPTED is finished."""

    WAITING = 1
    WAITING_FOR_FSM = 2
    WAITING_FOR_REMOTE_KVS = 3
    RUNNING = 4
    PREEMPTED = 5
    FINISHED_STOPPED = 6
    FINISHED_LENGTH_CAPPED = 7
    FINISHED_ABORTED = 8
    FINISHED_IGNORED = 9
    FINISHED_ERROR = 10
    FINISHED_REPETITION = 11

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


class RequestContainer(Collection["Request"]):
    """A container of requests. From its arrival to its end a request is in exactly one, its
    `container`, which calls `entered` and `left`.
    """

    # What the requests in it may be.
    statuses: ClassVar[tuple[RequestStatus, ...]]

    @abstractmethod
    def remove_request(self, request: "Request") -> None:
        """Take out a request that is here."""

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and request.container is self


class Request:
    """The scheduler's mutable view of one EngineCoreRequest. Owned by the engine thread."""

    __slots__ = (
        "__weakref__",
        "_all_token_ids",
        "block_hashes",
        "clock",
        "container",
        "core_request",
        "do_remote_decode",
        "do_remote_prefill",
        "drafts",
        "end_token_ids",
        "error",
        "events",
        "first_scheduled_time",
        "grammar",
        "handoff",
        "is_probe",
        "max_tokens",
        "mm_features",
        "num_cached_tokens",
        "num_cached_when_queued",
        "num_emitted_prompt_logprobs",
        "num_emitted_tokens",
        "num_prefill_chunks",
        "num_prompt_tokens",
        "num_resumed_tokens",
        "output_limit",
        "pooling_params",
        "prefill_stats",
        "progress",
        "queued_time",
        "request_id",
        "sampling_params",
        "seed",
        "status",
        "stop_reason",
        "tensors",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        *,
        max_model_len: int,
        seed: int,
        tensors: Tensors = NO_TENSORS,
        queued_time: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`queued_time`: seconds of the clock; None for now."""
        # To the scheduler the answer to a pooling request is one output token, which never comes.
        task, params = request.task, _NO_SAMPLING
        if isinstance(task, Generate):
            params = task.sampling_params
        self.core_request = request
        self.mm_features = request.mm_features
        self.tensors = tensors
        self.request_id = request.request_id
        self.sampling_params = params
        self.pooling_params = task.pooling_params if isinstance(task, Pool) else None
        # A router's own, tiny: it comes before all others, in a slot of its own.
        self.is_probe = request.priority == PROBE_PRIORITY
        transfer = request.kv_transfer_params
        self.do_remote_decode = transfer is not None and transfer.do_remote_decode
        self.do_remote_prefill = transfer is not None and transfer.do_remote_prefill
        self.handoff = Handoff(needs_remote_kv=self.do_remote_prefill)
        # What its output follows; none if it follows none, or while that is not ready.
        self.grammar: CompiledGrammar | None = None
        self.drafts = RequestDrafts()
        self.seed = seed
        self.num_prompt_tokens = len(request.prompt_token_ids)
        # Output tokens that earlier attempts have brought.
        self.num_resumed_tokens = len(request.resume_output_token_ids)
        self._all_token_ids = list(request.prompt_token_ids)
        self._all_token_ids.extend(request.resume_output_token_ids)
        room = max_model_len - self.num_prompt_tokens
        self.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        # Output tokens after which it ends here: on prefill that is the first, the rest is
        # decode's.
        self.output_limit = self.max_tokens
        if self.do_remote_decode or self.pooling_params is not None:
            self.output_limit = self.num_resumed_tokens + 1
        self.end_token_ids = _end_token_ids(params, request.eos_token_id)
        self.status = RequestStatus.WAITING
        self.container: RequestContainer | None = None
        self.stop_reason: int | str | None = None
        self.error: EngineError | None = None
        self.progress = RequestProgress()
        # Steps before its first token here.
        self.num_prefill_chunks = 0
        # Tokens of the prompt that the local prefix cache had at the first scheduling.
        self.num_cached_tokens = -1
        # The same when it was queued: a guess of what it will not have to compute.
        self.num_cached_when_queued = 0
        # Output tokens already sent to the front end.
        self.num_emitted_tokens = self.num_resumed_tokens
        # Decode's leg has them from prefill.
        self.num_emitted_prompt_logprobs = self.num_prompt_tokens if self.do_remote_prefill else 0
        self.block_hashes: list[bytes] = []
        self.events: list[EngineCoreEvent] = []
        self.clock = clock
        self.queued_time = clock() if queued_time is None else queued_time
        self.first_scheduled_time: float | None = None
        self.prefill_stats: PrefillStats | None = None

    def leave(self) -> None:
        """Have its container let go of it, if it has one."""
        if self.container is not None:
            self.container.remove_request(self)

    def entered(self, container: RequestContainer) -> None:
        """`container` has taken the request, which has the first of its statuses then, unless it
        has one of the others.
        """
        assert self.container is None, f"{self.request_id} is in {self.container}"
        self.container = container
        if self.status not in container.statuses:
            self.status = container.statuses[0]

    def left(self) -> None:
        """Its container has let go of it."""
        self.container = None

    @property
    def adapter(self) -> str | None:
        """The digest of its LoRA adapter."""
        lora = self.core_request.lora_request
        return None if lora is None else lora.digest

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output tokens. Do not change it: use append_output_token_ids."""
        return self._all_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that it is expected to compute while it waits for its turn."""
        return len(self._all_token_ids) - self.num_cached_when_queued

    @property
    def num_output_tokens(self) -> int:
        return len(self._all_token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens, known or about to be sampled, that no step computes yet."""
        progress = self.progress
        num_tokens = len(self._all_token_ids) + progress.num_output_placeholders
        return num_tokens - progress.num_computed_tokens

    @property
    def is_output_complete(self) -> bool:
        """The last token it may have is sampled or being sampled."""
        return self.num_output_tokens + self.progress.num_output_placeholders >= self.output_limit

    @property
    def priority(self) -> int:
        return self.core_request.priority

    @property
    def arrival_time(self) -> float:
        return self.core_request.arrival_time

    @property
    def kv_transfer_params(self) -> KVTransferParams | None:
        return self.core_request.kv_transfer_params

    @property
    def can_continue(self) -> bool:
        """May the next step compute more of it? Not if it is not running, its last token is coming,
        its first step is speculative, or the length of what is in flight is open.
        """
        # Asked of all that run in each step: the properties that say the same cost a call each.
        progress = self.progress
        num_tokens = len(self._all_token_ids) + progress.num_output_placeholders
        return (
            self.status is RequestStatus.RUNNING
            and num_tokens - self.num_prompt_tokens < self.output_limit
            and not self.handoff.needs_remote_kv
            and not (progress.is_length_open and progress.num_in_flight_tokens)
        )

    @property
    def is_handed_off(self) -> bool:
        """Prefill: the prefill is done and the request goes on at decode."""
        return (
            self.do_remote_decode
            and self.status == RequestStatus.FINISHED_LENGTH_CAPPED
            and self.num_output_tokens < self.max_tokens
        )

    @property
    def is_redrive(self) -> bool:
        """Has its front end sent it again after a failure?"""
        return self.core_request.attempt > 0

    @property
    def has_begun(self) -> bool:
        """Was it running once, here or at another worker?"""
        return self.is_redrive or self.status is RequestStatus.PREEMPTED

    @property
    def is_prompt_computed(self) -> bool:
        """Is the KV of its whole prompt written and its own to share?"""
        progress = self.progress
        is_ready = not self.handoff.needs_remote_kv and progress.num_slots > 0
        return is_ready and progress.num_finished_tokens >= self.num_prompt_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return _FINISH_REASONS.get(self.status)

    @property
    def reads_prefix_cache(self) -> bool:
        """Log-probabilities of a prompt need its logits, so it is computed whole."""
        return self.sampling_params.prompt_logprobs is None or self.do_remote_prefill

    def append_output_token_ids(self, token_ids: Sequence[int]) -> None:
        self._all_token_ids.extend(token_ids)

    def record_event(self, event_type: EngineCoreEventType, time: float | None = None) -> None:
        """`time`: seconds of the clock; None for now."""
        self.events.append(EngineCoreEvent(event_type, self.clock() if time is None else time))

    def take_events(self) -> tuple[EngineCoreEvent, ...]:
        events = tuple(self.events)
        self.events.clear()
        return events

    def count_chunk(self) -> None:
        """A step is over: before the first token here it computed some of the prompt."""
        if len(self._all_token_ids) == self.num_prompt_tokens + self.num_resumed_tokens:
            self.num_prefill_chunks += 1

    def measure_prefill(self) -> PrefillStats | None:
        """Return where the time of the first token of this engine went, which has come by the first
        call. None on decode after a pull: they are prefill's.
        """
        is_pulled = self.do_remote_prefill and not self.handoff.needs_remote_kv
        if self.prefill_stats is None and not is_pulled:
            self.prefill_stats = self._measure_prefill()
        return self.prefill_stats

    def _measure_prefill(self) -> PrefillStats | None:
        if self.first_scheduled_time is None:
            return None
        queue_s = self.first_scheduled_time - self.queued_time
        is_on_p = self.do_remote_decode or self.pooling_params is not None
        return PrefillStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=max(self.num_cached_tokens, 0),
            queue_s=queue_s,
            prefill_s=self.clock() - self.first_scheduled_time,
            # What is not prefill's is decode's: no other worker has it.
            decode_queue_s=self.handoff.decode_queue_s if is_on_p else queue_s,
            num_chunks=self.num_prefill_chunks,
        )

    def __lt__(self, other: "Request") -> bool:
        """Priority order: lower value, then those that are on their way already, then earlier
        arrival, then id.
        """
        return self._rank < other._rank

    @property
    def _rank(self) -> tuple[int, bool, float, str]:
        return self.priority, not self.is_redrive, self.arrival_time, self.request_id


def _end_token_ids(params: SamplingParams, eos_token_id: int | None) -> frozenset[int]:
    """Return the tokens that may end an answer."""
    if params.ignore_eos or eos_token_id is None:
        return frozenset(params.stop_token_ids)
    return frozenset((*params.stop_token_ids, eos_token_id))
