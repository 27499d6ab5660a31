"""The spans of a worker's requests, made of what their outputs say: docs/tracing.md."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve_common.types.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    Generate,
    KVLost,
    KVTransferStats,
    PrefillStats,
)

if TYPE_CHECKING:
    from pdserve_common.observability.tracing import AttributeValue, Span, Tracing

# vLLM's name, so that what is made for its traces finds ours.
SPAN_NAME = "llm_request"
# How a leg ends that its router has ended, or that has nothing to do.
_NO_ERRORS = (ErrorCode.CANCELLED, ErrorCode.INVALID_ARGUMENT, ErrorCode.OVERLOADED)
# They are spans, or their ends.
_SHOWN_AS_SPANS = (
    EngineCoreEventType.QUEUED,
    EngineCoreEventType.SCHEDULED,
    EngineCoreEventType.KV_TRANSFER_STARTED,
    EngineCoreEventType.KV_TRANSFER_FINISHED,
)


@dataclass(slots=True)
class _Open:
    """A request that has not ended, and what its outputs have said."""

    request: EngineCoreRequest
    span: "Span"
    num_tokens: int = 0
    events: list[EngineCoreEvent] = field(default_factory=list)
    prefill: PrefillStats | None = None
    transfer: KVTransferStats | None = None
    kv_lost: KVLost | None = None

    def time_of(self, event_type: EngineCoreEventType, *, is_last: bool = False) -> int | None:
        """Return when it happened first, or last (ns)."""
        times = [event.timestamp for event in self.events if event.type is event_type]
        return _ns(times[-1 if is_last else 0]) if times else None


class RequestSpans:
    """Those of one router's requests. Used on the event loop's thread only."""

    def __init__(
        self,
        tracing: "Tracing",
        *,
        model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tracing = tracing
        self._model = model
        self._clock = clock
        self._open: dict[str, _Open] = {}

    def _now_ns(self) -> int:
        return round(self._clock() * 1e9)

    def begin(self, request: EngineCoreRequest) -> None:
        """The engine is about to get a request. One without a trace context has no span."""
        if not request.trace_headers:
            return
        before = self._open.pop(request.request_id, None)
        if before is not None:
            # A higher attempt takes its place.
            self._end(before, None)
        span = self._tracing.begin(SPAN_NAME, request.trace_headers, self._now_ns())
        if span.is_recording:
            self._open[request.request_id] = _Open(request, span)

    def take(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Note what outputs say; the last one of a request ends its span."""
        if self._open:
            for output in outputs:
                self._take(output)

    def refuse(self, request_id: str) -> None:
        """The engine has not taken it."""
        if (traced := self._open.pop(request_id, None)) is not None:
            traced.span.set({"error.type": "refused"})
            traced.span.end(self._now_ns())

    def end_all(self) -> None:
        """Nobody hears of these requests any more."""
        for traced in self._open.values():
            self._end(traced, None)
        self._open.clear()

    def _take(self, output: EngineCoreOutput) -> None:
        traced = self._open.get(output.request_id)
        if traced is None or traced.request.attempt != output.attempt:
            return
        traced.num_tokens += len(output.new_token_ids)
        traced.events.extend(output.events)
        traced.prefill = output.prefill_stats or traced.prefill
        traced.transfer = output.kv_transfer_stats or traced.transfer
        traced.kv_lost = output.kv_lost or traced.kv_lost
        if output.finished:
            del self._open[output.request_id]
            self._end(traced, output)

    def _end(self, traced: _Open, last: EngineCoreOutput | None) -> None:
        """`last` is the output that ended it; None: its router has given it up."""
        now_ns = self._now_ns()
        span = traced.span
        span.set(self._attributes(traced, last))
        for event in traced.events:
            if event.type not in _SHOWN_AS_SPANS:
                span.event(event.type.name.lower(), _ns(event.timestamp))
        decode_ns = _add_prefill(traced)
        decode_ns = _add_transfer(traced, now_ns) or decode_ns
        is_handed_off = last is not None and last.kv_transfer_params is not None
        generates = isinstance(traced.request.task, Generate)
        if decode_ns is not None and generates and not is_handed_off:
            span.add("decode", decode_ns, max(now_ns, decode_ns))
        if last is None:
            span.set({"error.type": "cancelled"})
        elif last.error is not None:
            span.set({"error.type": last.error.code.name.lower()})
            if last.error.code not in _NO_ERRORS:
                span.fail(last.error.message)
        span.end(now_ns)

    def _attributes(
        self, traced: _Open, last: EngineCoreOutput | None
    ) -> "dict[str, AttributeValue]":
        request, prefill = traced.request, traced.prefill
        lora = request.lora_request
        attributes: dict[str, AttributeValue] = {
            "gen_ai.request.model": self._model if lora is None else lora.lora_name,
            "gen_ai.request.id": request.external_req_id or request.request_id,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.output_tokens": traced.num_tokens,
            "pdserve.attempt": request.attempt,
        }
        if prefill is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = prefill.num_cached_tokens
            attributes["gen_ai.latency.time_in_queue"] = prefill.queue_s
            attributes["gen_ai.latency.time_in_model_prefill"] = prefill.prefill_s
        if last is not None and last.finish_reason is not None:
            attributes["gen_ai.response.finish_reasons"] = [str(last.finish_reason)]
        if traced.kv_lost is not None:
            attributes["pdserve.kv_lost_reason"] = traced.kv_lost.reason
        return attributes


def _add_prefill(traced: _Open) -> int | None:
    """Add the stages up to the first token of a prompt that was computed here; return when that
    came (ns).
    """
    stats = traced.prefill
    scheduled_ns = traced.time_of(EngineCoreEventType.SCHEDULED)
    if stats is None or scheduled_ns is None:
        return None
    granted_ns = scheduled_ns - _ns(stats.decode_queue_s)
    queued_ns = scheduled_ns - _ns(stats.queue_s)
    if queued_ns < granted_ns:
        traced.span.add("prefill_queue", queued_ns, granted_ns)
    if granted_ns < scheduled_ns:
        traced.span.add("decode_queue", granted_ns, scheduled_ns)
    end_ns = scheduled_ns + _ns(stats.prefill_s)
    traced.span.add("prefill", scheduled_ns, end_ns, {"pdserve.num_chunks": stats.num_chunks})
    return end_ns


def _add_transfer(traced: _Open, now_ns: int) -> int | None:
    """Add the stages of a pull; return when the first token came that was computed here (ns)."""
    span, stats = traced.span, traced.transfer
    queued_ns = traced.time_of(EngineCoreEventType.QUEUED)
    granted_ns = traced.time_of(EngineCoreEventType.KV_TRANSFER_STARTED, is_last=True)
    if granted_ns is None:
        return None
    if queued_ns is not None:
        span.add("grant_wait", queued_ns, granted_ns)
    landed_ns = traced.time_of(EngineCoreEventType.KV_TRANSFER_FINISHED, is_last=True)
    if stats is None or landed_ns is None:
        _add_lost_transfer(traced, granted_ns, landed_ns or now_ns)
        return None
    transfer = span.add(
        "kv_transfer",
        granted_ns,
        landed_ns,
        {
            "pdserve.kv_transfer.bytes": stats.num_bytes,
            "pdserve.kv_transfer.blocks": stats.num_blocks,
            "pdserve.kv_transfer.reads": stats.num_reads,
            "pdserve.kv_transfer.transport": stats.transport,
            "pdserve.kv_transfer.busy_ms": stats.transfer_s * 1e3,
            "pdserve.kv_transfer.exposed_ms": stats.exposed_s * 1e3,
        },
    )
    transfer.add("kv_transfer_exposed", landed_ns - _ns(stats.exposed_s), landed_ns)
    start_ns = landed_ns
    for stage in ("decode_admit", "first_decode_step", "release_ack"):
        end_ns = start_ns + _ns(getattr(stats, f"{stage}_s"))
        span.add(stage, start_ns, end_ns)
        start_ns = end_ns
    return start_ns


def _add_lost_transfer(traced: _Open, granted_ns: int, end_ns: int) -> None:
    """Of one that has not brought a token here."""
    lost = traced.kv_lost
    lost_ns = traced.time_of(EngineCoreEventType.KV_LOST, is_last=True)
    transfer = traced.span.begin("kv_transfer", granted_ns)
    if lost is not None:
        transfer.set({"error.type": lost.reason})
        transfer.fail(lost.message)
    transfer.end(max(granted_ns, lost_ns or end_ns))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
