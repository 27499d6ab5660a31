"""Two Ps and two Ds with few blocks, and without one of the rules of grants."""

from dataclasses import replace

import pytest
from grant_model import GrantModel, Request
from model_checks import fails, holds

# P 0 and D 0 are shared by several, and have too little for all of them.
ONCE = GrantModel(
    requests=(
        Request(0, 0, 2),
        Request(0, 0, 1),
        Request(1, 0, 1),
        Request(1, 1, 1),
        Request(0, 1, 1),
    ),
    p_blocks=(2, 1),
    d_blocks=(4, 3),
)
# D 0 can decode two while a third has its grant: growing ones want that back.
AGAIN = GrantModel(
    requests=(Request(0, 0, 2), Request(0, 0, 1), Request(1, 0, 1), Request(1, 1, 1)),
    p_blocks=(2, 1),
    d_blocks=(7, 3),
    recurs=True,
)
# Enough for somebody to starve.
ONE_D = replace(AGAIN, requests=AGAIN.requests[:3])

# Room for all, slots for one of two.
SLOTS = replace(ONCE, requests=ONCE.requests[:4], d_blocks=(20, 20), d_slots=(2, 1))


def test_all_requests_are_served() -> None:
    holds(ONCE, more_than=30_000)


def test_nobody_starves() -> None:
    holds(AGAIN, more_than=10_000)


def test_if_p_starts_before_d_has_reserved_they_wait_for_each_other() -> None:
    two = ONCE.requests[:2]
    found = fails(replace(ONCE, requests=two, grants_first=False))
    assert found.what == "from here no good end can be reached"
    assert found.happens("D grants 0", "P starts without a grant 1")


def test_unless_a_grant_leaves_room_for_the_next_token_full_prompts_block_each_other() -> None:
    three = ONCE.requests[:3]
    found = fails(replace(ONCE, requests=three, reserves_next_block=False))
    assert found.what == "from here no good end can be reached"
    assert found.happens("D grants 0", "D grants 1", "D grants 2")


def test_unless_d_keeps_claims_small_requests_starve_a_large_one() -> None:
    found = fails(replace(ONE_D, keeps_claims=False))
    assert "starves" in found.what
    assert found.happens("D has no room and forgets")


def test_unless_preempted_requests_come_first_claims_starve_them() -> None:
    found = fails(replace(ONE_D, resumes_first=False))
    assert "starves" in found.what
    assert found.happens("D preempts", "D grants", "D grants")


def test_without_revocation_running_requests_give_way_and_all_are_served() -> None:
    """Nothing waits for a revocation: it spares those that run."""
    holds(replace(ONE_D, revokes=False), more_than=2_000)
    once = replace(ONCE, requests=ONCE.requests[:4], d_blocks=ONE_D.d_blocks)
    holds(replace(once, revokes=False), more_than=5_000)


def test_a_grant_with_a_slot_has_nobody_wait_behind_its_first_token() -> None:
    holds(replace(SLOTS, wants_slot_at_once=True), more_than=1_000)


def test_unless_a_slot_is_in_sight_a_grant_has_a_client_wait_behind_its_first_token() -> None:
    found = fails(replace(SLOTS, wants_slot_at_once=True, slots_first=False))
    assert "waits behind its first token" in found.what


@pytest.mark.parametrize("num_in_sight", [0, 1])
def test_with_few_slots_and_few_blocks_all_are_served(num_in_sight: int) -> None:
    holds(replace(ONCE, d_slots=(1, 1), num_in_sight=num_in_sight), more_than=5_000)
    for d_slots in ((1, 1), (2, 1)):
        holds(replace(AGAIN, d_slots=d_slots, num_in_sight=num_in_sight), more_than=1_000)
