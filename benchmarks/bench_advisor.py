"""What `pdserve advise` predicts, against stacks that really run on this machine.

    python benchmarks/bench_advisor.py

In each round a cost profile is measured of one prefill and one decode worker, and a prediction
printed for that pair and for two mixed workers. Then the pair replays the trace as `pdserve bench`
does, and two mixed workers do. The error is predicted / measured - 1, the median of all rounds.
Each worker has a core of its own where there are enough; whatever else runs on them shows as error.
"""

import argparse
import asyncio
import dataclasses
import datetime
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from machine import describe

from pdserve_client.advisor.command import profile_lines
from pdserve_client.advisor.cost_profile import CostProfile, load_profile, save_profile
from pdserve_client.advisor.profiler import Plan, Profiler, get_info
from pdserve_client.advisor.search import percentile
from pdserve_client.advisor.simulator import Simulation, Split
from pdserve_client.advisor.trace import Trace, draw_trace, parse_lengths
from pdserve_client.bench import RequestResult, add_bench_flags, send_load
from pdserve_client.client import AsyncClient
from pdserve_client.config import StackConfig
from pdserve_client.stack import Stack
from pdserve_common.rpc.addresses import join_address

LOG_DIR = Path(".bench/advisor")
SPLITS = (Split(1, 1), Split(0, 2))
COLUMNS = ("TTFT p50", "TTFT p90", "ITL p50", "ITL p90")
VOCAB_SIZE = 1300  # of models/pdserve-tiny

Figures = dict[str, float]


def figures(ttft: list[float], itl: list[float]) -> Figures:
    """Return milliseconds by column."""
    ttft, itl = sorted(ttft), sorted(itl)
    values = [percentile(series, percent) for series in (ttft, itl) for percent in (50, 90)]
    return {name: value * 1e3 for name, value in zip(COLUMNS, values, strict=True)}


@contextmanager
def stack(split: Split, args: argparse.Namespace) -> Iterator[Stack]:
    """Yield a stack that is ready."""
    config = StackConfig(
        model=str(args.model),
        prefill=split.num_prefill,
        decode=split.num_decode,
        num_threads=1,
        # Ready only when it hands over.
        require_disaggregation=split.num_prefill > 0,
        kv_cache_memory_mib=256,
        log_dir=str(LOG_DIR),
        **dict.fromkeys(("grpc_port", "http_port", "metrics_port", "worker_port"), 0),
    )
    with Stack(config) as started:
        for _ in started.wait_until_ready():
            pass
        yield started


async def measure_profile(started: Stack, args: argparse.Namespace) -> CostProfile:
    prefill, decode = (
        get_info(join_address(started.config.host, worker.port), None) for worker in started.workers
    )
    plan = Plan(max_prompt_tokens=args.max_prompt_tokens, max_batch=8, repeats=args.repeats)
    client = AsyncClient([started.grpc_address])
    try:
        profiler = Profiler(client, decode, prefill, plan, lambda text: None)
        now = datetime.datetime.now(datetime.timezone.utc)
        return await profiler.measure(describe("torch"), now.isoformat(timespec="seconds"))
    finally:
        await client.close()


def replay(started: Stack, trace: Trace) -> Figures:
    parser = argparse.ArgumentParser()
    add_bench_flags(parser)
    flags = parser.parse_args(
        [f"--address={started.grpc_address}", f"--vocab-size={VOCAB_SIZE}"],
    )
    results: list[RequestResult] = asyncio.run(send_load(flags, trace))
    if failed := [result.error for result in results if result.error is not None]:
        sys.exit(f"{len(failed)} requests failed: {failed[0]}")
    return figures([r.ttft for r in results], [itl for r in results for itl in r.itls])


def predict(trace: Trace, profile: CostProfile, split: Split) -> Figures:
    outcome = Simulation(trace, profile, split).run()
    return figures(list(outcome.ttft), list(outcome.itl))


def print_row(name: str, what: str, values: list[str]) -> None:
    print(f"| {name} | {what} | {' | '.join(values)} |", flush=True)


def main() -> None:
    """Measure, predict, replay, and print Markdown."""
    args = _parse_args()
    print(describe("torch", "nixl-cu13"), flush=True)
    trace = draw_trace(
        num_requests=args.num_requests,
        rate=args.rate,
        prompt_tokens=parse_lengths(args.prompt_tokens),
        output_tokens=parse_lengths(args.output_tokens),
        seed=args.seed,
    )
    LOG_DIR.mkdir(parents=True, exist_ok=True)
    print_row("split", "ms", list(COLUMNS))
    print_row("---", "---", ["---"] * len(COLUMNS))
    errors: dict[Split, list[Figures]] = {split: [] for split in SPLITS}
    for _ in range(args.rounds):
        for split, error in run_round(trace, args).items():
            errors[split].append(error)
    for split, found in errors.items():
        medians = [statistics.median(each[name] for each in found) for name in COLUMNS]
        print_row(str(split), "error", [f"{error:+.0%}" for error in medians])
    print(f"\n{describe('torch')}; the last profile:\n")
    print("\n".join(profile_lines(load_profile(LOG_DIR / "profile.json"))))


def run_round(trace: Trace, args: argparse.Namespace) -> dict[Split, Figures]:
    """Measure a profile, predict both splits, then run them; return the errors."""
    # The first steps of a process take longer.
    warm = dataclasses.replace(trace, requests=trace.requests[:20])
    errors = {}
    with stack(SPLITS[0], args) as started:
        profile = asyncio.run(measure_profile(started, args))
        save_profile(profile, LOG_DIR / "profile.json")
        predicted = {split: predict(trace, profile, split) for split in SPLITS}
        for split, values in predicted.items():
            print_row(str(split), "predicted", [f"{value:.1f}" for value in values.values()])
        errors[SPLITS[0]] = compare(SPLITS[0], predicted, replay(started, trace))
    with stack(SPLITS[1], args) as started:
        replay(started, warm)
        errors[SPLITS[1]] = compare(SPLITS[1], predicted, replay(started, trace))
    return errors


def compare(split: Split, predicted: dict[Split, Figures], measured: Figures) -> Figures:
    print_row(str(split), "measured", [f"{value:.1f}" for value in measured.values()])
    return {name: predicted[split][name] / measured[name] - 1 for name in COLUMNS}


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/pdserve-tiny"))
    parser.add_argument("--num-requests", type=int, default=120, help="(%(default)s)")
    parser.add_argument("--rate", type=float, default=3.0, help="requests/s (%(default)s)")
    parser.add_argument("--prompt-tokens", default="uniform:64:900", help="(%(default)s)")
    parser.add_argument("--output-tokens", default="uniform:8:64", help="(%(default)s)")
    parser.add_argument("--max-prompt-tokens", type=int, default=1000, help="of the profile")
    parser.add_argument("--repeats", type=int, default=5, help="of the profile (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each split (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the trace (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
