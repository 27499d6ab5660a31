"""Which requests workers died under."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdserve_common.types.engine import WorkerRole
from pdserve_router.requests import poison_requests
from pdserve_router.requests.poison_requests import is_to_be_judged
from support.engine_info import make_info
from support.stub_worker import StubWorker

SETTLE_S = 0.05


def find_at_fault(
    lost: Sequence["Lost"], now: float, *, rivals: Sequence["Lost"] = ()
) -> list[tuple["Lost", Any]]:
    sent_from = [(each, each.not_before) for each in lost]
    return poison_requests.find_at_fault(sent_from, now, settle_s=SETTLE_S, rivals=rivals)


@dataclass
class Lost:
    ended: list[tuple[Any, str]]
    died_at: Any
    is_tried_alone: bool = False
    is_excused: bool = False
    lost_at: float = 0.0
    not_before: float = 0.0


@dataclass
class Workers:
    made: list[Any] = field(default_factory=list)

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.made.append(StubWorker(WorkerRole.DECODE, info=make_info()))
            self.made[-1].is_ready = False
            yield self.made[-1]


@pytest.fixture
def workers() -> Iterator[Any]:
    return iter(Workers())


def lost(*ended: Any, at: float = 0.0) -> Lost:
    return Lost([(each, each.info.epoch) for each in ended], ended[-1], lost_at=at)


def test_the_only_one_of_two_deaths_is_at_fault(workers: Iterator[Any]) -> None:
    first, second, third = (next(workers) for _ in range(3))
    culprit, others = lost(first, second), [lost(second), lost(third, third)]
    others[1].died_at = None  # it has had tokens of that one
    assert [is_to_be_judged(each) for each in (culprit, *others)] == [True, False, False]
    assert find_at_fault([culprit, *others], SETTLE_S / 2) == [], "others may follow"
    assert find_at_fault([culprit, *others], 2 * SETTLE_S) == [(culprit, second)]
    assert not any(each.is_tried_alone for each in others)


def test_of_several_each_is_tried_and_nobody_is_judged_twice(workers: Iterator[Any]) -> None:
    first, second = next(workers), next(workers)
    both = [lost(first, second), lost(first, second)]
    assert find_at_fault(both, 1.0) == []
    assert all(each.is_tried_alone and each.is_excused for each in both)
    assert find_at_fault(both[:1], 1.0) == []


def test_nobody_is_judged_while_one_may_go_on_without_the_worker(workers: Iterator[Any]) -> None:
    first, second = next(workers), next(workers)
    both = [lost(first, second), lost(first, second)]
    both[1].not_before = 0.25
    assert find_at_fault(both, 0.2) == []
    assert [is_to_be_judged(each) for each in both] == [True, True]
    both[1].died_at = None  # it goes on
    assert find_at_fault(both, 0.3) == [(both[0], second)]


def test_the_one_that_lost_most_is_at_fault(workers: Iterator[Any]) -> None:
    first, second, third = (next(workers) for _ in range(3))
    culprit, other = lost(first, second, third), lost(first, third)
    assert find_at_fault([other, culprit], 1.0) == [(culprit, third)]


def test_workers_that_only_say_so_have_not_died(workers: Iterator[Any]) -> None:
    first, second = next(workers), next(workers)
    second.is_ready = True
    request = lost(first, second)
    assert find_at_fault([request], 1.0) == []
    assert not request.is_tried_alone


def test_a_verdict_waits_for_those_that_lost_a_worker_too(workers: Iterator[Any]) -> None:
    """Each worker died under one of them, at its first: the one that lost both did nothing."""
    first, second, third = (next(workers) for _ in range(3))
    both, of_first, of_second = lost(first, second), lost(first), lost(second)
    for rivals in ([of_first, of_second], [of_first], [of_second]):
        assert find_at_fault([both], 1.0, rivals=rivals) == []
        assert is_to_be_judged(both)
    # The first one ends another worker, and is judged.
    of_first.ended.append((third, third.info.epoch))
    of_first.died_at = third
    assert find_at_fault([of_first], 1.0, rivals=[of_second]) == [(of_first, third)]
    # Without it, who lost both has lost one that nobody is known to have ended.
    both.ended.pop(0)
    assert not is_to_be_judged(both)
    assert find_at_fault([both], 1.0, rivals=[of_second]) == []


def test_it_is_at_fault_when_the_others_have_brought_tokens_or_too_late(
    workers: Iterator[Any],
) -> None:
    first, second = next(workers), next(workers)
    for now, rivals in ((1.0, []), (11.0, [lost(first), lost(second)])):
        both = lost(first, second)
        assert find_at_fault([both], now, rivals=rivals) == [(both, second)]


def test_two_that_lost_one_worker_together_and_another_each_are_tried(
    workers: Iterator[Any],
) -> None:
    first, second, third = (next(workers) for _ in range(3))
    each = [lost(first, second), lost(first, third)]
    assert find_at_fault(each, 1.0) == []
    assert all(one.is_tried_alone and one.is_excused for one in each)
