"""`pdserve bench`: seeded random load or a trace on a router, and the latencies a client sees."""

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.advisor.trace import Trace, TraceRequest, read_trace
from pdserve_client.client import AsyncClient
from pdserve_client.config import api_key, tls_of
from pdserve_common.config import add_config_flags
from pdserve_common.rpc.tls import TlsConfig
from pdserve_common.types.sampling_params import SamplingParams

PERCENTILES = (50, 90, 99)
# Below it most tokenizers have their special tokens.
FIRST_TOKEN_ID = 3


@dataclass(slots=True)
class RequestResult:
    """What one request looked like from outside. Times in seconds."""

    start: float
    token_times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None
    # What the router measured, on the last message.
    metrics: pb2.RequestMetrics | None = None
    num_prompt_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.start

    @property
    def tpot(self) -> float:
        return (self.token_times[-1] - self.token_times[0]) / max(self.num_tokens - 1, 1)

    @property
    def itls(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


def add_router_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that sends requests."""
    parser.add_argument(
        "--address",
        default="127.0.0.1:50051",
        help="the router, or several with commas between (%(default)s)",
    )
    add_config_flags(parser, TlsConfig)


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `pdserve bench`."""
    add_router_flags(parser)
    parser.add_argument("--num-requests", type=int, default=32, help="how many (%(default)s)")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="requests/s, Poisson; 0: all at once"
    )
    parser.add_argument("--concurrency", type=int, default=256, help="most requests open at once")
    parser.add_argument("--input-len", type=int, default=128, help="prompt tokens (%(default)s)")
    parser.add_argument("--output-len", type=int, default=32, help="generated tokens (%(default)s)")
    parser.add_argument("--vocab-size", type=int, default=1000, help="token ids drawn below this")
    parser.add_argument("--goodput-ttft-ms", type=float, default=2000.0, help="TTFT objective")
    parser.add_argument("--goodput-tpot-ms", type=float, default=100.0, help="TPOT objective")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="deadline of each request")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (%(default)s)")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="send these requests when they are due, with prompts of random tokens; JSONL as "
        "`pdserve advise --help` says. --num-requests, --input-len and --output-len do not count",
    )
    parser.add_argument(
        "--save-requests",
        type=Path,
        metavar="FILE",
        help="write a line of JSON for each request that was answered: a trace again, with its "
        "times",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )


def run_bench(args: argparse.Namespace) -> int:
    """Run the load and print the result; 1 if a request failed."""
    for name in ("num_requests", "concurrency", "input_len", "output_len", "vocab_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} is {getattr(args, name)}, must be at least 1")
    if args.vocab_size <= FIRST_TOKEN_ID:
        raise ValueError(
            f"vocab_size is {args.vocab_size}, must be at least {FIRST_TOKEN_ID + 1}: "
            "prompts have no special tokens"
        )
    if not (math.isfinite(args.rate) and args.rate >= 0):
        raise ValueError(f"rate is {args.rate}, must be a number of at least 0")
    trace = None if args.trace is None else read_trace(args.trace)
    started = time.monotonic()
    results = asyncio.run(send_load(args, trace))
    if args.save_requests is not None:
        save_requests(results, started, args.save_requests)
    summary = summarize(results, time.monotonic() - started, args)
    print(json.dumps(summary) if args.json else format_summary(summary))
    return 1 if summary["num_failed"] else 0


async def send_load(args: argparse.Namespace, trace: Trace | None) -> list[RequestResult]:
    """Send the trace, or what the flags say, and return what became of each request."""
    client = AsyncClient(args.address.split(","), tls=tls_of(args), api_key=api_key())
    places = asyncio.Semaphore(args.concurrency)
    tasks = []
    started = time.monotonic()
    try:
        for index, (request, prompt) in enumerate(_load(args, trace)):
            await asyncio.sleep(max(0.0, started + request.arrival_s - time.monotonic()))
            tasks.append(asyncio.create_task(_one(client, request, prompt, index, places, args)))
        return await asyncio.gather(*tasks)
    finally:
        await client.close()


def _load(
    args: argparse.Namespace, trace: Trace | None
) -> Iterator[tuple[TraceRequest, list[int]]]:
    """Yield requests with their prompts. A trace's own rate counts, unless --rate says another."""
    rng = random.Random(args.seed)
    if trace is not None:
        trace = trace.at_rate(args.rate) if args.rate > 0 else trace
        for request in trace.requests:
            yield request, _prompt(request, trace.unit_tokens, rng, args.vocab_size)
        return
    arrival_s = 0.0
    for _ in range(args.num_requests):
        request = TraceRequest(arrival_s, args.input_len, args.output_len)
        yield request, _prompt(request, 1, rng, args.vocab_size)
        if args.rate > 0:
            arrival_s += rng.expovariate(args.rate)


def _prompt(
    request: TraceRequest, unit_tokens: int, rng: random.Random, vocab_size: int
) -> list[int]:
    """Draw token ids: the same for equal entries of prefixes."""
    token_ids: list[int] = []
    for each in request.prefix:
        shared = random.Random(each)
        token_ids += [shared.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(unit_tokens)]
    del token_ids[request.num_prompt_tokens :]
    num_own = request.num_prompt_tokens - len(token_ids)
    return token_ids + [rng.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(num_own)]


async def _one(
    client: AsyncClient,
    request: TraceRequest,
    prompt: list[int],
    seed: int,
    places: asyncio.Semaphore,
    args: argparse.Namespace,
) -> RequestResult:
    num_tokens = request.num_output_tokens
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed)
    async with places:
        result = RequestResult(time.monotonic(), num_prompt_tokens=request.num_prompt_tokens)
        try:
            async for output in client.generate(prompt, params, timeout_s=args.timeout_s):
                if output.finished:
                    result.metrics = output.metrics
                for completion in output.outputs:
                    if completion.token_ids:
                        result.token_times.append(time.monotonic())
                        result.num_tokens += len(completion.token_ids)
                    if completion.HasField("error"):
                        result.error = completion.error.message
        except grpc.aio.AioRpcError as error:
            result.error = f"{error.code().name}: {error.details()}"
    return result


def save_requests(results: list[RequestResult], started: float, path: Path) -> None:
    """Write what was answered since `started`, as a trace without shared beginnings; TTFT and ITL
    in milliseconds beside it.
    """
    with path.open("w") as file:
        for result in results:
            if result.error is not None or not result.token_times:
                continue
            row: dict[str, Any] = {
                "arrival_s": round(result.start - started, 6),
                "num_prompt_tokens": result.num_prompt_tokens,
                "num_output_tokens": result.num_tokens,
                "ttft_ms": round(result.ttft * 1e3, 3),
                "itl_ms": [round(itl * 1e3, 3) for itl in result.itls],
            }
            file.write(json.dumps(row) + "\n")


def summarize(
    results: list[RequestResult], wall_s: float, args: argparse.Namespace
) -> dict[str, float | int | str | None]:
    """Return the figures: rates, goodput, and percentiles in milliseconds."""
    good = [result for result in results if result.error is None and result.token_times]
    measured = [result.metrics for result in good if result.metrics is not None]
    handed_over = [metrics for metrics in measured if metrics.prefill_engine_id]
    met = [
        result
        for result in good
        if result.ttft * 1e3 <= args.goodput_ttft_ms and result.tpot * 1e3 <= args.goodput_tpot_ms
    ]
    summary: dict[str, float | int | str | None] = {
        "num_requests": len(results),
        "num_failed": len(results) - len(good),
        "num_recovered": sum(metrics.num_redrives > 0 for metrics in measured),
        "first_error": next((result.error for result in results if result.error), None),
        "requests_per_s": len(good) / wall_s,
        "goodput_requests_per_s": len(met) / wall_s,
        "output_tokens_per_s": sum(result.num_tokens for result in good) / wall_s,
    }
    series = {
        "ttft_ms": [result.ttft for result in good],
        "tpot_ms": [result.tpot for result in good if result.num_tokens > 1],
        "itl_ms": [itl for result in good for itl in result.itls],
        "first_itl_ms": [metrics.first_itl_ns / 1e9 for metrics in handed_over],
        "kv_exposed_ms": [metrics.kv_transfer_exposed_ns / 1e9 for metrics in handed_over],
    }
    for name, values in series.items():
        for percent in PERCENTILES:
            summary[f"{name}_p{percent}"] = percentile(values, percent) * 1e3
    return summary


def percentile(values: list[float], percent: float) -> float:
    """Return the nearest-rank percentile, 0 for no values."""
    if not values:
        return 0.0
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def format_summary(summary: dict[str, float | int | str | None]) -> str:
    """Return the figures as lines for people."""
    lines = []
    for name, value in summary.items():
        shown = f"{value:.2f}" if isinstance(value, float) else str(value)
        lines.append(f"{name:<24}{shown}")
    return "\n".join(lines)
