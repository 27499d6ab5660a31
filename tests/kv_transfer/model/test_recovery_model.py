"""A request whose workers fail, and without one of the rules K6 and K7."""

from model_checks import fails, holds
from recovery_model import RecoveryModel


def test_the_client_gets_one_answer_if_its_workers_fail_once() -> None:
    holds(RecoveryModel(max_redrives=1), more_than=5_000)


def test_the_client_gets_one_answer_if_its_workers_fail_twice() -> None:
    holds(RecoveryModel(p_dies=False), more_than=100_000)


def test_without_k6_d_tells_another_story_than_p() -> None:
    found = fails(RecoveryModel(reports_loss=False))
    assert found.what == "a known token came again, and differently"
    assert found.happens("P samples P0", "D falls back alone", "the router takes output D0")


def test_without_k7_a_token_of_p_comes_from_an_attempt_that_was_given_up() -> None:
    found = fails(RecoveryModel(checks_attempt=False))
    assert found.what == "the client has a token of the old attempt 0"
    assert found.happens("P samples P0", "the router retries", "the router takes output P0")


def test_without_k7_a_d_that_was_stopped_goes_on_with_an_attempt_that_was_given_up() -> None:
    found = fails(RecoveryModel(checks_attempt=False, has_p=False))
    assert found.what == "the client has a token of the old attempt 0"
    assert found.happens("D takes attempt 0", "the router retries", "the router takes output D0")


def test_without_k7_the_client_gets_ps_token_twice() -> None:
    found = fails(RecoveryModel(checks_index=False))
    assert found.what == "the client has P0 P0 D0: not one answer"


def test_unless_d_repeats_ps_token_the_loss_of_ps_message_leaves_a_hole() -> None:
    found = fails(RecoveryModel(repeats_first_token=False))
    assert found.what == "token 0 of the answer is missing"
    assert not found.happens("the router takes output P")


def test_unless_d_supersedes_its_own_attempt_the_router_waits_for_ever() -> None:
    found = fails(RecoveryModel(supersedes=False, max_redrives=1))
    assert found.what == "from here no good end can be reached"
    assert found.happens("D takes attempt 0", "the router retries on the same D")
    assert not found.happens("the router retries on the other D")
