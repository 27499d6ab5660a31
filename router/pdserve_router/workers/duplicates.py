"""Workers of a pool that cannot be used beside another one: the same process under a second name,
and another process that calls itself the same.
"""

import logging
from collections.abc import Iterable, Sequence

from pdserve_common.engine_types import WorkerRole
from pdserve_router.workers.worker_client import WorkerClient, WorkerState

logger = logging.getLogger(__name__)

# In these a process is known to run, or may well.
_RUNNING = (
    WorkerState.READY,
    WorkerState.PAUSED,
    WorkerState.DRAINING,
    WorkerState.REATTACHING,
)


class Duplicates:
    """Finds both kinds; `update` is to be called after each change."""

    def __init__(self) -> None:
        # Other names of workers that are used already.
        self.by_address: frozenset[WorkerClient] = frozenset()
        # They call themselves what a worker of their role calls itself that was there before.
        self.by_engine_id: frozenset[WorkerClient] = frozenset()
        self.all: frozenset[WorkerClient] = frozenset()
        # Who has each engine_id. Workers know their links by it: two of one name would be taken
        # for each other.
        self._owners: dict[tuple[WorkerRole, str], WorkerClient] = {}

    def update(
        self,
        workers: Sequence[WorkerClient],
        leaving: Iterable[WorkerClient],
        *,
        keeps_owners: bool,
    ) -> None:
        """Take the listed workers as they are now, and those that run on without being listed.
        Names stay with who has them for as long as that one runs; unless `keeps_owners`, while
        nothing is used yet, the oldest process has it, so that routers agree.
        """
        self._find_by_address(workers)
        if not keeps_owners:
            self._owners = {}
        self._find_owners([w for w in (*workers, *leaving) if w.state in _RUNNING])
        self._find_by_engine_id(workers)
        self.all = self.by_address | self.by_engine_id

    def _find_by_address(self, workers: Sequence[WorkerClient]) -> None:
        """Find what is ready under two names, such as its IPv4 and its IPv6 address: the one that
        is listed first is used.
        """
        ready = [worker for worker in workers if worker.is_ready]
        first = {(worker.engine_id, worker.epoch): worker for worker in reversed(ready)}
        first_of = {worker: first[worker.engine_id, worker.epoch] for worker in ready}
        known = self.by_address
        self.by_address = frozenset(w for w, other in first_of.items() if w != other)
        for worker in self.by_address - known:
            logger.warning(
                "%s is another name of worker %s, which is used",
                worker.address,
                first_of[worker].address,
            )

    def _find_owners(self, running: Sequence[WorkerClient]) -> None:
        names = {worker: (worker.role, worker.engine_id) for worker in running}
        self._owners = {name: w for name, w in self._owners.items() if names.get(w) == name}
        for worker in sorted(running, key=_age):
            self._owners.setdefault(names[worker], worker)

    def _find_by_engine_id(self, workers: Sequence[WorkerClient]) -> None:
        known = self.by_engine_id
        self.by_engine_id = frozenset(w for w in workers if self._is_duplicate(w))
        for worker in self.by_engine_id - known:
            logger.error(
                "worker %s calls itself %s, as worker %s does: it gets nothing until that one is "
                "gone, set its --engine-id",
                worker.address,
                worker.engine_id,
                self._owner_of(worker).address,
            )

    def _is_duplicate(self, worker: WorkerClient) -> bool:
        # The owner has the same epoch at another address.
        return worker.is_ready and self._owner_of(worker).epoch != worker.epoch

    def _owner_of(self, worker: WorkerClient) -> WorkerClient:
        return self._owners[worker.role, worker.engine_id]


def _age(worker: WorkerClient) -> tuple[int, str]:
    """The oldest process is the least."""
    return (worker.info.started_at_ms if worker.info is not None else 0), worker.epoch
