"""Steps with drafts: what counts of them, and what is left of those that do not."""

from collections.abc import Callable, Mapping

import pytest

from pdserve_common.types.engine import DraftStats, FinishReason
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.core.features import drafts as core_drafts
from pdserve_engine.core.step_plan import DECODE, StepPlan
from pdserve_engine.request.progress import ScheduledTokens
from pdserve_engine.request.request import Request
from pdserve_engine.request.sched_output import ModelRunnerOutput, SchedulerOutput
from pdserve_engine.spec_decode.draft_lengths import DraftLengths, StepCosts
from pdserve_engine.spec_decode.proposer import Draft
from support.drafts import lengths_chosen_by
from support.requests import held_request
from support.scripted_engine import BLOCK_SIZE, ON_P, Engine, ScriptedProducer, expected

PROMPT = [5] * 6
WRONG = 499


class Scripted:
    """Proposes what a function says of each request."""

    def __init__(self, draft: Callable[[Request, int], list[int]]) -> None:
        self._draft = draft

    def propose(self, candidates: Mapping[Request, int]) -> Mapping[Request, Draft]:
        return {r: Draft("suffix", self._draft(r, limit)) for r, limit in candidates.items()}


def right(request: Request, limit: int) -> list[int]:
    return expected(list(request.all_token_ids), limit)


def wrong_at(index: int) -> Callable[[Request, int], list[int]]:
    def draft(request: Request, limit: int) -> list[int]:
        tokens = right(request, limit)
        tokens[index : index + 1] = [WRONG]
        return tokens[:limit]

    return draft


def make_engine(draft: Callable[[Request, int], list[int]] = right, **options: object) -> Engine:
    return Engine(proposer=Scripted(draft), **options)  # type: ignore[arg-type]


def num_drafts(step: SchedulerOutput) -> dict[str, int]:
    return {name: len(ids) for name, ids in step.scheduled_spec_decode_tokens.items()}


def steps_with_drafts(engine: Engine) -> list[SchedulerOutput]:
    return [step for step in engine.rank.steps if step.scheduled_spec_decode_tokens]


def test_right_drafts_bring_a_block_of_tokens_a_step() -> None:
    engine = make_engine()
    engine.add("a", PROMPT, max_tokens=9)
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 9)
    computed = [step.num_scheduled_tokens["a"] for step in engine.rank.steps[:3]]
    # Drafts are fewer than a block has tokens.
    assert computed == [6, BLOCK_SIZE, BLOCK_SIZE]
    assert len(engine.rank.steps) == 4, "and one that tells of its end"
    engine.assert_idle()


@pytest.mark.parametrize("index", [0, 1, 2])
def test_tokens_count_up_to_the_first_that_differs_from_its_draft(index: int) -> None:
    engine = make_engine(wrong_at(index))
    engine.add("a", PROMPT, max_tokens=20)
    engine.step()
    engine.step()
    assert len(engine.tokens("a")) == 1 + index + 1
    (request,) = engine.scheduler.running
    progress = request.progress
    assert progress.num_computed_tokens == progress.num_finished_tokens == request.num_tokens - 1
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 20)
    engine.assert_idle()


def test_a_stop_in_mid_run_drops_what_follows() -> None:
    stop = expected(PROMPT, 3)[-1]
    engine = make_engine()
    params = SamplingParams(max_tokens=20, stop_token_ids=(stop,))
    engine.add("a", PROMPT, sampling_params=params)
    engine.run()
    answer = expected(PROMPT, 20)
    assert engine.tokens("a") == answer[: answer.index(stop) + 1]
    assert engine.finish_reason("a") is FinishReason.STOP
    assert engine.outputs["a"][-1].finished
    engine.assert_idle()


def test_drafts_give_way_before_anything_else_does() -> None:
    # A chunk of another's prompt takes what the budget has.
    engine = make_engine(max_num_batched_tokens=6)
    engine.add("a", PROMPT, max_tokens=12)
    engine.step()
    engine.add("b", [6] * 12, max_tokens=2)
    step = engine.step()
    assert step is not None
    assert step.num_scheduled_tokens == {"a": 1, "b": 5}
    # In a pool without a spare block they take none.
    engine = make_engine(num_blocks=5, max_num_seqs=2)
    for name in ("a", "b"):
        engine.add(name, [ord(name)] * 7, max_tokens=8)
    engine.run()
    for name in ("a", "b"):
        assert engine.tokens(name) == expected([ord(name)] * 7, 8)
    with_drafts = max(map(len, map(num_drafts, engine.rank.steps)))
    assert with_drafts, "while there was room"
    engine.assert_idle()


@pytest.mark.parametrize(("num_blocks", "has_drafts"), [(4, False), (5, True)])
def test_drafts_leave_a_block_for_each_request_and_one_more(
    num_blocks: int, *, has_drafts: bool
) -> None:
    engine = make_engine(num_blocks=num_blocks)
    engine.add("a", PROMPT, max_tokens=9)
    engine.step()
    step = engine.step()
    assert step is not None
    # It has two blocks, and needs one more for its drafts.
    assert bool(num_drafts(step)) == has_drafts
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 9)


def test_there_are_no_more_rows_of_logits_than_places_in_the_batch() -> None:
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=64)
    for name in "abcd":
        engine.add(name, [ord(name)] * 3, max_tokens=12)
    engine.run()
    max_rows = engine.scheduler.config.max_batch_size
    assert steps_with_drafts(engine)
    for step in steps_with_drafts(engine):
        assert sum(step.num_scheduled_tokens.values()) <= max_rows


def test_a_request_at_its_prefill_worker_has_none() -> None:
    engine = make_engine(producer=ScriptedProducer())
    engine.add("a", PROMPT, max_tokens=9, kv_transfer_params=ON_P)
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 1)
    assert not steps_with_drafts(engine)


def test_a_prompt_has_none_before_all_of_it_is_computed() -> None:
    engine = make_engine(long_prefill_token_threshold=4)
    engine.add("a", [5] * 14, max_tokens=4)
    engine.run()
    computed = [step.num_scheduled_tokens["a"] for step in engine.rank.steps[:4]]
    assert computed == [4, 4, 4, 2 + 3]
    assert [num_drafts(step) for step in steps_with_drafts(engine)] == [{"a": 3}]
    assert engine.tokens("a") == expected([5] * 14, 4)


def test_a_request_with_logits_processors_has_none() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=9, logits_processors=("name",))
    engine.add("a", PROMPT, sampling_params=params)
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 9)
    assert not steps_with_drafts(engine)


def test_with_async_scheduling_nothing_is_planned_ahead_of_drafts() -> None:
    engine = make_engine(async_scheduling=True)
    engine.add("a", PROMPT, max_tokens=12)
    while engine.core.has_work():
        engine.pretend_last_step(0.0)
        engine.step()
        assert len(engine.scheduler.in_flight) <= 1
    assert engine.tokens("a") == expected(PROMPT, 12)
    assert steps_with_drafts(engine)
    engine.core.close()
    engine.assert_idle()


def test_a_step_that_failed_leaves_no_trace_of_its_drafts() -> None:
    engine = make_engine()
    for name in ("a", "b"):
        engine.add(name, [ord(name)] * 6, max_tokens=12)
    faults = [RuntimeError("a passing fault")]

    def fail_once(step: SchedulerOutput) -> None:
        if step.scheduled_spec_decode_tokens and faults:
            raise faults.pop()

    engine.rank.on_step = fail_once
    while faults:
        engine.step()
    for request in engine.scheduler.requests.values():
        progress = request.progress
        assert not progress.is_length_open
        assert progress.num_computed_tokens == progress.num_output_placeholders == 0
    engine.run()
    for name in ("a", "b"):
        assert engine.tokens(name) == expected([ord(name)] * 6, 12)
    engine.assert_idle()


@pytest.mark.parametrize("asked", [0, 1, 2, 1000])
def test_a_request_says_how_many_it_wants_at_most(asked: int) -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=12, max_draft_tokens=asked)
    engine.add("a", PROMPT, sampling_params=params)
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 12)
    most = max((num_drafts(step).get("a", 0) for step in engine.rank.steps), default=0)
    assert most == min(asked, BLOCK_SIZE - 1)


def test_outputs_tell_what_has_come_of_drafts() -> None:
    engine = make_engine(wrong_at(2))
    engine.add("a", PROMPT, max_tokens=8)
    engine.run()
    stats = [each for output in engine.outputs["a"] for each in output.draft_stats]
    assert stats[0] == DraftStats(source="suffix", num_draft_tokens=3, num_accepted_tokens=2)
    num_accepted = sum(each.num_accepted_tokens for each in stats)
    assert num_accepted == 8 - len(engine.outputs["a"])
    drafts = [sum(num_drafts(step).values()) for step in steps_with_drafts(engine)]
    assert [each.num_draft_tokens for each in stats] == drafts


def test_a_draft_that_is_the_end_counts_as_accepted() -> None:
    engine = make_engine()
    engine.add(
        "a",
        PROMPT,
        sampling_params=SamplingParams(
            max_tokens=20, stop_token_ids=(expected(PROMPT, 2)[-1],), min_tokens=0
        ),
    )
    engine.run()
    (stats,) = engine.outputs["a"][-1].draft_stats
    assert len(engine.tokens("a")) == 2
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 1)


def make_drafts(engine: Engine) -> core_drafts.Drafts:
    """Of nobody's scheduler."""
    return core_drafts.Drafts(engine.scheduler.config, engine.kv, Scripted(right))


def test_costs_are_those_of_steps_without_prompts_and_without_a_draft_model_s_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = RecordedCosts()
    monkeypatch.setattr(core_drafts, "StepCosts", lambda: costs)
    drafts = make_drafts(make_engine())
    a, b = held_request("a"), held_request("b")
    output = ModelRunnerOutput(draft_token_ids={"a": (1, 2, 3), "b": (4,)}, drafting_s=0.5)
    step = {a: ScheduledTokens(4, 4, "draft_model"), b: DECODE}
    drafts.observe_step(step, output, 2.0)
    assert costs.seen == [("step", 2, 5, 1.5), ("guesses", 2, 3, 0.5)]
    drafts.observe_step(step, ModelRunnerOutput(), 2.0)
    assert costs.seen[2:] == [("step", 2, 5, 2.0)]
    drafts.observe_step({a: ScheduledTokens(7, 1), b: DECODE}, output, 2.0)
    drafts.observe_step({}, output, 2.0)
    assert len(costs.seen) == 3


def test_lengths_are_chosen_by_all_rows_of_a_step() -> None:
    asked: list[tuple[int, int, int]] = []

    class Lengths(DraftLengths):
        def choose(
            self, drafts: Mapping[Request, Draft], num_requests: int, num_rows: int, most: int
        ) -> dict[Request, int]:
            asked.append((num_requests, num_rows, most))
            return {}

    engine = make_engine(long_prefill_token_threshold=4, draft_lengths=Lengths)
    engine.add("a", PROMPT[:3], max_tokens=9)
    engine.step()
    engine.add("b", [6] * 12, max_tokens=2)
    engine.step()
    # A decode beside four tokens of a prompt, in a step of 16.
    max_rows = engine.scheduler.config.max_batch_size
    assert asked == [(1, 5, min(16 - 5, max_rows - 1))]


def test_a_draft_model_guesses_for_rows_that_no_request_needs() -> None:
    engine = make_engine(max_num_seqs=6)
    asked: list[tuple[int, int]] = []

    class Lengths(DraftLengths):
        def choose_guesses(
            self, limits: Mapping[Request, int], num_requests: int, most: int
        ) -> dict[Request, int]:
            asked.append((num_requests, most))
            return {}

    with lengths_chosen_by(Lengths):
        drafts = make_drafts(engine)
    a, b, c = map(held_request, "abc")
    plan = StepPlan(token_budget=4)
    plan.scheduled = {a: DECODE, b: ScheduledTokens(4, 0), c: ScheduledTokens(7, 1)}
    drafts.choose_guesses({a: 3}, plan)
    assert asked == [(2, engine.scheduler.config.max_batch_size - 2)]


class RecordedCosts(StepCosts):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, int, float]] = []

    def observe(self, num_requests: int, num_rows: int, duration_s: float) -> None:
        self.seen.append(("step", num_requests, num_rows, duration_s))

    def observe_guesses(self, num_requests: int, num_drafts: int, duration_s: float) -> None:
        self.seen.append(("guesses", num_requests, num_drafts, duration_s))
