"""Where a request's time went: stages that exclude each other and sum exactly."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from pdserve_common.engine_types import KVTransferStats, PrefillStats
from pdserve_common.metrics import RouterMetrics

TTFT_STAGES = ("router_queue", "tokenize", "dispatch", "prefill_queue", "prefill", "return")
FIRST_ITL_STAGES = ("kv_transfer_exposed", "first_decode_step", "decode_return")


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
    """The stages of TTFT_STAGES sum to ttft_ns and those of FIRST_ITL_STAGES to first_itl_ns."""

    router_queue_ns: int = 0
    tokenize_ns: int = 0
    dispatch_ns: int = 0
    prefill_queue_ns: int = 0
    prefill_ns: int = 0
    return_ns: int = 0
    ttft_ns: int = 0
    kv_transfer_exposed_ns: int = 0
    first_decode_step_ns: int = 0
    decode_return_ns: int = 0
    first_itl_ns: int = 0
    kv_transfer_ns: int = 0
    kv_transfer_bytes: int = 0
    kv_transport: str = ""
    mean_itl_ns: int = 0
    e2e_ns: int = 0
    path: str = ""
    prefill_engine_id: str = ""
    decode_engine_id: str = ""

    def milliseconds(self) -> Iterator[tuple[str, float]]:
        """Yield every duration, named without its unit."""
        for field in fields(self):
            if field.name.endswith("_ns"):
                yield field.name.removesuffix("_ns"), getattr(self, field.name) / 1e6

    def trailers(self) -> Iterator[tuple[str, str]]:
        """Yield what clients get as trailing metadata or HTTP headers."""
        for name, value in self.milliseconds():
            yield f"pdserve-{name.replace('_', '-')}-ms", f"{value:.3f}"
        yield "pdserve-path", self.path
        yield "pdserve-prefill-engine-id", self.prefill_engine_id
        yield "pdserve-decode-engine-id", self.decode_engine_id
        yield "pdserve-kv-transport", self.kv_transport
        yield "pdserve-kv-transfer-bytes", str(self.kv_transfer_bytes)


def measure(
    timeline: Timeline,
    *,
    num_tokens: int,
    prefill: PrefillStats | None,
    transfer: KVTransferStats | None,
    path: str,
    prefill_engine_id: str,
    decode_engine_id: str,
) -> RequestMetrics:
    """Return the metrics of a finished request; what no stage explains is `return`."""
    ttft = _since(timeline.arrival_ns, timeline.first_token_ns)
    first_itl = _since(timeline.first_token_ns, timeline.second_token_ns)
    queue, tokenize, dispatch, prefill_queue, prefill_run, rest = _split(
        ttft,
        timeline.tokenize_start_ns - timeline.arrival_ns,
        timeline.tokenize_end_ns - timeline.tokenize_start_ns,
        timeline.dispatched_ns - timeline.tokenize_end_ns,
        _ns(prefill.queue_s) if prefill else 0,
        _ns(prefill.prefill_s) if prefill else 0,
    )
    exposed, decode_step, decode_rest = _split(
        first_itl,
        _ns(transfer.exposed_s) if transfer else 0,
        _ns(transfer.first_decode_step_s) if transfer else 0,
    )
    decode_ns = _since(timeline.first_token_ns, timeline.last_token_ns)
    return RequestMetrics(
        router_queue_ns=queue,
        tokenize_ns=tokenize,
        dispatch_ns=dispatch,
        prefill_queue_ns=prefill_queue,
        prefill_ns=prefill_run,
        return_ns=rest,
        ttft_ns=ttft,
        kv_transfer_exposed_ns=exposed,
        first_decode_step_ns=decode_step,
        decode_return_ns=decode_rest,
        first_itl_ns=first_itl,
        kv_transfer_ns=_ns(transfer.transfer_s) if transfer else 0,
        kv_transfer_bytes=transfer.num_bytes if transfer else 0,
        kv_transport=transfer.transport if transfer else "",
        mean_itl_ns=decode_ns // (num_tokens - 1) if num_tokens > 1 else 0,
        e2e_ns=_since(timeline.arrival_ns, timeline.finished_ns),
        path=path,
        prefill_engine_id=prefill_engine_id,
        decode_engine_id=decode_engine_id,
    )


def observe(registry: RouterMetrics, metrics: RequestMetrics, *, model: str) -> None:
    """Export what a finished request took. Requests without a token only count as requests."""
    registry.request_duration.labels(model=model).observe(metrics.e2e_ns / 1e9)
    if metrics.ttft_ns:
        ttft = registry.time_to_first_token.labels(model=model, path=metrics.path)
        ttft.observe(metrics.ttft_ns / 1e9)
        _observe_stages(registry, metrics, TTFT_STAGES)
    if metrics.first_itl_ns:
        _observe_stages(registry, metrics, FIRST_ITL_STAGES)
    if metrics.mean_itl_ns:
        registry.time_per_output_token.labels(model=model).observe(metrics.mean_itl_ns / 1e9)
    if metrics.kv_transfer_ns:
        _observe_stages(registry, metrics, ("kv_transfer",))


def _observe_stages(
    registry: RouterMetrics, metrics: RequestMetrics, stages: Sequence[str]
) -> None:
    for stage in stages:
        seconds = getattr(metrics, f"{stage}_ns") / 1e9
        registry.stage.labels(stage=stage).observe(seconds)


def _since(start_ns: int, end_ns: int) -> int:
    return max(0, end_ns - start_ns) if end_ns else 0


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _split(total: int, *parts: int) -> list[int]:
    """Return the parts and the rest. Parts come from other hosts' clocks and may overlap what
    they are parts of: each is cut to what is left, so that the sum always holds.
    """
    left = total
    result = []
    for part in parts:
        result.append(min(max(part, 0), left))
        left -= result[-1]
    return [*result, left]
