"""The pair of workers that a request costs least, by what they have cached and what waits there."""

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import EngineCoreRequest, SchedulerStats, WorkerRole
from pdserve_router.workers.routing.candidates import Candidates
from pdserve_router.workers.routing.prefix_index import PrefixMatch, num_known_tokens
from pdserve_router.workers.worker import Worker

# So many workers of each role with the longest prefix cached are looked at, and so many drawn at
# random.
NUM_CACHED = 3
NUM_DRAWN = 2
# So many of these prefill workers are paired, those that cost least.
NUM_PAIRED = 3
# What was sent counts until the worker's next stats, but for no longer: idle workers send none.
_SENT_S = 2.0

# Pairs whose costs differ by less cost the same.
TIE = 8.0

Cached = PrefixMatch[Worker]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingWeights:
    """What things cost, in prompt tokens that a prefill worker has to compute."""

    # A prompt token that waits on prefill before the request.
    routing_queue_weight: float = 1.0
    # A request that is on decode.
    routing_decode_weight: float = 16.0
    # A token that decode has no free block for.
    routing_room_weight: float = 1.0
    # A token whose KV has to be moved to decode.
    routing_transfer_weight: float = 0.1
    # Prefill and decode on different hosts.
    routing_topology_weight: float = 32.0
    # And in different zones.
    routing_zone_weight: float = 256.0


class _Sent:
    """What was sent to workers and is not in their stats yet."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # The newest last.
        self._sent: dict[Worker, tuple[SchedulerStats | None, float, float]] = {}

    def get(self, worker: Worker) -> float:
        entry = self._sent.get(worker)
        if entry is None or entry[0] is not worker.stats or self._clock() > entry[2]:
            return 0.0
        return entry[1]

    def add(self, worker: Worker, amount: float) -> None:
        total = self.get(worker) + amount
        now = self._clock()
        self._sent.pop(worker, None)
        self._sent[worker] = (worker.stats, total, now + _SENT_S)
        # A worker that is gone is not kept.
        oldest = next(iter(self._sent))
        if now > self._sent[oldest][2]:
            del self._sent[oldest]


class PrefixRouting:
    """Chooses prefill and decode together: the pair of least cost among those that have most of the
    prompt cached and a few that are drawn, so a prefix is used until that costs more than to
    compute it elsewhere. Of two that cost the same either is taken.
    """

    def __init__(self, weights: RoutingWeights, runtime: Runtime) -> None:
        self._weights = weights
        self._rng = runtime.rng
        # Tokens to prefill, requests to decode.
        self._sent = _Sent(runtime.now)

    def pick_pair(
        self, request: EngineCoreRequest, candidates: Candidates, *, session: str = ""
    ) -> tuple[Worker, Worker] | None:
        """See RoutingPolicy."""
        cached = candidates.cached(request)
        num_known = num_known_tokens(request)
        prefill = self._prefill_costs(num_known, cached, candidates)
        decode: dict[Worker, float] = {}
        holders = cached.longest(WorkerRole.DECODE, NUM_CACHED, candidates.allows_decode)
        costs = []
        for p in heapq.nsmallest(NUM_PAIRED, prefill, key=prefill.__getitem__):
            drawn, paired = candidates.draw_paired(p, NUM_DRAWN), candidates.paired(p)
            for d in dict.fromkeys((*drawn, *[d for d in holders if d in paired])):
                if d not in decode:
                    decode[d] = self._decode_cost(d, num_known, cached)
                costs.append((prefill[p] + decode[d] + self._distance(p, d), (p, d)))
        if not costs:
            return None
        p, d = _one_of_best(costs, self._rng)
        self._sent.add(p, num_known - cached.num_tokens(p))
        self._sent.add(d, 1)
        return p, d

    def pick_decode(
        self, request: EngineCoreRequest, candidates: Candidates, *, session: str = ""
    ) -> Worker | None:
        """See RoutingPolicy. What decode has not cached it computes itself."""
        cached = candidates.cached(request)
        num_known = num_known_tokens(request)
        holders = cached.longest(WorkerRole.DECODE, NUM_CACHED, candidates.allows_decode)
        costs = [
            (num_known - cached.num_tokens(d) + self._decode_cost(d, num_known, cached), d)
            for d in dict.fromkeys((*candidates.draw_decode(NUM_DRAWN), *holders))
        ]
        if not costs:
            return None
        chosen = _one_of_best(costs, self._rng)
        self._sent.add(chosen, 1)
        return chosen

    def pick_prefill(
        self, request: EngineCoreRequest, candidates: Candidates, *, session: str = ""
    ) -> Worker | None:
        """See RoutingPolicy."""
        cached = candidates.cached(request)
        num_known = num_known_tokens(request)
        prefill = self._prefill_costs(num_known, cached, candidates)
        if not prefill:
            return None
        chosen = _one_of_best(((cost, worker) for worker, cost in prefill.items()), self._rng)
        self._sent.add(chosen, num_known - cached.num_tokens(chosen))
        return chosen

    def _prefill_costs(
        self, num_known: int, cached: Cached, candidates: Candidates
    ) -> dict[Worker, float]:
        holders = cached.longest(WorkerRole.PREFILL, NUM_CACHED, candidates.allows_prefill)
        workers = dict.fromkeys((*holders, *candidates.draw_prefill(NUM_DRAWN)))
        return {p: num_known - cached.num_tokens(p) + self._queue_cost(p) for p in workers}

    def _queue_cost(self, prefill: Worker) -> float:
        num_waiting = self._sent.get(prefill)
        if (stats := prefill.stats) is not None:
            num_waiting += stats.num_waiting_tokens
            # Half of a step is still to come.
            num_waiting += stats.step_num_tokens / 2 if stats.num_running_reqs else 0
        return num_waiting * self._weights.routing_queue_weight

    def _decode_cost(self, decode: Worker, num_known: int, cached: Cached) -> float:
        weights = self._weights
        num_missing = num_known - cached.num_tokens(decode)
        num_requests = self._sent.get(decode)
        num_lacking = 0
        if (stats := decode.stats) is not None:
            num_requests += stats.num_running_reqs + stats.num_waiting_reqs
            block_size = decode.info.block_size if decode.info is not None else 0
            num_lacking = max(0, num_missing - stats.num_free_blocks * block_size)
        return (
            max(num_requests, decode.num_in_flight) * weights.routing_decode_weight
            + num_lacking * weights.routing_room_weight
            + num_missing * weights.routing_transfer_weight
        )

    def _distance(self, prefill: Worker, decode: Worker) -> float:
        if prefill.host == decode.host:
            return 0.0
        zones = _zone(prefill), _zone(decode)
        is_far = "" not in zones and zones[0] != zones[1]
        weights = self._weights
        return weights.routing_topology_weight + (weights.routing_zone_weight if is_far else 0.0)


def _one_of_best(costs: Iterable[tuple[float, T]], rng: random.Random) -> T:
    best = sorted(costs, key=itemgetter(0))[:2]
    is_tie = best[-1][0] - best[0][0] < TIE
    return rng.choice(best)[1] if is_tie else best[0][1]


def _zone(worker: Worker) -> str:
    return "" if worker.info is None else worker.info.zone
