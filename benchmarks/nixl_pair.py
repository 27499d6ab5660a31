"""Two processes with a pool and a NixlTransport each, for bench_nixl.py: P announces its whole pool
and answers, D reads.
"""

import multiprocessing
import os
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from pdserve_common.types.kv import PROTOCOL_VERSION, KVLinkWelcome, new_epoch
from pdserve_engine.kv.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.kv.kv_groups import group_layers
from pdserve_engine.kv_transfer.base import KVIdentity, ReadResult
from pdserve_engine.kv_transfer.transport.factory import make_transport
from pdserve_engine.kv_transfer.transport.sharded_transport import ShardedTransport

# Blocks of 1.75 MiB: those of Qwen3-0.6B.
SPEC = KVCacheSpec(
    groups=group_layers([None] * 28),
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    dtype=torch.bfloat16,
)
BLOCK_BYTES = SPEC.block_bytes
WAIT_S = 30.0


class Bare:
    """NIXL without anything of ours: one descriptor, polled without a pause."""

    def __init__(self, name: str, pool: KVCache) -> None:
        from pdserve_engine.kv_transfer.transport.nixl_agent import _api

        config = _api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = _api.nixl_agent(name, config)
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


class DSide:
    """The reading side, connected."""

    def __init__(self, pipe: Connection, transport_name: str, num_blocks: int) -> None:
        assert pipe.poll(WAIT_S), "P does not start"
        self.pipe = pipe
        self.p_pid, self.welcome, bare_metadata = pipe.recv()
        self.pool, self._transport, _ = _make_side("d", transport_name, num_blocks)
        self._peer = self._transport.add_peer(self.welcome, lambda why: print("lost:", why))
        self.read(range(num_blocks))
        assert torch.equal(self.pool.tensor.view(torch.int16), _pattern(num_blocks)), "wrong bytes"
        self._bare = Bare("bare-d", self.pool)
        self._bare.connect(bare_metadata)
        self.read_bare(0, BLOCK_BYTES)

    def read(self, block_ids: range) -> float:
        """Read blocks through our transport; return the seconds until they are there."""
        results: list[ReadResult] = []
        is_over = threading.Event()

        def on_done(result: ReadResult) -> None:
            results.append(result)
            is_over.set()

        self.poll_soon()
        start = time.perf_counter()
        self._transport.read(self._peer, block_ids, block_ids, WAIT_S, on_done, lambda: None)
        assert is_over.wait(WAIT_S), "the READ does not end"
        assert results[0].is_ok, results[0].error
        return time.perf_counter() - start

    def read_bare(self, first: int, num_bytes: int) -> float:
        """Read the same number of bytes from a block on with NIXL alone, both sides spinning."""
        self.pipe.send("spin")
        time.sleep(1e-3)
        return seconds(lambda: self._bare.read(*self.addresses(first), num_bytes))

    def poll_soon(self) -> None:
        """What P does by itself when it announces blocks. Ends its spinning."""
        self.pipe.send("poll_soon")

    def addresses(self, block_id: int) -> tuple[int, int]:
        """Of a block here and on P."""
        offset = block_id * BLOCK_BYTES
        (rank,) = self.welcome.endpoint.ranks
        return self.pool.data_ptr + offset, rank.regions[0].base_address + offset

    def p_cpu_share(self, for_s: float) -> float:
        """What P takes of a core while it exports and nobody reads."""
        self.pipe.send(for_s)
        return float(self.pipe.recv())

    def close(self) -> None:
        self._transport.close()
        self.pipe.send("stop")


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def run_pair(
    transport_name: str, num_blocks: int, measure: Callable[[DSide, str, Namespace], None],
    args: Namespace,
) -> None:  # fmt: skip
    """Call `measure` in D's process. Both are processes: UCX reads its settings once."""
    context = multiprocessing.get_context("spawn")
    for_p, for_d = context.Pipe()
    p = context.Process(target=_run_p, args=(for_p, transport_name, num_blocks), daemon=True)
    d_args = (for_d, transport_name, num_blocks, measure, args)
    d = context.Process(target=_run_d, args=d_args, daemon=True)
    for process in (p, d):
        process.start()
    for_p.close()
    for_d.close()
    for process in (d, p):
        process.join()
    if p.exitcode or d.exitcode:
        sys.exit(f"P ended with {p.exitcode}, D with {d.exitcode}")


def _run_d(
    pipe: Connection, transport_name: str, num_blocks: int,
    measure: Callable[[DSide, str, Namespace], None], args: Namespace,
) -> None:  # fmt: skip
    d = DSide(pipe, transport_name, num_blocks)
    measure(d, transport_name, args)
    d.close()


def _run_p(pipe: Connection, transport_name: str, num_blocks: int) -> None:
    pool, transport, welcome = _make_side("p", transport_name, num_blocks)
    pool.tensor.view(torch.int16).copy_(_pattern(num_blocks))
    bare = Bare("bare-p", pool)
    transport.expect_peer()
    transport.set_exporting(True)
    pipe.send((os.getpid(), welcome, bare.metadata))
    while (command := pipe.recv()) != "stop":
        if command == "poll_soon":
            transport.poll_soon()
        elif command == "spin":
            while not pipe.poll():
                bare.progress()
        else:
            before = time.process_time()
            time.sleep(command)
            pipe.send((time.process_time() - before) / command)
    transport.close()


def _make_side(engine_id: str, transport_name: str, num_blocks: int) -> tuple[Any, ...]:
    """Return (pool, transport, what a peer is told)."""
    identity = KVIdentity(
        engine_id=engine_id,
        epoch=new_epoch(),
        compatibility_hash="bench",
        layout=SPEC.layout(),
        vocab_size=32_000,
    )
    pool = KVCache(SPEC, num_blocks=num_blocks, device=torch.device("cpu"))
    rank = make_transport(identity, require_transport=transport_name)
    rank.register(pool)
    transport = ShardedTransport([rank], layout=identity.layout)
    welcome = KVLinkWelcome(
        protocol_version=PROTOCOL_VERSION,
        engine_id=engine_id,
        epoch=identity.epoch,
        compatibility_hash="bench",
        link=1,
        endpoint=transport.endpoint(),
    )
    return pool, transport, welcome


def _pattern(num_blocks: int) -> torch.Tensor:
    """Every block's number, in the shape of a pool."""
    numbers = torch.arange(num_blocks, dtype=torch.int16)
    return numbers.view(-1, *[1] * len(SPEC.block_shape)).expand(num_blocks, *SPEC.block_shape)
