"""Where a request's time went: stages that exclude each other and sum exactly."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from prometheus_client import Histogram

from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.types.engine import KVTransferStats, PrefillStats

TTFT_STAGES = (
    "router_queue",
    "tokenize",
    "dispatch",
    "prefill_queue",
    "decode_queue",
    "prefill",
    "return",
)
FIRST_ITL_STAGES = (
    "kv_transfer_exposed",
    "decode_admit",
    "first_decode_step",
    "release_ack",
    "decode_return",
)

_NO_PREFILL = PrefillStats(num_prompt_tokens=0, num_cached_tokens=0, queue_s=0.0, prefill_s=0.0)
_NO_TRANSFER = KVTransferStats(
    num_bytes=0,
    num_blocks=0,
    num_reads=0,
    transport="",
    transfer_s=0.0,
    exposed_s=0.0,
    release_ack_s=0.0,
)


@dataclass(slots=True, kw_only=True)
class Timeline:
    """A request's moments on the router's clock (monotonic ns); 0 has not happened."""

    arrival_ns: int
    tokenize_start_ns: int
    tokenize_end_ns: int
    dispatched_ns: int = 0
    first_token_ns: int = 0
    second_token_ns: int = 0
    last_token_ns: int = 0
    finished_ns: int = 0

    def on_tokens(self, now_ns: int, *, num_before: int, num_new: int) -> None:
        if num_before == 0:
            self.first_token_ns = now_ns
        if num_before < 2 <= num_before + num_new:
            self.second_token_ns = now_ns
        self.last_token_ns = now_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """The stages of TTFT_STAGES sum to ttft_ns and those of FIRST_ITL_STAGES to first_itl_ns.

    kv_transfer_ns overlaps the prefill and the exposed transfer. A request that was sent again has
    the stages of the attempts that brought its first and its second token; what the lost ones took
    is in `return` and `decode_return`.
    """

    router_queue_ns: int = 0
    tokenize_ns: int = 0
    dispatch_ns: int = 0
    prefill_queue_ns: int = 0
    decode_queue_ns: int = 0
    prefill_ns: int = 0
    return_ns: int = 0
    ttft_ns: int = 0
    kv_transfer_exposed_ns: int = 0
    decode_admit_ns: int = 0
    first_decode_step_ns: int = 0
    release_ack_ns: int = 0
    decode_return_ns: int = 0
    first_itl_ns: int = 0
    kv_transfer_ns: int = 0
    kv_transfer_bytes: int = 0
    kv_transport: str = ""
    mean_itl_ns: int = 0
    e2e_ns: int = 0
    path: str = ""
    # Why it is local; empty if it is not.
    route_reason: str = ""
    prefill_engine_id: str = ""
    decode_engine_id: str = ""
    determinism: str = ""
    num_redrives: int = 0

    def milliseconds(self) -> Iterator[tuple[str, float]]:
        """Yield every duration, named without its unit."""
        for field in fields(self):
            if field.name.endswith("_ns"):
                yield field.name.removesuffix("_ns"), getattr(self, field.name) / 1e6

    def facts(self) -> Iterator[tuple[str, str | int]]:
        """Yield everything else: where it went, and how."""
        for field in fields(self):
            if not field.name.endswith("_ns"):
                yield field.name, getattr(self, field.name)

    def trailers(self) -> Iterator[tuple[str, str]]:
        """Yield what clients get as trailing metadata or HTTP headers."""
        for name, value in self.milliseconds():
            yield f"pdserve-{name.replace('_', '-')}-ms", f"{value:.3f}"
        for name, fact in self.facts():
            yield f"pdserve-{name.replace('_', '-')}", str(fact)
        yield "pdserve-recovered", str(int(self.num_redrives > 0))


def measure(
    timeline: Timeline,
    *,
    num_tokens: int,
    prefill: PrefillStats | None,
    transfer: KVTransferStats | None,
    path: str,
    route_reason: str,
    prefill_engine_id: str,
    decode_engine_id: str,
    determinism: str,
    num_redrives: int,
) -> RequestMetrics:
    """Return the metrics of a request so far. What no stage explains is `return`, and after the
    first token `decode_return`: all of it if there was no handoff.
    """
    prefill = prefill or _NO_PREFILL
    transfer = transfer or _NO_TRANSFER
    ttft = _since(timeline.arrival_ns, timeline.first_token_ns)
    first_itl = _since(timeline.first_token_ns, timeline.second_token_ns)
    to_first = _split(
        ttft,
        TTFT_STAGES,
        timeline.tokenize_start_ns - timeline.arrival_ns,
        timeline.tokenize_end_ns - timeline.tokenize_start_ns,
        timeline.dispatched_ns - timeline.tokenize_end_ns,
        _ns(prefill.queue_s) - _ns(prefill.decode_queue_s),
        _ns(prefill.decode_queue_s),
        _ns(prefill.prefill_s),
    )
    to_second = _split(
        first_itl,
        FIRST_ITL_STAGES,
        _ns(transfer.exposed_s),
        _ns(transfer.decode_admit_s),
        _ns(transfer.first_decode_step_s),
        _ns(transfer.release_ack_s),
    )
    decode_ns = _since(timeline.first_token_ns, timeline.last_token_ns)
    return RequestMetrics(
        **to_first,
        ttft_ns=ttft,
        **to_second,
        first_itl_ns=first_itl,
        kv_transfer_ns=_ns(transfer.transfer_s),
        kv_transfer_bytes=transfer.num_bytes,
        kv_transport=transfer.transport,
        mean_itl_ns=decode_ns // (num_tokens - 1) if num_tokens > 1 else 0,
        e2e_ns=_since(timeline.arrival_ns, timeline.finished_ns),
        path=path,
        route_reason=route_reason,
        prefill_engine_id=prefill_engine_id,
        decode_engine_id=decode_engine_id,
        determinism=determinism,
        num_redrives=num_redrives,
    )


def observe_first_token(
    metrics: RouterMetrics,
    timing: RequestMetrics,
    *,
    model: str,
    exemplar: dict[str, str] | None = None,
) -> None:
    """Export what a request took to its first token, once it has one. An `exemplar` names the
    request's trace.
    """
    ttft = _series(metrics.time_to_first_token, model, timing.path)
    ttft.observe(timing.ttft_ns / 1e9, exemplar)
    _observe_stages(metrics, timing, TTFT_STAGES)


def observe_end(
    metrics: RouterMetrics,
    timing: RequestMetrics,
    *,
    model: str,
    exemplar: dict[str, str] | None = None,
) -> None:
    """Export what a finished request took as a whole, and behind its first token."""
    _series(metrics.request_duration, model).observe(timing.e2e_ns / 1e9, exemplar)
    if timing.first_itl_ns:
        _series(metrics.first_itl, model).observe(timing.first_itl_ns / 1e9, exemplar)
        # Zeros of requests without a handoff would hide what a handoff takes.
        has_handoff = timing.first_decode_step_ns > 0
        _observe_stages(metrics, timing, FIRST_ITL_STAGES if has_handoff else ("decode_return",))
    if timing.mean_itl_ns:
        _series(metrics.time_per_output_token, model).observe(timing.mean_itl_ns / 1e9, exemplar)
    if timing.kv_transfer_ns:
        _observe_stages(metrics, timing, ("kv_transfer",))


def _observe_stages(metrics: RouterMetrics, timing: RequestMetrics, stages: Sequence[str]) -> None:
    for stage in stages:
        seconds = getattr(timing, f"{stage}_ns") / 1e9
        _series(metrics.stage, stage).observe(seconds)


@functools.lru_cache(64)
def _series(metric: Histogram, *labels: str) -> Histogram:
    """Return what `labels` does, which takes 3 us and is asked for 13 times a request."""
    return metric.labels(*labels)


def _since(start_ns: int, end_ns: int) -> int:
    return max(0, end_ns - start_ns) if end_ns else 0


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _split(total: int, stages: Sequence[str], *parts: int) -> dict[str, Any]:
    """Return the stages' fields: the parts, in their order, and for the last one the rest. Parts
    come from other hosts' clocks and may overlap what they are parts of: each is cut to what is
    left, so that the sum always holds.
    """
    left = total
    cut = []
    for part in parts:
        cut.append(min(max(part, 0), left))
        left -= cut[-1]
    return {f"{stage}_ns": ns for stage, ns in zip(stages, [*cut, left], strict=True)}
