"""KV blocks over our NIXL transport, between two processes, against what the machine can do.

    python benchmarks/bench_nixl.py [--transports shm tcp] [--rounds N]

In turns: READs through NixlTransport (neighbouring blocks, which NIXL merges, and every other
block); one descriptor of the same size read by NIXL alone, polled without a pause on both sides; a
copy by one thread within a process; and process_vm_readv, the system call with which UCX copies
through shared memory. Then what a READ costs to post, and what P's transfer thread takes of a core
while its blocks are announced and nobody reads them. Medians.
"""

import argparse
import ctypes
import os
import signal
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from machine import describe
from nixl_pair import BLOCK_BYTES, SPEC, DSide, run_pair, seconds

from pdserve_engine.kv.kv_cache import KVCache
from pdserve_engine.kv_transfer.transport.shards import KVPeer, KVSlice

SMALL_BLOCK_BYTES = 1024
POST_BLOCKS = (1, 8, 32)
# P is quick to answer for 5 s after a peer has announced itself.
SETTLE_S = 6.0


def main() -> None:
    """Run all transports and print Markdown tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp"], help="%(default)s")
    parser.add_argument("--mib", nargs="+", type=float, default=[1.75, 16, 64, 256], help="sizes")
    parser.add_argument("--rounds", type=int, default=15, help="per size (%(default)s)")
    parser.add_argument("--post-rounds", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--quiet-s", type=float, default=5.0, help="how long to watch a quiet P")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # stops both sides too
    print(describe("nixl-cu13", "numpy", "torch"))
    num_blocks = 2 * max(_counts(args)) + 2  # room for every other block of the largest READ
    for transport_name in args.transports:
        run_pair(transport_name, num_blocks, measure, args)


def measure(d: DSide, transport_name: str, args: Namespace) -> None:
    """All of one transport; runs in D's process."""
    report_speed(d, transport_name, args)
    report_posting(d, transport_name, args.post_rounds)
    time.sleep(SETTLE_S)
    share = d.p_cpu_share(args.quiet_s)
    print(f"\n{transport_name}: quiet, P takes {share:.2%} of a core", flush=True)


def report_speed(d: DSide, transport_name: str, args: Namespace) -> None:
    source = KVCache(SPEC, num_blocks=d.pool.num_blocks, device=torch.device("cpu"))
    names = [name for name in variants(d, source, 1) if transport_name == "shm" or "vm" not in name]
    print(f"\n{transport_name}: GB/s, medians of {args.rounds} rounds\n")
    print(f"| READ | {' | '.join(names)} | neighbours / one descriptor | neighbours / memcpy |")
    print("|---|" + "---|" * (len(names) + 2))
    for count in _counts(args):
        ways = {name: variants(d, source, count)[name] for name in names}
        times = time_in_turns(ways, args.rounds, count, d.pool.num_blocks - 2 * count)
        rate = {name: count * BLOCK_BYTES / times[name] / 1e9 for name in names}
        cells = [f"{count * BLOCK_BYTES / 2**20:.2f} MiB", *(f"{rate[n]:.2f}" for n in names)]
        cells += [f"{rate['neighbours'] / rate[of]:.0%}" for of in ("one descriptor", "memcpy")]
        print(f"| {' | '.join(cells)} |", flush=True)


def variants(d: DSide, source: KVCache, count: int) -> dict[str, Callable[[int], float]]:
    """Ways to get `count` blocks from a first one on, each returning seconds."""
    num_bytes = count * BLOCK_BYTES

    def memcpy(first: int) -> float:
        local, address = d.addresses(first)[0], source.data_ptr + first * BLOCK_BYTES
        return seconds(lambda: ctypes.memmove(local, address, num_bytes))

    return {
        "neighbours": lambda first: d.read(range(first, first + count)),
        "every other": lambda first: d.read(range(first, first + 2 * count, 2)),
        "one descriptor": lambda first: d.read_bare(first, num_bytes),
        "memcpy": memcpy,
        "process_vm_readv": lambda first: copy_from_process(d, first, num_bytes),
    }


def copy_from_process(d: DSide, first: int, num_bytes: int) -> float:
    here, there = ((ctypes.c_size_t * 2)(at, num_bytes) for at in d.addresses(first))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    start = time.perf_counter()
    done = libc.process_vm_readv(d.p_pid, here, 1, there, 1, 0)
    assert done == num_bytes, os.strerror(ctypes.get_errno())
    return time.perf_counter() - start


def time_in_turns(
    ways: dict[str, Callable[[int], float]], rounds: int, count: int, num_first: int
) -> dict[str, float]:
    """Median seconds of each. Each READ takes other blocks than the one before, which are in the
    cache now, and each round begins with another way.
    """
    names = list(ways)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds * len(names)):
        name = names[(turn + turn // len(names)) % len(names)]
        times[name].append(ways[name](turn * count % num_first))
    return {name: statistics.median(times[name]) for name in names}


def report_posting(d: DSide, transport_name: str, rounds: int) -> None:
    print(f"\n{transport_name}: making and posting a READ\n")
    print("| blocks | neighbours | every other |\n|---|---|---|")
    for count in POST_BLOCKS:
        near, apart = (post_seconds(d, count, step, rounds) * 1e3 for step in (1, 2))
        print(f"| {count} | {near:.3f} ms | {apart:.3f} ms |", flush=True)


def post_seconds(d: DSide, count: int, step: int, rounds: int) -> float:
    """Median of making and posting a READ of `count` blocks, so small that their bytes cost
    nothing: over shared memory a READ is copied while it is posted.
    """
    from pdserve_engine.kv_transfer.transport.nixl_agent import NixlAgent

    small = SimpleNamespace(
        tensor=d.pool.tensor,
        data_ptr=d.pool.data_ptr,
        block_bytes=SMALL_BLOCK_BYTES,
        num_blocks=d.pool.num_bytes // SMALL_BLOCK_BYTES,
        spec=d.pool.spec,
    )
    agent = NixlAgent(f"small-{count}-{step}", small)
    (rank,) = d.welcome.endpoint.ranks
    region = replace(rank.regions[0], num_blocks=small.num_blocks)
    peer = KVPeer(
        engine_id=d.welcome.engine_id,
        epoch=d.welcome.epoch,
        agent_name=f"{d.welcome.engine_id}.{d.welcome.epoch}",
        endpoint=replace(rank, regions=(region,)),
        num_blocks=small.num_blocks,
        block_bytes=SMALL_BLOCK_BYTES,
        slices=(KVSlice(0, 0, SMALL_BLOCK_BYTES),),
    )
    blocks = agent.add_peer(peer)
    ids = np.arange(0, count * step, step, dtype=np.int32)
    times = []
    for _ in range(1 + rounds):
        d.poll_soon()
        start = time.perf_counter()
        handle = agent.make_read(blocks, ids, ids)
        is_over = agent.post(handle)
        times.append(time.perf_counter() - start)
        while not is_over:
            is_over, error = agent.poll(handle)
            assert not error, error
        agent.release(handle)
    agent.remove_peer(peer.agent_name, blocks, is_broken=False)
    agent.close()
    return statistics.median(times[1:])  # the first one connects


def _counts(args: Namespace) -> list[int]:
    """Blocks of each READ."""
    return [max(1, round(mib * 2**20 / BLOCK_BYTES)) for mib in args.mib]


if __name__ == "__main__":
    main()
