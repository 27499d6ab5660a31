"""Jobs of several clients, who take turns by what theirs have cost so far."""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

# Clients without jobs that are remembered for what they have cost.
MAX_IDLE_CLIENTS = 4096

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Client(Generic[T]):
    cost: float
    # Of its last turn; who had none comes first.
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
        # Of the client that had the last turn, before it.
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

    def charge(self, name: str, cost: float) -> None:
        """A client's job, which was popped, has cost so much."""
        client = self._clients.setdefault(name, _Client(self._cost))
        client.cost += cost
        self._forget()

    def drop_newest(self, name: str, may_drop: Callable[[T], bool]) -> T | None:
        """Take the newest job that may be dropped of the client that has most, if that has more
        than this one; None if there is none.
        """
        most = max(self._clients.values(), key=lambda each: len(each.jobs), default=None)
        own = self._clients.get(name)
        if most is None or len(most.jobs) <= (len(own.jobs) if own is not None else 0) + 1:
            return None
        job = next(filter(may_drop, reversed(most.jobs)), None)
        if job is not None:
            most.jobs.remove(job)
        return job

    def _forget(self) -> None:
        idle = [(each.cost, name) for name, each in self._clients.items() if not each.jobs]
        num_most = len(idle) - MAX_IDLE_CLIENTS
        for number, (cost, name) in enumerate(sorted(idle)):
            if cost <= self._cost or number < num_most:
                del self._clients[name]
