"""A rank's KV transport inside one process, without NIXL."""

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve_common.errors import KVTransferError
from pdserve_common.types.kv import KVMemoryRegion, KVRankEndpoint
from pdserve_engine.kv_transfer.base import PoolTransport, ReadDone, ReadResult, check_block_ids
from pdserve_engine.kv_transfer.transport.shards import KVPeer

if TYPE_CHECKING:
    from pdserve_engine.kv.kv_cache import KVCache


class LocalRegistry:
    """The pools of one process by their owners' names. Copies hold the lock, so that a pool that
    has been removed is not read any more.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pools: dict[str, KVCache] = {}


@dataclass(slots=True, eq=False)
class _Peer:
    rank: KVPeer
    on_lost: Callable[[str], None]
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class _Read:
    peer: _Peer
    remote_block_ids: tuple[int, ...]
    local_block_ids: tuple[int, ...]
    on_done: ReadDone


class LocalTransport(PoolTransport):
    """Copies blocks on a thread of its own."""

    name = "local"

    def __init__(self, agent_name: str, registry: LocalRegistry) -> None:
        self._agent_name = agent_name
        self._registry = registry
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._num_peers = 0
        self._is_closed = False
        self._reads: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def register(self, kv_cache: "KVCache") -> None:
        self._kv_cache = kv_cache
        with self._registry.lock:
            self._registry.pools[self._agent_name] = kv_cache
        self._thread.start()

    def endpoint(self) -> KVRankEndpoint:
        region = KVMemoryRegion(
            base_address=self._kv_cache.data_ptr,
            first_block=0,
            num_blocks=self._kv_cache.num_blocks,
        )
        return KVRankEndpoint(
            shard=self._kv_cache.spec.part,
            memory_type="DRAM",
            regions=(region,),
            nixl_metadata=b"",
        )

    def expect_peer(self) -> None:
        """Peers need no help."""

    def set_exporting(self, is_exporting: bool) -> None:
        """Peers need no help."""

    def poll_soon(self) -> None:
        """Peers need no help."""

    def self_check(self) -> None:
        """A copy within a process needs no proof."""

    def add_peer(self, peer: KVPeer, on_lost: Callable[[str], None]) -> str:
        with self._lock:
            self._num_peers += 1
            key = f"{peer.agent_name}#{self._num_peers}"
            self._peers[key] = _Peer(peer, on_lost)
        return key

    def remove_peer(self, peer: str) -> None:
        with self._lock:
            removed = self._peers.pop(peer, None)
            if removed is not None:
                removed.is_lost = True

    def read(
        self,
        peer: str,
        remote_block_ids: Sequence[int],
        local_block_ids: Sequence[int],
        timeout_s: float,
        on_done: ReadDone,
        on_stall: Callable[[], None],
    ) -> None:
        with self._lock:
            target = self._peers.get(peer)
            if target is None or target.is_lost or self._is_closed:
                raise KVTransferError(f"no connection to {peer}")
            check_block_ids(remote_block_ids, target.rank.num_blocks, "remote")
            check_block_ids(local_block_ids, self._kv_cache.num_blocks, "local")
            if len(remote_block_ids) != len(local_block_ids):
                raise KVTransferError("remote and local block ids differ in number")
            read = _Read(target, tuple(remote_block_ids), tuple(local_block_ids), on_done)
            self._reads.put(read)

    def close(self) -> None:
        with self._lock:
            is_first = not self._is_closed
            self._is_closed = True
        if is_first and self._thread.is_alive():
            self._reads.put(None)
            self._thread.join()
            with self._registry.lock:
                del self._registry.pools[self._agent_name]

    def _run(self) -> None:
        while (read := self._reads.get()) is not None:
            start = time.monotonic()
            error = self._copy(read)
            with self._lock:
                is_news = bool(error) and not read.peer.is_lost
                read.peer.is_lost |= bool(error)
            result = ReadResult(
                is_ok=not error,
                num_bytes=len(read.local_block_ids) * read.peer.rank.read_bytes,
                duration_s=time.monotonic() - start,
                transport=self.name,
                error=error,
            )
            read.on_done(result)
            if is_news:
                read.peer.on_lost(error)

    def _copy(self, read: _Read) -> str:
        """Return what went wrong, or nothing."""
        rank = read.peer.rank
        if read.peer.is_lost:
            return f"connection to {rank.agent_name} was closed"
        with self._registry.lock:
            source = self._registry.pools.get(rank.agent_name)
            if source is None:
                return f"{rank.agent_name} is gone"
            pairs = zip(read.remote_block_ids, read.local_block_ids, strict=True)
            for remote, local in pairs:
                theirs = source.data_ptr + remote * rank.block_bytes
                ours = self._kv_cache.data_ptr + local * self._kv_cache.block_bytes
                for there, here, num_bytes in rank.slices:
                    ctypes.memmove(ours + here, theirs + there, num_bytes)
        return ""
