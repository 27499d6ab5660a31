"""How many tokens of each draft are computed."""

import random

import pytest

from pdserve_engine.request.request import Request
from pdserve_engine.spec_decode.draft_lengths import DraftLengths, StepCosts
from pdserve_engine.spec_decode.proposer import Draft
from support.requests import held_request

NUM_DRAFTS = 5
DRAFT = Draft("suffix", range(NUM_DRAFTS))


class NoProbes(random.Random):
    def random(self) -> float:
        return 1.0


class OnlyProbes(random.Random):
    def random(self) -> float:
        return 0.0


def make_costs(costs: dict[int, float], num_requests: int = 1) -> StepCosts:
    found = StepCosts()
    for num_rows, seconds in costs.items():
        found.observe(num_requests, num_rows, seconds)
    return found


def choose(lengths: DraftLengths, *requests: Request, most: int = 100) -> list[int]:
    chosen = lengths.choose(dict.fromkeys(requests, DRAFT), len(requests), len(requests), most)
    return [chosen.get(request, 0) for request in requests]


def teach(lengths: DraftLengths, request: Request, num_accepted: int, times: int = 40) -> None:
    for _ in range(times):
        lengths.observe(request, "suffix", NUM_DRAFTS, num_accepted)


def test_all_are_computed_where_rows_are_free_and_none_where_they_cost_what_steps_do() -> None:
    request = held_request()
    free = DraftLengths(make_costs(dict.fromkeys(range(1, 7), 1.0)), NoProbes())
    assert choose(free, request) == [NUM_DRAFTS]
    dear = DraftLengths(make_costs({rows: float(rows) for rows in range(1, 7)}), NoProbes())
    assert choose(dear, request) == [0]


def test_a_request_whose_drafts_fail_has_none_and_one_whose_drafts_are_right_has_many() -> None:
    failing, right = held_request("failing"), held_request("right")
    lengths = DraftLengths(StepCosts(), NoProbes())
    teach(lengths, failing, 0)
    teach(lengths, right, NUM_DRAFTS)
    assert choose(lengths, failing, right) == [0, NUM_DRAFTS]


def test_a_new_request_is_expected_to_be_like_the_others() -> None:
    lengths = DraftLengths(StepCosts(), NoProbes())
    assert choose(lengths, held_request()) != [0]
    teach(lengths, held_request(), 0)
    assert choose(lengths, held_request()) == [0]
    teach(lengths, held_request(), NUM_DRAFTS)
    assert choose(lengths, held_request()) == [NUM_DRAFTS]


def test_of_each_source_it_is_counted_apart() -> None:
    request = held_request()
    lengths = DraftLengths(StepCosts(), NoProbes())
    teach(lengths, request, 0)
    for _ in range(40):
        lengths.observe(request, "grammar", NUM_DRAFTS, NUM_DRAFTS)
    assert choose(lengths, request) == [0]
    forced = DRAFT._replace(source="grammar")
    assert lengths.choose({request: forced}, 1, 1, 100) == {request: NUM_DRAFTS}


def test_no_more_than_there_is_room_for_the_likeliest_first() -> None:
    good, better = held_request("good"), held_request("better")
    lengths = DraftLengths(make_costs(dict.fromkeys(range(1, 13), 1.0), 2), NoProbes())
    teach(lengths, good, 1)
    teach(lengths, better, NUM_DRAFTS)
    assert choose(lengths, good, better, most=4) == [1, 3], "its second was never accepted"


def test_a_probe_now_and_then_learns_that_drafts_have_become_right() -> None:
    request = held_request()
    lengths = DraftLengths(StepCosts(), random.Random(0))
    teach(lengths, request, 0)
    counts = []
    for _ in range(5000):
        (count,) = choose(lengths, request)
        counts.append(count)
        if count:
            lengths.observe(request, "suffix", count, count)
    first = next(index for index, count in enumerate(counts) if count)
    assert 0 < first < 1000
    assert counts[first] <= 4, "a probe is cheap"
    assert counts[-1] == NUM_DRAFTS


def test_a_probe_may_also_be_a_step_without_drafts() -> None:
    request = held_request()
    lengths = DraftLengths(StepCosts(), OnlyProbes())
    found = {choose(lengths, request)[0] for _ in range(100)}
    assert 0 in found
    assert found <= set(range(NUM_DRAFTS + 1))


def test_what_is_not_measured_is_told_from_what_is() -> None:
    costs = StepCosts()
    typical = [costs.expect(1, rows) for rows in range(1, 20)]
    assert typical == sorted(typical)
    costs.observe(1, 4, 0.02)
    assert costs.expect(1, 4) == pytest.approx(0.02)
    assert costs.expect(1, 6) / costs.expect(1, 4) == pytest.approx(typical[5] / typical[3])
    assert costs.expect(2, 4) == typical[3], "of other numbers of requests it says nothing"


def test_one_slow_step_says_little() -> None:
    costs = StepCosts()
    for duration_s in [0.02] * 20 + [5.0]:
        costs.observe(1, 1, duration_s)
    assert costs.expect(1, 1) < 0.0225
    for _ in range(100):
        costs.observe(1, 1, 0.1)
    assert costs.expect(1, 1) == pytest.approx(0.1, rel=0.05)


# ---- what a draft model is to guess


def guesses(lengths: DraftLengths, *requests: Request, most: int = 100) -> list[int]:
    chosen = lengths.choose_guesses(dict.fromkeys(requests, NUM_DRAFTS), len(requests), most)
    return [chosen.get(request, 0) for request in requests]


def teach_guesses(lengths: DraftLengths, request: Request, num_accepted: int) -> None:
    for _ in range(40):
        lengths.observe(request, "draft_model", NUM_DRAFTS, num_accepted)


class FreeRows(StepCosts):
    def __init__(self, num_requests: int = 1) -> None:
        super().__init__()
        self.observe(num_requests, num_requests, 1.0)

    def expect(self, num_requests: int, num_rows: int) -> float:
        return 1.0


def test_all_are_guessed_until_it_is_known_what_they_cost() -> None:
    lengths = DraftLengths(FreeRows(), NoProbes())
    teach_guesses(lengths, held_request(), 0)
    assert guesses(lengths, held_request()) == [NUM_DRAFTS]
    assert guesses(lengths) == []


@pytest.mark.parametrize(
    ("seconds", "num_accepted", "expected"),
    [
        (0.01, NUM_DRAFTS, NUM_DRAFTS),
        (0.01, 2, 2),
        (0.01, 0, 0),
        # Each brings a token more, and costs more than a step does.
        (1.1, NUM_DRAFTS, 0),
    ],
)
def test_no_more_are_guessed_than_bring_what_they_cost(
    seconds: float, num_accepted: int, expected: int
) -> None:
    request, costs = held_request(), FreeRows()
    costs.observe_guesses(1, NUM_DRAFTS, NUM_DRAFTS * seconds)
    lengths = DraftLengths(costs, NoProbes())
    teach_guesses(lengths, request, num_accepted)
    assert guesses(lengths, request) == [expected]


def test_what_guesses_cost_is_known_from_other_numbers_of_requests() -> None:
    costs = FreeRows(num_requests=4)
    costs.observe_guesses(1, 1, 2.0)
    requests = [held_request(name) for name in "abcd"]
    lengths = DraftLengths(costs, NoProbes())
    for request in requests:
        teach_guesses(lengths, request, 1)
    assert guesses(lengths, *requests) == [0] * 4
    costs.observe_guesses(3, 1, 0.1)
    assert guesses(lengths, *requests) == [1] * 4


def test_none_are_guessed_that_cannot_be_computed() -> None:
    request, costs = held_request(), FreeRows()
    costs.observe_guesses(1, 1, 0.01)
    lengths = DraftLengths(costs, NoProbes())
    teach_guesses(lengths, request, NUM_DRAFTS)
    assert guesses(lengths, request, most=3) == [3]
    assert guesses(lengths, request, most=0) == [0]


def test_a_probe_guesses_all_of_all_or_of_one_where_none_are_worth_it() -> None:
    requests, costs = [held_request(name) for name in "ab"], FreeRows(num_requests=2)
    costs.observe_guesses(2, 1, 0.1)
    lengths = DraftLengths(costs, OnlyProbes())
    for request in requests:
        teach_guesses(lengths, request, 1)
    assert guesses(lengths, *requests) == [NUM_DRAFTS] * 2
    for request in requests:
        teach_guesses(lengths, request, 0)
    assert sorted(guesses(lengths, *requests)) == [0, NUM_DRAFTS]
