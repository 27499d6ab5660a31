"""Our prefill and decode pair against vLLM's over NIXL, on the same cores, under the same load.

    make bench-peers
    python benchmarks/bench_pair.py [--loads 128:32:0.5 ...] [--requests N]

A load is INPUT_TOKENS:OUTPUT_TOKENS:REQUESTS_PER_SECOND; arrivals are Poisson. Both get the same
prompts at the same moments, over OpenAI's HTTP API, each with one thread for prefill and one for
decode. Goodput counts requests with a TTFT and a TPOT within the objectives.
"""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from http_load import COLUMNS, add_load_flags, max_model_len, print_header, print_row, run_loads
from machine import describe, free_ports
from make_model import DEFAULT_MODEL, make_model
from peers.vllm_servers import vllm_pair

from pdserve_client.config import StackConfig
from pdserve_client.stack import Stack

PEERS = Path(".venv-peers")
LOG_DIR = Path(".bench/pair")


def main() -> None:
    """Run every load on both systems and print a Markdown table."""
    args = _parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # stops what was started
    if args.model == DEFAULT_MODEL:
        make_model(args.model)
    print(describe("torch", "nixl-cu13"))
    print(f"{args.model.name}, {args.requests} requests a load\n")
    print_header()
    with ours(args) as url:
        mine = run_loads("pdserve", url, args)
    with theirs(args) as url:
        peers = run_loads("vLLM", url, args)
    for load in args.loads:
        pairs = [(mine[load][column], peers[load][column]) for column in COLUMNS]
        print_row(load, "pdserve / vLLM", [f"{a / b:.2f}" if b else "-" for a, b in pairs])


@contextmanager
def ours(args: argparse.Namespace, *, num_prefill: int = 1, num_threads: int = 1) -> Iterator[str]:
    """Start a decode service and prefill services and yield the router's URL."""
    config = StackConfig(
        model=str(args.model),
        prefill=num_prefill,
        num_threads=num_threads,
        max_model_len=max_model_len(args),
        kv_cache_memory_mib=1024,
        require_disaggregation=num_prefill > 0,
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


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="the default is made")
    add_load_flags(parser, [(128, 32, 0.5), (512, 64, 0.5)])
    parser.add_argument(
        "--vllm-flags", nargs="*", default=[], help="more of `vllm serve`: --vllm-flags=--x=y"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
