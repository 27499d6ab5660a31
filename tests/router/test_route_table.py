"""The table is what a walk over all workers and links would find."""

import itertools
import random

import pytest

from pdserve_common.engine_types import WorkerRole
from pdserve_router.workers.indexed_set import IndexedSet
from pdserve_router.workers.route_table import RouteTable

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
NAMES = ("", "a", "b")


class Worker:
    def __init__(self, role: WorkerRole) -> None:
        self.role = role


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_a_walk_would_find(seed: int) -> None:
    rng = random.Random(seed)
    workers = {role: [Worker(role) for _ in range(5)] for role in (P, D)}
    every = [*workers[P], *workers[D]]
    table, names, links = RouteTable(), dict.fromkeys(every, ""), set()
    for _ in range(150):
        pair = (rng.choice(workers[P]), rng.choice(workers[D]))
        kind = rng.choice(("place", "link", "unlink"))
        if kind == "place":
            worker = rng.choice(pair)
            names[worker] = rng.choice(NAMES)
            table.place(worker, names[worker])
        elif kind == "link":
            links.add(pair)
            table.link(*pair)
        else:
            links.discard(pair)
            table.unlink(*pair)
        used = {(p, d) for p, d in links if names[p] and names[p] == names[d]}
        used |= {(d, p) for p, d in used}
        for worker in every:
            assert set(table.partners(worker)) == {b for a, b in used if a is worker}
        for role, name in itertools.product((P, D), NAMES[1:]):
            placed = {w for w in workers[role] if names[w] == name}
            assert set(table.workers(role, name)) == placed
            assert set(table.paired(role, name)) == placed & {a for a, _ in used}
        assert table.has_partners == bool(used)


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
