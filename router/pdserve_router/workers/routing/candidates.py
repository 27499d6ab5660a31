"""Whom one request may go to."""

import random
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from pdserve_common.types.engine import EngineCoreRequest, WorkerRole
from pdserve_router.workers.routing.indexed_set import IndexedSet
from pdserve_router.workers.routing.prefix_index import (
    MAX_LOOKED_AT,
    PrefixIndex,
    PrefixMatch,
    prefix_hashes,
)
from pdserve_router.workers.routing.route_table import RouteTable
from pdserve_router.workers.worker import Worker


class Candidates:
    """The workers that may take one request. Policies draw from them: nobody looks at all."""

    __slots__ = (
        "_decode",
        "_exclude",
        "_hashes",
        "_index",
        "_is_pooling",
        "_match",
        "_max_queue_tokens",
        "_name",
        "_only_decode",
        "_prefill",
        "_rng",
        "_table",
    )

    def __init__(
        self,
        table: RouteTable,
        name: str,
        *,
        index: PrefixIndex[Worker],
        rng: random.Random,
        hashes: Sequence[int] = (),
        exclude: AbstractSet[Worker] = frozenset(),
        only_decode: Worker | None = None,
        max_queue_tokens: int = 0,
        is_pooling: bool = False,
    ) -> None:
        """Those placed under `name`; `only_decode` is the only decode worker, if there is one.
        Prefill workers with more waiting tokens than `max_queue_tokens` get none; 0: no limit. Of a
        pooling request they need no pair.
        """
        self._table = table
        self._name = name
        self._index = index
        self._rng = rng
        # The request's `prefix_hashes`, if they are known.
        self._hashes = hashes
        self._match: PrefixMatch[Worker] | None = None
        self._exclude = exclude
        self._only_decode = only_decode
        self._max_queue_tokens = max_queue_tokens
        self._is_pooling = is_pooling
        # Decode workers that can be used, and prefill workers that work with any that is wanted.
        self._decode = table.workers(WorkerRole.DECODE, name)
        if is_pooling:
            self._prefill = table.workers(WorkerRole.PREFILL, name)
        elif only_decode is None:
            self._prefill = table.paired(WorkerRole.PREFILL, name)
        else:
            self._prefill = table.paired_with(only_decode, name)

    def draw_prefill(self, num: int) -> list[Worker]:
        """Return up to `num` prefill workers that have the pairs they need, and room in their
        queue.
        """
        if not self._exclude and not self._max_queue_tokens:
            return draw(self._prefill.items, num, self._rng)
        return self._draw(self._prefill, num, self._has_room)

    def draw_paired(self, prefill: Worker, num: int) -> list[Worker]:
        """Return up to `num` decode workers that work with it; with one that was drawn there is at
        least one, if MAX_LOOKED_AT of them show it.
        """
        if self._only_decode is not None:
            return [self._only_decode]
        return self._draw(self.paired(prefill), num, self._is_allowed)

    def draw_decode(self, num: int) -> list[Worker]:
        """Return up to `num` decode workers."""
        if self._only_decode is not None:
            return [self._only_decode] if self.allows_decode(self._only_decode) else []
        return self._draw(self._decode, num, self._is_allowed)

    def cached(self, request: EngineCoreRequest) -> PrefixMatch[Worker]:
        """Return what workers have cached of the request, for which these are, also those that may
        not take it.
        """
        if self._match is None:
            size = self._block_size
            hashes = self._hashes or prefix_hashes(request, size) if size else ()
            self._match = self._index.match(hashes, size)
        return self._match

    @property
    def _block_size(self) -> int:
        """Of the workers' caches; 0 if there are none."""
        caching = self._prefill.items if self._is_pooling else self._decode.items
        info = caching[0].info if caching else None
        return info.block_size if info is not None and info.has_prefix_caching else 0

    def allows_prefill(self, worker: Worker) -> bool:
        """True if it has the pairs it needs, and room in its queue."""
        return worker in self._prefill and self._has_room(worker)

    def allows_decode(self, worker: Worker) -> bool:
        is_wanted = self._only_decode is None or self._only_decode is worker
        return is_wanted and worker in self._decode and worker not in self._exclude

    def paired(self, prefill: Worker) -> IndexedSet[Worker]:
        """Return all decode workers that work with it, also those that may not take the request."""
        return self._table.paired_with(prefill, self._name)

    def has_pair(self) -> bool:
        """True if there are pairs, whatever waits in their queues."""
        return bool(self._draw(self._prefill, 1, self._has_pair))

    def has_prefill(self) -> bool:
        """True if there are prefill workers, whether they have pairs or not."""
        workers = self._table.workers(WorkerRole.PREFILL, self._name)
        return bool(self._draw(workers, 1, self._is_allowed))

    def _is_allowed(self, worker: Worker) -> bool:
        return worker not in self._exclude

    def _has_pair(self, prefill: Worker) -> bool:
        if prefill in self._exclude:
            return False
        if not self._exclude or self._only_decode is not None or self._is_pooling:
            return True
        return any(decode not in self._exclude for decode in self.paired(prefill))

    def _has_room(self, prefill: Worker) -> bool:
        waiting = prefill.stats.num_waiting_tokens if prefill.stats is not None else 0
        limit = self._max_queue_tokens
        return not 0 < limit < waiting and self._has_pair(prefill)

    def _draw(
        self,
        workers: IndexedSet[Worker],
        num: int,
        accepts: Callable[[Worker], bool],
    ) -> list[Worker]:
        """Return up to `num` that are accepted, of few that are drawn; of more if too few are."""
        drawn = [worker for worker in draw(workers.items, num, self._rng) if accepts(worker)]
        if len(drawn) < min(num, len(workers)):
            drawn = [w for w in draw(workers.items, MAX_LOOKED_AT, self._rng) if accepts(w)]
            self._rng.shuffle(drawn)
        return drawn[:num]


def draw(workers: Sequence[Worker], num: int, rng: random.Random) -> list[Worker]:
    """Return `num` of them in random order; all if there are no more."""
    if num == 2 < len(workers):
        # As random.sample, at a third of the cost.
        one = int(rng.random() * len(workers))
        another = int(rng.random() * (len(workers) - 1))
        return [workers[one], workers[another + (another >= one)]]
    return rng.sample(workers, min(num, len(workers)))
