"""What plans leave a draft model: the KV of requests that wait for P, and drafts of use."""

import pytest

from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.core.scheduler import PauseState
from pdserve_engine.request.sched_output import DraftPrefill, SchedulerOutput
from support.scripted_engine import BLOCK_SIZE, ON_D, Engine, decode_engine, expected

BUDGET = 16
# 29 tokens: seven blocks and one token.
PROMPT = [7] * 29


@pytest.fixture
def engine() -> Engine:
    return decode_engine(max_num_batched_tokens=BUDGET, num_blocks=64, has_draft_model=True)


def claim(engine: Engine, name: str = "a", **fields: object) -> None:
    """P asks for the blocks of a request; D gives them to it in the next step."""
    engine.add(name, PROMPT, kv_transfer_params=ON_D, **fields)
    engine.consumer.claim(name)


def prefills(engine: Engine) -> list[list[DraftPrefill]]:
    """Those of each step that had any."""
    return [list(step.draft_prefills) for step in engine.rank.steps if step.draft_prefills]


def test_a_request_that_waits_is_computed_in_steps_of_its_own(engine: Engine) -> None:
    claim(engine)
    engine.run()
    first, second = prefills(engine)
    assert [prefill.num_tokens for prefill in (*first, *second)] == [16, 12]
    block_ids = engine.kv.get_block_ids("a")[0]
    assert all(prefill.block_ids == tuple(block_ids) for prefill in (*first, *second))
    assert all(prefill.token_ids == tuple(PROMPT) for prefill in (*first, *second))
    assert not any(step.num_scheduled_tokens for step in engine.rank.steps)
    assert not engine.core.has_work(), "there is nothing left to do"
    engine.consumer.finish_load("a")
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 4)
    assert len(prefills(engine)) == 2
    engine.assert_idle()


def test_steps_that_compute_something_leave_the_rest_of_their_budget(engine: Engine) -> None:
    engine.add("local", [1] * 10, max_tokens=9)
    claim(engine, "a")
    claim(engine, "b")
    while "local" in engine.scheduler.requests:
        engine.step()
    for step in engine.rank.steps:
        num_tokens = sum(prefill.num_tokens for prefill in step.draft_prefills)
        assert num_tokens % BLOCK_SIZE == 0
        assert step.total_num_scheduled_tokens + num_tokens <= BUDGET
    assert sum(prefill.num_tokens for step in prefills(engine) for prefill in step) == 2 * 28
    assert engine.tokens("local") == expected([1] * 10, 9)


def test_nothing_is_computed_while_paused(engine: Engine) -> None:
    claim(engine)
    engine.step()
    num_steps = len(engine.rank.steps)
    engine.scheduler.pause_state = PauseState.PAUSED_ALL
    assert not engine.core.has_work()
    engine.step()
    assert len(engine.rank.steps) == num_steps
    engine.scheduler.pause_state = PauseState.UNPAUSED
    engine.run()
    assert sum(prefill.num_tokens for step in prefills(engine) for prefill in step) == 28


def test_blocks_that_others_needed_are_computed_again() -> None:
    engine = decode_engine(num_blocks=12, has_draft_model=True)
    claim(engine)
    engine.run()
    engine.add("local", [1] * 4, max_tokens=20)
    engine.step()
    while "a" in engine.consumer.loading:
        engine.step()
    engine.run()
    assert engine.tokens("local") == expected([1] * 4, 20)
    assert "a" in engine.consumer.loading, "it has blocks again"
    assert sum(prefill.num_tokens for step in prefills(engine) for prefill in step) == 2 * 28


def test_a_step_that_finds_out_whose_fault_it_is_computes_nothing_else(engine: Engine) -> None:
    for name in ("one", "other"):
        engine.add(name, [1] * 4, max_tokens=3)
    claim(engine)
    num_failures = 0

    def fail(step: SchedulerOutput) -> None:
        nonlocal num_failures
        if len(step.num_scheduled_tokens) == 2 and not num_failures:
            num_failures += 1
            raise RuntimeError("a passing fault")

    engine.rank.on_step = fail
    engine.run()
    failed, *trials = engine.rank.steps
    assert len(failed.num_scheduled_tokens) == 2
    alone = [step for step in trials if len(step.num_scheduled_tokens) == 1][:2]
    assert not any(step.draft_prefills for step in alone)
    assert sum(prefill.num_tokens for step in prefills(engine) for prefill in step) == 28
    for name in ("one", "other"):
        assert engine.tokens(name) == expected([1] * 4, 3)


def test_drafts_are_asked_for_where_a_next_step_may_have_them(engine: Engine) -> None:
    engine.add("a", [1] * 20, max_tokens=6)
    engine.add("b", [2], sampling_params=SamplingParams(max_tokens=9, logits_processors=("x",)))
    engine.run()
    # A block has 4 tokens, so that there are 3 drafts at most. The first chunk brings no token, and
    # behind the last but one no step has more than one.
    steps = [step for step in engine.rank.steps if "a" in step.num_scheduled_tokens]
    assert [step.num_draft_tokens.get("a", 0) for step in steps] == [0, 3, 3, 2, 1, 0, 0]
    assert not any("b" in step.num_draft_tokens for step in engine.rank.steps)


@pytest.mark.parametrize("most", [0, 2, 9])
def test_no_more_drafts_are_asked_for_than_a_request_allows(engine: Engine, most: int) -> None:
    engine.add("a", [1], sampling_params=SamplingParams(max_tokens=9, max_draft_tokens=most))
    engine.run()
    asked = [step.num_draft_tokens.get("a", 0) for step in engine.rank.steps]
    assert max(asked) == min(most, BLOCK_SIZE - 1)


def test_what_the_runner_guesses_is_handed_out_once_and_at_its_place(engine: Engine) -> None:
    engine.add("a", [1] * 3, max_tokens=8)
    engine.step()
    request = engine.scheduler.requests["a"]
    assert request.drafts.spec_token_ids == ()
    request.drafts.spec_token_ids = (5, 6)
    engine.step()
    assert request.drafts.spec_token_ids == (), "a step without new ones takes the old ones away"
