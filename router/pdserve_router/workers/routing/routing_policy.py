"""How the workers of a request are chosen among those that could take it."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import EngineCoreRequest, WorkerRole
from pdserve_router.workers.routing.candidates import Candidates
from pdserve_router.workers.routing.prefix_policy import PrefixRouting, RoutingWeights
from pdserve_router.workers.worker import Worker

# Among so many the one with the fewest turns takes the next request.
NUM_IN_TURN = 8
# The pairs of so many sessions are remembered.
_MAX_SESSIONS = 1 << 16

Pair = tuple[Worker, Worker]
T = TypeVar("T")


class RoutingPolicy(Protocol):
    """Chooses the workers of requests, at once and without waiting. Requests of one `session`
    belong together, as their client says; empty: it says nothing.
    """

    def pick_pair(
        self, request: EngineCoreRequest, candidates: Candidates, *, session: str = ""
    ) -> Pair | None:
        """Return a prefill and a decode worker; None if there are none."""

    def pick_decode(
        self, request: EngineCoreRequest, candidates: Candidates, *, session: str = ""
    ) -> Worker | None:
        """Return the decode worker of a request that needs no other; None if there is none."""

    def pick_prefill(
        self, request: EngineCoreRequest, candidates: Candidates, *, session: str = ""
    ) -> Worker | None:
        """Return the prefill worker of a pooling request, which needs no other; None if there is
        none.
        """


class RoundRobin:
    """Of a few that are drawn, one that had the fewest turns; of few workers each once in a round.
    The next of a round is drawn: rounds of the two roles in step would use few of their pairs.
    """

    def __init__(self) -> None:
        self._num_turns: WeakKeyDictionary[Worker, int] = WeakKeyDictionary()

    def pick_pair(
        self, request: EngineCoreRequest, candidates: Candidates, *, session: str = ""
    ) -> Pair | None:
        prefill = self._pick(candidates.draw_prefill(NUM_IN_TURN))
        if prefill is None:
            return None
        decode = self._pick(candidates.draw_paired(prefill, NUM_IN_TURN))
        return (prefill, decode) if decode is not None else None

    def pick_decode(
        self, request: EngineCoreRequest, candidates: Candidates, *, session: str = ""
    ) -> Worker | None:
        return self._pick(candidates.draw_decode(NUM_IN_TURN))

    def pick_prefill(
        self, request: EngineCoreRequest, candidates: Candidates, *, session: str = ""
    ) -> Worker | None:
        return self._pick(candidates.draw_prefill(NUM_IN_TURN))

    def _pick(self, drawn: Sequence[Worker]) -> Worker | None:
        if not drawn:
            return None
        turns = [self._num_turns.get(worker, 0) for worker in drawn]
        # A worker that comes, or comes back, has not all turns to itself.
        least = max(turns) - 2
        # They are in random order.
        place = min(range(len(drawn)), key=lambda place: max(turns[place], least))
        self._num_turns[drawn[place]] = max(turns[place], least) + 1
        return drawn[place]


class PowerOfTwo:
    """The less loaded of two drawn at random: nearly as even as looking at all, and routers that
    act on the same old stats do not all run to the same worker.
    """

    def pick_pair(
        self, request: EngineCoreRequest, candidates: Candidates, *, session: str = ""
    ) -> Pair | None:
        prefill = min(candidates.draw_prefill(2), key=load, default=None)
        if prefill is None:
            return None
        decode = min(candidates.draw_paired(prefill, 2), key=load, default=None)
        return (prefill, decode) if decode is not None else None

    def pick_decode(
        self, request: EngineCoreRequest, candidates: Candidates, *, session: str = ""
    ) -> Worker | None:
        return min(candidates.draw_decode(2), key=load, default=None)

    def pick_prefill(
        self, request: EngineCoreRequest, candidates: Candidates, *, session: str = ""
    ) -> Worker | None:
        return min(candidates.draw_prefill(2), key=load, default=None)


class SessionAffinity:
    """A session stays with its pair until one of the two is gone or saturated; whatever else comes
    goes to the less loaded of two.
    """

    def __init__(self) -> None:
        self._others = PowerOfTwo()
        # The one that was used last is the last.
        self._pairs: OrderedDict[str, Pair] = OrderedDict()
        # The workers of pooling requests.
        self._prefills: OrderedDict[str, Worker] = OrderedDict()

    def pick_pair(
        self, request: EngineCoreRequest, candidates: Candidates, *, session: str = ""
    ) -> Pair | None:
        kept = self._pairs.get(session)
        if kept is not None and _can_take(kept, candidates):
            self._pairs.move_to_end(session)
            return kept
        pair = self._others.pick_pair(request, candidates)
        if session and pair is not None:
            _keep(self._pairs, session, pair)
        return pair

    def pick_decode(
        self, request: EngineCoreRequest, candidates: Candidates, *, session: str = ""
    ) -> Worker | None:
        _, kept = self._pairs.get(session, (None, None))
        if kept is not None and candidates.allows_decode(kept) and not _is_saturated(kept):
            return kept
        return self._others.pick_decode(request, candidates)

    def pick_prefill(
        self, request: EngineCoreRequest, candidates: Candidates, *, session: str = ""
    ) -> Worker | None:
        worker = self._prefills.get(session)
        if worker is None or not candidates.allows_prefill(worker) or _is_saturated(worker):
            worker = self._others.pick_prefill(request, candidates)
        if session and worker is not None:
            _keep(self._prefills, session, worker)
        return worker


def _keep(kept: OrderedDict[str, T], session: str, workers: T) -> None:
    kept[session] = workers
    kept.move_to_end(session)
    if len(kept) > _MAX_SESSIONS:
        kept.popitem(last=False)


def _can_take(pair: Pair, candidates: Candidates) -> bool:
    prefill, decode = pair
    is_allowed = candidates.allows_prefill(prefill) and candidates.allows_decode(decode)
    if not is_allowed or decode not in candidates.paired(prefill):
        return False
    return not _is_saturated(prefill) and not _is_saturated(decode)


def _is_saturated(worker: Worker) -> bool:
    """True if more than a step's tokens wait on prefill, or requests on decode."""
    if worker.stats is None or worker.info is None:
        return False
    if worker.role is WorkerRole.PREFILL:
        return worker.stats.num_waiting_tokens > worker.info.max_num_batched_tokens
    return worker.stats.num_waiting_reqs > 0


def load(worker: Worker) -> int:
    """Return how many requests are on it, as far as this router knows."""
    # The stats are a step old and know the other routers; ours is exact and only ours.
    stats = worker.stats
    reported = stats.num_running_reqs + stats.num_waiting_reqs if stats is not None else 0
    return max(reported, worker.num_in_flight)


ROUTING_POLICIES: Mapping[str, Callable[[RoutingWeights, Runtime], RoutingPolicy]] = {
    "power_of_two": lambda weights, runtime: PowerOfTwo(),
    "prefix": PrefixRouting,
    "round_robin": lambda weights, runtime: RoundRobin(),
    "session": lambda weights, runtime: SessionAffinity(),
}
