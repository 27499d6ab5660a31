"""What choosing workers costs a router, and what it brings.

The router's real pool, index and policies run over modelled workers, in this process.
"""

import argparse
import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pdserve_common.engine_types import EngineCoreRequest, SamplingParams, WorkerRole
from pdserve_router.workers.worker_client import WorkerState
from support.modelled_pool import ModelledPool, modelled

NUM_REQUESTS = 2000


def request(number: int = 0, num_tokens: int = 1024) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=str(number),
        prompt_token_ids=tuple(range(number, number + num_tokens)),
        sampling_params=SamplingParams(max_tokens=100),
    )


def timed_us(call: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1000


def row(name: str, times_us: Sequence[float]) -> str:
    ordered = sorted(times_us)
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return (
        f"{name:<44}{statistics.median(ordered):>10.1f}{p99:>10.1f}{ordered[-1]:>10.1f}"
        f"{len(ordered):>8}"
    )


HEADER = f"{'us':<44}{'p50':>10}{'p99':>10}{'most':>10}{'n':>8}"


async def measure_sizes(num_prefill: int, num_decode: int) -> None:
    """Print what choosing and changes cost in a pool of that size."""
    name = f"{num_prefill} P + {num_decode} D"
    for policy in ("round_robin", "power_of_two"):
        stage = ModelledPool(num_prefill, num_decode, routing_policy=policy)
        first = []
        for worker in stage.workers:
            first.append(timed_us(partial(stage.attach, worker)))
            await stage.proven()
        choosing = [
            timed_us(partial(stage.pool.route, one)) for one in map(request, range(NUM_REQUESTS))
        ]
        print(row(f"{name}: choose, {policy}", choosing))
        if policy == "power_of_two":
            print(row(f"{name}: first attached, one by one", first))
            await measure_changes(name, stage)
        await stage.pool.close()


async def measure_changes(name: str, stage: ModelledPool) -> None:
    going, coming, proofs = [], [], []
    for worker in (*stage.pool.prefill[:20], *stage.pool.decode[:20]) * 5:
        going.append(timed_us(partial(stage.set, worker, WorkerState.DOWN)))
        began = time.perf_counter_ns()
        await stage.proven()
        coming.append(timed_us(partial(stage.attach, worker)))
        await stage.proven()
        proofs.append((time.perf_counter_ns() - began) / 1000)
    print(row(f"{name}: a worker goes", going))
    print(row(f"{name}: it comes back", coming))
    print(row(f"{name}: both, with all proofs", proofs))
    addresses = [worker.address for worker in stage.pool.decode]
    listing = []
    for i in range(20):
        kept = addresses[:-1] if i % 2 == 0 else addresses
        listing.append(timed_us(partial(stage.list_workers, WorkerRole.DECODE, kept)))
        await stage.proven()
    print(row(f"{name}: another list", listing))


async def run(sizes: Sequence[int]) -> None:
    print(HEADER)
    with modelled():
        for size in sizes:
            await measure_sizes(size, size)
            gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[4, 100, 500], help="P, and D")
    args = parser.parse_args()
    asyncio.run(run(args.sizes))


if __name__ == "__main__":
    main()
