"""Prints where a request's time went, from the RequestMetrics of its last message."""

from pdserve.v1 import inference_service_pb2 as pb2

BAR_WIDTH = 32
# What people read for a stage of docs/metrics.md, here, on the chat page and on dashboards.
TTFT_STAGES = {
    "router_queue": "router queue",
    "tokenize": "tokenize",
    "dispatch": "dispatch",
    "prefill_queue": "prefill queue",
    "decode_queue": "decode queue",
    "prefill": "prefill",
    "return": "return",
}
FIRST_ITL_STAGES = {
    "kv_transfer_exposed": "KV transfer, not hidden",
    "decode_admit": "into decode's batch",
    "first_decode_step": "first decode step",
    "release_ack": "release acknowledged",
    "decode_return": "return",
}


def format_waterfall(metrics: pb2.RequestMetrics, usage: pb2.Usage) -> str:
    """Return a table of the exclusive stages of TTFT and of the first inter-token latency."""
    lines = _group("time to first token (TTFT)", metrics.ttft_ns, TTFT_STAGES, metrics)
    if metrics.first_itl_ns:
        title = "first to second token (first ITL)"
        lines += _group(title, metrics.first_itl_ns, FIRST_ITL_STAGES, metrics)
    if metrics.kv_transfer_bytes:
        lines += _transfer(metrics)
    lines.append(f"mean ITL         {_ms(metrics.mean_itl_ns)} ms")
    lines.append(f"end to end       {_ms(metrics.e2e_ns)} ms")
    lines.append(
        f"tokens           {usage.num_prompt_tokens} prompt ({usage.num_cached_tokens} cached), "
        f"{usage.num_output_tokens} generated"
    )
    workers = metrics.decode_engine_id
    if metrics.prefill_engine_id:
        workers = f"{metrics.prefill_engine_id} -> {workers}"
    path = f"{metrics.path} ({metrics.route_reason})" if metrics.route_reason else metrics.path
    lines.append(f"path             {path}: {workers}")
    lines.append(f"determinism      {metrics.determinism}")
    if metrics.num_redrives:
        lines.append(f"redrives         {metrics.num_redrives}")
    return "\n".join(lines)


def _transfer(metrics: pb2.RequestMetrics) -> list[str]:
    rate = metrics.kv_transfer_bytes / max(metrics.kv_transfer_ns, 1)
    # All but what came after the prefill's end.
    hidden_ns = max(0, metrics.kv_transfer_ns - metrics.kv_transfer_exposed_ns)
    percent = 100 * hidden_ns / max(metrics.kv_transfer_ns, 1)
    return [
        f"KV transfer      {_ms(metrics.kv_transfer_ns)} ms for "
        f"{metrics.kv_transfer_bytes / 2**20:.2f} MiB: {rate:.2f} GB/s over "
        f"{metrics.kv_transport}",
        f"  under prefill  {_ms(hidden_ns)} ms ({percent:.0f}%)",
    ]


def _group(
    title: str, total_ns: int, stages: dict[str, str], metrics: pb2.RequestMetrics
) -> list[str]:
    lines = [f"{title:<40}{_ms(total_ns)} ms"]
    done = 0
    for stage, name in stages.items():
        value: int = getattr(metrics, f"{stage}_ns")
        left = round(BAR_WIDTH * done / max(total_ns, 1))
        done += value
        width = max(round(BAR_WIDTH * done / max(total_ns, 1)) - left, 1 if value else 0)
        lines.append(f"  {name:<24}{_ms(value)} ms  {' ' * left}{'█' * width}")
    return lines


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:10.3f}"
