"""The router's index of cached blocks: lookups, losing a worker, hashing, and what events cost.

    python benchmarks/bench_prefix_index.py

64 workers and 1,000,000 blocks: prompts of 512 blocks of 100 tenants, each of which has a system
prompt of 128; up to 8 workers have more of a prompt than that, as far as it was drawn for each.
"""

import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

from machine import describe

from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import EngineCoreRequest, Generate
from pdserve_common.types.kv import KVCacheEvents
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_common.wire import from_proto, to_proto
from pdserve_engine.kv.block_pool import BlockPool
from pdserve_router.workers.routing.kv_cache_follower import KVCacheFollower
from pdserve_router.workers.routing.prefix_index import PrefixIndex, prefix_hashes

NUM_BLOCKS = 1_000_000
NUM_WORKERS = 64
PROMPT_BLOCKS, SYSTEM_BLOCKS = 512, 128
BLOCK_SIZE = 16


def main() -> None:
    """Print a Markdown table."""
    random.seed(1)
    print(describe())
    print("\n| | p50, us | p99, us |\n|---|---|---|")
    index, prompts = _filled()
    # Numbers of their own, as a router has them.
    asked = [[int(str(block)) for block in each] for each in random.sample(prompts, 3000)]
    _report("lookup", [_time(_look_up, index, each) for each in asked])
    unknown = [_draw(PROMPT_BLOCKS) for _ in range(3000)]
    _report("lookup of what nobody has", [_time(_look_up, index, each) for each in unknown])
    _report("losing a worker", [_time(index.forget, each) for each in range(NUM_WORKERS)])
    slices = []
    while len(index):
        slices.append(_time(index.stored, NUM_WORKERS, ()))
    _report("a slice of sweeping out after that", slices)
    request = EngineCoreRequest(
        request_id="a",
        prompt_token_ids=tuple(random.choices(range(150_000), k=PROMPT_BLOCKS * BLOCK_SIZE)),
        task=Generate(SamplingParams()),
    )
    _report("hashing the prompt", [_time(prefix_hashes, request, BLOCK_SIZE) for _ in range(500)])
    _report("a step of 16 blocks in the pool, unheard", _steps(is_heard=False))
    _report("the same, recorded", _steps(is_heard=True))
    _report("such a step's events at the router", _events())


def _filled() -> tuple[PrefixIndex[int], list[list[int]]]:
    index = PrefixIndex[int](runtime=Runtime())
    systems = [_draw(SYSTEM_BLOCKS) for _ in range(100)]
    prompts: list[list[int]] = []
    while len(prompts) % 50 or len(index) < NUM_BLOCKS:
        prompt = random.choice(systems) + _draw(PROMPT_BLOCKS - SYSTEM_BLOCKS)
        for worker in random.sample(range(NUM_WORKERS), random.choice([1, 1, 2, 3, 8])):
            index.stored(worker, prompt[: random.randrange(SYSTEM_BLOCKS, PROMPT_BLOCKS + 1)])
        prompts.append(prompt)
    return index, prompts


def _look_up(index: PrefixIndex[int], hashes: Sequence[int]) -> None:
    index.match(hashes).longest(None, 3, lambda worker: True)


def _steps(*, is_heard: bool) -> Iterable[float]:
    pool = BlockPool(4096, enable_caching=True)
    if is_heard:
        pool.record_events()
    for _ in range(2000):
        hashes = [os.urandom(32) for _ in range(16)]
        yield _time(_step, pool, hashes)


def _step(pool: BlockPool, hashes: list[bytes]) -> None:
    blocks = pool.get_new_blocks(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.cache_block(block, block_hash)
    pool.free_blocks(reversed(blocks))
    pool.take_events()


def _events() -> Iterable[float]:
    follower = KVCacheFollower(PrefixIndex[int](runtime=Runtime()), 0, lambda: None)
    for seq in range(1, 2000):
        events = KVCacheEvents(
            seq=seq,
            all_blocks_cleared=seq == 1,
            blocks_stored=tuple(_draw(16)),
            blocks_removed=tuple(_draw(16)),
        )
        raw = to_proto(events).SerializeToString()
        yield _time(_apply, follower, raw)


def _apply(follower: KVCacheFollower[int], raw: bytes) -> None:
    message = service_pb2.KVCacheEvents.FromString(raw)
    follower.apply(from_proto(KVCacheEvents, message))


def _draw(count: int) -> list[int]:
    return [random.getrandbits(64) for _ in range(count)]


def _time(function: Callable[..., object], *args: object) -> float:
    began = time.perf_counter()
    function(*args)
    return time.perf_counter() - began


def _report(name: str, seconds: Iterable[float]) -> None:
    cuts = statistics.quantiles(seconds, n=100)
    print(f"| {name} | {1e6 * cuts[49]:.1f} | {1e6 * cuts[98]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
