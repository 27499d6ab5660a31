"""RDMA of a simulation: READs copy block by block, in any order, at any time, whatever the
processes do; some stall and land long after they were given up.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdserve_common.errors import KVTransferError
from pdserve_common.types.kv import KVEndpoint, KVLinkWelcome, KVMemoryRegion, KVRankEndpoint
from pdserve_engine.kv_transfer.base import KVTransport, ReadResult

if TYPE_CHECKING:
    from support.simulation.worker import SimulatedWorker

MAX_PIECE_S = 4e-3
MAX_PIECE_BLOCKS = 4
# Of pieces while a NIC is faulty.
STALL_SHARE, FAILURE_SHARE = 0.1, 0.05
# A READ that has stalled goes on up to so long after it was given up.
MAX_AFTER_STALL_S = 3.0


@dataclass(eq=False)
class _Peer:
    # None: that start of it is over.
    worker: "SimulatedWorker | None"
    on_lost: Callable[[str], None]


@dataclass(eq=False)
class _Read:
    key: str
    source: "SimulatedWorker"
    pairs: list[tuple[int, int]]
    timeout_s: float
    on_done: Callable[[ReadResult], None]
    on_stall: Callable[[], None]
    began_s: float
    num_blocks: int
    is_stalled: bool = False


class SimulatedNic(KVTransport):
    """A worker's transport."""

    name = "shm"

    def __init__(self, worker: "SimulatedWorker") -> None:
        self._worker, self._network = worker, worker.world.network
        self._random, self._journal = worker.world.random, worker.world.journal
        self._peers: dict[str, _Peer] = {}
        self._numbers = itertools.count(1)
        self.reads: list[_Read] = []
        self.is_faulty = False

    def endpoint(self) -> KVEndpoint:
        region = KVMemoryRegion(
            base_address=1, first_block=0, num_blocks=self._worker.pool.num_blocks
        )
        rank = KVRankEndpoint(memory_type="DRAM", regions=(region,), nixl_metadata=b"")
        return KVEndpoint(ranks=(rank,), transport="")

    def add_peer(self, peer: KVLinkWelcome, on_lost: Callable[[str], None]) -> str:
        key = f"{peer.engine_id}#{next(self._numbers)}"
        self._peers[key] = _Peer(self._worker.world.worker_of(peer.engine_id, peer.epoch), on_lost)
        return key

    def remove_peer(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def read(
        self,
        peer: str,
        remote_block_ids: Sequence[int],
        local_block_ids: Sequence[int],
        timeout_s: float,
        on_done: Callable[[ReadResult], None],
        on_stall: Callable[[], None],
    ) -> None:
        known = self._peers.get(peer)
        if known is None or known.worker is None:
            raise KVTransferError(f"no connection to {peer}")
        pairs = list(zip(remote_block_ids, local_block_ids, strict=True))
        self._random.shuffle(pairs)
        now = self._network.loop.time()
        read = _Read(peer, known.worker, pairs, timeout_s, on_done, on_stall, now, len(pairs))
        self.reads.append(read)
        self._journal.note(f"posts a READ of {pairs} from {peer}")
        self._plan(read)

    def _plan(self, read: _Read) -> None:
        """Say when its next piece is copied."""
        wait_s = self._random.uniform(0.0, MAX_PIECE_S)
        now = self._network.loop.time()
        if self.is_faulty and not read.is_stalled and self._random.random() < STALL_SHARE:
            self._network.call_at(now + read.timeout_s, lambda: self._stall(read))
            wait_s = read.timeout_s + self._random.uniform(0.0, MAX_AFTER_STALL_S)
        self._network.call_at(now + wait_s, lambda: self._copy(read))

    def _copy(self, read: _Read) -> None:
        if self._worker.is_gone:
            return
        is_cut = read.source.is_gone or not self._network.is_reachable(
            self._worker.name, read.source.name
        )
        if is_cut or (self.is_faulty and self._random.random() < FAILURE_SHARE):
            self._end(read, "the peer is gone" if is_cut else "failed")
            self._lose(read, "failed")
            return
        count = self._random.randint(1, MAX_PIECE_BLOCKS)
        for remote, local in read.pairs[:count]:
            target = self._worker.pool.blocks[local]
            if target.ref_cnt != 1:
                self._worker.world.blame("a READ writes into a block that is free (K5)")
            if target.block_hash is not None:
                self._worker.world.blame("a READ writes into a block that others may use (K4)")
            self._worker.memory[local] = read.source.memory[remote]
        del read.pairs[:count]
        if read.pairs:
            self._plan(read)
        else:
            self._end(read, "stalled" if read.is_stalled else "")

    def _stall(self, read: _Read) -> None:
        read.is_stalled = True
        self._worker.process.post(read.on_stall)
        self._lose(read, "stalled")

    def _end(self, read: _Read, error: str) -> None:
        self.reads.remove(read)
        self._journal.note(f"READ from {read.key} ends: {error or 'ok'}", self._worker.name)
        result = ReadResult(
            is_ok=not error,
            num_bytes=read.num_blocks,
            duration_s=self._network.loop.time() - read.began_s,
            transport=self.name,
            error=error,
        )
        self._worker.process.post(read.on_done, result)

    def _lose(self, read: _Read, reason: str) -> None:
        peer = self._peers.get(read.key)
        if peer is not None and peer.worker is not None:
            peer.worker = None
            self._worker.process.post(peer.on_lost, reason)

    def register(self, kv_cache: Any) -> None:
        """The memory is there."""

    def expect_peer(self) -> None:
        """Peers need no help."""

    def poll_soon(self) -> None:
        """Peers need no help."""

    def set_exporting(self, is_exporting: bool) -> None:
        """Peers need no help."""

    def self_check(self) -> None:
        """A copy within a process needs no proof."""

    def close(self) -> None:
        """READs that are under way end with their worker."""
