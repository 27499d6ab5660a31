"""The advice in words, as a table and as JSON."""

from collections.abc import Sequence
from typing import Any

from pdserve_client.advisor.search import Goodput, RateResult, percentile
from pdserve_client.advisor.simulator import Outcome

NAMES = {
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
}
# Prefill workers that compute for this share of the time are what limits.
BUSY = 0.7
# Waiting for decode is a reason if most requests wait for this share of what is too long. Only the
# next few in a queue ask decode, the others wait behind them.
LARGE = 0.02
# Requests' durations that a trace should last for, or its end is all it shows.
MIN_DURATIONS = 10


def why_missed(result: RateResult) -> str:
    """Return in words which objectives a rate missed, and what of the workers made it so."""
    outcome = result.outcome
    what = ", ".join(f"{NAMES[name]} {result.latencies[name]:.0f} ms" for name in result.missed)
    causes = []
    if any(name.startswith("ttft") for name in result.missed):
        causes.append(_why_ttft(outcome))
    if any(name.startswith("itl") for name in result.missed):
        causes.append(_why_itl(outcome, result))
    return f"{what}: {'; '.join(dict.fromkeys(causes))}"


def _why_ttft(outcome: Outcome) -> str:
    if not outcome.prefill:
        return "prompts wait for mixed workers that are busy"
    if outcome.prefill_busy > BUSY:
        return "prefill workers are too few for the prompts"
    waits = percentile(sorted(outcome.grant_waits), 90)
    if waits > LARGE * percentile(sorted(outcome.ttft), 99):
        return "decode workers have no slot or no KV room, so prompts wait for them"
    return "prompts come in bursts, or are long"


def _why_itl(outcome: Outcome, result: RateResult) -> str:
    if any(worker.num_preemptions for worker in outcome.decode):
        return "decode workers run out of KV blocks and compute preempted requests again"
    latencies = result.latencies
    if outcome.local_reasons and latencies["itl_p99_ms"] > 2 * latencies["itl_p50_ms"]:
        return "steps that compute prompts hold up the answers beside them"
    return f"batches are large ({outcome.decode_batch:.0f} requests on average), so steps are long"


def limit_of(found: Goodput) -> str:
    """Return what keeps a split from more."""
    if found.above is None:
        return "nothing, up to the highest rate that was tried"
    return why_missed(found.above)


def verdict(found: Sequence[Goodput], precision: float) -> list[str]:
    """Return the answer: which split, by how much, and why."""
    best = max(found, key=lambda each: each.rate)
    if not best.rate:
        return [
            "No split meets the objectives at any rate that was tried: they ask for more than one "
            "request alone gets. Relax them, or measure faster workers."
        ]
    lines = [f"Best: {best.split}, {best.rate:.2f} requests/s within the objectives."]
    mixed = max((each for each in found if not each.split.num_prefill), key=_rate, default=None)
    separate = max((each for each in found if each.split.num_prefill), key=_rate, default=None)
    if mixed is None or separate is None:
        return lines
    if not mixed.rate:
        lines.append("Disaggregation is worth it: mixed workers meet the objectives at no rate.")
    elif separate.rate > mixed.rate * (1 + 2 * precision):
        lines.append(
            f"Disaggregation is worth it: {separate.rate / mixed.rate:.2f} times the rate of "
            f"{mixed.split} ({mixed.rate:.2f} requests/s)."
        )
    elif mixed.rate > separate.rate * (1 + 2 * precision):
        worth = "Disaggregation is not worth it:"
        lines.append(
            f"{worth} mixed workers reach {mixed.rate / separate.rate:.2f} times the rate of "
            f"{separate.split} ({separate.rate:.2f} requests/s)."
            if separate.rate
            else f"{worth} {separate.split} meets the objectives at no rate."
        )
    else:
        lines.append(
            f"Disaggregation makes no difference that this can tell: {separate.split} reaches "
            f"{separate.rate:.2f}, {mixed.split} {mixed.rate:.2f} requests/s."
        )
    lines += [f"What limits {each.split}: {limit_of(each)}." for each in (mixed, separate)]
    return lines + _doubts(best)


def _doubts(best: Goodput) -> list[str]:
    """Say it if the trace is too short to tell."""
    assert best.best is not None
    outcome = best.best.outcome
    durations = [times.last_token_at - times.request.arrival_s for times in outcome.times]
    mean_s = sum(durations) / len(durations)
    if outcome.arrivals_s >= MIN_DURATIONS * mean_s:
        return []
    return [
        f"But: at this rate all requests come within {outcome.arrivals_s:.1f} s, and one takes "
        f"{mean_s:.1f} s. That is too short for queues to grow as they would; use more requests."
    ]


def _rate(found: Goodput) -> float:
    return found.rate


def table(results: Sequence[tuple[str, RateResult | None, str]]) -> list[str]:
    """Return a Markdown table: for each split its rate, latencies there, and a remark."""
    header = ["split", "requests/s", *(f"{name}, ms" for name in NAMES.values())]
    header += ["P busy", "D batch", "KV peak", "what gives way first"]
    rows = [header, ["---"] * len(header)]
    for split, result, remark in results:
        if result is None:
            rows.append([split, "0", *["-"] * (len(header) - 3), remark])
            continue
        outcome = result.outcome
        rows.append(
            [
                split,
                f"{result.rate:.2f}",
                *(f"{result.latencies[name]:.1f}" for name in NAMES),
                f"{outcome.prefill_busy:.0%}" if outcome.prefill else "-",
                f"{outcome.decode_batch:.1f}",
                f"{outcome.peak_kv_share:.0%}",
                remark,
            ]
        )
    return [f"| {' | '.join(row)} |" for row in rows]


def as_json(result: RateResult | None) -> dict[str, Any] | None:
    """Return what the table says of a rate."""
    if result is None:
        return None
    outcome = result.outcome
    return {
        "requests_per_s": result.rate,
        **result.latencies,
        "missed": result.missed,
        "prefill_busy": outcome.prefill_busy,
        "decode_batch": outcome.decode_batch,
        "kv_peak": outcome.peak_kv_share,
        "num_preemptions": sum(worker.num_preemptions for worker in outcome.decode),
        "num_local": sum(outcome.local_reasons.values()),
        "duration_s": outcome.duration_s,
    }
