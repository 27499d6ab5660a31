"""Which weights of a pool take new requests: one set, until another takes over as a whole."""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdserve_common.engine_types import WorkerRole
from pdserve_router.workers.origin import Origin
from pdserve_router.workers.worker_client import WorkerClient, WorkerState

logger = logging.getLogger(__name__)

# A worker that is lost, and has not said that it leaves, counts for so long on: the others do not
# hand the pool over because of a crash.
GONE_S = 60.0

_Partners = Mapping[WorkerClient, Sequence[WorkerClient]]


# In these a worker may go on where it was; in the others of _ATTACHED it is about to leave.
_HELD = (WorkerState.READY, WorkerState.PAUSED, WorkerState.REATTACHING)
_ATTACHED = (WorkerState.READY, WorkerState.PAUSED, WorkerState.DRAINING)


@dataclass(slots=True)
class _Member:
    worker: WorkerClient
    until: float = math.inf


class _Set(NamedTuple):
    """The ready workers of the same weights."""

    name: str
    prefill: tuple[WorkerClient, ...]
    decode: tuple[WorkerClient, ...]

    @property
    def workers(self) -> tuple[WorkerClient, ...]:
        return self.prefill + self.decode

    @property
    def rank(self) -> tuple[int, bool, int, str]:
        """The higher, the rather it serves. The last two make routers agree: older workers."""
        started_at_ms = min(w.info.started_at_ms for w in self.workers if w.info is not None)
        return len(self.workers), bool(self.prefill), -started_at_ms, self.name


class ServedWeights:
    """The pool's agreement on one set of weights, the incumbent.

    At first that is the set with the most ready workers. Another one with a ready decode worker
    takes over if the incumbent has no decode worker any more; or if more of its workers are ready
    than the incumbent has, and it has a usable pair wherever the incumbent has prefill workers. So
    a worker that is alone in its weights gets nothing, and a rolling update ends with the new ones.
    The incumbent's workers count until they drain, leave the list, come back with other weights or
    are lost for GONE_S: what comes and goes changes nothing back and forth.

    An answer that has begun stays with the weights that began it, whichever serve.
    """

    def __init__(
        self,
        *,
        disaggregation: bool,
        require_exact: bool,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `require_exact` workers have to agree on their arithmetic as well, and all that are
        not exact are refused. `on_change` is called when time alone has changed something, and has
        to call `update`.
        """
        # Empty: none yet.
        self.name = ""
        self._disaggregation = disaggregation
        self._require_exact = require_exact
        self._on_change = on_change
        self._clock = clock
        # The incumbent's workers, and when each stops to count.
        self._members: dict[tuple[WorkerRole, str], _Member] = {}
        self._refused: frozenset[WorkerClient] = frozenset()
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def name_of(self, origin: Origin) -> str:
        """Return which set it is; empty for what can be in none."""
        if not self._require_exact:
            return origin.weights
        return str(origin) if origin.numerics else ""

    def serves(self, worker: WorkerClient) -> bool:
        """True if it may take new requests as far as its weights go."""
        return bool(self.name) and self.name_of(worker.origin) == self.name

    def name_for(self, origins: Iterable[Origin]) -> str:
        """Return which set may go on with an answer that comes from `origins`; empty: none may. One
        that nothing is known of is like a new request.
        """
        names = {self.name_of(origin) for origin in origins if origin.weights}
        if not names:
            return self.name
        return names.pop() if len(names) == 1 else ""

    def update(
        self,
        prefill: Sequence[WorkerClient],
        decode: Sequence[WorkerClient],
        *,
        usable: _Partners,
        has_settled: bool,
    ) -> None:
        """Take the listed workers as they are now, and the pairs that can be used. Before the pool
        has settled the first set is chosen only if those that are still dialed cannot change it.
        """
        sets = self._find_sets(prefill, decode)
        self._note_members((*prefill, *decode))
        if not self.name:
            self._choose(sets, decode, has_settled=has_settled)
        else:
            self._maybe_change(sets, usable)
        if self.name:
            self._note_members((*prefill, *decode))
            self._note_refused((*prefill, *decode))
        self._set_timer()

    def _find_sets(
        self, prefill: Sequence[WorkerClient], decode: Sequence[WorkerClient]
    ) -> list[_Set]:
        """Return those that could serve, the first of them first."""
        ready: defaultdict[str, list[WorkerClient]] = defaultdict(list)
        for worker in (*prefill, *decode):
            if worker.is_ready and (name := self.name_of(worker.origin)):
                ready[name].append(worker)
        sets = [
            _Set(
                name,
                tuple(w for w in workers if w.role is WorkerRole.PREFILL),
                tuple(w for w in workers if w.role is WorkerRole.DECODE),
            )
            for name, workers in ready.items()
        ]
        return sorted((s for s in sets if s.decode), key=lambda each: each.rank, reverse=True)

    def _choose(
        self, sets: Sequence[_Set], decode: Sequence[WorkerClient], *, has_settled: bool
    ) -> None:
        sizes = [len(each.workers) for each in sets] + [0, 0]
        num_dialed = sum(worker.state is WorkerState.CONNECTING for worker in decode)
        if sets and (has_settled or sizes[0] - sizes[1] > num_dialed or not num_dialed):
            self.name = sets[0].name
            logger.info("weights %s serve, %d workers are ready", self.name, sizes[0])

    def _maybe_change(self, sets: Sequence[_Set], usable: _Partners) -> None:
        size = len(self._members)
        others = [s for s in sets if s.name != self.name and self._may_take_over(s, usable)]
        if not others:
            return
        text = "weights %s take over, %d workers are ready; %s had %d: %s get no new requests"
        logger.warning(text, others[0].name, len(others[0].workers), self.name, size, self.name)
        self.name = others[0].name
        self._members.clear()

    def _may_take_over(self, other: _Set, usable: _Partners) -> bool:
        roles = {role for role, _ in self._members}
        if WorkerRole.DECODE not in roles:
            return True
        needs_pair = self._disaggregation and WorkerRole.PREFILL in roles
        has_pair = any(d in other.decode for p in other.prefill for d in usable.get(p, ()))
        return len(other.workers) > len(self._members) and (has_pair or not needs_pair)

    def _note_members(self, workers: Sequence[WorkerClient]) -> None:
        listed = {(worker.role, worker.address): worker for worker in workers}
        for key, worker in listed.items():
            if worker.state in _HELD and self.serves(worker):
                self._members[key] = _Member(worker)
            elif worker.state in _HELD or worker.state is WorkerState.DRAINING:
                self._members.pop(key, None)
        for key, member in list(self._members.items()):
            is_held = key in listed and member.worker.state in _HELD
            if not is_held and not self._still_counts(member):
                del self._members[key]

    def _still_counts(self, member: "_Member") -> bool:
        """Of one that is lost, or no longer listed: who runs on without that was sent away."""
        if member.worker.state in _ATTACHED:
            return False
        now = self._clock()
        member.until = min(member.until, now + GONE_S)
        return now < member.until

    def _note_refused(self, workers: Sequence[WorkerClient]) -> None:
        refused = frozenset(w for w in workers if w.is_ready and not self.serves(w))
        for worker in refused - self._refused:
            logger.warning(
                "worker %s at %s has weights %s, weights %s serve: it gets no new requests%s",
                worker.engine_id,
                worker.address,
                self.name_of(worker.origin) or worker.origin,
                self.name,
                ", as --require-determinism is exact" if self._require_exact else "",
            )
        self._refused = refused

    def _set_timer(self) -> None:
        self.close()
        self._timer = None
        due = min((member.until for member in self._members.values()), default=math.inf)
        if due < math.inf:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, due - self._clock()), self._on_change)
