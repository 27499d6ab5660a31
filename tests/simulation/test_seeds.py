"""Router, prefill and decode workers and their faults on one virtual clock. A seed that fails is
replayed with `python -m support.simulation --seed N`: docs/simulation.md.
"""

import collections

import pytest

from support.simulation.world import Report, simulate

NUM_SEEDS = 16
# What `make soak` runs, so many in a test.
NUM_SOAK_SEEDS, CHUNK = 2000, 100


def check(seeds: range) -> list[Report]:
    reports = [simulate(seed) for seed in seeds]
    for report in reports:
        if report.problems:
            pytest.fail("\n".join([*report.lines[-400:], str(report)]), pytrace=False)
    return reports


def test_every_answer_is_exact_or_ends_with_one_error() -> None:
    reports = check(range(NUM_SEEDS))
    outcomes = sum((report.outcomes for report in reports), collections.Counter[str]())
    # So the faults hurt, and most requests live with them.
    assert sum(report.num_redrives for report in reports) > NUM_SEEDS
    assert outcomes["length"] > 0.75 * outcomes.total()
    assert outcomes["length"] < outcomes.total()


def test_without_faults_all_is_exact_and_nothing_is_sent_again() -> None:
    report = simulate(1, schedule=())
    assert not report.problems
    assert set(report.outcomes) <= {"length", "left"}
    assert report.num_redrives == 0


def test_a_seed_tells_all() -> None:
    one, other = simulate(7), simulate(7)
    assert one.lines == other.lines
    assert one.digest == other.digest
    assert simulate(8).digest != one.digest


def test_a_router_comes_back_to_a_worker_that_was_frozen() -> None:
    """What it had there is about to end, and the next attempts come before that: the ids are not
    in use.
    """
    check(range(294, 295))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(NUM_SEEDS, NUM_SOAK_SEEDS, CHUNK))
def test_more_seeds(first: int) -> None:
    check(range(first, first + CHUNK))
