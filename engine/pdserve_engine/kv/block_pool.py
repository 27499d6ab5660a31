"""The pool of KV blocks: reference counts, an LRU free list and the prefix-hash index, all O(1).

Source of the design: vLLM V1's BlockPool and FreeKVCacheBlockQueue. Owned by the engine thread.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from pdserve_common.tokens.block_hash import ROOT_HASH, truncated_hashes
from pdserve_common.types.kv import KVCacheEvents


class KVCacheBlock:
    """One physical block. Free blocks are linked into the pool's LRU list through prev and next."""

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt})"


# Stands in a request's table where a sliding group keeps no block. It belongs to no pool and nobody
# holds it; the id is no pool's either, so that no list of ids can be mistaken about it.
NULL_BLOCK_ID = -1
NULL_BLOCK = KVCacheBlock(NULL_BLOCK_ID)


class FreeBlockQueue:
    """Free blocks, first to be reused at the head; an intrusive list, so that any block leaves in
    O(1).
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-2)
        self._tail = KVCacheBlock(-3)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.num_blocks = 0
        for block in blocks:
            self.append(block)

    def append(self, block: KVCacheBlock) -> None:
        """Add as the last to be reused."""
        assert self._tail.prev_free is not None
        self._link(self._tail.prev_free, block, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        """Add as the first to be reused."""
        assert self._head.next_free is not None
        self._link(self._head, block, self._head.next_free)

    def popleft(self) -> KVCacheBlock:
        block = self._head.next_free
        assert block is not None
        assert block is not self._tail, "the caller checks num_blocks"
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        before, after = block.prev_free, block.next_free
        assert before is not None
        assert after is not None, f"{block} is not free"
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self.num_blocks -= 1

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def _link(self, before: KVCacheBlock, block: KVCacheBlock, after: KVCacheBlock) -> None:
        before.next_free = after.prev_free = block
        block.prev_free, block.next_free = before, after
        self.num_blocks += 1


class BlockPool:
    """All KV blocks of a worker.

    A block is held (ref_cnt > 0) or free. A free block that still has a prefix hash is cached: a
    request with the same prefix can take it back until it is reused.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_caching: bool,
        on_dead: Callable[[Sequence[int]], object] | None = None,
    ) -> None:
        """`on_dead` is told the ids of blocks whose content nobody can ask for any more: free, and
        without a hash. It may be set later.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 1")
        self.on_dead = on_dead
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self._free = FreeBlockQueue(self.blocks)
        # By hash, held ones and free ones; and how many of them are free.
        self._cached: dict[bytes, KVCacheBlock] = {}
        self.num_free_cached_blocks = 0
        # Since they were last taken: hashes that were stored (True) or removed, and whether all
        # were cleared before. None while nobody listens.
        self._events: dict[bytes, bool] | None = None
        self._is_cleared = False

    @property
    def num_free_blocks(self) -> int:
        return self._free.num_blocks

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks out of the free list, least recently used first; their hashes are forgotten.

        The caller checks num_free_blocks before.
        """
        assert num_blocks <= self.num_free_blocks, "the caller checks num_free_blocks"
        taken = [self._free.popleft() for _ in range(num_blocks)]
        self._forget(taken)
        for block in taken:
            block.ref_cnt = 1
        return taken

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        """Return the block with this prefix hash; it may be free or held."""
        return self._cached.get(block_hash)

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Hold cached blocks once more."""
        for block in blocks:
            if block.ref_cnt == 0:
                self._free.remove(block)
                self.num_free_cached_blocks -= 1
            block.ref_cnt += 1

    def cache_block(self, block: KVCacheBlock, block_hash: bytes) -> None:
        """Make a full, held block findable. Equal content in another block keeps the older one."""
        if self.enable_caching and block.block_hash is None and block_hash not in self._cached:
            block.block_hash = block_hash
            self._cached[block_hash] = block
            if self._events is not None:
                self._events[block_hash] = True

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Give up one hold on each. Pass a request's blocks last first, so that its prefix lives
        longest.
        """
        dead = []
        for block in blocks:
            assert block.ref_cnt > 0, f"{block} is freed twice"
            block.ref_cnt -= 1
            if block.ref_cnt > 0:
                continue
            if block.block_hash is None:
                self._free.prepend(block)
                dead.append(block)
            else:
                self._free.append(block)
                self.num_free_cached_blocks += 1
        self._report_dead(dead)

    def forget(self, block_hashes: Iterable[bytes]) -> None:
        """Nobody finds the blocks of these hashes any more; held ones stay held."""
        found = map(self._cached.get, block_hashes)
        self._forget([block for block in found if block is not None])

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes. Refused (False) while any block is held."""
        if self.num_free_blocks != self.num_blocks:
            return False
        self._forget(list(self._cached.values()))
        if self._events is not None:
            self._events.clear()
            self._is_cleared = True
        return True

    def record_events(self) -> None:
        """Have take_events return what changes from now on, and before that all that is cached."""
        self._events = dict.fromkeys(self._cached, True)
        self._is_cleared = True

    def take_events(self) -> KVCacheEvents | None:
        """Return what has changed since the last call; None if nothing has.

        Of several KV groups the first one, whose keys are the hashes, stands for all.
        """
        if not self._events and not self._is_cleared:
            return None
        events, is_cleared = self._events or {}, self._is_cleared
        self._events, self._is_cleared = {}, False
        hashes = [each for each in events if len(each) == len(ROOT_HASH)]
        return KVCacheEvents(
            all_blocks_cleared=is_cleared,
            blocks_removed=truncated_hashes(each for each in hashes if not events[each]),
            blocks_stored=truncated_hashes(each for each in hashes if events[each]),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError, with numbers, if the pool contradicts itself. O(num_blocks): when
        idle.
        """
        free_ids = [block.block_id for block in self._free]
        unheld = [block.block_id for block in self.blocks if block.ref_cnt == 0]
        assert sorted(free_ids) == unheld, f"free list {sorted(free_ids)} != unheld {unheld}"
        assert len(free_ids) == self._free.num_blocks, (len(free_ids), self._free.num_blocks)
        hashed = {block.block_hash: block for block in self.blocks if block.block_hash is not None}
        assert hashed == self._cached, f"{len(hashed)} hashed blocks, {len(self._cached)} indexed"
        num_free_cached = sum(block.ref_cnt == 0 for block in self._cached.values())
        assert num_free_cached == self.num_free_cached_blocks, (
            f"{num_free_cached} free blocks are cached, {self.num_free_cached_blocks} are counted"
        )

    def _forget(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Drop the hashes that blocks still have."""
        hashed = [block for block in blocks if block.block_hash is not None]
        for block in hashed:
            assert block.block_hash is not None
            del self._cached[block.block_hash]
            if self._events is not None:
                self._events[block.block_hash] = False
            block.block_hash = None
        free = [block for block in hashed if block.ref_cnt == 0]
        self.num_free_cached_blocks -= len(free)
        self._report_dead(free)

    def _report_dead(self, blocks: Sequence[KVCacheBlock]) -> None:
        if blocks and self.on_dead is not None:
            self.on_dead([block.block_id for block in blocks])
