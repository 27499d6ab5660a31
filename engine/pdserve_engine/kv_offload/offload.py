"""Keeps copies of full KV blocks in tiers besides the pool, and brings them back before a prompt is
computed.

Blocks are written through: copied when they are full and their step is over, by a thread of its
own, and held meanwhile, so that no byte of a later content gets into a copy. What comes faster than
it is copied, or copied faster than it is written, is dropped, and offered again when a request
finds it in the pool.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdserve_common.metrics.kv_offload import KVOffloadMetrics
from pdserve_common.processes.call_thread import CallThread
from pdserve_common.tokens.block_hash import ROOT_HASH
from pdserve_engine.kv.block_copier import BlockBytes
from pdserve_engine.kv.block_pool import BlockPool, KVCacheBlock
from pdserve_engine.kv_offload.tier import KVTier
from pdserve_engine.kv_transfer.ports import (
    BlocksConfirmed,
    BlocksFreed,
    KVEvent,
    PrefixEnded,
)
from pdserve_engine.request.request import Request

# Blocks that wait to be copied are this share of the pool at most, and no more than so many.
MAX_HELD_SHARE = 0.25
MAX_HELD_BLOCKS = 128
# Copies that wait to be written take at most so much memory, or one of them any.
MAX_BACKLOG_BYTES = 256 << 20
# What a tier brings at least, if it is worth waiting for.
MIN_BYTES_PER_S = 0.5e9
# How long a copy that is under way may take when all are given up.
COPY_TIMEOUT_S = 10.0
# How long each thread may take at the end, for what was offered.
CLOSE_TIMEOUT_S = 3.0


class Copier(Protocol):
    """What `kv.block_copier.BlockCopier` does."""

    def read(self, block_id: int) -> BlockBytes:
        """Return a copy of a block, whose step is over: uint8 [block_bytes]."""

    def write(self, block_id: int, content: BlockBytes) -> None:
        """Fill a block, uint8 [block_bytes], for steps that are begun after the return."""


@dataclass(slots=True, eq=False)
class _Store:
    """A block on its way into the tiers."""

    block_hash: bytes
    parent: bytes
    block_id: int
    # The block is kept as it is until it is copied.
    is_held: bool = True
    is_cancelled: bool = False
    content: BlockBytes | None = None


@dataclass(slots=True, eq=False)
class _Load:
    """Blocks of a request on their way out of the tiers."""

    request: Request
    parent: bytes
    block_hashes: Sequence[bytes]
    block_ids: Sequence[int]
    num_cached_tokens: int
    since: float
    has_begun: bool = False
    is_cancelled: bool = False
    # Blocks that have come so far.
    num_filled: int = 0
    # The same, once all have or one has not.
    num_loaded: int | None = None
    # Belong to nobody else while the load goes on after its request has ended.
    kept: tuple[int, ...] = field(default=())


class KVOffload:
    """The tiers of one engine, the fastest first: a PrefixConsumerPort, and the KVCacheManager's
    BlockStore. Methods are the engine thread's.
    """

    def __init__(
        self,
        tiers: Sequence[KVTier],
        *,
        block_pool: BlockPool,
        block_size: int,
        block_bytes: int,
        open_copier: Callable[[], Copier],
        metrics: KVOffloadMetrics,
        wakeup: Callable[[], None],
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_copier` makes one for a thread of its own. `wakeup` is called, on any thread, when
        there are events. A load is waited for `timeout_s`, and for as long as its bytes take.
        """
        self._tiers = tuple(tiers)
        self._pool = block_pool
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._metrics = metrics
        self._wakeup = wakeup
        self._timeout_s = timeout_s
        share = int(MAX_HELD_SHARE * block_pool.num_blocks)
        self._max_held_blocks = min(max(share, 1), MAX_HELD_BLOCKS)
        self._max_backlog_blocks = max(MAX_BACKLOG_BYTES // block_bytes, 1)
        self._clock = clock
        # Guards all that follows; told when a thread has work or a copy is made.
        self._changed = threading.Condition()
        self._to_copy: dict[_Store, None] = {}
        self._copying: _Store | None = None
        self._to_write: set[_Store] = set()
        # By hash, from the offer until they are in the tiers.
        self._stores: dict[bytes, _Store] = {}
        self._copied_ids: list[int] = []
        self._loads: dict[Request, _Load] = {}
        # Those that go on after their requests have ended.
        self._num_kept_loads = 0
        self._events: list[KVEvent] = []
        self._is_closed = False
        self._show_tiers()
        self._read_copier, self._write_copier = open_copier(), open_copier()
        self._copies = CallThread("kv-copy")
        self._writes = CallThread("kv-write")
        self._reads = CallThread("kv-load")

    # ---- the KVCacheManager's BlockStore

    def offer(
        self, block_hashes: Sequence[bytes], blocks: Sequence[KVCacheBlock], start: int
    ) -> None:
        """Store what is not stored of `blocks` from number `start` on, which are full and held.
        Nothing behind a block that is neither stored nor about to be: nobody would find it.
        """
        home = self._home
        if home is None:
            return
        parent = block_hashes[start - 1] if start else ROOT_HASH
        with self._changed:
            if not self._is_kept(parent, home):
                return
            for index in range(start, len(blocks)):
                block_hash = block_hashes[index]
                if block_hash not in self._stores and block_hash not in home:
                    if len(self._to_copy) >= self._max_held_blocks:
                        self._metrics.dropped_blocks.inc(len(blocks) - index)
                        break
                    self._pool.touch((blocks[index],))
                    store = _Store(block_hash, parent, blocks[index].block_id)
                    self._stores[block_hash] = store
                    self._to_copy[store] = None
                    self._post(self._copies, self._copy, store)
                parent = block_hash

    @property
    def _home(self) -> KVTier | None:
        """The largest tier that still stores."""
        return next((tier for tier in reversed(self._tiers) if tier.is_writable), None)

    def _is_kept(self, block_hash: bytes, home: KVTier) -> bool:
        """It is stored, or about to be. Under the lock."""
        store = self._stores.get(block_hash)
        is_stored = block_hash == ROOT_HASH or block_hash in home
        return is_stored or (store is not None and not store.is_cancelled)

    def forget(self, block_hashes: Sequence[bytes]) -> None:
        """Nobody is to find these blocks: neither stored ones nor those on their way."""
        hashes = frozenset(block_hashes)
        with self._changed:
            for block_hash in hashes & self._stores.keys():
                self._stores[block_hash].is_cancelled = True
            for load in self._loads.values():
                load.is_cancelled |= not hashes.isdisjoint(load.block_hashes)
        for tier in self._tiers:
            for block_hash in hashes:
                tier.discard(block_hash)
        self._show_tiers()

    # ---- an operator's verbs

    def cancel_stores(self) -> tuple[int, ...]:
        """Copy nothing any more of what was offered; return the blocks that are not held for it any
        longer. A copy under way is waited for.
        """
        with self._changed:
            for store in self._stores.values():
                store.is_cancelled = True
            self._changed.wait_for(lambda: self._copying is None, COPY_TIMEOUT_S)
            block_ids = [*self._copied_ids, *(store.block_id for store in self._to_copy)]
            for store in self._to_copy:
                store.is_held = False
                del self._stores[store.block_hash]
            self._copied_ids.clear()
            self._to_copy.clear()
        return tuple(block_ids)

    def clear(self) -> None:
        """Nobody is to find anything of what was stored or offered. No load is under way."""
        with self._changed:
            for store in self._stores.values():
                store.is_cancelled = True
        for tier in self._tiers:
            tier.clear()
        self._show_tiers()

    # ---- the PrefixConsumerPort

    def find_prefix(self, request: Request, num_cached_tokens: int) -> int:
        first = num_cached_tokens // self._block_size
        for index in range(first, len(request.block_hashes)):
            if not any(request.block_hashes[index] in tier for tier in self._tiers):
                return index * self._block_size
        return len(request.block_hashes) * self._block_size

    def fetch(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        num_tokens: int,
        num_cached_tokens: int,
    ) -> float:
        first, end = num_cached_tokens // self._block_size, num_tokens // self._block_size
        load = _Load(
            request,
            request.block_hashes[first - 1] if first else ROOT_HASH,
            request.block_hashes[first:end],
            block_ids[0][first:end],
            num_cached_tokens,
            self._clock(),
        )
        with self._changed:
            self._loads[request] = load
            self._reads.post(
                functools.partial(self._load, load),
                "kv_offload",
                costs="a prompt KV blocks that were stored",  # it is computed
                on_defect=lambda error: self._end_load(load),
            )
        return self._timeout_s + len(load.block_ids) * self._block_bytes / MIN_BYTES_PER_S

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> frozenset[int]:
        with self._changed:
            load = self._loads.pop(request, None)
            if load is None:
                return frozenset()
            self._count(load)
            if not load.has_begun:
                load.num_loaded = 0
            elif load.num_loaded is None:
                load.is_cancelled = True
                load.kept = tuple(load.block_ids)
                self._num_kept_loads += 1
            return frozenset(load.kept)

    def fence_all(self, reason: str) -> None:
        """Loads end, and confirm nothing."""
        with self._changed:
            for load in self._loads.values():
                load.is_cancelled = True

    def take_events(self) -> list[KVEvent]:
        with self._changed:
            # A load may have been cancelled after its end.
            events = [event for event in self._events if not self._is_void(event)]
            self._events = []
            if self._copied_ids:
                events.append(BlocksFreed(tuple(self._copied_ids)))
                self._copied_ids.clear()
        return events

    def num_open_sessions(self) -> int:
        """Loads that are not over."""
        return len(self._loads) + self._num_kept_loads

    def num_open_stores(self) -> int:
        """Blocks that were offered and are not in the tiers yet."""
        return len(self._stores)

    def close(self) -> None:
        """Store what was offered, for a bounded time; then the threads end. Requests have ended."""
        with self._changed:
            self._is_closed = True
        deadline = self._clock() + CLOSE_TIMEOUT_S
        # What is copied has yet to be written.
        threads = (self._copies, self._writes, self._reads)
        have_ended = [thread.close(max(0.0, deadline - self._clock())) for thread in threads]
        with self._changed:
            # The pool's memory goes now: what is copied from here on is no block's.
            for store in self._stores.values():
                store.is_cancelled = True
            for load in self._loads.values():
                load.is_cancelled = True
        if all(have_ended):
            for tier in self._tiers:
                tier.close()

    def _is_void(self, event: KVEvent) -> bool:
        load = self._loads.get(event.request) if isinstance(event, BlocksConfirmed) else None
        return load is not None and load.is_cancelled

    # ---- the threads that store

    def _post(self, thread: CallThread, call: Callable[[_Store], None], store: _Store) -> None:
        thread.post(
            functools.partial(call, store),
            "kv_offload",
            costs="the copy of a KV block",
            on_defect=lambda error: self._drop(store),
        )

    def _copy(self, store: _Store) -> None:
        if not self._begin_copy(store):
            return
        content = self._read_copier.read(store.block_id) if self._is_wanted(store) else None
        if content is None:
            self._drop(store)
            return
        with self._changed:
            store.content = content
            self._to_write.add(store)
            self._post(self._writes, self._write, store)
        self._release(store)

    def _begin_copy(self, store: _Store) -> bool:
        """False if it was given up."""
        with self._changed:
            if store not in self._to_copy:
                return False
            del self._to_copy[store]
            self._copying = store
            return True

    def _is_wanted(self, store: _Store) -> bool:
        """Nobody finds a block whose parent was dropped: then the rest of its prefix is, too."""
        with self._changed:
            home = self._home
            has_room = len(self._to_write) < self._max_backlog_blocks
            is_wanted = has_room and not store.is_cancelled and home is not None
            return is_wanted and home is not None and self._is_kept(store.parent, home)

    def _release(self, store: _Store) -> None:
        """Hold the block no longer."""
        with self._changed:
            if self._copying is store:
                self._copying = None
                self._changed.notify_all()
            if not store.is_held:
                return
            store.is_held = False
            self._copied_ids.append(store.block_id)
            is_known = len(self._copied_ids) > 1
        if not is_known:
            self._wakeup()

    def _drop(self, store: _Store) -> None:
        """Nothing comes of it."""
        with self._changed:
            self._to_copy.pop(store, None)
            self._to_write.discard(store)
            if self._forget(store):
                self._metrics.dropped_blocks.inc(not store.is_cancelled)
            self._release(store)

    def _forget(self, store: _Store) -> bool:
        """False if another one has its place, or none."""
        is_here = self._stores.get(store.block_hash) is store
        if is_here:
            del self._stores[store.block_hash]
        return is_here

    def _write(self, store: _Store) -> None:
        content, store.content = store.content, None
        assert content is not None, "it is copied"
        with self._changed:
            self._to_write.discard(store)
        for tier in self._tiers:
            if tier.put(store.block_hash, store.parent, content, lambda: not store.is_cancelled):
                self._metrics.num_bytes.labels(tier.name, "stored").inc(self._block_bytes)
        self._show_tiers()
        with self._changed:
            self._forget(store)

    # ---- the thread that loads

    def _load(self, load: _Load) -> None:
        with self._changed:
            if self._is_closed or load.num_loaded is not None:
                return
            load.has_begun = True
        for _ in self._loaded(load):
            load.num_filled += 1
        self._end_load(load)

    def _loaded(self, load: _Load) -> Iterator[None]:
        """Fill the load's blocks, up to the first that no tier has."""
        parent = load.parent
        for block_hash, block_id in zip(load.block_hashes, load.block_ids, strict=True):
            if load.is_cancelled or (content := self._get(load, block_hash, parent)) is None:
                return
            self._write_copier.write(block_id, content)
            parent = block_hash
            yield

    def _get(self, load: _Load, block_hash: bytes, parent: bytes) -> BlockBytes | None:
        """Return a block from the fastest tier that has it, and put it into the faster ones."""
        for number, tier in enumerate(self._tiers):
            if block_hash not in tier or (content := tier.get(block_hash)) is None:
                continue
            self._metrics.num_bytes.labels(tier.name, "loaded").inc(self._block_bytes)
            for faster in self._tiers[:number]:
                faster.put(block_hash, parent, content, lambda: not load.is_cancelled)
            return content
        return None

    def _end_load(self, load: _Load) -> None:
        with self._changed:
            if load.num_loaded is not None:
                return
            num_loaded = 0 if load.is_cancelled else load.num_filled
            self._events += self._events_of(load, num_loaded)
            load.num_loaded = num_loaded
            self._num_kept_loads -= bool(load.kept)
        self._wakeup()

    def _events_of(self, load: _Load, num_loaded: int) -> list[KVEvent]:
        """Return how the engine hears of a load's end."""
        if load.kept:
            return [BlocksFreed(load.kept)]
        ended = PrefixEnded(load.request)
        if not num_loaded:
            return [ended]
        num_tokens = load.num_cached_tokens + num_loaded * self._block_size
        return [BlocksConfirmed(load.request, num_tokens), ended]

    # ---- metrics

    def _count(self, load: _Load) -> None:
        """The scheduler ends a load: what has come of it?"""
        num_blocks = len(load.block_hashes)
        num_loaded = load.num_loaded or 0
        rest = "given_up" if load.num_loaded is None else "failed"
        self._metrics.tokens.labels("loaded").inc(num_loaded * self._block_size)
        self._metrics.tokens.labels(rest).inc((num_blocks - num_loaded) * self._block_size)
        outcome = "loaded" if num_loaded == num_blocks else rest
        self._metrics.load_duration.labels(outcome).observe(self._clock() - load.since)

    def _show_tiers(self) -> None:
        for tier in self._tiers:
            self._metrics.used_bytes.labels(tier.name).set(tier.used_bytes)
            self._metrics.is_writable.labels(tier.name).set(tier.is_writable)
