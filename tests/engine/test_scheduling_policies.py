"""What decides who computes how much: chunk limits, watermark, V0 mode, pauses, loops."""

import pytest

from pdserve_common.types.engine import FinishReason
from pdserve_common.types.sampling_params import RepetitionDetectionParams, SamplingParams
from pdserve_engine.core import step_planner as planner
from pdserve_engine.core.scheduler import PauseState
from pdserve_engine.request.request_queue import PriorityRequestQueue
from support.scripted_engine import (
    BLOCK_SIZE,
    ON_D,
    Engine,
    decode_engine,
    expected,
    num_requests_alive,
)


def test_a_long_prompt_takes_no_more_than_its_threshold_of_a_step() -> None:
    engine = Engine(
        max_num_batched_tokens=16, long_prefill_token_threshold=6, max_num_partial_prefills=2
    )
    engine.add("long", list(range(20)))
    engine.add("short", [1, 2])
    assert engine.step().num_scheduled_tokens == {"long": 6, "short": 2}
    engine.run()
    assert engine.tokens("long") == expected(list(range(20)), 4)


def test_short_prompts_overtake_a_long_one_that_waits_for_a_place_among_the_partial_ones() -> None:
    engine = Engine(max_num_batched_tokens=16, long_prefill_token_threshold=4)
    for name in ("long-1", "long-2"):
        engine.add(name, [ord(name[-1])] * 12)
    engine.add("short", [1, 2, 3])
    assert engine.step().num_scheduled_tokens == {"long-1": 4, "short": 3}
    assert [request.request_id for request in engine.scheduler.waiting] == ["long-2"]
    engine.step()
    # long-1 reaches its end in this step, so its place goes to long-2.
    assert engine.step().num_scheduled_tokens == {"long-1": 4, "short": 1, "long-2": 4}
    engine.run()


def test_only_so_many_long_prompts_are_overtaken_in_one_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "MAX_SKIPPED", 1)
    engine = Engine(max_num_batched_tokens=16, long_prefill_token_threshold=4)
    for name in ("long-1", "long-2", "long-3"):
        engine.add(name, [ord(name[-1])] * 12)
    engine.add("short", [1, 2, 3])
    step = engine.step()
    assert step is not None
    assert step.num_scheduled_tokens == {"long-1": 4}
    waiting = [request.request_id for request in engine.scheduler.waiting]
    assert waiting == ["long-2", "long-3", "short"]
    engine.run()


def test_admission_leaves_the_watermark_free_unless_nothing_runs() -> None:
    engine = Engine(num_blocks=10, kv_watermark=0.3, enable_caching=False)
    engine.add("big", [1] * 38, max_tokens=1)  # all ten blocks: alone it may have them
    engine.run()
    assert engine.finish_reason("big") == FinishReason.LENGTH
    engine.add("a", [1] * (3 * BLOCK_SIZE), max_tokens=8)
    engine.add("b", [2] * (4 * BLOCK_SIZE), max_tokens=8)
    engine.step()
    # b would fit (3 + 1 reserved + 4 blocks), but leave 2 of 10 free.
    assert [request.request_id for request in engine.scheduler.running] == ["a"]
    engine.run()
    engine.assert_idle()


def test_v0_mode_computes_whole_prompts_apart_from_decodes() -> None:
    prompts = {"a": [1] * 9, "b": [2] * 14, "c": [3] * 3}
    engines = {}
    for mode in ("v0", "v1"):
        engine = engines[mode] = Engine(scheduling_mode=mode, max_num_batched_tokens=20)
        engine.add("a", prompts["a"], max_tokens=6)
        engine.step()
        for name in ("b", "c"):
            engine.add(name, prompts[name], max_tokens=6)
        engine.run()
        for name, prompt in prompts.items():
            assert engine.tokens(name) == expected(prompt, 6)
    for step in engines["v0"].rank.steps:
        is_new = {request.request_id for request in step.scheduled_new_reqs}
        assert not (is_new and set(step.num_scheduled_tokens) - is_new), "both in one step"
        for name in is_new:
            assert step.num_scheduled_tokens[name] == len(prompts[name]), "not whole"
    assert any(
        len({min(count, 2) for count in step.num_scheduled_tokens.values()}) == 2
        for step in engines["v1"].rank.steps
    ), "v1 mixes"


def test_v0_mode_decodes_what_was_pulled() -> None:
    engine = decode_engine(scheduling_mode="v0", max_num_batched_tokens=32)
    engine.add("pulled", [5] * 10, kv_transfer_params=ON_D)
    engine.add("local", [6] * 10)
    engine.consumer.claim("pulled")
    engine.step()
    engine.consumer.finish_load("pulled")
    engine.run()
    assert engine.tokens("pulled") == expected([5] * 10, 4)
    assert engine.tokens("local") == expected([6] * 10, 4)
    engine.assert_idle()


def test_a_paused_engine_takes_requests_and_goes_on_where_it_was() -> None:
    engine = Engine()
    engine.add("running", [1] * 5, max_tokens=8)
    engine.step()
    engine.scheduler.pause_state = PauseState.PAUSED_NEW
    engine.add("new", [2] * 5)
    engine.step()
    assert list(engine.rank.steps[-1].num_scheduled_tokens) == ["running"]
    engine.scheduler.pause_state = PauseState.PAUSED_ALL
    assert not engine.core.has_work()
    engine.scheduler.pause_state = PauseState.UNPAUSED
    engine.run()
    assert engine.tokens("running") == expected([1] * 5, 8)
    assert engine.tokens("new") == expected([2] * 5, 4)


@pytest.mark.parametrize(
    ("output", "is_loop"), [([7, 8, 7, 8, 7, 8], True), ([7, 8, 7, 8, 7], False)]
)
def test_a_loop_ends_a_request(output: list[int], is_loop: bool) -> None:
    engine = Engine()
    params = SamplingParams(
        max_tokens=len(output) + is_loop,
        repetition_detection=RepetitionDetectionParams(
            max_pattern_size=2, min_pattern_size=2, min_count=3
        ),
    )
    engine.add("a", [1, 2, 3], sampling_params=params)
    engine.rank.script["a"] = list(output)
    engine.run()
    wanted = FinishReason.REPETITION if is_loop else FinishReason.LENGTH
    assert engine.finish_reason("a") == wanted
    assert engine.tokens("a") == output


def test_the_queue_knows_its_tokens_through_every_change() -> None:
    for policy in ("fcfs", "priority"):
        engine = Engine(scheduling_policy=policy, max_num_seqs=1)
        for index, name in enumerate("abc"):
            engine.add(name, [index] * (index + 1), priority=-index)
        assert engine.scheduler.waiting.num_tokens == 6
        engine.core.abort_requests(["b"])
        assert engine.scheduler.waiting.num_tokens == 4
        engine.run()
        assert engine.scheduler.waiting.num_tokens == 0


def test_what_left_the_queue_is_not_kept_behind_what_stays() -> None:
    engine = Engine(scheduling_policy="priority")
    engine.add("stays", [1])
    before = num_requests_alive()
    for index in range(1000):
        engine.add(f"{index}", [1], priority=1)
        engine.core.abort_requests([f"{index}"])
    queue = engine.scheduler.waiting
    assert isinstance(queue, PriorityRequestQueue)
    assert len(queue) == 1
    assert num_requests_alive() < before + 100
    engine.run()
    assert engine.tokens("stays") == expected([1], 4)


def test_the_common_prefix_of_the_batch_is_known() -> None:
    engine = Engine(windows=(None, 8), num_blocks=64, max_num_batched_tokens=64)
    shared = [1] * (3 * BLOCK_SIZE)
    engine.add("a", [*shared, 2, 3], max_tokens=8)
    engine.step()
    assert engine.rank.steps[-1].num_common_prefix_blocks == (0, 0), "alone there is none"
    engine.add("b", [*shared, 4], max_tokens=4)
    engine.step()
    assert engine.rank.steps[-1].num_common_prefix_blocks == (3, 0)
    stats = engine.scheduler.make_stats(step_num_tokens=0, step_duration_s=0.0)
    assert stats.num_common_prefix_blocks == 3
    engine.add("c", [5] * 6, max_tokens=2)
    engine.step()
    assert engine.rank.steps[-1].num_common_prefix_blocks == (0, 0)
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_pause_for_what_is_new_lets_preempted_requests_finish(policy: str) -> None:
    engine = Engine(num_blocks=6, enable_caching=False, scheduling_policy=policy)
    for name in ("a", "b"):
        engine.add(name, [ord(name)] * 8, max_tokens=12, priority=1)
    while not engine.scheduler.num_preemptions:
        engine.step()
    engine.scheduler.pause_state = PauseState.PAUSED_NEW
    engine.add("new", [1] * 4, priority=0)
    assert engine.scheduler.has_admitted_requests()
    engine.run()
    for name in ("a", "b"):
        assert engine.tokens(name) == expected([ord(name)] * 8, 12)
    assert not engine.scheduler.has_admitted_requests()
    assert "new" not in engine.outputs
    engine.scheduler.pause_state = PauseState.UNPAUSED
    engine.run()
    assert engine.tokens("new") == expected([1] * 4, 4)
    engine.assert_idle()


def test_a_loop_before_min_tokens_does_not_end_a_request() -> None:
    engine = Engine()
    detection = RepetitionDetectionParams(max_pattern_size=1, min_count=3)
    params = SamplingParams(max_tokens=20, min_tokens=5, repetition_detection=detection)
    engine.add("a", [1, 2, 3], sampling_params=params)
    engine.rank.script["a"] = [7] * 20
    engine.run()
    assert engine.tokens("a") == [7] * 5
    assert engine.finish_reason("a") == FinishReason.REPETITION
