"""How a worker is chosen among those that could take a request."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from pdserve_common.engine_types import EngineCoreRequest, SchedulerStats


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
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, candidates: Sequence[W], request: EngineCoreRequest) -> W:
        candidate = candidates[self._next % len(candidates)]
        self._next += 1
        return candidate


class PowerOfTwo:
    """The less loaded of two drawn at random: nearly as even as looking at all, and routers that
    act on the same old stats do not all run to the same worker.
    """

    def __init__(self) -> None:
        self._random = random.Random()

    def pick(self, candidates: Sequence[W], request: EngineCoreRequest) -> W:
        drawn = self._random.sample(candidates, min(2, len(candidates)))
        return min(drawn, key=_load)


def _load(worker: WorkerLoad) -> int:
    # The stats are a step old and know the other routers; ours is exact and only ours.
    stats = worker.stats
    reported = stats.num_running_reqs + stats.num_waiting_reqs if stats is not None else 0
    return max(reported, worker.num_in_flight)


ROUTING_POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = {
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
}
