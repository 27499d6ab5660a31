"""More requests than decode has places in its batch: who waits, and where.

    python benchmarks/bench_decode_slots.py [--baseline PYTHON] [--rounds N] [--step-ms MS]
        [--decode N]

One prefill service and decode services with few places (`--max-num-seqs`), and all requests at
once. Answers have random lengths, so that places do not get free all at the same time. `--baseline`
is the interpreter of another checkout: its services and this one's get the same load in turns. A
step is the median gap between tokens of that run, as clients see it; finished/step does not depend
on what else the machine does. `--step-ms` pads the workers' steps with sleep: those of a tiny model
on cores that all share are as long as what router and client do between them. Prefill's steps
should be as full beside one decode service as beside two.
"""

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from machine import describe, free_ports

from pdserve_client.bench import RequestResult, percentile
from pdserve_client.client import AsyncClient
from pdserve_common.types.sampling_params import SamplingParams

PLUGIN = Path(__file__).parent / "plugin"
LOG_DIR = Path(".bench/decode_slots").absolute()
READY_S = 120.0
COLUMNS = (
    "finished/s", "finished/step", "TTFT p50, ms", "step, ms", "first ITL p50, ms", "p99, ms",
    "p99, steps", "decode_admit p99, steps", "prefill tokens/step",
)  # fmt: skip


def main() -> None:
    """Run all rounds and print a Markdown table of them and of the medians' ratios."""
    args = _parse_args()
    systems = {"new": sys.executable}
    if args.baseline:
        systems = {"old": args.baseline, **systems}
    print(describe("grpcio", "nixl-cu13", "torch"))
    print(f"\n| round | system | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 2)}")
    found: dict[str, list[list[float]]] = {name: [] for name in systems}
    for number in range(args.rounds):
        for name, python in systems.items():
            with services(python, args) as (address, metrics_port):
                computed, steps = step_tokens(metrics_port)
                values = asyncio.run(measure(address, args, seed=number))
                computed_then, steps_then = step_tokens(metrics_port)
            found[name].append([*values, (computed_then - computed) / (steps_then - steps)])
            print_row(str(number), name, found[name][-1])
    medians = {
        name: [statistics.median(values) for values in zip(*rows, strict=True)]
        for name, rows in found.items()
    }
    for name, row in medians.items():
        print_row("median", name, row)
    if args.baseline:
        ratios = [new / old for new, old in zip(medians["new"], medians["old"], strict=True)]
        print_row("median", "new / old", ratios)


def print_row(number: str, name: str, values: list[float]) -> None:
    print(f"| {number} | {name} | {' | '.join(f'{v:.2f}' for v in values)} |", flush=True)


@contextlib.contextmanager
def services(python: str, args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Start a checkout's router and services; yield the router's address, and the port of prefill's
    metrics.
    """
    grpc, http, metrics = free_ports(3)
    LOG_DIR.mkdir(parents=True, exist_ok=True)
    flags = {
        "grpc-port": grpc,
        "http-port": http,
        "metrics-port": metrics,
        "decode": args.decode,
        "max-num-batched-tokens": args.batched_tokens,
        "worker-port": 0,
        "max-num-seqs": args.slots,
        "max-model-len": 2 * args.output_len + args.input_len,
        "kv-cache-memory-mib": 256,
        "num-threads": 1,
        "log-dir": LOG_DIR,
    }
    command = [python, "-m", "pdserve_client", "up", "--model", str(args.model.absolute())]
    command += [f"--{name}={value}" for name, value in flags.items()]
    command += ["--require-disaggregation"]
    environ = {**os.environ, "PYTHONPATH": str(PLUGIN), "STEP_MS": str(args.step_ms)}
    with (LOG_DIR / "up.log").open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=LOG_DIR, env=environ)
        try:
            address = f"127.0.0.1:{grpc}"
            asyncio.run(wait_until_ready(address, process))
            yield address, metrics + 1
        finally:
            process.terminate()
            process.wait()


def step_tokens(metrics_port: int) -> tuple[float, float]:
    """Return how many tokens an engine has computed, and in how many steps."""
    url = f"http://127.0.0.1:{metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        lines = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines())
    name = "pdserve_engine_step_tokens"
    return float(lines[f"{name}_sum"]), float(lines[f"{name}_count"])


async def wait_until_ready(address: str, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + READY_S
    client = AsyncClient(address)
    try:
        while True:
            result = await ask(client, [5] * 40, 4, seed=0)
            if result.error is None:
                return
            if time.monotonic() > end or process.poll() is not None:
                raise SystemExit(f"not ready: {result.error}; see {LOG_DIR}")
            await asyncio.sleep(0.5)
    finally:
        await client.close()


async def measure(address: str, args: argparse.Namespace, *, seed: int) -> list[float]:
    """Return the values of COLUMNS."""
    rng = random.Random(seed)
    client = AsyncClient(address)
    try:
        start = time.monotonic()
        tasks = []
        for number in range(args.requests):
            prompt = [rng.randrange(3, 250) for _ in range(args.input_len)]
            length = rng.randrange(args.output_len // 2, 2 * args.output_len)
            tasks.append(asyncio.create_task(ask(client, prompt, length, seed=number)))
        results = await asyncio.gather(*tasks)
        wall_s = time.monotonic() - start
    finally:
        await client.close()
    errors = [result.error for result in results if result.error is not None]
    if errors:
        raise SystemExit(f"{len(errors)} failed: {errors[0]}")
    step = statistics.median(gap for result in results for gap in result.itls[1:])
    first = [result.itls[0] for result in results]
    admit = [result.metrics.decode_admit_ns for result in results if result.metrics is not None]
    return [
        len(results) / wall_s,
        len(results) / wall_s * step,
        percentile([result.ttft for result in results], 50) * 1e3,
        step * 1e3,
        percentile(first, 50) * 1e3,
        percentile(first, 99) * 1e3,
        percentile(first, 99) / step,
        percentile(admit, 99) / 1e9 / step,
    ]


async def ask(
    client: AsyncClient, prompt: list[int], num_tokens: int, *, seed: int
) -> RequestResult:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=seed)
    result = RequestResult(time.monotonic())
    try:
        async for output in client.generate(prompt, params, timeout_s=300):
            if output.finished:
                result.metrics = output.metrics
            for completion in output.outputs:
                result.token_times += [time.monotonic()] * len(completion.token_ids)
                if completion.HasField("error"):
                    result.error = completion.error.message
    except Exception as error:  # not up yet, or refused
        result.error = repr(error)
    return result


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--baseline", help="python of another checkout")
    parser.add_argument("--model", type=Path, default=Path("models/pdserve-tiny"))
    parser.add_argument("--rounds", type=int, default=3, help="of each (%(default)s)")
    parser.add_argument("--requests", type=int, default=500, help="all at once (%(default)s)")
    parser.add_argument("--step-ms", type=float, default=0, help="a step at least (%(default)s)")
    parser.add_argument("--slots", type=int, default=16, help="--max-num-seqs (%(default)s)")
    parser.add_argument("--decode", type=int, default=1, help="decode services (%(default)s)")
    parser.add_argument("--batched-tokens", type=int, default=512, help="a step (%(default)s)")
    parser.add_argument("--input-len", type=int, default=64, help="tokens (%(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="half to twice (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
