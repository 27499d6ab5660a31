"""Moves whole blocks between two workers by way of their ranks."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from pdserve_common.errors import KVTransferError
from pdserve_common.types.kv import KVEndpoint, KVLayout, KVLinkWelcome
from pdserve_engine.kv_transfer.base import KVTransport, RankTransport, ReadDone, ReadResult
from pdserve_engine.kv_transfer.transport.shards import check_cover, plan_reads, whole_shard


@dataclass(slots=True, eq=False)
class _Peer:
    """A worker that is read from; guarded by its transport's lock."""

    on_lost: Callable[[str], None]
    # Its ranks: who reads from one, and by what key.
    parts: list[tuple[RankTransport, str]] = field(default_factory=list)
    is_lost: bool = False


class _Read:
    """A READ in parts: over with the last of them, stalled with the first."""

    def __init__(self, num_parts: int, on_done: ReadDone, on_stall: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._num_left = num_parts
        self._results: list[ReadResult] = []
        self._is_stalled = False
        self._on_done = on_done
        self._on_stall = on_stall

    def on_done(self, result: ReadResult) -> None:
        with self._lock:
            self._results.append(result)
            self._num_left -= 1
            is_over = self._num_left == 0
        if is_over:
            self._on_done(_merged(self._results))

    def on_stall(self) -> None:
        with self._lock:
            is_first = not self._is_stalled
            self._is_stalled = True
        if is_first:
            self._on_stall()

    def refuse(self, error: str) -> None:
        """A part was not taken. From another thread: who asks for a READ may hold a lock."""
        result = ReadResult(is_ok=False, num_bytes=0, duration_s=0.0, transport="", error=error)
        threading.Thread(target=self.on_done, args=(result,), name="kv-refused-read").start()


class ShardedTransport(KVTransport):
    """The transport of a worker with one rank or more, each of which reads what its part of a block
    has in common with those of a peer's ranks.
    """

    def __init__(
        self, ranks: Sequence[RankTransport], *, layout: KVLayout, transport: str = "any"
    ) -> None:
        """`ranks` have registered their pools, in order; `layout` is the whole model's; peers are
        told that memory can be reached by `transport`. Raises KVTransferError if the pools do not
        make one of the whole model.
        """
        self.name = ranks[0].name
        self._layout = layout
        self._required = transport
        self._failure: str | None = None
        # Since the pools were registered first.
        self.has_had_peers = False
        self._use(ranks)
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._numbers = itertools.count(1)

    def _use(self, ranks: Sequence[RankTransport]) -> None:
        self._ranks = tuple(ranks)
        endpoints = [
            dataclasses.replace(rank.endpoint(), rank=number) for number, rank in enumerate(ranks)
        ]
        self._endpoint = KVEndpoint(ranks=tuple(endpoints), transport=self._required)
        self._shards = [endpoint.shard or whole_shard(self._layout) for endpoint in endpoints]
        check_cover(self._shards, self._layout, "this worker")

    @property
    def failure(self) -> str | None:
        # All of them, since each has to be looked at so often.
        failures = [rank.failure for rank in self._ranks]
        return self._failure or next(filter(None, failures), None)

    def fail(self, reason: str) -> None:
        """The worker cannot go on."""
        self._failure = reason

    def endpoint(self) -> KVEndpoint:
        return self._endpoint

    def self_check(self) -> None:
        for rank in self._ranks:
            rank.self_check()

    def expect_peer(self) -> None:
        self.has_had_peers = True
        for rank in self._ranks:
            rank.expect_peer()

    def set_exporting(self, is_exporting: bool) -> None:
        for rank in self._ranks:
            rank.set_exporting(is_exporting)

    def poll_soon(self) -> None:
        for rank in self._ranks:
            rank.poll_soon()

    def add_peer(self, peer: KVLinkWelcome, on_lost: Callable[[str], None]) -> str:
        plan = plan_reads(peer, self._shards, self._layout)
        added = _Peer(on_lost)
        try:
            for rank, sources in zip(self._ranks, plan, strict=True):
                for source in sources:
                    key = rank.add_peer(source, partial(self._lose, added))
                    added.parts.append((rank, key))
        except KVTransferError:
            _remove_parts(added)
            raise
        with self._lock:
            name = f"{peer.engine_id}.{peer.epoch}#{next(self._numbers)}"
            self._peers[name] = added
            is_lost = added.is_lost
        if is_lost:  # before all of its ranks were added
            _remove_parts(added)
        return name

    def remove_peer(self, peer: str) -> None:
        with self._lock:
            removed = self._peers.pop(peer, None)
            if removed is None:
                return
            removed.is_lost = True
        _remove_parts(removed)

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
            if target is None or target.is_lost:
                raise KVTransferError(f"no connection to {peer}")
        ids = (remote_block_ids, local_block_ids)
        (first, key), *others = target.parts
        if not others:
            first.read(key, *ids, timeout_s, on_done, on_stall)
            return
        read = _Read(len(target.parts), on_done, on_stall)
        first.read(key, *ids, timeout_s, read.on_done, read.on_stall)
        for rank, key in others:
            try:
                rank.read(key, *ids, timeout_s, read.on_done, read.on_stall)
            except KVTransferError as error:  # it has been lost since, and the first is under way
                read.refuse(error.message)

    def suspend(self) -> None:
        """Deregister the pools. Peers are gone, and none comes before `resume`; no READ is under
        way. Waits for it.
        """
        with self._lock:
            self._peers.clear()
        self.close()

    def resume(self, ranks: Sequence[RankTransport]) -> None:
        """Go on with transports that have registered the same pools anew."""
        self._use(ranks)

    def close(self) -> None:
        if len(self._ranks) == 1:
            self._ranks[0].close()
            return
        with ThreadPoolExecutor(len(self._ranks)) as pool:  # each may take seconds
            list(pool.map(lambda rank: rank.close(), self._ranks))

    def _lose(self, peer: _Peer, reason: str) -> None:
        """A rank has lost one of the peer's: they are of no use without each other."""
        with self._lock:
            is_new = not peer.is_lost
            peer.is_lost = True
        if is_new:
            _remove_parts(peer)
            peer.on_lost(reason)


def _remove_parts(peer: _Peer) -> None:
    for rank, key in peer.parts:
        rank.remove_peer(key)


def _merged(results: Sequence[ReadResult]) -> ReadResult:
    """Return how a READ ended whose parts ended so."""
    longest = max(results, key=lambda result: result.duration_s)
    error = next((result.error for result in results if not result.is_ok), "")
    return dataclasses.replace(
        longest,
        is_ok=all(result.is_ok for result in results),
        num_bytes=sum(result.num_bytes for result in results),
        error=error,
    )
