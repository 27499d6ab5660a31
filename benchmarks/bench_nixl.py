"""KV blocks over our NIXL transport, between two processes, against what the machine can do.

    python benchmarks/bench_nixl.py [--transports shm tcp] [--rounds N]

In turns, over the same memory: READs through NixlTransport (neighbouring blocks, which NIXL merges,
and every other block); one descriptor of the same size read by NIXL alone, polled without a pause
on both sides; a copy by one thread within a process; and the system call that UCX's shared memory
copies with. Then what a READ costs to post, and what P's transfer thread takes of a core while its
blocks are announced and nobody reads them. Medians.
"""

import argparse
import ctypes
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from machine import describe

from pdserve_common.kv_types import KVEndpoint, KVLinkWelcome, new_epoch
from pdserve_engine.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.kv_groups import group_layers
from pdserve_engine.kv_transfer.base import KVIdentity, KVTransport, ReadResult
from pdserve_engine.kv_transfer.factory import make_transport

# Blocks of 1.75 MiB: those of a Qwen3-0.6B.
SPEC = KVCacheSpec(
    groups=group_layers([None] * 28),
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    dtype=torch.bfloat16,
)
SMALL_BLOCK_BYTES = 1024
POST_BLOCKS = (1, 8, 32)
WAIT_S = 30.0


def make_side(engine_id: str, transport_name: str, num_blocks: int) -> tuple[Any, ...]:
    """Return (pool, transport, what a peer is told)."""
    identity = KVIdentity(
        engine_id=engine_id,
        epoch=new_epoch(),
        compatibility_hash="bench",
        layout=SPEC.layout(),
        vocab_size=32_000,
    )
    pool = KVCache(SPEC, num_blocks=num_blocks, device=torch.device("cpu"))
    transport = make_transport("nixl", identity, require_transport=transport_name)
    transport.register(pool)
    welcome = KVLinkWelcome(
        protocol_version=1,
        engine_id=engine_id,
        epoch=identity.epoch,
        compatibility_hash="bench",
        link=1,
        endpoint=transport.endpoint(),
    )
    return pool, transport, welcome


class Bare:
    """NIXL without anything of ours: one descriptor, polled without a pause."""

    def __init__(self, name: str, pool: KVCache) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = nixl_agent(name, config)
        self._agent.register_memory([(pool.data_ptr, pool.num_bytes, 0, "")], "DRAM")
        self.metadata = self._agent.get_agent_metadata()
        self.progress = self._agent.get_new_notifs

    def connect(self, metadata: bytes) -> None:
        self._peer = self._agent.add_remote_agent(metadata)

    def read(self, local: int, remote: int, num_bytes: int) -> None:
        """Addresses."""
        agent = self._agent
        local_descs = agent.get_xfer_descs([(local, num_bytes, 0)], "DRAM")
        remote_descs = agent.get_xfer_descs([(remote, num_bytes, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", local_descs, remote_descs, self._peer)
        state, end = agent.transfer(handle), time.monotonic() + WAIT_S
        while state != "DONE":
            assert state == "PROC", state
            assert time.monotonic() < end, "the READ does not end"
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)


def run_p(pipe: Connection, transport_name: str, num_blocks: int) -> None:
    """P: announces its pool and does what the pipe says."""
    pool, transport, welcome = make_side("p", transport_name, num_blocks)
    pool.tensor.view(torch.int16).copy_(pattern(num_blocks))
    bare = Bare("bare-p", pool)
    transport.expect_peer()
    transport.set_exporting(True)
    pipe.send((os.getpid(), welcome, bare.metadata))
    while (command := pipe.recv()) != "stop":
        if command == "poke":
            transport.poke()
        elif command == "spin":
            while not pipe.poll():
                bare.progress()
        else:
            before = time.process_time()
            time.sleep(command)
            pipe.send((time.process_time() - before) / command)
    transport.close()


def pattern(num_blocks: int) -> torch.Tensor:
    """Every block's number, in the shape of a pool."""
    numbers = torch.arange(num_blocks, dtype=torch.int16)
    return numbers.view(-1, *[1] * len(SPEC.block_shape)).expand(num_blocks, *SPEC.block_shape)


@contextmanager
def p_process(transport_name: str, num_blocks: int) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_p, args=(theirs, transport_name, num_blocks), daemon=True)
    process.start()
    try:
        yield ours
        ours.send("stop")
        process.join(WAIT_S)
    finally:
        process.kill()


def read(transport: KVTransport, peer: str, remote: range, local: range) -> None:
    """Read blocks and wait for them."""
    results: list[ReadResult] = []
    is_over = threading.Event()

    def on_done(result: ReadResult) -> None:
        results.append(result)
        is_over.set()

    transport.read(peer, remote, local, WAIT_S, on_done, lambda: None)
    assert is_over.wait(WAIT_S), "the READ does not end"
    assert results[0].is_ok, results[0].error


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def copy_from_process(pid: int, local: int, remote: int, num_bytes: int) -> None:
    """process_vm_readv, which UCX's shared memory reads with."""
    here, there = ((ctypes.c_size_t * 2)(address, num_bytes) for address in (local, remote))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    done = libc.process_vm_readv(pid, here, 1, there, 1, 0)
    assert done == num_bytes, os.strerror(ctypes.get_errno())


class D:
    """The reading side."""

    def __init__(self, transport_name: str, num_blocks: int, pipe: Connection) -> None:
        assert pipe.poll(WAIT_S), "P does not start"
        self.pipe = pipe
        self.p_pid, welcome, bare_metadata = pipe.recv()
        self.p_endpoint: KVEndpoint = welcome.endpoint
        self.p_name = f"{welcome.engine_id}.{welcome.epoch}"
        self.pool, self.transport, _ = make_side("d", transport_name, num_blocks)
        self.source = KVCache(SPEC, num_blocks=num_blocks, device=torch.device("cpu"))
        self.peer = self.transport.add_peer(welcome, lambda reason: print("lost:", reason))
        read(self.transport, self.peer, range(num_blocks), range(num_blocks))
        assert torch.equal(self.pool.tensor.view(torch.int16), pattern(num_blocks)), "wrong bytes"
        self.bare = Bare("bare-d", self.pool)
        self.bare.connect(bare_metadata)
        self._spin()
        self.bare.read(*self._addresses(0), SPEC.block_bytes)

    def variants(self, count: int) -> dict[str, Callable[[int], float]]:
        """Ways to get `count` blocks from a first one on, each returning seconds."""
        block_bytes = SPEC.block_bytes
        num_bytes = count * block_bytes

        def ours(block_ids: range) -> float:
            self.pipe.send("poke")  # P does it when it announces
            return seconds(lambda: read(self.transport, self.peer, block_ids, block_ids))

        def bare(first: int) -> float:
            local, remote = self._addresses(first)
            self._spin()
            return seconds(lambda: self.bare.read(local, remote, num_bytes))

        def memcpy(first: int) -> float:
            source = self.source.data_ptr + first * block_bytes
            return seconds(lambda: ctypes.memmove(self._addresses(first)[0], source, num_bytes))

        def system_call(first: int) -> float:
            local, remote = self._addresses(first)
            return seconds(lambda: copy_from_process(self.p_pid, local, remote, num_bytes))

        return {
            "neighbours": lambda first: ours(range(first, first + count)),
            "every other": lambda first: ours(range(first, first + 2 * count, 2)),
            "one descriptor": bare,
            "memcpy": memcpy,
            "process_vm_readv": system_call,
        }

    def post_seconds(self, count: int, step: int, rounds: int) -> float:
        """Median of making and posting a READ of `count` blocks, so small that their bytes cost
        nothing: over shared memory a READ is copied while it is posted.
        """
        from pdserve_engine.kv_transfer.nixl import NixlAgent

        tensor = self.pool.tensor.view(-1).view(torch.uint8)
        num_blocks = len(tensor) // SMALL_BLOCK_BYTES
        small = SimpleNamespace(
            tensor=tensor,
            data_ptr=self.pool.data_ptr,
            block_bytes=SMALL_BLOCK_BYTES,
            num_blocks=num_blocks,
        )
        agent = NixlAgent(f"small-{count}-{step}", small, transport="")
        region = replace(self.p_endpoint.regions[0], num_blocks=num_blocks)
        blocks = agent.add_peer(self.p_name, replace(self.p_endpoint, regions=(region,)))
        ids = np.arange(0, count * step, step, dtype=np.int32)
        times = []
        for _ in range(rounds):
            self.pipe.send("poke")
            start = time.perf_counter()
            handle = agent.make_read(blocks, ids, ids)
            is_over = agent.post(handle)
            times.append(time.perf_counter() - start)
            while not is_over:
                is_over, error = agent.poll(handle)
                assert not error, error
            agent.release(handle)
        agent.remove_peer(self.p_name, blocks)
        agent.close()
        return statistics.median(times[1:])  # the first one connects

    def quiet_share(self, for_s: float) -> float:
        """What P takes of a core while it exports and nobody reads."""
        time.sleep(6.0)  # it expects a peer for 5 s
        self.pipe.send(for_s)
        return float(self.pipe.recv())

    def _spin(self) -> None:
        self.pipe.send("spin")
        time.sleep(1e-3)

    def _addresses(self, block_id: int) -> tuple[int, int]:
        """Here and on P."""
        offset = block_id * SPEC.block_bytes
        return self.pool.data_ptr + offset, self.p_endpoint.regions[0].base_address + offset


def report_speed(d: D, transport_name: str, counts: list[int], rounds: int) -> None:
    names = [name for name in d.variants(1) if transport_name == "shm" or "vm" not in name]
    print(f"\n{transport_name}: GB/s, medians of {rounds} rounds\n")
    print(f"| READ | {' | '.join(names)} | neighbours / one descriptor | neighbours / memcpy |")
    print("|---|" + "---|" * (len(names) + 2))
    for count in counts:
        times = time_in_turns(d, count, names, rounds)
        num_bytes = count * SPEC.block_bytes
        rate = {name: num_bytes / statistics.median(times[name]) / 1e9 for name in names}
        cells = [f"{num_bytes / 2**20:.2f} MiB", *(f"{value:.2f}" for value in rate.values())]
        cells += [f"{rate['neighbours'] / rate[of]:.0%}" for of in ("one descriptor", "memcpy")]
        print(f"| {' | '.join(cells)} |", flush=True)


def time_in_turns(d: D, count: int, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant. Each READ takes other blocks than the one before, which are in the
    cache now, and each round begins with another variant.
    """
    variants = d.variants(count)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds * len(names)):
        name = names[(turn + turn // len(names)) % len(names)]
        first = turn * count % (d.pool.num_blocks - 2 * count)
        times[name].append(variants[name](first))
    return times


def report_costs(d: D, transport_name: str, rounds: int, quiet_s: float) -> None:
    print(f"\n{transport_name}: making and posting a READ\n")
    print("| blocks | neighbours | every other |\n|---|---|---|")
    for count in POST_BLOCKS:
        near, apart = (d.post_seconds(count, step, rounds) * 1e3 for step in (1, 2))
        print(f"| {count} | {near:.3f} ms | {apart:.3f} ms |", flush=True)
    print(f"\n{transport_name}: quiet, P takes {d.quiet_share(quiet_s):.2%} of a core", flush=True)


def measure(transport_name: str, args: argparse.Namespace) -> None:
    """All of one transport, in a process of its own: UCX reads its settings once."""
    counts = [max(1, round(mib * 2**20 / SPEC.block_bytes)) for mib in args.mib]
    num_blocks = 2 * max(counts) + 2
    with p_process(transport_name, num_blocks) as pipe:
        d = D(transport_name, num_blocks, pipe)
        report_speed(d, transport_name, counts, args.rounds)
        report_costs(d, transport_name, args.post_rounds, args.quiet_s)
        d.transport.close()


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
    print(describe("nixl", "numpy", "torch"))
    context = multiprocessing.get_context("spawn")
    for transport_name in args.transports:
        process = context.Process(target=measure, args=(transport_name, args))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()
