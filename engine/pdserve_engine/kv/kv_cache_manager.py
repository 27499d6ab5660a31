"""Which blocks each request holds: prefix lookup, allocation, hashing, freeing. Owned by the
engine thread.

A request has one block table per KV group; the tables of all groups are equally long and take their
blocks from one pool. In a sliding group the blocks that no later token sees are given back early:
a table begins with null blocks then.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Protocol

from pdserve_common.tokens.block_hash import extend_block_hashes
from pdserve_engine.kv.block_pool import NULL_BLOCK, NULL_BLOCK_ID, BlockPool, KVCacheBlock
from pdserve_engine.kv.kv_groups import num_skipped_blocks
from pdserve_engine.request.request import Request

# The blocks of a known prefix, per KV group in logical order and equally many in each.
ComputedBlocks = tuple[Sequence[KVCacheBlock], ...]


class BlockStore(Protocol):
    """Keeps copies of full blocks besides the pool, by their hashes."""

    def offer(
        self, block_hashes: Sequence[bytes], blocks: Sequence[KVCacheBlock], start: int
    ) -> None:
        """The first `len(blocks)` blocks of a request are full and cached, and held by it; those
        before `start` have been offered.
        """

    def forget(self, block_hashes: Sequence[bytes]) -> None:
        """Nobody is to find these blocks."""


@dataclass(frozen=True, slots=True)
class _Group:
    window: int | None
    # Equal tokens make different bytes in each group. Empty in the first: its keys are the hashes.
    key_suffix: bytes


@dataclass(slots=True)
class _BlockTables:
    """One request's blocks per group: num_null[group] null ones, then blocks that it holds."""

    blocks: tuple[list[KVCacheBlock], ...]
    num_null: list[int]
    # Logical blocks that are in the pool's index already, as far as they are there.
    num_cached: int

    def __len__(self) -> int:
        return len(self.blocks[0])

    def held(self) -> list[KVCacheBlock]:
        """Return all held blocks, those of the request's start first."""
        if len(self.blocks) == 1:  # as most models have it
            return self.blocks[0][self.num_null[0] :]
        rows = zip_longest(*self.blocks, fillvalue=NULL_BLOCK)
        return [block for row in rows for block in row if block is not NULL_BLOCK]


class KVCacheManager:
    """The block tables of all requests over one BlockPool."""

    def __init__(
        self,
        block_pool: BlockPool,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        *,
        max_tokens_in_flight: int | None = None,
    ) -> None:
        """`windows` has an entry per KV group, those with full attention (None) first.

        `max_tokens_in_flight` bounds the tokens of one request that are scheduled between two calls
        of remove_skipped_blocks; None: any number. Only num_blocks_needed depends on it.
        """
        self.block_pool = block_pool
        self.block_size = block_size
        self.empty_computed_blocks: ComputedBlocks = ((),) * len(windows)
        self._groups = tuple(
            _Group(window, index.to_bytes(2, "big") if index else b"")
            for index, window in enumerate(windows)
        )
        self._full = tuple(group for group in self._groups if group.window is None)
        self._sliding = self._groups[len(self._full) :]
        assert None not in windows[len(self._full) :], f"full groups are not first in {windows}"
        self._max_tokens_in_flight = max_tokens_in_flight
        self._tables: dict[str, _BlockTables] = {}
        # For models of one KV group. It may be set later.
        self.block_store: BlockStore | None = None
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0

    # ---- how many

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the length of each of a request's block tables."""
        return -(-num_tokens // self.block_size)

    def num_blocks_needed(self, num_tokens: int) -> int:
        """Return the most blocks that a request holds, over all groups, while it grows to
        `num_tokens` tokens.
        """
        if not self._sliding:
            return len(self._groups) * self.blocks_for(num_tokens)
        return sum(self._num_blocks_needed(group, num_tokens) for group in self._groups)

    def num_blocks_of(self, request_id: str) -> int:
        """Return how many blocks a request holds, over all groups."""
        tables = self._tables.get(request_id)
        if tables is None:
            return 0
        if not self._sliding:
            return len(tables) * len(self._groups)
        return len(tables) * len(self._groups) - sum(tables.num_null)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Physical ids per KV group, in logical order; NULL_BLOCK_ID where a sliding group keeps
        no block.
        """
        tables = self._tables.get(request_id)
        return tuple([] for _ in self._groups) if tables is None else _ids(tables, 0)

    # ---- prefixes

    def num_common_prefix_blocks(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Return, per group, how many blocks the tables of all `requests` begin with alike: none
        in sliding groups, whose requests do not see the start for long.
        """
        tables = [self._tables[request.request_id].blocks for request in requests]
        by_group = list(zip(*tables, strict=True))[: len(self._full)]
        counts = [_num_equal(blocks) for blocks in by_group]
        return (*(counts or [0] * len(self._full)), *(0 for _ in self._sliding))

    def get_computed_blocks(
        self, request: Request, max_num_tokens: int
    ) -> tuple[ComputedBlocks, int]:
        """Return the cached blocks of the longest known prefix of at most `max_num_tokens`, and
        its tokens.

        Known is a prefix if every group has what the token after it sees of it. Holds nothing: pass
        the blocks to allocate_slots in the same step.
        """
        if not self.block_pool.enable_caching:
            return self.empty_computed_blocks, 0
        self._update_block_hashes(request)
        hashes = request.block_hashes[: max_num_tokens // self.block_size]
        full = []
        for group in self._full:
            full.append(self._leading_blocks(group, hashes))
            hashes = hashes[: len(full[-1])]
        hashes = hashes[: self._longest_visible_prefix(hashes)]
        sliding = (self._visible_blocks(group, hashes) for group in self._sliding)
        computed = (*(blocks[: len(hashes)] for blocks in full), *sliding)
        return computed, len(hashes) * self.block_size

    def record_lookup(self, request: Request, num_hit_tokens: int) -> None:
        """Count an admitted request's lookup: the first one, not those after a preemption."""
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = min(num_hit_tokens, request.num_prompt_tokens)
            self.prefix_cache_queries += request.num_prompt_tokens
            self.prefix_cache_hits += request.num_cached_tokens

    def fork(self, source: Request, request: Request, num_tokens: int) -> int:
        """Share the full blocks of `source`'s first `num_tokens` tokens, which are computed, with
        `request`, which holds nothing. Return how many tokens are shared.

        None are if a sliding group does not have any more what the token after them sees.
        """
        assert request.request_id not in self._tables, f"{request.request_id} holds blocks"
        tables = self._tables[source.request_id]
        length = min(num_tokens // self.block_size, len(tables))
        skipped = [self._num_skipped(group, length * self.block_size) for group in self._groups]
        is_lost = any(n > start for n, start in zip(tables.num_null, skipped, strict=True))
        if is_lost or not length:
            return 0
        blocks = tuple(
            [NULL_BLOCK] * start + table[start:length]
            for table, start in zip(tables.blocks, skipped, strict=True)
        )
        shared = _BlockTables(blocks, skipped, min(tables.num_cached, length))
        self.block_pool.touch(shared.held())
        self._tables[request.request_id] = shared
        request.progress.allocated(length * self.block_size)
        return length * self.block_size

    # ---- allocation

    def can_allocate(
        self, num_tokens: int, computed: ComputedBlocks = (), *, num_spare: int = 0
    ) -> bool:
        """Would a new request that grows to `num_tokens` fit, with `num_spare` blocks left over?"""
        needed = num_spare
        for group, blocks in zip(self._groups, computed or self.empty_computed_blocks, strict=True):
            held = blocks[self._num_skipped(group, len(blocks) * self.block_size) :]
            needed += max(self._num_blocks_needed(group, num_tokens) - len(held), 0)
            needed += _num_revived(held)
        return needed <= self.block_pool.num_free_blocks

    def allocate_slots(
        self,
        request: Request,
        num_tokens: int,
        computed: ComputedBlocks = (),
        *,
        num_remote_tokens: int = 0,
    ) -> tuple[list[int], ...] | None:
        """Make room for the request's first `num_tokens` tokens; return, per group, the ids added
        to its table in logical order.

        None, and nothing changed, if the pool has too few. Only for a request that holds nothing:
        `computed` comes first and is held; of the first `num_remote_tokens` tokens, whose KV comes
        from elsewhere, sliding groups keep only what the token after them sees.
        """
        length = self.blocks_for(num_tokens)
        tables = self._tables.get(request.request_id)
        if tables is not None:
            assert not any(computed), f"{request.request_id} holds blocks already"
            start = len(tables)
            if not self._extend(tables, length):
                return None
            request.progress.allocated(len(tables) * self.block_size)
            return _ids(tables, start)
        tables = self._first_tables(computed, num_remote_tokens)
        if not self._extend(tables, length, taken_over=tables.held()):
            return None
        self._tables[request.request_id] = tables
        request.progress.allocated(len(tables) * self.block_size)
        if self.block_store is not None and computed and len(computed[0]):
            # The store may lack what it could not take at first.
            self.block_store.offer(request.block_hashes, computed[0], 0)
        return _ids(tables, 0)

    def remove_skipped_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Give back the blocks of sliding groups that no token from position `num_computed_tokens`
        on sees. No step that may read them is under way.
        """
        if not self._sliding:
            return
        tables = self._tables[request.request_id]
        for index, group in enumerate(self._groups):
            blocks, start = tables.blocks[index], tables.num_null[index]
            end = min(self._num_skipped(group, num_computed_tokens), len(blocks))
            if end > start:
                self.block_pool.free_blocks(reversed(blocks[start:end]))
                blocks[start:end] = [NULL_BLOCK] * (end - start)
                tables.num_null[index] = end

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Hash the blocks that are full now, so that others can share them."""
        if not self.block_pool.enable_caching:
            return
        tables = self._tables[request.request_id]
        start, end = tables.num_cached, num_computed_tokens // self.block_size
        if end <= start:
            return
        self._update_block_hashes(request)
        for group, blocks, num_null in zip(
            self._groups, tables.blocks, tables.num_null, strict=True
        ):
            for index in range(max(start, num_null), end):
                key = request.block_hashes[index] + group.key_suffix
                self.block_pool.cache_block(blocks[index], key)
        tables.num_cached = end
        if self.block_store is not None:
            self.block_store.offer(request.block_hashes, tables.blocks[0][:end], start)

    def forget_blocks(self, request: Request) -> None:
        """Nobody is to share what was computed from the request's tokens, by whomever."""
        if not self.block_pool.enable_caching:
            return
        self._update_block_hashes(request)  # a fork's blocks may all be hashed by its source
        self.block_pool.forget(
            block_hash + group.key_suffix
            for block_hash in request.block_hashes
            for group in self._groups
        )
        if self.block_store is not None:
            self.block_store.forget(request.block_hashes)

    def free(self, request: Request) -> None:
        """Give up all blocks of a request."""
        self.block_pool.free_blocks(reversed(self.take(request)))

    def take(self, request: Request) -> list[KVCacheBlock]:
        """Forget the request but keep its blocks held: their new owner returns them with
        free_block_ids.
        """
        request.progress.freed()
        tables = self._tables.pop(request.request_id, None)
        return tables.held() if tables is not None else []

    def hold_cached(
        self,
        block_hashes: Sequence[bytes],
        first_block: int,
        *,
        max_num: int,
        num_spare: int,
    ) -> tuple[list[int], ...]:
        """Hold the cached blocks of these hashes, the first of which is logical block `first_block`
        of a prefix, once more; return their ids per KV group in logical order, NULL_BLOCK_ID before
        `first_block` and where the token after the prefix does not look.

        Those from the first on that is not cached are left out. Empty lists, and nothing held: none
        is cached, or a sliding group lacks what it needs, or more than `max_num` would be held, or
        fewer than `num_spare` be left free.
        """
        leading = min(
            (self._leading_blocks(group, block_hashes) for group in self._full),
            key=len,
            default=[],
        )
        length = len(leading) if self._full else len(block_hashes)
        if self._sliding and length < len(block_hashes):
            length = 0
        found = [
            self._cached_after(group, block_hashes[:length], first_block) for group in self._groups
        ]
        held = [block for blocks in found for block in blocks if block is not NULL_BLOCK]
        is_whole = all(len(blocks) == first_block + length for blocks in found)
        num_left = self.block_pool.num_free_blocks - _num_revived(held)
        if not (length and is_whole and len(held) <= max_num and num_left >= num_spare):
            return tuple([] for _ in self._groups)
        self.block_pool.touch(held)
        return tuple([block.block_id for block in blocks] for blocks in found)

    def free_block_ids(self, block_ids: Sequence[int]) -> None:
        """Give up one hold on each block that `take` left with another owner."""
        assert NULL_BLOCK_ID not in block_ids, "null blocks are nobody's to free"
        blocks = self.block_pool.blocks
        self.block_pool.free_blocks(blocks[block_id] for block_id in reversed(block_ids))

    def check_integrity(self) -> None:
        """Raise AssertionError if the tables and the pool disagree."""
        self.block_pool.check_integrity()
        num_holds: Counter[KVCacheBlock] = Counter()
        group_of: dict[KVCacheBlock, int] = {}
        for request_id, tables in self._tables.items():
            lengths = {len(blocks) for blocks in tables.blocks}
            assert len(lengths) == 1, f"{request_id} has block tables of lengths {lengths}"
            for group, (blocks, start) in enumerate(
                zip(tables.blocks, tables.num_null, strict=True)
            ):
                assert blocks[:start] == [NULL_BLOCK] * start, (request_id, group, start)
                assert NULL_BLOCK not in blocks[start:], (request_id, group, start)
                num_holds.update(blocks[start:])
                owners = {group_of.setdefault(block, group) for block in blocks[start:]}
                assert owners <= {group}, f"{request_id} shares blocks between groups {owners}"
        lost = [block.block_id for block, count in num_holds.items() if block.ref_cnt < count]
        assert not lost, f"blocks {lost} are in more tables than hold them"

    # ---- inside

    def _num_skipped(self, group: _Group, num_tokens: int) -> int:
        return num_skipped_blocks(group.window, num_tokens, self.block_size)

    def _num_blocks_needed(self, group: _Group, num_tokens: int) -> int:
        length = self.blocks_for(num_tokens)
        if group.window is None or self._max_tokens_in_flight is None:
            return length
        # What the first token in flight sees before it, and all of them, anywhere in their blocks.
        num_positions = group.window - 1 + self._max_tokens_in_flight
        return min(length, self.blocks_for(num_positions - 1) + 1)

    def _cached_after(
        self, group: _Group, block_hashes: Sequence[bytes], first_block: int
    ) -> list[KVCacheBlock]:
        """Return the cached blocks of a prefix, null where it is not asked for or not seen."""
        end = first_block + len(block_hashes)
        first = max(first_block, self._num_skipped(group, end * self.block_size))
        cached = self._leading_blocks(group, block_hashes[first - first_block :])
        return [NULL_BLOCK] * first + cached

    def _leading_blocks(self, group: _Group, hashes: Sequence[bytes]) -> list[KVCacheBlock]:
        """Return the cached blocks up to the first that lacks."""
        blocks = []
        get_cached_block, key_suffix = self.block_pool.get_cached_block, group.key_suffix
        for block_hash in hashes:
            block = get_cached_block(block_hash + key_suffix)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _longest_visible_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return the most blocks of which all sliding groups have what the token after them sees.

        Any prefix that ends between a block that lacks and one that needs it needs it too, so the
        search goes on right before the block.
        """
        length = len(hashes)
        while length:
            limits = [self._visible_limit(group, hashes, length) for group in self._sliding]
            if min(limits, default=length) == length:
                break
            length = min(limits)
        return length

    def _visible_limit(self, group: _Group, hashes: Sequence[bytes], length: int) -> int:
        """Return the index of the last block that lacks of those a prefix of `length` blocks
        needs; `length` if none does.
        """
        first = self._num_skipped(group, length * self.block_size)
        for index in range(length - 1, first - 1, -1):
            key = hashes[index] + group.key_suffix
            if self.block_pool.get_cached_block(key) is None:
                return index
        return length

    def _visible_blocks(self, group: _Group, hashes: Sequence[bytes]) -> list[KVCacheBlock]:
        """Return a known prefix's blocks, null where the token after it does not see them."""
        first = self._num_skipped(group, len(hashes) * self.block_size)
        return [NULL_BLOCK] * first + self._leading_blocks(group, hashes[first:])

    def _first_tables(self, computed: ComputedBlocks, num_remote_tokens: int) -> _BlockTables:
        """Begin a request's tables with what it takes over; nothing is held yet."""
        computed = computed or self.empty_computed_blocks
        length = len(computed[0])
        num_known = max(num_remote_tokens, length * self.block_size)
        num_null = [self._num_skipped(group, num_known) for group in self._groups]
        blocks = tuple(
            [NULL_BLOCK] * first + list(prefix[first:])
            for prefix, first in zip(computed, num_null, strict=True)
        )
        return _BlockTables(blocks, num_null, length)

    def _extend(
        self, tables: _BlockTables, length: int, *, taken_over: Sequence[KVCacheBlock] = ()
    ) -> bool:
        """Make the tables at least `length` blocks long and hold the blocks taken over. False, and
        nothing changed, if the pool has too few.
        """
        num_missing = [max(length - len(blocks), 0) for blocks in tables.blocks]
        num_new = sum(num_missing)
        if num_new + _num_revived(taken_over) > self.block_pool.num_free_blocks:
            return False
        self.block_pool.touch(taken_over)
        new_blocks = iter(self.block_pool.get_new_blocks(num_new))
        for blocks, count in zip(tables.blocks, num_missing, strict=True):
            blocks.extend(islice(new_blocks, count))
        return True

    def _update_block_hashes(self, request: Request) -> None:
        """Extend the request's hashes to all its full blocks."""
        extend_block_hashes(
            request.block_hashes, request.core_request, request.all_token_ids, self.block_size
        )


def _num_equal(tables: Sequence[Sequence[KVCacheBlock]]) -> int:
    """Return how many blocks all tables begin with; none of one table."""
    first, *others = tables
    length = min(map(len, tables)) if others else 0
    for other in others:
        if other[:length] != first[:length]:
            pairs = zip(first, other, strict=False)
            length = next(index for index, (mine, its) in enumerate(pairs) if mine is not its)
    return length


def _ids(tables: _BlockTables, start: int) -> tuple[list[int], ...]:
    """Return each table's block ids from `start` on."""
    return tuple([block.block_id for block in blocks[start:]] for blocks in tables.blocks)


def _num_revived(blocks: Iterable[KVCacheBlock]) -> int:
    """Return how many leave the free list when they are held."""
    return sum(block.ref_cnt == 0 for block in blocks)
