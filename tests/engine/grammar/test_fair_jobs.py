"""Whose grammar is compiled next."""

import random
from collections import Counter

import pytest

from pdserve_engine.grammar import fair_jobs
from pdserve_engine.grammar.fair_jobs import FairJobs
from support.samples import seeds


@pytest.mark.parametrize("seed", seeds(50))
def test_turns_go_round_by_cost(seed: int) -> None:
    """Who always has a job gets as much as each other one that has, within a job; who comes with
    one that costs little waits for one job of each of the others at most.
    """
    rng = random.Random(seed)
    jobs: FairJobs[float] = FairJobs()
    heavy = [f"heavy{number}" for number in range(rng.randint(1, 4))]
    most = {name: rng.choice([0.1, 1.0, 10.0]) for name in heavy}
    for name in heavy:
        jobs.put(name, rng.uniform(0.0, most[name]))
    spent: Counter[str] = Counter()
    waits: dict[str, int] = {}
    for number in range(200):
        if rng.random() < 0.1:
            name = f"small{number}"
            jobs.put(name, 0.01)
            waits[name] = 0
        name, cost = jobs.pop()
        for each in waits:
            waits[each] += name in heavy and each != name
        jobs.charge(name, cost)
        if name in heavy:
            spent[name] += cost
            jobs.put(name, rng.uniform(0.0, most[name]))
        elif name in waits:
            assert waits.pop(name) <= len(heavy)
        assert max(spent.values()) - min(spent[name] for name in heavy) <= 2 * max(most.values())


def test_an_innocents_job_waits_for_the_one_that_runs() -> None:
    jobs: FairJobs[str] = FairJobs()
    for number in range(8):
        jobs.put("mallory", f"costly{number}")
    jobs.pop()
    jobs.put("alice", "small")
    jobs.charge("mallory", 10.0)
    assert jobs.pop() == ("alice", "small")
    jobs.charge("alice", 0.1)
    jobs.put("alice", "again")
    assert jobs.pop() == ("alice", "again")


def test_the_one_with_most_gives_way() -> None:
    jobs: FairJobs[int] = FairJobs()
    for number in range(4):
        jobs.put("mallory", number)
    assert jobs.drop_newest("mallory", lambda _: ["mallory"]) is None
    assert jobs.drop_newest("alice", lambda _: ["mallory"]) == 3
    jobs.discard("mallory", 1)
    assert [jobs.pop()[1] for _ in range(2)] == [0, 2]
    assert not jobs


def test_a_job_of_several_gives_way_if_each_of_them_has_more() -> None:
    jobs: FairJobs[int] = FairJobs()
    waiting = {number: ["mallory", "trudy"] for number in range(4)} | {4: ["mallory", "bob"]}
    for number, names in waiting.items():
        for name in names:
            jobs.put(name, number)
    assert jobs.drop_newest("bob", waiting.__getitem__) == 3
    assert jobs.drop_newest("alice", waiting.__getitem__) == 2
    assert jobs.drop_newest("alice", waiting.__getitem__) == 1
    assert jobs.drop_newest("alice", waiting.__getitem__) is None, "trudy has one, and bob"
    assert [jobs.pop() for _ in range(4)] == [
        ("bob", 4),
        ("mallory", 0),
        ("trudy", 0),
        ("mallory", 4),
    ]
    assert not jobs


def test_clients_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_jobs, "MAX_IDLE_CLIENTS", 10)
    jobs: FairJobs[int] = FairJobs()
    for number in range(1000):
        jobs.put(f"{number}", number)
        name, _ = jobs.pop()
        jobs.charge(name, number)
    assert jobs.num_clients <= 10
