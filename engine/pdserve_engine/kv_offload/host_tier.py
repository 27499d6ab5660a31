"""A tier in host memory: for pools on a GPU, and before the disk."""

import threading
from collections.abc import Callable

from pdserve_engine.kv.block_copier import BlockBytes
from pdserve_engine.kv_offload.prefix_index import PrefixIndex


class HostTier:
    """A KVTier whose blocks end with the process."""

    name = "host"
    is_writable = True

    def __init__(self, *, num_bytes: int, block_bytes: int) -> None:
        """Raises ValueError if it cannot hold a block."""
        if num_bytes < block_bytes:
            raise ValueError(
                f"kv_offload_host_bytes is {num_bytes}, a KV block takes {block_bytes}"
            )
        self._block_bytes = block_bytes
        self._lock = threading.Lock()
        self._index = PrefixIndex(num_bytes // block_bytes)
        self._blocks: dict[bytes, BlockBytes] = {}

    @property
    def used_bytes(self) -> int:
        return len(self._blocks) * self._block_bytes

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._blocks

    def put(
        self,
        block_hash: bytes,
        parent: bytes,
        content: BlockBytes,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        with self._lock:
            if block_hash in self._index or not is_wanted():
                return False
            for evicted, _ in self._index.evict_for(parent):
                del self._blocks[evicted]
            if len(self._index) >= self._index.capacity:
                return False
            self._index.add(block_hash, parent)
            self._blocks[block_hash] = content
            return True

    def get(self, block_hash: bytes) -> BlockBytes | None:
        with self._lock:
            self._index.touch(block_hash)
            return self._blocks.get(block_hash)

    def discard(self, block_hash: bytes) -> None:
        with self._lock:
            if self._index.discard(block_hash):
                del self._blocks[block_hash]

    def clear(self) -> None:
        with self._lock:
            self._index.clear()
            self._blocks.clear()

    def close(self) -> None:
        self.clear()
