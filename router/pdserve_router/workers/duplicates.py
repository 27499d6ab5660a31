"""Workers of a pool that cannot be used beside another one: the same process under a second name,
and another process that calls itself the same.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

from pdserve_common.types.engine import WorkerRole
from pdserve_router.workers.worker import Worker, WorkerState

logger = logging.getLogger(__name__)

# In these a process is known to run, or may well.
_RUNNING = (
    WorkerState.READY,
    WorkerState.PAUSED,
    WorkerState.DRAINING,
    WorkerState.REATTACHING,
)


class Duplicates:
    """Finds both kinds among workers that call themselves the same; `update` is to be called with
    each worker that has changed.
    """

    def __init__(self, listed: Mapping[Worker, int]) -> None:
        """`listed` has the listed workers and their places, as of now; others that are known here
        run on without being listed.
        """
        # Other names of workers that are used already.
        self.by_address: set[Worker] = set()
        # They call themselves what a worker of their role calls itself that was there before.
        self.by_engine_id: set[Worker] = set()
        self._listed = listed
        self._engine_ids: dict[Worker, str] = {}
        self._named: dict[str, dict[Worker, None]] = {}
        # The worker of each engine_id. Workers know their links by it: two of one name would be
        # taken for each other.
        self._owners: dict[tuple[WorkerRole, str], Worker] = {}

    def __contains__(self, worker: Worker) -> bool:
        return worker in self.by_address or worker in self.by_engine_id

    def update(self, worker: Worker, *, keeps_owners: bool) -> list[Worker]:
        """Take a worker as it is now; return all that may have become one of either kind, or none.
        Names stay with who has them for as long as that one runs; unless `keeps_owners`, while
        nothing is used yet, the oldest process has it, so that routers agree.
        """
        return self._rename(worker, worker.engine_id, keeps_owners=keeps_owners)

    def forget(self, worker: Worker) -> list[Worker]:
        """The worker no longer runs, nor is it listed; returns what `update` does."""
        return self._rename(worker, "", keeps_owners=True)

    def _rename(self, worker: Worker, engine_id: str, *, keeps_owners: bool) -> list[Worker]:
        before = self._engine_ids.pop(worker, "")
        if before:
            del self._named[before][worker]
        if engine_id:
            self._engine_ids[worker] = engine_id
            self._named.setdefault(engine_id, {})[worker] = None
        if before != engine_id or worker not in self._listed:
            self.by_address.discard(worker)
            self.by_engine_id.discard(worker)
        affected = []
        for name in {before, engine_id} - {""}:
            affected += self._find(name, keeps_owners=keeps_owners)
        return affected

    def _find(self, engine_id: str, *, keeps_owners: bool) -> list[Worker]:
        known = self._named[engine_id]
        if not known:
            del self._named[engine_id]
        self._find_owners(engine_id, known, keeps_owners=keeps_owners)
        listed = sorted((w for w in known if w in self._listed), key=self._listed.__getitem__)
        self._find_by_address(listed)
        self._find_by_engine_id(listed)
        return listed

    def _find_by_address(self, workers: Sequence[Worker]) -> None:
        """Find what is ready under two names, such as its IPv4 and its IPv6 address: the one that
        is listed first is used.
        """
        first: dict[str, Worker] = {}
        for worker in workers:
            used = first.setdefault(worker.epoch, worker) if worker.is_ready else worker
            if used is worker:
                self.by_address.discard(worker)
            elif worker not in self.by_address:
                self.by_address.add(worker)
                logger.warning(
                    "%s is another name of worker %s, which is used", worker.address, used.address
                )

    def _find_owners(self, engine_id: str, known: Iterable[Worker], *, keeps_owners: bool) -> None:
        running = sorted((w for w in known if w.state in _RUNNING), key=_age)
        for role in WorkerRole:
            name = (role, engine_id)
            candidates = [worker for worker in running if worker.role is role]
            owner = self._owners.pop(name, None)
            if candidates:
                is_kept = keeps_owners and owner in candidates
                self._owners[name] = owner if owner and is_kept else candidates[0]

    def _find_by_engine_id(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            if not self._is_duplicate(worker):
                self.by_engine_id.discard(worker)
            elif worker not in self.by_engine_id:
                self.by_engine_id.add(worker)
                logger.error(
                    "worker %s calls itself %s, as worker %s does: it gets nothing until that one "
                    "is gone, set its --engine-id",
                    worker.address,
                    worker.engine_id,
                    self._owner_of(worker).address,
                )

    def _is_duplicate(self, worker: Worker) -> bool:
        # The owner has the same epoch at another address.
        return worker.is_ready and self._owner_of(worker).epoch != worker.epoch

    def _owner_of(self, worker: Worker) -> Worker:
        return self._owners[worker.role, worker.engine_id]


def _age(worker: Worker) -> tuple[int, str]:
    """The oldest process is the least."""
    return (worker.info.started_at_ms if worker.info is not None else 0), worker.epoch
