"""Which blocks each request holds: prefix lookup, allocation, hashing, freeing. Owned by the
engine thread.
"""

import hashlib
from array import array
from collections.abc import Sequence

from pdserve_engine.core.block_pool import BlockPool, KVCacheBlock
from pdserve_engine.core.request import Request

# The parent of a prompt's first block. Fixed, so that a router can compute the same hashes.
ROOT_HASH = b"\0" * 32


def hash_block(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Return the chained SHA-256 of a full block: its parent's hash, its tokens, and salt or
    adapter.
    """
    digest = hashlib.sha256(parent)
    digest.update(array("I", token_ids).tobytes())
    digest.update(extra)
    return digest.digest()


class KVCacheManager:
    """The block tables of all requests over one BlockPool (one KV group in this version)."""

    def __init__(self, block_pool: BlockPool, block_size: int) -> None:
        self.block_pool = block_pool
        self.block_size = block_size
        self._blocks: dict[str, list[KVCacheBlock]] = {}
        # Full blocks of each request that are hashed into the pool's index already.
        self._num_cached_blocks: dict[str, int] = {}
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Physical ids per KV group, in logical order."""
        return ([block.block_id for block in self._blocks.get(request_id, ())],)

    def num_blocks_of(self, request_id: str) -> int:
        return len(self._blocks.get(request_id, ()))

    def get_computed_blocks(
        self, request: Request, max_num_tokens: int
    ) -> tuple[list[KVCacheBlock], int]:
        """Return the cached blocks of the longest known prefix of at most `max_num_tokens`, and
        its tokens.

        Holds nothing: pass the blocks to allocate_slots in the same step.
        """
        if not self.block_pool.enable_caching:
            return [], 0
        self._update_block_hashes(request)
        blocks = []
        for block_hash in request.block_hashes[: max_num_tokens // self.block_size]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks, len(blocks) * self.block_size

    def record_lookup(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Count an admitted request's lookup (not the ones repeated while it waits)."""
        self.prefix_cache_queries += num_queried_tokens
        self.prefix_cache_hits += num_hit_tokens

    def can_allocate(
        self, num_tokens: int, computed_blocks: Sequence[KVCacheBlock] = (), *, num_spare: int = 0
    ) -> bool:
        """Would a new request of `num_tokens` fit, with `num_spare` blocks left over?"""
        revived = sum(block.ref_cnt == 0 for block in computed_blocks)
        needed = self.blocks_for(num_tokens) - len(computed_blocks) + revived
        return needed + num_spare <= self.block_pool.num_free_blocks

    def allocate_slots(
        self,
        request: Request,
        num_tokens: int,
        computed_blocks: Sequence[KVCacheBlock] = (),
    ) -> list[int] | None:
        """Make room for the request's first `num_tokens` tokens and return the ids of the blocks
        added.

        None, and nothing changed, if the pool has too few. `computed_blocks` come first and are
        held.
        """
        held = self._blocks.get(request.request_id, [])
        num_new = self.blocks_for(num_tokens) - len(held) - len(computed_blocks)
        revived = sum(block.ref_cnt == 0 for block in computed_blocks)
        if max(num_new, 0) + revived > self.block_pool.num_free_blocks:
            return None
        self.block_pool.touch(computed_blocks)
        new_blocks = self.block_pool.get_new_blocks(max(num_new, 0))
        added = [*computed_blocks, *new_blocks]
        if not held:
            self._blocks[request.request_id] = held
            self._num_cached_blocks[request.request_id] = len(computed_blocks)
        held.extend(added)
        return [block.block_id for block in added]

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Hash the blocks that are full now, so that others can share them."""
        if not self.block_pool.enable_caching:
            return
        start = self._num_cached_blocks[request.request_id]
        end = num_computed_tokens // self.block_size
        if end <= start:
            return
        self._update_block_hashes(request)
        blocks = self._blocks[request.request_id]
        for index in range(start, end):
            self.block_pool.cache_block(blocks[index], request.block_hashes[index])
        self._num_cached_blocks[request.request_id] = end

    def free(self, request: Request) -> None:
        """Give up all blocks of a request."""
        self.block_pool.free_blocks(reversed(self.take(request)))

    def take(self, request: Request) -> list[KVCacheBlock]:
        """Forget the request but keep its blocks held: their new owner returns them with
        free_block_ids.
        """
        self._num_cached_blocks.pop(request.request_id, None)
        return self._blocks.pop(request.request_id, [])

    def free_block_ids(self, block_ids: Sequence[int]) -> None:
        """Give up one hold on each block that `take` left with another owner."""
        blocks = self.block_pool.blocks
        self.block_pool.free_blocks(blocks[block_id] for block_id in reversed(block_ids))

    def check_integrity(self) -> None:
        """Raise AssertionError if the tables and the pool disagree."""
        self.block_pool.check_integrity()
        for request_id, blocks in self._blocks.items():
            unheld = [block.block_id for block in blocks if block.ref_cnt < 1]
            assert not unheld, f"{request_id} has blocks {unheld} that nobody holds"

    def _update_block_hashes(self, request: Request) -> None:
        """Extend the request's hashes to all its full blocks."""
        hashes = request.block_hashes
        tokens = request.all_token_ids
        size = self.block_size
        extra = _extra_key(request)
        for index in range(len(hashes), len(tokens) // size):
            parent = hashes[-1] if hashes else ROOT_HASH
            block_tokens = tokens[index * size : (index + 1) * size]
            hashes.append(hash_block(parent, block_tokens, extra if index == 0 else b""))


def _extra_key(request: Request) -> bytes:
    """What separates equal tokens: the tenant's salt and the adapter."""
    salt = request.request.cache_salt
    lora = request.request.lora_request
    parts = (salt or "", lora.lora_name if lora else "")
    return "\0".join(parts).encode() if any(parts) else b""
