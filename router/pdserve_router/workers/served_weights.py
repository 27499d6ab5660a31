"""Which weights of a pool take new requests: one set, until another takes over as a whole."""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import WorkerRole
from pdserve_router.workers.model_limits import answering_role
from pdserve_router.workers.model_version import ModelVersion
from pdserve_router.workers.worker import Worker, WorkerState

logger = logging.getLogger(__name__)

# A worker that is lost, and has not said that it leaves, counts for so long on: the others do not
# hand the pool over because of a crash.
GONE_S = 60.0

# In these a worker may go on where it was; in the others of _ATTACHED it is about to leave.
_HELD = (WorkerState.READY, WorkerState.PAUSED, WorkerState.REATTACHING)
_ATTACHED = (WorkerState.READY, WorkerState.PAUSED, WorkerState.DRAINING)


_Key = tuple[WorkerRole, str]


@dataclass(slots=True)
class _Member:
    worker: Worker
    until: float = math.inf


class _Set:
    """The ready workers of the same weights."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.workers: dict[WorkerRole, dict[Worker, None]] = {role: {} for role in WorkerRole}

    def __len__(self) -> int:
        return sum(map(len, self.workers.values()))

    @property
    def role(self) -> WorkerRole:
        """Whose workers end requests."""
        every = itertools.chain(*self.workers.values())
        info = next((worker.info for worker in every), None)
        return WorkerRole.DECODE if info is None else answering_role(info)

    @property
    def is_able(self) -> bool:
        """True if it could serve."""
        return bool(self.workers[self.role])

    @property
    def rank(self) -> tuple[int, bool, int, str]:
        """The higher, the rather it serves. The last two make routers agree: older workers."""
        every = itertools.chain(*self.workers.values())
        started_at_ms = min(w.info.started_at_ms for w in every if w.info is not None)
        has_prefill = bool(self.workers[WorkerRole.PREFILL])
        return len(self), has_prefill, -started_at_ms, self.name


class ServedWeights:
    """The pool's agreement on one set of weights, the incumbent.

    At first that is the set with the most ready workers. Another one with a ready decode worker
    takes over if the incumbent has no decode worker any more; or if more of its workers are ready
    than the incumbent has, and it has a usable pair wherever the incumbent has prefill workers. So
    a worker that is alone in its weights gets nothing, and a rolling update ends with the new ones.
    Of models that pool, prefill workers are what decode workers are of others, without pairs.
    The incumbent's workers count until they drain, leave the list, come back with other weights or
    are lost for GONE_S: what comes and goes changes nothing back and forth.

    An answer that has begun stays with the weights that began it, whichever serve.
    """

    def __init__(
        self,
        *,
        disaggregation: bool,
        require_exact: bool,
        has_pair: Callable[[str], bool],
        on_change: Callable[[], None],
        runtime: Runtime,
    ) -> None:
        """With `require_exact` workers have to agree on their arithmetic as well, and all that are
        not exact are refused. `has_pair` says whether workers of such a set are a pair that can be
        used. `on_change` is called when time alone has changed something, and has to call `decide`.
        """
        # Empty: none yet.
        self.name = ""
        # Workers of this role end requests.
        self.role = WorkerRole.DECODE
        self._disaggregation = disaggregation
        self._require_exact = require_exact
        self._on_change = on_change
        self._runtime = runtime
        self._clock = runtime.now
        self._has_pair = has_pair
        # The listed workers that are ready, and in which set each is; empty: in none.
        self._sets: dict[str, _Set] = {}
        self._names: dict[Worker, str] = {}
        # The incumbent's workers, when each stops to count, and those of them that will.
        self._members: dict[_Key, _Member] = {}
        self._lost: set[_Key] = set()
        self._refused: set[Worker] = set()
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def name_of(self, model_version: ModelVersion) -> str:
        """Return which set it is; empty for what can be in none."""
        if not self._require_exact:
            return model_version.weights
        return model_version.model if model_version.numerics else ""

    def serves(self, worker: Worker) -> bool:
        """True if it may take new requests as far as its weights go."""
        return bool(self.name) and self.name_of(worker.model_version) == self.name

    def name_for(self, versions: Iterable[ModelVersion]) -> str:
        """Return which set may go on with an answer that comes from `origins`; empty: none may. One
        that nothing is known of is like a new request.
        """
        names = {self.name_of(model_version) for model_version in versions if model_version.weights}
        if not names:
            return self.name
        return names.pop() if len(names) == 1 else ""

    def ready(self, role: WorkerRole, name: str) -> Collection[Worker]:
        """Return the listed workers of a role that are ready, of the set `name`."""
        return self._sets[name].workers[role] if name in self._sets else ()

    def note(self, worker: Worker, *, is_listed: bool) -> None:
        """Take a worker as it is now."""
        name = self.name_of(worker.model_version) if is_listed and worker.is_ready else ""
        if name != self._names.get(worker, ""):
            self._move(worker, name)
        if is_listed:
            self._names[worker] = name
        else:
            self._names.pop(worker, None)
        if self.name:
            self._note_member(worker)
            self._note_refused(worker)

    def decide(self, *, num_dialed: int, has_settled: bool) -> bool:
        """Return whether other weights serve than before, after all that was noted. Before the pool
        has settled the first set is chosen only if the workers that are still dialed, of those that
        end requests, cannot change it.
        """
        before = self.name
        self._expire()
        if not self.name:
            self._choose(num_dialed, has_settled=has_settled)
        else:
            self._maybe_change()
        if self.name != before:
            for worker in self._names:
                self._note_member(worker)
                self._note_refused(worker)
        self._set_timer()
        return self.name != before

    def _move(self, worker: Worker, name: str) -> None:
        if before := self._names.get(worker, ""):
            del self._sets[before].workers[worker.role][worker]
            if not len(self._sets[before]):
                del self._sets[before]
        if name:
            self._sets.setdefault(name, _Set(name)).workers[worker.role][worker] = None

    def _ranked(self, sets: Iterable[_Set]) -> list[_Set]:
        """Return those that could serve, the first of them first."""
        able = [each for each in sets if each.is_able]
        return sorted(able, key=lambda each: each.rank, reverse=True)

    def _choose(self, num_dialed: int, *, has_settled: bool) -> None:
        sets = self._ranked(self._sets.values())
        sizes = [len(each) for each in sets] + [0, 0]
        if sets and (has_settled or sizes[0] - sizes[1] > num_dialed or not num_dialed):
            self.name, self.role = sets[0].name, sets[0].role
            logger.info("weights %s serve, %d workers are ready", self.name, sizes[0])

    def _maybe_change(self) -> None:
        size = len(self._members)
        others = [s for s in self._sets.values() if s.name != self.name and self._may_take_over(s)]
        if not others:
            return
        first = self._ranked(others)[0]
        text = "weights %s take over, %d workers are ready; %s had %d: %s get no new requests"
        logger.warning(text, first.name, len(first), self.name, size, self.name)
        self.name, self.role = first.name, first.role
        self._members.clear()
        self._lost.clear()

    def _may_take_over(self, other: _Set) -> bool:
        if not other.is_able:
            return False
        roles = {role for role, _ in self._members}
        if self.role not in roles:
            return True
        has_prefill = WorkerRole.PREFILL in roles and other.role is WorkerRole.DECODE
        needs_pair = self._disaggregation and has_prefill
        is_larger = len(other) > len(self._members)
        return is_larger and (not needs_pair or self._has_pair(other.name))

    def _note_member(self, worker: Worker) -> None:
        key = (worker.role, worker.address)
        is_listed, is_held = worker in self._names, worker.state in _HELD
        if is_listed and is_held and self.serves(worker):
            self._members[key] = _Member(worker)
            self._lost.discard(key)
        elif is_listed and (is_held or worker.state is WorkerState.DRAINING):
            self._remove(key)
        elif (member := self._members.get(key)) is not None and member.worker is worker:
            self._lose(key, member)

    def _lose(self, key: _Key, member: _Member) -> None:
        """It is lost, or no longer listed: who runs on without that was sent away."""
        if member.worker.state in _ATTACHED:
            self._remove(key)
        else:
            member.until = min(member.until, self._clock() + GONE_S)
            self._lost.add(key)

    def _expire(self) -> None:
        now = self._clock()
        for key in [key for key in self._lost if self._members[key].until <= now]:
            self._remove(key)

    def _remove(self, key: _Key) -> None:
        self._members.pop(key, None)
        self._lost.discard(key)

    def _note_refused(self, worker: Worker) -> None:
        is_refused = worker in self._names and worker.is_ready and not self.serves(worker)
        if not is_refused:
            self._refused.discard(worker)
        elif worker not in self._refused:
            self._refused.add(worker)
            logger.warning(
                "worker %s at %s has weights %s, weights %s serve: it gets no new requests%s",
                worker.engine_id,
                worker.address,
                self.name_of(worker.model_version) or worker.model_version,
                self.name,
                ", as --require-determinism is exact" if self._require_exact else "",
            )

    def _set_timer(self) -> None:
        self.close()
        self._timer = None
        due = min((self._members[key].until for key in self._lost), default=math.inf)
        if due < math.inf:
            self._timer = self._runtime.call_later(max(0.0, due - self._clock()), self._on_change)
