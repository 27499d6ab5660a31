"""The table is what a walk over all workers and links would find."""

import itertools
import random

import pytest

from pdserve_common.types.engine import WorkerRole
from pdserve_router.workers.routing.indexed_set import IndexedSet
from pdserve_router.workers.routing.route_table import RouteTable
from support.stub_worker import StubWorker

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
NAMES = ("a", "b", "b with an adapter")


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_a_walk_would_find(seed: int) -> None:
    rng = random.Random(seed)
    workers = {role: [StubWorker(role) for _ in range(5)] for role in (P, D)}
    every = [*workers[P], *workers[D]]
    table, links = RouteTable(), set()
    names: dict[StubWorker, set[str]] = {worker: set() for worker in every}
    for _ in range(150):
        pair = (rng.choice(workers[P]), rng.choice(workers[D]))
        kind = rng.choice(("place", "link", "unlink"))
        if kind == "place":
            worker = rng.choice(pair)
            names[worker] = set(rng.sample(NAMES, rng.randrange(3)))
            table.place(worker, *names[worker])
        elif kind == "link":
            links.add(pair)
            table.link(*pair)
        else:
            links.discard(pair)
            table.unlink(*pair)
        used = {(p, d, name) for p, d in links for name in names[p] & names[d]}
        used |= {(d, p, name) for p, d, name in used}
        for worker, name in itertools.product(every, NAMES):
            paired = {b for a, b, shared in used if a is worker and shared == name}
            assert set(table.paired_with(worker, name)) == paired
        for role, name in itertools.product((P, D), NAMES):
            placed = {w for w in workers[role] if name in names[w]}
            assert set(table.workers(role, name)) == placed
            paired = {a for a, _, shared in used if shared == name}
            assert set(table.paired(role, name)) == placed & paired
        assert table.has_pairs == bool(used)


def test_an_indexed_set_keeps_its_places() -> None:
    rng = random.Random(1)
    kept, known = IndexedSet(), set()
    for _ in range(500):
        member = rng.randrange(20)
        change = rng.choice(("add", "discard"))
        getattr(kept, change)(member)
        getattr(known, change)(member)
        assert sorted(kept) == sorted(kept.items) == sorted(known)
        assert len(kept) == len(known)
        assert all((member in kept) == (member in known) for member in range(20))
