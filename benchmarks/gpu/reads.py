"""Blocks of the large model, read over NIXL by one process out of another's pool on the same GPU.

Both sides are processes of their own: UCX reads its settings when NIXL loads it, and says which
transports it takes to standard output.
"""

import functools
import multiprocessing
import os
import statistics
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu.bench import Bench, last_lines
from gpu.measure import seconds
from gpu.shapes import BLOCK_SIZE, Shape

from pdserve_common.types.kv import PROTOCOL_VERSION, KVLinkWelcome, new_epoch
from pdserve_engine.kv.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.kv.kv_groups import group_layers
from pdserve_engine.kv_transfer.base import KVIdentity, KVTransport, ReadResult
from pdserve_engine.kv_transfer.transport.factory import make_transport
from pdserve_engine.kv_transfer.transport.sharded_transport import ShardedTransport

# Until a process has started, or has read blocks ten times.
ANSWER_S = 60.0
READ_S = 20.0
NUM_READS = 10
MAX_LOG_LINES = 16


class Setting(NamedTuple):
    """What both sides are made from."""

    device: str
    shape: Shape
    num_blocks: int
    # UCX_TLS; empty leaves it unset.
    tls: str


class Side(NamedTuple):
    """A pool, its transport, and what a peer is told."""

    pool: KVCache
    transport: KVTransport
    welcome: KVLinkWelcome


def record_reads(bench: Bench, tls: str) -> None:
    """Record how long READs of several sizes take with this UCX_TLS, and how UCX does them."""
    counts, what = bench.sizes.handoff_blocks, f"UCX_TLS={tls or 'unset'}"
    setting = Setting(bench.device.type, bench.large, 2 * max(counts), tls)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ucx"
        for name, values in _run_pair(setting, counts, log):
            bench.record(f"{name}, {what}", **values)
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    bench.record(f"UCX's choice, {what}", lines=_choices(lines))


def _choices(lines: list[str]) -> list[str]:
    """What UCX says it does with GPU memory, each line once."""
    words = ("cuda", "Error", "ERROR")
    seen = dict.fromkeys(line.strip() for line in lines if any(word in line for word in words))
    return list(seen)[:MAX_LOG_LINES]


def _run_pair(
    setting: Setting, counts: list[int], log: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and values of what D has measured, as they come."""
    context = multiprocessing.get_context("spawn")
    for_p, for_d = context.Pipe()
    receiver, sender = context.Pipe(duplex=False)
    d_args = (for_d, sender, setting, counts, log)
    processes = [
        context.Process(target=_run_d, args=d_args, daemon=True),
        context.Process(target=_run_p, args=(for_p, setting), daemon=True),
    ]
    for process in processes:
        process.start()
    for end in (for_p, for_d, sender):  # so that it is heard when a process ends
        end.close()
    try:
        yield from _answers(receiver)
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()


def _answers(receiver: Connection) -> Iterator[tuple[str, dict[str, Any]]]:
    while True:
        if not receiver.poll(ANSWER_S):
            raise TimeoutError("no answer from the reading process")
        try:
            message = receiver.recv()
        except EOFError:
            raise RuntimeError("the reading process has ended") from None
        if message is None:
            return
        if isinstance(message, list):
            raise RuntimeError("\n".join(message))
        yield message


def _run_p(pipe: Connection, setting: Setting) -> None:
    """Have every block hold its number, and let them be read."""
    pool, transport, welcome = _make_side("p", setting)
    numbers = _numbers(pool)
    pool.tensor.view(torch.int16).copy_(numbers.view(-1, *[1] * (pool.tensor.dim() - 1)))
    if pool.tensor.is_cuda:
        torch.cuda.synchronize()
    transport.expect_peer()
    transport.set_exporting(True)
    pipe.send(welcome)
    while pipe.recv() == "poll_soon":
        transport.poll_soon()
    transport.close()


def _run_d(
    pipe: Connection, sender: Connection, setting: Setting, counts: list[int], log: Path
) -> None:
    """Send what is measured, then None; the end of a traceback if it fails."""
    os.environ["UCX_PROTO_INFO"] = "y"
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        if not pipe.poll(ANSWER_S):
            raise TimeoutError("P does not start")
        _time_reads(pipe, sender, _make_side("d", setting), counts)
        sender.send(None)
    except Exception as error:  # for whoever waits
        sender.send(last_lines(error))
    pipe.send("stop")


def _make_side(engine_id: str, setting: Setting) -> Side:
    if setting.tls:
        os.environ["UCX_TLS"] = setting.tls
    shape, device = setting.shape, setting.device
    spec = KVCacheSpec(
        groups=group_layers([None] * shape.num_hidden_layers),
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
    )
    identity = KVIdentity(
        engine_id=engine_id,
        epoch=new_epoch(),
        compatibility_hash="bench",
        layout=spec.layout(),
        vocab_size=shape.vocab_size,
    )
    pool = KVCache(spec, num_blocks=setting.num_blocks, device=torch.device(device))
    rank = make_transport(identity, device=device)
    rank.register(pool)
    transport = ShardedTransport([rank], layout=identity.layout)
    welcome = KVLinkWelcome(
        protocol_version=PROTOCOL_VERSION,
        engine_id=engine_id,
        epoch=identity.epoch,
        compatibility_hash=identity.compatibility_hash,
        link=1,
        endpoint=transport.endpoint(),
    )
    return Side(pool, transport, welcome)


def _numbers(pool: KVCache) -> torch.Tensor:
    """Return what its blocks hold, int16."""
    return torch.arange(pool.num_blocks, device=pool.tensor.device).to(torch.int16)


def _time_reads(pipe: Connection, sender: Connection, side: Side, counts: list[int]) -> None:
    pool, transport = side.pool, side.transport
    peer = transport.add_peer(pipe.recv(), lambda why: None)
    read = functools.partial(_read, pipe, transport, peer)
    read(range(pool.num_blocks))
    if not bool((pool.tensor.view(torch.int16).flatten(1) == _numbers(pool)[:, None]).all()):
        raise RuntimeError("wrong bytes")
    for count in counts:
        for step in (1, 2):
            ids = range(0, count * step, step)
            read_ids = functools.partial(read, ids)
            median_s = statistics.median(seconds(read_ids) for _ in range(NUM_READS))
            num_bytes = count * pool.block_bytes
            values = {
                "ms": median_s * 1e3,
                "gb_s": num_bytes / median_s / 1e9,
                "transport": read_ids().transport,
            }
            name = f"READ {count} blocks, {num_bytes / 2**20:.1f} MiB, every {step}."
            sender.send((name, values))


def _read(pipe: Connection, transport: KVTransport, peer: str, block_ids: range) -> ReadResult:
    """Read blocks of the peer to where they lie there."""
    results: list[ReadResult] = []
    is_over = threading.Event()

    def on_done(result: ReadResult) -> None:
        results.append(result)
        is_over.set()

    pipe.send("poll_soon")
    transport.read(peer, block_ids, block_ids, READ_S, on_done, lambda: None)
    if not is_over.wait(READ_S + 10.0):
        raise TimeoutError("the READ does not end")
    if not results[0].is_ok:
        raise RuntimeError(results[0].error)
    return results[0]
