"""Which workers' KV fits together, as far as what they say of themselves tells."""

import logging

from pdserve_common.types.engine import EngineInfo, WorkerRole
from pdserve_router.workers.worker import Worker

logger = logging.getLogger(__name__)

# Fields of EngineInfo; the last one covers what else the KV depends on, the weights among it. That
# they serve the same model is known: workers are used only if it is this router's.
_SAME_FIELDS = (
    "dtype",
    "block_size",
    "vocab_size",
    "kv_transport",
    "kv_compatibility_hash",
)

# Workers of one role that agree on _SAME_FIELDS.
Group = tuple[WorkerRole, tuple[object, ...]]


def other_side(group: Group) -> Group:
    """Return the workers that those of `group` fit together with."""
    role = WorkerRole.DECODE if group[0] is WorkerRole.PREFILL else WorkerRole.PREFILL
    return role, group[1]


def group_of(worker: Worker) -> Group:
    """Return the group of a worker that was attached."""
    return worker.role, tuple(getattr(worker.info, name) for name in _SAME_FIELDS)


class PairGroups:
    """A pool's workers by group; tells of those that cannot work with others."""

    def __init__(self) -> None:
        self._groups: dict[Group, dict[Worker, None]] = {}

    def add(self, worker: Worker) -> Group:
        """Return the group of a worker that was attached."""
        group = group_of(worker)
        self._groups.setdefault(group, {})[worker] = None
        for (role, fields), others in self._groups.items():
            # One of each group: they are all alike.
            if role is not worker.role and fields != group[1]:
                _warn(worker, next(iter(others)))
        return group

    def remove(self, worker: Worker, group: Group) -> None:
        del self._groups[group][worker]
        if not self._groups[group]:
            del self._groups[group]

    def num_mismatched(self) -> int:
        """Return how many pairs of the two roles can never work."""
        sizes = {group: len(workers) for group, workers in self._groups.items()}
        num_pairs = num_alike = 0
        for group, size in sizes.items():
            if group[0] is WorkerRole.PREFILL:
                num_alike += size * sizes.get(other_side(group), 0)
                num_pairs += size * sum(n for each, n in sizes.items() if each[0] is not group[0])
        return num_pairs - num_alike


def _warn(worker: Worker, other: Worker) -> None:
    prefill, decode = (worker, other) if worker.role is WorkerRole.PREFILL else (other, worker)
    assert prefill.info is not None
    assert decode.info is not None
    difference = _difference(prefill.info, decode.info)
    logger.warning(
        "%s and %s cannot work together: %s", prefill.engine_id, decode.engine_id, difference
    )


def _difference(prefill: EngineInfo, decode: EngineInfo) -> str:
    return ", ".join(
        f"{name} is {getattr(prefill, name)} and {getattr(decode, name)}"
        for name in _SAME_FIELDS
        if getattr(prefill, name) != getattr(decode, name)
    )
