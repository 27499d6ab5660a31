"""Prints where a request's time went, from the RequestMetrics of its last message."""

from pdserve.v1 import inference_service_pb2 as pb2

BAR_WIDTH = 32


def format_waterfall(metrics: pb2.RequestMetrics, usage: pb2.Usage) -> str:
    """Return a table of the exclusive stages of TTFT and of the first inter-token latency."""
    ttft = [
        ("router queue", metrics.router_queue_ns),
        ("tokenize", metrics.tokenize_ns),
        ("dispatch", metrics.dispatch_ns),
        ("prefill queue", metrics.prefill_queue_ns),
        ("decode queue", metrics.decode_queue_ns),
        ("prefill", metrics.prefill_ns),
        ("return", metrics.return_ns),
    ]
    first_itl = [
        ("KV transfer, exposed", metrics.kv_transfer_exposed_ns),
        ("into D's batch", metrics.decode_admit_ns),
        ("first decode step", metrics.first_decode_step_ns),
        ("waiting for P's word", metrics.release_ack_ns),
        ("return", metrics.decode_return_ns),
    ]
    lines = _group("time to first token (TTFT)", metrics.ttft_ns, ttft)
    if metrics.first_itl_ns:
        lines += _group("first to second token (first ITL)", metrics.first_itl_ns, first_itl)
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
    lines.append(f"path             {metrics.path}: {workers}")
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


def _group(title: str, total_ns: int, stages: list[tuple[str, int]]) -> list[str]:
    lines = [f"{title:<38}{_ms(total_ns)} ms"]
    done = 0
    for name, value in stages:
        left = round(BAR_WIDTH * done / max(total_ns, 1))
        done += value
        width = max(round(BAR_WIDTH * done / max(total_ns, 1)) - left, 1 if value else 0)
        lines.append(f"  {name:<22}{_ms(value)} ms  {' ' * left}{'█' * width}")
    return lines


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:10.3f}"
