"""The workers that can take requests, and who works with whom."""

from collections import defaultdict

from pdserve_common.types.engine import WorkerRole
from pdserve_router.workers.routing.indexed_set import IndexedSet
from pdserve_router.workers.worker import Worker


class RouteTable:
    """Kept as workers and links come and go, so that choosing looks only at those it draws. A
    worker that can be used is placed under names: that of its weights, and one for each adapter
    beside them. Two that are linked are paired under the names that both have.
    """

    def __init__(self) -> None:
        self._names: dict[Worker, frozenset[str]] = {}
        # In the order of their links: what is drawn is the same with the same random numbers.
        self._links: defaultdict[Worker, dict[Worker, None]] = defaultdict(dict)
        self._paired_with: dict[tuple[Worker, str], IndexedSet[Worker]] = {}
        self._placed: dict[tuple[WorkerRole, str], IndexedSet[Worker]] = {}
        self._paired: dict[tuple[WorkerRole, str], IndexedSet[Worker]] = {}

    @property
    def has_pairs(self) -> bool:
        """True if any two can be used together."""
        return bool(self._paired_with)

    def workers(self, role: WorkerRole, name: str) -> IndexedSet[Worker]:
        """Return all of a role that can be used."""
        return self._placed.get((role, name), _NONE)

    def paired(self, role: WorkerRole, name: str) -> IndexedSet[Worker]:
        """Return those of them that have pairs."""
        return self._paired.get((role, name), _NONE)

    def paired_with(self, worker: Worker, name: str) -> IndexedSet[Worker]:
        """Return whom it can be used with, of the other role."""
        return self._paired_with.get((worker, name), _NONE)

    def place(self, worker: Worker, *names: str) -> None:
        """It can be used under these names; none: it cannot be used."""
        before, after = self._names.get(worker, frozenset()), frozenset(names)
        for name in before - after:
            self._take_out(worker, name)
        if after:
            self._names[worker] = after
        else:
            self._names.pop(worker, None)
        for name in after - before:
            self._put_in(worker, name)

    def link(self, prefill: Worker, decode: Worker) -> None:
        """The two work together."""
        self._links[prefill][decode] = self._links[decode][prefill] = None
        for name in self._shared_names(prefill, decode):
            self._join(prefill, decode, name)

    def unlink(self, prefill: Worker, decode: Worker) -> None:
        """The two no longer work together."""
        for worker, other in ((prefill, decode), (decode, prefill)):
            self._links[worker].pop(other, None)
            if not self._links[worker]:
                del self._links[worker]
        for name in self._shared_names(prefill, decode):
            if decode in self.paired_with(prefill, name):
                self._part(prefill, decode, name)

    def _shared_names(self, one: Worker, another: Worker) -> frozenset[str]:
        nothing: frozenset[str] = frozenset()
        return self._names.get(one, nothing) & self._names.get(another, nothing)

    def _put_in(self, worker: Worker, name: str) -> None:
        self._placed.setdefault((worker.role, name), IndexedSet()).add(worker)
        for other in self._links.get(worker, ()):
            if name in self._names.get(other, ()):
                self._join(worker, other, name)

    def _take_out(self, worker: Worker, name: str) -> None:
        for other in tuple(self.paired_with(worker, name)):
            self._part(worker, other, name)
        _remove(self._placed, (worker.role, name), worker)

    def _join(self, one: Worker, another: Worker, name: str) -> None:
        for worker, other in ((one, another), (another, one)):
            self._paired_with.setdefault((worker, name), IndexedSet()).add(other)
            self._paired.setdefault((worker.role, name), IndexedSet()).add(worker)

    def _part(self, one: Worker, another: Worker, name: str) -> None:
        for worker, other in ((one, another), (another, one)):
            others = self._paired_with[worker, name]
            others.discard(other)
            if not others:
                del self._paired_with[worker, name]
                _remove(self._paired, (worker.role, name), worker)


def name_with_adapter(weights: str, digest: str) -> str:
    """Return the name that workers with these weights and this adapter are placed under."""
    return f"{weights} {digest}"


_Sets = dict[tuple[WorkerRole, str], IndexedSet[Worker]]
_NONE: IndexedSet[Worker] = IndexedSet()


def _remove(sets: _Sets, key: tuple[WorkerRole, str], worker: Worker) -> None:
    sets[key].discard(worker)
    if not sets[key]:
        del sets[key]
