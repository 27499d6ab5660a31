"""What the handoff costs a request, stage by stage: one prefill and one decode service.

    python benchmarks/bench_handoff.py [--lengths 512 2048 8192] [--rounds N]

One request at a time, so that nothing else waits or runs. `handoff` is the time from the end of the
prefill to D's first step being over, less a plain decode step at that context (the median gap
between later tokens, as the client sees them). 8,192 tokens take about a minute a request.

With `--busy` D decodes another request all the while, as in service: what an idle D pays in its
first step for having rested is gone, and `admit` has the wait for the step that is under way.
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import grpc
from machine import describe
from make_model import make_model

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.client import Client
from pdserve_client.config import StackConfig
from pdserve_client.stack import Stack
from pdserve_common.types.sampling_params import SamplingParams

DEFAULT_MODEL = Path(".bench/qwen3-0.6b-random")
MAX_PROMPT_TOKEN_ID = 1000
CONNECT_S = 60.0
# All columns but the last two are milliseconds.
COLUMNS = (
    "TTFT", "prefill", "raw transfer", "exposed", "release ack", "admit", "first step",
    "plain step", "handoff", "exposed / TTFT", "raw / prefill",
)  # fmt: skip
SHARES = COLUMNS[-2:]


def main() -> None:
    """Run all lengths and print a Markdown table of medians."""
    args = _parse_args()
    if args.model == DEFAULT_MODEL:
        make_model(args.model)
    config = StackConfig(
        model=str(args.model),
        num_threads=args.threads,
        prefill_tensor_parallel_size=args.prefill_tensor_parallel_size,
        max_model_len=max(args.lengths) + args.tokens,
        kv_cache_memory_mib=args.kv_cache_memory_mib,
        require_transport=args.transport,
        require_disaggregation=True,
        log_dir=".bench/handoff",
        **dict.fromkeys(("grpc_port", "http_port", "metrics_port", "worker_port"), 0),
    )
    print(describe("grpcio", "nixl-cu13", "torch"))
    with Stack(config) as stack, Client(stack.grpc_address) as client:
        for _ in stack.wait_until_ready():
            pass
        warm_up(client, args)
        report(client, args)


def warm_up(client: Client, args: argparse.Namespace) -> None:
    """Workers are ready before they are connected: until then requests are refused."""
    end = time.monotonic() + CONNECT_S
    while True:
        try:
            measure(client, args, num_prompt_tokens=min(args.lengths))
            return
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE or time.monotonic() > end:
                raise
            time.sleep(0.5)


def report(client: Client, args: argparse.Namespace) -> None:
    print(
        f"{args.model.name}, {args.threads} thread(s) a service, medians of {args.rounds} "
        "requests, ms\n"
    )
    print(f"| prompt | KV | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}")
    for length in args.lengths:
        rows = []
        for _ in range(args.rounds):
            with busy(client, args) if args.busy else nullcontext():
                rows.append(measure(client, args, num_prompt_tokens=length))
        medians = {name: statistics.median(row.values[name] for row in rows) for name in COLUMNS}
        cells = [f"{medians[n]:.2%}" if n in SHARES else f"{medians[n]:.2f}" for n in COLUMNS]
        print(f"| {length} | {rows[0].moved} | {' | '.join(cells)} |", flush=True)


@contextmanager
def busy(client: Client, args: argparse.Namespace) -> Iterator[None]:
    """Have D decode a request of its own from its first token until the end."""
    params = SamplingParams(max_tokens=max(args.lengths), temperature=0.0, ignore_eos=True)
    decoding, measured = threading.Event(), threading.Event()

    def decode() -> None:
        for number, _ in enumerate(client.generate([3], params, timeout_s=args.timeout_s)):
            if number > 0:  # the first token is the prefill service's
                decoding.set()
            if measured.is_set():
                return

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        if not decoding.wait(CONNECT_S):
            raise SystemExit("the other request has no token")
        yield
    finally:
        measured.set()
        thread.join()


def measure(client: Client, args: argparse.Namespace, *, num_prompt_tokens: int) -> SimpleNamespace:
    """Send one prompt that nobody has cached; return its times."""
    prompt = [random.randrange(3, MAX_PROMPT_TOKEN_ID) for _ in range(num_prompt_tokens)]
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    token_times = []
    for output in client.generate(prompt, params, timeout_s=args.timeout_s):
        token_times.append(time.perf_counter())
        for completion in output.outputs:
            if completion.HasField("error"):
                raise SystemExit(f"{num_prompt_tokens} tokens: {completion.error.message}")
    metrics = output.metrics
    moved = f"{metrics.kv_transfer_bytes / 2**20:.0f} MiB, {metrics.kv_transport}"
    gaps = [after - before for before, after in pairwise(token_times[1:])]
    return SimpleNamespace(values=stages(metrics, statistics.median(gaps) * 1e9), moved=moved)


def stages(metrics: pb2.RequestMetrics, plain_step_ns: float) -> dict[str, float]:
    """Milliseconds and shares, named as the columns."""
    handed_over = {
        "exposed": metrics.kv_transfer_exposed_ns,
        "release ack": metrics.release_ack_ns,
        "admit": metrics.decode_admit_ns,
        "first step": metrics.first_decode_step_ns,
    }
    nanoseconds = {
        "TTFT": metrics.ttft_ns,
        "prefill": metrics.prefill_ns,
        "raw transfer": metrics.kv_transfer_ns,
        **handed_over,
        "plain step": plain_step_ns,
        "handoff": sum(handed_over.values()) - plain_step_ns,
    }
    return {name: value / 1e6 for name, value in nanoseconds.items()} | {
        "exposed / TTFT": metrics.kv_transfer_exposed_ns / metrics.ttft_ns,
        "raw / prefill": metrics.kv_transfer_ns / metrics.prefill_ns,
    }


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="the default is made")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192], help="tokens")
    parser.add_argument("--rounds", type=int, default=3, help="requests a length (%(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of each service (%(default)s)")
    parser.add_argument("--busy", action="store_true", help="D decodes another request meanwhile")
    parser.add_argument("--prefill-tensor-parallel-size", type=int, default=1)
    parser.add_argument("--transport", default="any", choices=["any", "shm", "tcp"])
    parser.add_argument("--kv-cache-memory-mib", type=int, default=1280, help="of each service")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of a request")
    return parser.parse_args()


if __name__ == "__main__":
    main()
