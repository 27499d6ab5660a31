"""How many workers of a pool are in which state."""

from collections import Counter
from collections.abc import Collection

from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.types.engine import WorkerRole
from pdserve_router.workers.worker import Worker, WorkerState

# Values of a metric's label. The last two are ready and refused: other weights than those that
# serve, and an engine_id that is in use.
WORKER_STATES = (*(state.value for state in WorkerState), "mismatched", "duplicate")


class WorkerStates:
    """Counts listed workers by role and state, as they were noted last."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._states: dict[Worker, str] = {}
        self._counts: Counter[tuple[WorkerRole, str]] = Counter()

    def count(self, role: WorkerRole, *states: str) -> int:
        """Return how many workers of a role are in one of these states."""
        return sum(self._counts[role, state] for state in states)

    def note(self, worker: Worker, state: str | None) -> None:
        """Take a worker's state; None if it is not listed any more."""
        if (before := self._states.pop(worker, None)) is not None:
            self._counts[worker.role, before] -= 1
        if state is not None:
            self._states[worker] = state
            self._counts[worker.role, state] += 1

    def show(self, failing: Collection[Worker]) -> None:
        """Export them, and how many keep failing."""
        for role in WorkerRole:
            name = role.name.lower()
            for state in WORKER_STATES:
                self._metrics.workers.labels(role=name, state=state).set(self._counts[role, state])
            num_failing = sum(worker.role is role for worker in failing)
            self._metrics.workers_failing.labels(role=name).set(num_failing)
