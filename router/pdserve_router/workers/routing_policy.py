"""How a worker is chosen among those that could take a request."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from pdserve_common.engine_types import EngineCoreRequest, SchedulerStats, WorkerRole


class WorkerLoad(Protocol):
    """What a policy may know of a worker."""

    @property
    def address(self) -> str:
        """Its stable name in this router."""

    @property
    def num_in_flight(self) -> int:
        """Requests this router has on it."""

    @property
    def stats(self) -> SchedulerStats | None:
        """Its load after its last step, all routers together; None before the first."""


W = TypeVar("W", bound=WorkerLoad)


class RoutingPolicy(Protocol):
    """Chooses workers of one role; each role has an instance of its own."""

    def pick(self, candidates: Sequence[W], request: EngineCoreRequest) -> W:
        """Return one of the candidates (at least one, in a stable order). Never blocks."""


class RoundRobin:
    """Each once in a round: decode workers in their order, prefill workers in one that is drawn
    for the round, because rounds of the two in step would use few of their pairs.
    """

    def __init__(self, role: WorkerRole) -> None:
        self._is_drawn = role is WorkerRole.PREFILL
        self._random = random.Random()
        # Addresses that had their turn in this round.
        self._picked: set[str] = set()

    def pick(self, candidates: Sequence[W], request: EngineCoreRequest) -> W:
        left = [worker for worker in candidates if worker.address not in self._picked]
        if not left:
            self._picked.clear()
            left = list(candidates)
        chosen = self._random.choice(left) if self._is_drawn else left[0]
        self._picked.add(chosen.address)
        return chosen


class PowerOfTwo:
    """The less loaded of two drawn at random: nearly as even as looking at all, and routers that
    act on the same old stats do not all run to the same worker.
    """

    def __init__(self, role: WorkerRole) -> None:
        self._random = random.Random()

    def pick(self, candidates: Sequence[W], request: EngineCoreRequest) -> W:
        drawn = self._random.sample(candidates, min(2, len(candidates)))
        return min(drawn, key=_load)


def _load(worker: WorkerLoad) -> int:
    # The stats are a step old and know the other routers; ours is exact and only ours.
    stats = worker.stats
    reported = stats.num_running_reqs + stats.num_waiting_reqs if stats is not None else 0
    return max(reported, worker.num_in_flight)


ROUTING_POLICIES: Mapping[str, Callable[[WorkerRole], RoutingPolicy]] = {
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
}
