"""What the engine's pool has cached, and how each attached router is kept up to date on it."""

import asyncio
import logging
from collections.abc import Callable
from itertools import islice

from pdserve_common.observability import defects
from pdserve_common.types.kv import KVCacheEvents

logger = logging.getLogger(__name__)

# A message has at most so many, 32 KiB on the wire: tokens must not wait behind it. The rest comes
# with the next.
MAX_BLOCKS = 4096
# A router has at most so many. One that is further behind gets all that is cached again.
MAX_PENDING = 65536
# How long changes wait for a message that they can ride on.
DELAY_S = 0.02
# The pool is told shard by shard, so that nobody has to copy it.
NUM_SHARDS = 256


class CachedBlocks:
    """The blocks (`truncated_hashes`) that the pool has cached as of the last step."""

    def __init__(self) -> None:
        self.shards: list[set[int]] = [set() for _ in range(NUM_SHARDS)]
        self._feeds: set[KVCacheFeed] = set()

    def apply(self, events: KVCacheEvents) -> None:
        """The engine says what has changed."""
        try:
            self._apply(events)
        except BaseException as error:  # the engine's thread calls, and serves all
            # What is forgotten is not found at worst: routers are told anew, of less.
            defects.record("kv_events", error, "routers the knowledge of cached blocks")
            self.shards = [set() for _ in range(NUM_SHARDS)]
            for feed in self._feeds:
                feed.restart()

    def _apply(self, events: KVCacheEvents) -> None:
        if events.all_blocks_cleared:
            self.shards = [set() for _ in range(NUM_SHARDS)]
        for block in events.blocks_removed:
            self.shards[block % NUM_SHARDS].discard(block)
        for block in events.blocks_stored:
            self.shards[block % NUM_SHARDS].add(block)
        for feed in self._feeds:
            feed.put(events)

    def open_feed(self, wake: Callable[[], None]) -> "KVCacheFeed":
        """Begin to tell a stream; `wake` is called when something waits for it."""
        feed = KVCacheFeed(self, wake)
        self._feeds.add(feed)
        return feed

    def close_feed(self, feed: "KVCacheFeed") -> None:
        self._feeds.discard(feed)
        feed.close()


class KVCacheFeed:
    """What one stream is still to be told. Whatever a message says of a block is true when it is
    taken, so that it does not matter in which order changes and shards are told.
    """

    def __init__(self, cached: CachedBlocks, wake: Callable[[], None]) -> None:
        self._cached = cached
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None
        self._seq = 0
        # Changed since it was last told: is it cached?
        self._pending: dict[int, bool] = {}
        self.restart()

    @property
    def is_behind(self) -> bool:
        """Is there more than waits for the next message to ride on?"""
        return self._next_shard < NUM_SHARDS or len(self._pending) > MAX_BLOCKS

    def restart(self) -> None:
        """Tell all that is cached again."""
        self._pending.clear()
        self._next_shard = 0

    def put(self, events: KVCacheEvents) -> None:
        """Tell a change in time."""
        if events.all_blocks_cleared:
            self.restart()
        else:
            self._pending.update(dict.fromkeys(events.blocks_removed, False))
            self._pending.update(dict.fromkeys(events.blocks_stored, True))
        if len(self._pending) > MAX_PENDING:
            logger.warning("a router is %d blocks behind: it is told all again", MAX_PENDING)
            self.restart()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELAY_S, self._on_delay)

    def take(self) -> KVCacheEvents | None:
        """Return the next message; None if there is nothing to tell."""
        if not self._pending and self._next_shard == NUM_SHARDS:
            return None
        self._seq += 1
        is_first = self._next_shard == 0
        changes = self._take_changes()
        stored = [block for block, is_cached in changes.items() if is_cached]
        while len(changes) + len(stored) < MAX_BLOCKS and self._next_shard < NUM_SHARDS:
            stored.extend(self._cached.shards[self._next_shard])
            self._next_shard += 1
        return KVCacheEvents(
            seq=self._seq,
            all_blocks_cleared=is_first,
            blocks_removed=tuple(block for block, is_cached in changes.items() if not is_cached),
            blocks_stored=tuple(stored),
        )

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _take_changes(self) -> dict[int, bool]:
        changes = dict(islice(self._pending.items(), MAX_BLOCKS))
        if len(changes) == len(self._pending):
            self._pending = {}
        for block in changes.keys() & self._pending.keys():
            del self._pending[block]
        return changes

    def _on_delay(self) -> None:
        self._timer = None
        if self._pending or self.is_behind:
            self._wake()
