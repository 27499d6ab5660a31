"""Our prefill and decode pair against vLLM's over NIXL, on the same cores, under the same load.

    make bench-peers
    python benchmarks/bench_pair.py [--loads 128:32:0.5 ...] [--requests N]

A load is INPUT_TOKENS:OUTPUT_TOKENS:REQUESTS_PER_SECOND; arrivals are Poisson. Both get the same
prompts at the same moments, over OpenAI's HTTP API, each with one thread for prefill and one for
decode. Goodput counts requests with a TTFT and a TPOT within the objectives.
"""

import argparse
import asyncio
import json
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from machine import describe
from make_model import make_model
from peers.vllm_pair import vllm_pair

from pdserve_client.bench import RequestResult, summarize
from pdserve_client.config import StackConfig
from pdserve_client.stack import Stack

DEFAULT_MODEL = Path(".bench/qwen3-0.6b-random")
PEERS = Path(".venv-peers")
LOG_DIR = Path(".bench/pair")
NUM_WARM_UP = 3
MAX_PROMPT_TOKEN_ID = 1000
COLUMNS = (
    "goodput_requests_per_s", "requests_per_s", "num_failed", "ttft_ms_p50", "ttft_ms_p99",
    "tpot_ms_p50", "itl_ms_p50", "itl_ms_p99",
)  # fmt: skip

Load = tuple[int, int, float]


def main() -> None:
    """Run every load on both systems and print a Markdown table."""
    args = _parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # stops what was started
    if args.model == DEFAULT_MODEL:
        make_model(args.model)
    print(describe("torch", "nixl"))
    print(f"{args.model.name}, {args.requests} requests a load\n")
    print(f"| in:out:rate | system | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}")
    with ours(args) as url:
        mine = run_loads("pdserve", url, args)
    with theirs(args) as url:
        peers = run_loads("vLLM", url, args)
    for load in args.loads:
        pairs = [(mine[load][column], peers[load][column]) for column in COLUMNS]
        print_row(load, "pdserve / vLLM", [f"{a / b:.2f}" if b else "-" for a, b in pairs])


def run_loads(name: str, url: str, args: argparse.Namespace) -> dict[Load, dict[str, float]]:
    """Return, and print, the figures of each load."""
    figures = {}
    for load in args.loads:
        summary = asyncio.run(measure(url, load, args))
        figures[load] = {column: float(summary[column] or 0.0) for column in COLUMNS}
        print_row(load, name, [f"{value:.2f}" for value in figures[load].values()])
        if summary["first_error"]:
            print(f"{name}: {summary['first_error']}", file=sys.stderr)
    return figures


def print_row(load: Load, name: str, cells: list[str]) -> None:
    print(f"| {':'.join(map(str, load))} | {name} | {' | '.join(cells)} |", flush=True)


@contextmanager
def ours(args: argparse.Namespace) -> Iterator[str]:
    config = StackConfig(
        model=str(args.model),
        num_threads=1,
        max_model_len=max_model_len(args),
        kv_cache_memory_mib=1024,
        log_dir=str(LOG_DIR),
        **dict.fromkeys(("grpc_port", "http_port", "metrics_port", "worker_port"), 0),
    )
    with Stack(config) as stack:
        for _ in stack.wait_until_ready():
            pass
        yield f"http://127.0.0.1:{stack.http_port}"


@contextmanager
def theirs(args: argparse.Namespace) -> Iterator[str]:
    flags = [f"--max-model-len={max_model_len(args)}", *args.vllm_flags]
    with vllm_pair(PEERS, args.model, free_ports(5), LOG_DIR, flags) as url:
        yield url


def max_model_len(args: argparse.Namespace) -> int:
    return max(num_input + num_output for num_input, num_output, _ in args.loads)


async def measure(
    url: str, load: Load, args: argparse.Namespace
) -> dict[str, float | int | str | None]:
    """Send the load and return what `pdserve bench` would say of it."""
    num_input, num_output, rate = load
    rng = random.Random(args.seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=args.timeout_s, limits=limits) as http:
        for _ in range(NUM_WARM_UP):  # compiles, connects
            result = await send(http, prompt_of(rng, num_input), num_output, args)
            if result.error:
                raise SystemExit(f"{url} does not work: {result.error}")
        tasks, started = [], time.monotonic()
        for _ in range(args.requests):
            prompt = prompt_of(rng, num_input)
            tasks.append(asyncio.create_task(send(http, prompt, num_output, args)))
            await asyncio.sleep(rng.expovariate(rate))
        results = await asyncio.gather(*tasks)
    return summarize(results, time.monotonic() - started, args)


def prompt_of(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(3, MAX_PROMPT_TOKEN_ID) for _ in range(num_tokens)]


async def send(
    http: httpx.AsyncClient, prompt: list[int], num_output: int, args: argparse.Namespace
) -> RequestResult:
    """Stream one completion; each event with a choice is one moment."""
    body = {
        "model": args.model.name,
        "prompt": prompt,
        "max_tokens": num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    result = RequestResult(time.monotonic())
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                result.error = (await answer.aread()).decode()
            async for line in answer.aiter_lines():
                take_line(line, result)
    except httpx.HTTPError as error:
        result.error = f"{type(error).__name__}: {error}"
    if not result.error and result.num_tokens != num_output:
        result.error = f"{result.num_tokens} tokens came of {num_output}"
    return result


def take_line(line: str, result: RequestResult) -> None:
    """One line of the answer's server-sent events."""
    if not line.startswith("data: {"):
        return
    event = json.loads(line.removeprefix("data: "))
    if event.get("choices"):
        result.token_times.append(time.monotonic())
    if event.get("usage"):
        result.num_tokens = event["usage"]["completion_tokens"]
    if event.get("error"):
        result.error = str(event["error"])


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def parse_load(text: str) -> Load:
    num_input, num_output, rate = text.split(":")
    return int(num_input), int(num_output), float(rate)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="the default is made")
    parser.add_argument(
        "--loads", nargs="+", type=parse_load, default=[(128, 32, 0.5), (512, 64, 0.5)]
    )
    parser.add_argument("--requests", type=int, default=30, help="of each load (%(default)s)")
    parser.add_argument("--goodput-ttft-ms", type=float, default=2000.0, help="TTFT objective")
    parser.add_argument("--goodput-tpot-ms", type=float, default=100.0, help="TPOT objective")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="between two events")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    parser.add_argument(
        "--vllm-flags", nargs="*", default=[], help="more of `vllm serve`: --vllm-flags=--x=y"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
