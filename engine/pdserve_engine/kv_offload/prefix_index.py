"""Which blocks a tier has, and which of them goes when it is full."""

import heapq
from collections import Counter
from collections.abc import Iterator


class _Entry:
    __slots__ = ("parent", "queued_tick", "tick")

    def __init__(self, parent: bytes, tick: int) -> None:
        self.parent = parent
        self.tick = tick
        # The tick that stands in the heap for it; None: it is not in it.
        self.queued_tick: int | None = None


class PrefixIndex:
    """At most `capacity` blocks by hash. The one goes first that was not used for longest among
    those that no block here continues: without its start a prefix is of no use. O(log n).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: dict[bytes, _Entry] = {}
        # Also of blocks that are not here.
        self._num_children: Counter[bytes] = Counter()
        self._leaves: list[tuple[int, bytes]] = []
        self._tick = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._entries

    def parent_of(self, block_hash: bytes) -> bytes | None:
        """Return the hash of the block before; None if the block is not here."""
        entry = self._entries.get(block_hash)
        return None if entry is None else entry.parent

    def add(self, block_hash: bytes, parent: bytes) -> None:
        """Add one that is not here, and for which there is room, as the last used."""
        assert block_hash not in self._entries
        assert len(self._entries) < self.capacity, "the caller makes room"
        self._tick += 1
        entry = _Entry(parent, self._tick)
        self._entries[block_hash] = entry
        self._num_children[entry.parent] += 1
        self._queue(block_hash, entry)

    def touch(self, block_hash: bytes) -> None:
        """It was used."""
        entry = self._entries.get(block_hash)
        if entry is not None:
            self._tick += 1
            entry.tick = self._tick

    def evict_for(self, parent: bytes) -> list[tuple[bytes, bytes]]:
        """Make room for one more block, but not by evicting its parent; return what has gone, each
        with its parent. There is no room then in a tier of one block, which is the parent.
        """
        self._num_children[parent] += 1
        evicted = self._evict(self.capacity - 1)
        self._release(parent)
        return evicted

    def evict_surplus(self) -> list[tuple[bytes, bytes]]:
        """Keep `capacity` blocks, which has become smaller; return what has gone."""
        return self._evict(self.capacity)

    def _evict(self, num_kept: int) -> list[tuple[bytes, bytes]]:
        evicted = []
        while len(self._entries) > num_kept and (victim := self._pop_leaf()) is not None:
            evicted.append((victim, self._entries[victim].parent))
            self.discard(victim)
        return evicted

    def discard(self, block_hash: bytes) -> bool:
        """Take a block out. False if it is not here."""
        entry = self._entries.pop(block_hash, None)
        if entry is None:
            return False
        self._release(entry.parent)
        return True

    def clear(self) -> None:
        self._entries.clear()
        self._num_children.clear()
        self._leaves.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if it contradicts itself. O(n)."""
        counted = Counter(entry.parent for entry in self._entries.values())
        assert counted == +self._num_children, "children are counted wrong"
        queued = {block_hash for _, block_hash in self._leaves}
        lost = [each for each in self._entries if self._is_leaf(each) and each not in queued]
        assert not lost, f"{len(lost)} leaves can never be evicted"

    def _release(self, parent: bytes) -> None:
        self._num_children[parent] -= 1
        if self._num_children[parent]:
            return
        del self._num_children[parent]
        entry = self._entries.get(parent)
        if entry is not None:
            self._queue(parent, entry)

    def _is_leaf(self, block_hash: bytes) -> bool:
        return block_hash not in self._num_children

    def _queue(self, block_hash: bytes, entry: _Entry) -> None:
        if entry.queued_tick is None:
            entry.queued_tick = entry.tick
            heapq.heappush(self._leaves, (entry.tick, block_hash))

    def _pop_leaf(self) -> bytes | None:
        while self._leaves:
            tick, block_hash = heapq.heappop(self._leaves)
            entry = self._entries.get(block_hash)
            if entry is None or entry.queued_tick != tick:
                continue
            entry.queued_tick = None
            if not self._is_leaf(block_hash):
                continue
            if entry.tick == tick:
                return block_hash
            self._queue(block_hash, entry)
        return None
