"""The scheduler alone, step by step."""

import time

import pytest

from pdserve_common.types.engine import (
    ErrorCode,
    FinishReason,
    KVTransferParams,
    LogprobsLists,
)
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.request.sched_output import ModelRunnerOutput, SchedulerOutput
from support.clock import Clock
from support.scripted_engine import (
    MAX_MODEL_LEN,
    ON_D,
    ON_P,
    Engine,
    ScriptedProducer,
    decode_engine,
    expected,
    num_requests_alive,
)


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    engine = Engine(max_num_batched_tokens=5)
    prompt = list(range(12))
    engine.add("a", prompt, max_tokens=2)
    sizes = []
    while engine.core.has_work():
        sizes.append(engine.step().total_num_scheduled_tokens)
    assert sizes[:4] == [5, 5, 2, 1]
    assert engine.tokens("a") == expected(prompt, 2)
    engine.assert_idle()


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_holds_it_whole() -> None:
    engine = Engine(max_num_batched_tokens=16, enable_chunked_prefill=False)
    engine.add("a", list(range(10)), max_tokens=3)
    engine.add("b", list(range(100, 110)), max_tokens=3)
    assert engine.step().num_scheduled_tokens == {"a": 10}
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 10}
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize(
    ("num_tokens", "salts", "num_computed"),
    [
        (10, ("", ""), 2),
        # The last token is computed, and with it its block.
        (8, ("", ""), 4),
        (8, ("one", "two"), 8),
    ],
)
def test_a_shared_prefix_is_computed_once(
    num_tokens: int, salts: tuple[str, str], num_computed: int
) -> None:
    engine = Engine()
    prompt = list(range(num_tokens))
    for name, salt in zip("ab", salts, strict=True):
        engine.add(name, prompt, cache_salt=salt)
        step = engine.step()
        engine.run()
    assert step.num_scheduled_tokens == {"b": num_computed}
    assert engine.tokens("a") == engine.tokens("b") == expected(prompt, 4)
    stats = engine.outputs["b"][0].prefill_stats
    assert stats is not None
    assert stats.num_cached_tokens == num_tokens - num_computed


def test_lower_priority_numbers_go_first_and_are_preempted_last() -> None:
    engine = Engine(
        num_blocks=8, max_num_seqs=2, scheduling_policy="priority", enable_caching=False
    )
    engine.add("late", list(range(8)), max_tokens=16, priority=5)
    engine.add("early", list(range(20, 28)), max_tokens=16, priority=-1)
    assert list(engine.step().num_scheduled_tokens) == ["early", "late"]
    engine.run()
    finished = [rid for rid, outs in engine.outputs.items() if outs[-1].finished]
    assert set(finished) == {"early", "late"}
    preempted = set().union(*(step.preempted_req_ids for step in engine.rank.steps))
    assert preempted == {"late"}


@pytest.mark.parametrize(
    ("params", "num_tokens", "reason"),
    [
        (SamplingParams(max_tokens=3), 3, FinishReason.LENGTH),
        (SamplingParams(max_tokens=None), MAX_MODEL_LEN - 3, FinishReason.LENGTH),
        (SamplingParams(max_tokens=20, stop_token_ids=(0,)), None, FinishReason.STOP),
        (SamplingParams(max_tokens=20, stop_token_ids=(0,), min_tokens=7), None, FinishReason.STOP),
    ],
)
def test_a_request_stops_where_its_parameters_say(
    params: SamplingParams, num_tokens: int | None, reason: FinishReason
) -> None:
    whole = expected([5, 6, 7], 20)
    if num_tokens is None:
        # Stop at the token that comes fifth, or, with min_tokens, let it pass.
        stop = whole[4]
        params = SamplingParams(
            max_tokens=20, stop_token_ids=(stop, whole[8]), min_tokens=params.min_tokens
        )
        num_tokens = 5 if params.min_tokens < 5 else 9
    engine = Engine()
    engine.add("a", [5, 6, 7], sampling_params=params)
    engine.run()
    assert engine.finish_reason("a") == reason
    assert engine.tokens("a") == expected([5, 6, 7], num_tokens)


def test_a_passed_deadline_ends_the_request_with_a_typed_error(clock: Clock) -> None:
    engine = Engine(clock=clock)
    engine.add("a", [1, 2, 3], max_tokens=50, deadline=clock.now_s + 10)
    engine.step()
    assert engine.scheduler.next_deadline() == clock.now_s + 10
    clock.now_s += 11
    engine.run()
    assert engine.outputs["a"][-1].error.code == ErrorCode.DEADLINE_EXCEEDED
    engine.assert_idle()


def test_a_deadline_ends_only_the_request_it_came_with(clock: Clock) -> None:
    engine = Engine(clock=clock)
    engine.add("a", [1, 2, 3], max_tokens=1, deadline=clock.now_s + 10)
    engine.run()
    engine.add("a", [1, 2, 3], max_tokens=50, deadline=clock.now_s + 100)
    clock.now_s += 11
    engine.run()
    assert engine.outputs["a"][-1].finish_reason == FinishReason.LENGTH


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    engine = Engine()
    before = num_requests_alive()
    for index in range(500):
        engine.add(str(index), [1, 2], max_tokens=1, deadline=time.monotonic() + 100 + index)
        engine.core.abort_requests([str(index)])
    assert num_requests_alive() < before + 100


def test_a_step_that_only_preempts_is_worth_another() -> None:
    """Or the engine would wait for an event although its blocks would let others run."""
    engine = Engine(num_blocks=4, max_num_seqs=1, enable_caching=False)
    engine.add("a", [1] * 8, max_tokens=8)
    engine.step()
    engine.pool.get_new_blocks(engine.pool.num_free_blocks)
    result = engine.core.step()
    assert not result.has_computed
    assert result.has_progressed


def test_nan_logits_fail_only_their_request() -> None:
    engine = Engine()
    engine.add("bad", [1, 2], max_tokens=5)
    engine.add("good", [3, 4], max_tokens=5)
    engine.rank.num_nans = {"bad": 7}
    engine.run()
    assert engine.finish_reason("bad") == FinishReason.ERROR
    assert engine.outputs["bad"][-1].num_nans_in_logits == 7
    assert engine.tokens("good") == expected([3, 4], 5)
    engine.assert_idle()


def test_a_prefill_worker_stops_after_the_first_token_and_keeps_the_blocks_until_released() -> None:
    producer = ScriptedProducer()
    engine = Engine(producer=producer)
    prompt = list(range(10))
    engine.add("a", prompt, max_tokens=8, kv_transfer_params=ON_P)
    engine.run()
    assert engine.tokens("a") == expected(prompt, 1)
    last = engine.outputs["a"][-1]
    assert last.finish_reason == FinishReason.LENGTH
    assert last.kv_transfer_params == ON_P
    assert engine.pool.num_free_blocks == engine.pool.num_blocks - 3
    producer.release("a")
    engine.step()
    engine.assert_idle()


def test_a_prefill_that_ends_for_good_is_not_handed_off() -> None:
    producer = ScriptedProducer()
    engine = Engine(producer=producer)
    (first,) = expected([1, 2, 3], 1)
    params = SamplingParams(max_tokens=8, stop_token_ids=(first,))
    engine.add("a", [1, 2, 3], sampling_params=params, kv_transfer_params=ON_P)
    engine.run()
    assert engine.finish_reason("a") == FinishReason.STOP
    assert engine.outputs["a"][-1].kv_transfer_params is None
    engine.assert_idle()


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 10])
def test_a_decode_worker_goes_on_after_the_transferred_token_and_repeats_it_first(
    prompt_len: int,
) -> None:
    engine = decode_engine()
    prompt = list(range(prompt_len))
    engine.add("a", prompt, max_tokens=6, kv_transfer_params=ON_D)
    engine.step()
    engine.consumer.claim("a")
    engine.step()
    engine.step()
    assert engine.consumer.loading["a"][1] == prompt_len
    assert not engine.core.has_work()
    engine.consumer.finish_load("a")
    engine.step()
    engine.run()
    assert engine.tokens("a") == expected(prompt, 6)
    assert engine.outputs["a"][0].new_token_ids == tuple(expected(prompt, 2))
    assert engine.outputs["a"][0].kv_transfer_stats is not None
    computed = sum(step.total_num_scheduled_tokens for step in engine.rank.steps)
    assert computed == 5, "no prompt token is computed on D"
    engine.assert_idle()


@pytest.mark.parametrize("params", [ON_P, ON_D], ids=["P", "D"])
def test_a_worker_without_a_connector_refuses_a_handoff(params: KVTransferParams) -> None:
    engine = Engine()
    engine.add("a", [1, 2], kv_transfer_params=params)
    engine.step()
    assert engine.outputs["a"][-1].error.code == ErrorCode.INVALID_ARGUMENT
    engine.assert_idle()


def test_a_preempted_request_goes_on_before_those_that_came_after_it() -> None:
    engine = Engine(num_blocks=6, max_num_seqs=2, enable_caching=False)
    for name in "abc":
        engine.add(name, [ord(name)] * 8, max_tokens=12)
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert [request.request_id for request in engine.scheduler.waiting] == ["b", "c"]
    assert engine.scheduler.num_preemptions == 1
    engine.run()
    for name in "abc":
        assert engine.tokens(name) == expected([ord(name)] * 8, 12)
    engine.assert_idle()


def test_the_logprobs_of_a_prompt_are_told_once_though_it_is_computed_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(max_num_batched_tokens=4)
    execute = engine.rank.execute_model

    def execute_with_logprobs(step: SchedulerOutput) -> ModelRunnerOutput:
        output = execute(step)
        for name, num_tokens in step.num_scheduled_tokens.items():
            start = engine.rank.num_computed[name] - num_tokens
            output.prompt_logprobs[name] = LogprobsLists(
                logprob_token_ids=tuple((start + i,) for i in range(num_tokens)),
                logprobs=((-1.0,),) * num_tokens,
                sampled_token_ranks=(1,) * num_tokens,
            )
        return output

    monkeypatch.setattr(engine.rank, "execute_model", execute_with_logprobs)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    engine.add("a", list(range(12)), sampling_params=params)
    engine.step()
    engine.step()
    engine.scheduler.containers.preempt(engine.scheduler.requests["a"])
    engine.run()
    told = [output.new_prompt_logprobs for output in engine.outputs["a"]]
    assert [lists and lists.logprob_token_ids[0] for lists in told] == [(0,), (4,), (8,)]
