"""What one API key's many requests do to another key's one, with and without turns at the router.

    python benchmarks/bench_fair_queue.py

One key sends many prompts at once, then another key one. Two routers serve both in turn over the
same workers: one as by default, one with --fair-queue-steps.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from make_model import DEFAULT_MODEL, make_model

from pdserve_client.client import AsyncClient
from pdserve_common.types.sampling_params import SamplingParams
from support.stack import RunningStack, attached_router, running_stack

MANY, ONE = "many-key-0123456789", "one-key-0123456789"
PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
# For the many to be taken before the one comes.
HEAD_START_S = 0.5


async def ttft_s(client: AsyncClient, num_tokens: int) -> float:
    """Return how long the first token of a prompt takes that nobody has asked for."""
    prompt = [random.randrange(100, 1000) for _ in range(num_tokens)]
    began, first = time.monotonic(), 0.0
    async for output in client.generate(prompt, PARAMS, timeout_s=200):
        if output.outputs and not first:
            first = time.monotonic() - began
    return first


async def measure(address: str, num_many: int, num_tokens: int) -> tuple[float, float]:
    """Return what the one's first token takes, and all of the many."""
    async with contextlib.AsyncExitStack() as stack:
        many, one = (AsyncClient(address, api_key=key) for key in (MANY, ONE))
        for client in (many, one):
            stack.push_async_callback(client.close)
        began = time.monotonic()
        asking = [asyncio.create_task(ttft_s(many, num_tokens)) for _ in range(num_many)]
        await asyncio.sleep(HEAD_START_S)
        of_one = await ttft_s(one, num_tokens)
        await asyncio.gather(*asking)
        return of_one, time.monotonic() - began


@contextlib.asynccontextmanager
async def serving(stack: RunningStack, keys: str, steps: float) -> AsyncIterator[str]:
    """Run a router with turns of that many steps."""
    config: dict[str, object] = {"api_keys_file": keys, "fair_queue_steps": steps}
    async with attached_router(stack, "prefill-0", **config) as routed:
        await routed.until(1, "pdserve_worker_pairs", state="proven")
        yield f"127.0.0.1:{routed.server.grpc_port}"


async def run(stack: RunningStack, keys: str, args: argparse.Namespace) -> None:
    figures: dict[float, list[tuple[float, float]]] = {0.0: [], args.steps: []}
    for number in range(args.rounds + 1):
        for steps, rounds in figures.items():
            async with serving(stack, keys, steps) as address:
                size = args.many if number else 2  # the first is to warm up
                pair = await measure(address, size, args.tokens)
                if number:
                    rounds.append(pair)
                    print(f"steps {steps:g}: one {pair[0]:.2f} s, many {pair[1]:.2f} s", flush=True)
    for name, index in (("TTFT of the one", 0), ("time of the many", 1)):
        ratios = [
            fair[index] / plain[index]
            for plain, fair in zip(figures[0.0], figures[args.steps], strict=True)
        ]
        print(f"{name}, with turns / without: {statistics.median(ratios):.2f} {ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--many", type=int, default=48, help="requests at once (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of a prompt (%(default)s)")
    parser.add_argument("--steps", type=float, default=4.0, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    args = parser.parse_args()
    make_model(args.model)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"many:{MANY}\none:{ONE}\n")
        with running_stack(
            Path(folder), model=args.model, kv_cache_memory_mib=1024, max_model_len=1024
        ) as stack:
            asyncio.run(run(stack, str(keys), args))


if __name__ == "__main__":
    main()
