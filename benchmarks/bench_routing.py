"""What choosing workers costs a router, and what it brings.

The router's real pool, index and policies run over modelled workers, in this process.
"""

import argparse
import asyncio
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pdserve_common.types.engine import EngineCoreRequest, Generate, WorkerRole
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.workers.routing.prefix_index import prefix_hashes
from pdserve_router.workers.worker import WorkerState
from support.modelled_pool import ModelledPool, modelled

NUM_REQUESTS = 2000

# With a full index
BLOCK_SIZE = 16
NUM_CACHED_BLOCKS = 1_000_000
NUM_CHATS = 300
NUM_TURNS = 5
PROMPT_TOKENS = 8192
SYSTEM_TOKENS = 2048


def request(number: int = 0, num_tokens: int = 1024) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=str(number),
        prompt_token_ids=tuple(range(number, number + num_tokens)),
        task=Generate(SamplingParams(max_tokens=100)),
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


async def measure_prefix(size: int) -> None:
    """Print what the policy `prefix` takes to decide, hashing apart: half of the workers have the
    system prompt that all chats share, two have more of each chat, and the index is full.
    """
    stage = ModelledPool(size, size, routing_policy="prefix")
    for worker in stage.workers:
        stage.attach(worker)
        await stage.proven()
    rng, index = random.Random(1), stage.pool.prefix_index
    for worker in stage.workers:
        num_blocks = NUM_CACHED_BLOCKS // len(stage.workers)
        index.stored(worker, [rng.getrandbits(64) for _ in range(num_blocks)])
    prompts = []
    system = tuple(rng.choices(range(300), k=SYSTEM_TOKENS))
    for number in range(NUM_CHATS):
        own = tuple(rng.choices(range(300), k=PROMPT_TOKENS - SYSTEM_TOKENS))
        prompt = replace(request(number), prompt_token_ids=system + own)
        hashes = prefix_hashes(prompt, BLOCK_SIZE)
        prompts.append((prompt, hashes))
        num_shared = SYSTEM_TOKENS // BLOCK_SIZE
        for worker in rng.sample(stage.workers, size):
            index.stored(worker, hashes[:num_shared])
        for worker in rng.sample(stage.workers, 2):
            index.stored(worker, hashes[: rng.randrange(num_shared, len(hashes))])
    times = [
        timed_us(partial(stage.pool.route, prompt, hashes=hashes))
        for prompt, hashes in prompts * NUM_TURNS
    ]
    print(row(f"{size} P + {size} D, {len(index)} blocks: choose, prefix", times))
    # Of each chat the quickest: what else runs on this machine hardly shows.
    print(row("  of each chat the quickest", [min(times[i::NUM_CHATS]) for i in range(NUM_CHATS)]))
    await stage.pool.close()


async def run(sizes: Sequence[int], prefix_sizes: Sequence[int]) -> None:
    print(HEADER)
    with modelled():
        for size in sizes:
            await measure_sizes(size, size)
            gc.collect()
        for size in prefix_sizes:
            await measure_prefix(size)
            gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[4, 100, 500], help="P, and D")
    parser.add_argument(
        "--prefix-sizes", type=int, nargs="*", default=[32, 500], help="the same, with a full index"
    )
    args = parser.parse_args()
    asyncio.run(run(args.sizes, args.prefix_sizes))


if __name__ == "__main__":
    main()
