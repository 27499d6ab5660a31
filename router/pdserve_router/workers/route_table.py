"""The workers that can take requests, and who works with whom."""

from collections import defaultdict

from pdserve_common.engine_types import WorkerRole
from pdserve_router.workers.indexed_set import IndexedSet
from pdserve_router.workers.worker_client import WorkerClient


class RouteTable:
    """Kept as workers and links come and go, so that choosing looks only at those it draws. A
    worker that can be used is placed under the name of its weights; two that are linked are
    partners while both are placed under the same one.
    """

    def __init__(self) -> None:
        self._names: dict[WorkerClient, str] = {}
        self._links: defaultdict[WorkerClient, set[WorkerClient]] = defaultdict(set)
        self._partners: dict[WorkerClient, IndexedSet[WorkerClient]] = {}
        self._placed: dict[tuple[WorkerRole, str], IndexedSet[WorkerClient]] = {}
        self._paired: dict[tuple[WorkerRole, str], IndexedSet[WorkerClient]] = {}

    @property
    def has_partners(self) -> bool:
        """True if any two can be used together."""
        return bool(self._partners)

    def workers(self, role: WorkerRole, name: str) -> IndexedSet[WorkerClient]:
        """Return all of a role that can be used."""
        return self._placed.get((role, name), _NONE)

    def paired(self, role: WorkerRole, name: str) -> IndexedSet[WorkerClient]:
        """Return those of them that have partners."""
        return self._paired.get((role, name), _NONE)

    def partners(self, worker: WorkerClient) -> IndexedSet[WorkerClient]:
        """Return whom it can be used with, of the other role."""
        return self._partners.get(worker, _NONE)

    def place(self, worker: WorkerClient, name: str) -> None:
        """It can be used, and has the weights `name`; empty: it cannot be used."""
        before = self._names.get(worker, "")
        if name == before:
            return
        if before:
            self._take_out(worker, before)
        if name:
            self._put_in(worker, name)

    def link(self, prefill: WorkerClient, decode: WorkerClient) -> None:
        """The two work together."""
        self._links[prefill].add(decode)
        self._links[decode].add(prefill)
        name = self._names.get(prefill)
        if name and name == self._names.get(decode):
            self._join(prefill, decode, name)

    def unlink(self, prefill: WorkerClient, decode: WorkerClient) -> None:
        """The two no longer work together."""
        for worker, other in ((prefill, decode), (decode, prefill)):
            self._links[worker].discard(other)
            if not self._links[worker]:
                del self._links[worker]
        if decode in self.partners(prefill):
            self._part(prefill, decode, self._names[prefill])

    def _put_in(self, worker: WorkerClient, name: str) -> None:
        self._names[worker] = name
        self._placed.setdefault((worker.role, name), IndexedSet()).add(worker)
        for other in self._links.get(worker, ()):
            if self._names.get(other) == name:
                self._join(worker, other, name)

    def _take_out(self, worker: WorkerClient, name: str) -> None:
        for other in tuple(self.partners(worker)):
            self._part(worker, other, name)
        del self._names[worker]
        _remove(self._placed, (worker.role, name), worker)

    def _join(self, one: WorkerClient, another: WorkerClient, name: str) -> None:
        for worker, other in ((one, another), (another, one)):
            self._partners.setdefault(worker, IndexedSet()).add(other)
            self._paired.setdefault((worker.role, name), IndexedSet()).add(worker)

    def _part(self, one: WorkerClient, another: WorkerClient, name: str) -> None:
        for worker, other in ((one, another), (another, one)):
            partners = self._partners[worker]
            partners.discard(other)
            if not partners:
                del self._partners[worker]
                _remove(self._paired, (worker.role, name), worker)


_Sets = dict[tuple[WorkerRole, str], IndexedSet[WorkerClient]]
_NONE: IndexedSet[WorkerClient] = IndexedSet()


def _remove(sets: _Sets, key: tuple[WorkerRole, str], worker: WorkerClient) -> None:
    sets[key].discard(worker)
    if not sets[key]:
        del sets[key]
