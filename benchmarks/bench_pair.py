"""Our prefill and decode pair against vLLM's over NIXL, on the same cores, under the same load.

    make bench-peers
    python benchmarks/bench_pair.py [--loads 128:32:0.5 ...] [--requests N]

A load is INPUT_TOKENS:OUTPUT_TOKENS:REQUESTS_PER_SECOND; arrivals are Poisson. Both get the same
prompts at the same moments, over OpenAI's HTTP API, each with one thread for prefill and one for
decode. Goodput counts requests with a TTFT and a TPOT within the objectives.
"""

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from http_load import Load, measure
from machine import describe
from make_model import make_model
from peers.vllm_pair import vllm_pair

from pdserve_client.config import StackConfig
from pdserve_client.stack import Stack

DEFAULT_MODEL = Path(".bench/qwen3-0.6b-random")
PEERS = Path(".venv-peers")
LOG_DIR = Path(".bench/pair")
COLUMNS = (
    "goodput_requests_per_s", "requests_per_s", "num_failed", "ttft_ms_p50", "ttft_ms_p99",
    "tpot_ms_p50", "itl_ms_p50", "itl_ms_p99",
)  # fmt: skip


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
        require_disaggregation=True,
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
