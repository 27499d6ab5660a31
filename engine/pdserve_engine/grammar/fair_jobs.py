"""Jobs of several clients, who take turns by what theirs have cost so far."""

import itertools
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

# Clients without jobs that are remembered for what they have cost.
MAX_IDLE_CLIENTS = 4096

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Client(Generic[T]):
    cost: float
    # The number of the client's last turn; who had none comes first.
    turn: int = -1
    jobs: deque[T] = field(default_factory=deque)


class FairJobs(Generic[T]):
    """The next job is one of the client whose jobs have cost least so far, of several of the one
    whose last turn is longest ago. Who comes, or comes again, counts as having cost what the one
    has whose turn it is: idle times are not saved up. So who has jobs that cost little waits for
    the job that runs, and for one of each other client at most. Not thread-safe.
    """

    def __init__(self) -> None:
        self._clients: dict[str, _Client[T]] = {}
        # The cost so far of the client that had the last turn, before that turn.
        self._cost = 0.0
        self._turns = itertools.count()

    def __bool__(self) -> bool:
        return any(client.jobs for client in self._clients.values())

    @property
    def num_clients(self) -> int:
        """Of whom something is known."""
        return len(self._clients)

    def put(self, name: str, job: T) -> None:
        client = self._clients.setdefault(name, _Client(self._cost))
        if not client.jobs:
            client.cost = max(client.cost, self._cost)
        client.jobs.append(job)

    def pop(self) -> tuple[str, T]:
        """Return the next job and whose it is; there has to be one."""
        waiting = [
            (each.cost, each.turn, name) for name, each in self._clients.items() if each.jobs
        ]
        self._cost, _, name = min(waiting)
        client = self._clients[name]
        client.turn = next(self._turns)
        return name, client.jobs.popleft()

    def discard(self, name: str, job: T) -> None:
        """Take a job from a client that has it."""
        self._clients[name].jobs.remove(job)

    def charge(self, name: str, cost: float) -> None:
        """A client's job, which was popped, has cost so much."""
        client = self._clients.setdefault(name, _Client(self._cost))
        client.cost += cost
        self._forget()

    def drop_newest(self, name: str, waiting_for: Callable[[T], Collection[str]]) -> T | None:
        """Take the newest job of the client that has most, among those for which only clients wait
        that have more than this one; None if there is none. `waiting_for` says who waits for a
        job.
        """
        own = self._clients.get(name)
        most = len(own.jobs) + 1 if own is not None else 1
        larger = {each: client for each, client in self._clients.items() if len(client.jobs) > most}
        for client in sorted(larger.values(), key=lambda each: -len(each.jobs)):
            for job in reversed(client.jobs):
                names = waiting_for(job)
                if larger.keys() >= set(names):
                    for each in names:
                        self.discard(each, job)
                    return job
        return None

    def _forget(self) -> None:
        idle = [(each.cost, name) for name, each in self._clients.items() if not each.jobs]
        num_most = len(idle) - MAX_IDLE_CLIENTS
        for number, (cost, name) in enumerate(sorted(idle)):
            if cost <= self._cost or number < num_most:
                del self._clients[name]
