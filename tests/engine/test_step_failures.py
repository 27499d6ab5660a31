"""A step that raises: only the requests it can be pinned on fail."""

import json
import logging
import threading

import pytest

from pdserve_common.errors import InvalidRequestError, RequestFailedError
from pdserve_common.limits.validation import validate_request_id
from pdserve_common.types.engine import ErrorCode, ErrorFault, FinishReason
from pdserve_engine.core.engine_core import MAX_FAILURES_IN_A_ROW, PROBE_ID
from pdserve_engine.request.sched_output import SchedulerOutput
from support.scripted_engine import BLOCK_SIZE, ON_D, Engine, decode_engine, expected


def fail_on(engine: Engine, *poisonous: str) -> None:
    def check(step: SchedulerOutput) -> None:
        bad = [name for name in poisonous if name in step.num_scheduled_tokens]
        if bad:
            raise RuntimeError(f"cannot compute {bad}")

    engine.rank.on_step = check


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_only_the_poisonous_request_fails(
    async_scheduling: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(async_scheduling=async_scheduling, max_num_batched_tokens=32)
    names = ["a", "bad", "c", "d"]
    for name in names:
        engine.add(name, [ord(name[0])] * 6, max_tokens=8)
    fail_on(engine, "bad")
    with caplog.at_level(logging.ERROR):
        engine.run()
    assert engine.finish_reason("bad") == FinishReason.ERROR
    error = engine.outputs["bad"][-1].error
    assert error is not None
    assert error.code == ErrorCode.INTERNAL
    assert "cannot compute" in error.message
    for name in ("a", "c", "d"):
        assert engine.tokens(name) == expected([ord(name)] * 6, 8)
    dump = json.loads(caplog.messages[0].split("it was ")[1])
    assert dump["num_scheduled_tokens"].keys() == set(names)
    engine.assert_idle()
    engine.core.close()


def test_a_request_that_turns_bad_in_mid_answer_keeps_the_tokens_it_had() -> None:
    engine = Engine()
    for name in ("a", "bad"):
        engine.add(name, [ord(name[0])] * 6, max_tokens=8)
    for _ in range(4):
        engine.step()
    fail_on(engine, "bad")
    engine.run()
    assert engine.tokens("bad") == expected([ord("b")] * 6, 4)
    assert engine.finish_reason("bad") == FinishReason.ERROR
    assert engine.tokens("a") == expected([ord("a")] * 6, 8)
    engine.assert_idle()


def test_an_engine_whose_every_step_fails_dies() -> None:
    engine = Engine()
    for index in range(2 * MAX_FAILURES_IN_A_ROW):
        engine.add(str(index), [index] * 6)

    def fail(step: SchedulerOutput) -> None:
        raise RuntimeError("no device")

    engine.rank.on_step = fail
    with pytest.raises(RuntimeError, match="no device"):
        engine.run()
    assert len(engine.rank.steps) == MAX_FAILURES_IN_A_ROW + 1
    assert engine.rank.steps[-1].num_scheduled_tokens == {PROBE_ID: 1}


def test_any_number_of_bad_requests_leaves_the_engine_and_the_others_alive() -> None:
    engine = Engine(max_num_seqs=16, max_num_batched_tokens=64)
    bad = [f"bad-{index}" for index in range(3 * MAX_FAILURES_IN_A_ROW)]
    engine.add("good", [1, 2, 3], max_tokens=30)
    engine.step()
    fail_on(engine, *bad)
    for index, name in enumerate(bad):
        engine.add(name, [index] * 4)
    engine.run()
    assert {engine.finish_reason(name) for name in bad} == {FinishReason.ERROR}
    assert engine.tokens("good") == expected([1, 2, 3], 30)
    assert PROBE_ID not in engine.outputs
    engine.assert_idle()


def test_a_probe_that_waits_for_a_block_decides_when_there_is_one() -> None:
    engine = decode_engine(num_blocks=64, max_num_seqs=1)
    engine.scheduler.containers.decode_slots.may_grant = lambda *_: (
        True
    )  # more than there are slots
    engine.add("local", [1] * 4, max_tokens=30, attempt=1)  # which need not leave them its own
    pulls = [f"d{index}" for index in range(3 * MAX_FAILURES_IN_A_ROW)]
    for name in pulls:
        engine.add(name, [int(name[1:])] * 3, kv_transfer_params=ON_D)
        engine.consumer.claim(name)
    engine.step()
    for name in pulls:
        engine.consumer.land_all(name)
    engine.step()
    engine.core.abort_requests(["local"])
    engine.pool.get_new_blocks(engine.pool.num_free_blocks - len(pulls))  # READs hang in them

    def fail(step: SchedulerOutput) -> None:
        if step.num_scheduled_tokens:
            raise RuntimeError("no device")

    engine.rank.on_step = fail
    for _ in range(2 * len(pulls)):
        engine.step()
    failed = [name for step in engine.rank.steps[2:] for name in step.num_scheduled_tokens]
    assert failed == pulls, "the probe waits: a block more is reserved for each of them"
    engine.core.abort_requests(pulls)
    with pytest.raises(RuntimeError, match="no device"):
        engine.step()
    assert engine.rank.steps[-1].num_scheduled_tokens == {PROBE_ID: 1}


def test_no_front_end_can_name_a_request_as_the_engines_own() -> None:
    with pytest.raises(InvalidRequestError):
        validate_request_id(PROBE_ID)
    engine = Engine()
    engine.add("engine-probe", [1] * 4)
    fail_on(engine, "engine-probe")
    engine.run()
    assert engine.finish_reason("engine-probe") == FinishReason.ERROR


def test_an_isolated_request_that_ends_leaves_the_others_isolated() -> None:
    engine = Engine()
    for name in ("a", "b", "c"):
        engine.add(name, [ord(name)] * 4)
    fail_in_flight(engine)
    assert fail_in_flight(engine, "a") == {"a"}
    assert engine.scheduler.schedule().num_scheduled_tokens.keys() == {"b"}


def fail_in_flight(engine: Engine, *aborted: str) -> set[str]:
    """Let the next step fail, in the midst of which some of its requests are aborted."""
    step = engine.scheduler.schedule()
    engine.core.abort_requests(aborted)
    engine.scheduler.discard_steps([step], "a passing fault")
    return set(step.num_scheduled_tokens)


def test_nothing_is_computed_behind_a_failed_step() -> None:
    engine = Engine(async_scheduling=True)
    engine.pretend_last_step(0.0)
    gate = threading.Event()
    num_computed = 0

    def fail_once(step: SchedulerOutput) -> None:
        nonlocal num_computed
        assert gate.wait(60)
        num_computed += 1
        if num_computed == 1:
            raise RuntimeError("a passing fault")

    engine.rank.on_step = fail_once
    for name in ("a", "b"):
        engine.add(name, [ord(name)] * 6, max_tokens=8)
    engine.step()
    engine.core._submit(engine.scheduler.schedule())  # planned while the first one runs
    gate.set()
    engine.step()
    assert num_computed == 1, "the step in flight behind the failed one ran"
    engine.run()
    for name in ("a", "b"):
        assert engine.tokens(name) == expected([ord(name)] * 6, 8)
    engine.assert_idle()
    engine.core.close()


def test_an_isolated_request_waits_for_a_slot_in_the_batch() -> None:
    engine = decode_engine(max_num_seqs=2, enable_caching=False, num_blocks=12)
    for name in ("a", "b"):
        engine.add(name, [ord(name)] * 6, max_tokens=20)
    for name in ("d1", "d2"):
        engine.add(name, [ord(name[1])] * 10, max_tokens=12, kv_transfer_params=ON_D)
        engine.consumer.claim(name)
    engine.step()
    engine.step()
    for name in list(engine.consumer.loading):
        engine.consumer.finish_load(name)
    num_failures = 0

    def fail_twice(step: SchedulerOutput) -> None:
        nonlocal num_failures
        if len(step.num_scheduled_tokens) > 1 and num_failures < 2:
            num_failures += 1
            raise RuntimeError("a passing fault")

    engine.rank.on_step = fail_twice
    while engine.scheduler.has_requests():
        engine.step()
        assert len(engine.scheduler.running) <= 2
        for name in list(engine.consumer.loading):
            engine.consumer.finish_load(name)
    assert num_failures == 2
    for name in ("a", "b"):
        assert engine.tokens(name) == expected([ord(name)] * 6, 20)


def test_isolated_requests_that_wait_for_room_stay_so_when_others_fail() -> None:
    engine = decode_engine(max_num_seqs=2, kv_watermark=0.5, num_blocks=16)
    for name in ("d1", "d2"):
        engine.add(name, [ord(name[1])] * 4, max_tokens=8, kv_transfer_params=ON_D)
        engine.consumer.claim(name)
    engine.step()
    # Sent again: they need not leave the slots to those that have been promised them.
    for name in ("a", "b"):
        engine.add(name, [ord(name)] * 4, max_tokens=20, attempt=1)
    while engine.scheduler.requests.keys() >= {"a", "b"} and (
        engine.scheduler.requests["a"].num_tokens < 20
    ):
        engine.step()
    for name in ("d1", "d2"):
        engine.consumer.finish_load(name)
    assert fail_in_flight(engine) == {"a", "b"}
    assert fail_in_flight(engine) == {"d1", "d2"}
    assert len(engine.scheduler.containers.isolated) == 4
    assert fail_in_flight(engine, "a") == {"a"}
    assert fail_in_flight(engine, "b") == {"b"}
    engine.run()
    assert engine.tokens("d1") == expected([ord("1")] * 4, 8)
    engine.assert_idle()


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_nobody_shares_blocks_that_led_to_nan_logits(windows: tuple[int | None, ...]) -> None:
    prompt = [1] * (3 * BLOCK_SIZE + 1)
    engine = Engine(windows=windows)
    engine.add("other", prompt[: 2 * BLOCK_SIZE], max_tokens=6)
    engine.run()
    engine.rank.num_nans["a"] = 3
    engine.add("a", prompt)
    engine.add("fork", prompt, fork_of="a")
    assert engine.step().num_scheduled_tokens == {"a": len(prompt) - 2 * BLOCK_SIZE}
    assert engine.finish_reason("a") == FinishReason.ERROR
    assert engine.step().num_scheduled_tokens == {"fork": len(prompt)}, "nothing is of use to it"
    engine.run()
    assert engine.tokens("fork") == expected(prompt, 4)
    engine.add("b", prompt)
    assert engine.step().num_scheduled_tokens == {"b": 1}, "what is right is shared again"
    engine.run()
    engine.assert_idle()


def test_a_fork_with_nan_logits_takes_its_sources_blocks_from_the_cache() -> None:
    prompt = [1] * (3 * BLOCK_SIZE + 1)
    engine = Engine()
    engine.add("a", prompt)
    engine.step()
    engine.add("fork", prompt, fork_of="a")
    engine.rank.num_nans["fork"] = 3
    engine.step()
    assert engine.finish_reason("fork") == FinishReason.ERROR
    engine.add("b", prompt)
    assert engine.step().num_scheduled_tokens["b"] == len(prompt), "nothing is of use to it"
    engine.run()
    assert engine.tokens("b") == expected(prompt, 4)
    engine.assert_idle()


def test_what_a_request_fails_by_itself_is_its_own_fault() -> None:
    engine = Engine()
    for name in ("nan", "bad"):
        engine.add(name, [ord(name[0])] * 6)
    engine.rank.num_nans["nan"] = 3
    fail_on(engine, "bad")
    engine.run()
    for name in ("nan", "bad"):
        error = engine.outputs[name][-1].error
        assert error is not None
        assert (error.code, error.fault) == (ErrorCode.INTERNAL, ErrorFault.REQUEST)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_engine_that_brings_nan_for_everybody_dies(async_scheduling: bool) -> None:
    engine = Engine(async_scheduling=async_scheduling, max_num_seqs=1)
    names = [str(index) for index in range(3 * MAX_FAILURES_IN_A_ROW)]
    for name in names:
        engine.add(name, [ord(name[0])] * 6)
    engine.rank.num_nans |= dict.fromkeys((*names, PROBE_ID), 7)
    with pytest.raises(RuntimeError, match="NaN logits for a token of our own"):
        engine.run()
    engine.core.close()
    # Nothing was planned behind it, but for a step of nothing where steps are planned ahead.
    planned = [step for step in engine.rank.steps if step.num_scheduled_tokens]
    assert PROBE_ID in planned[-1].num_scheduled_tokens


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_requests_with_nan_logits_cost_the_engine_a_token_now_and_then(
    async_scheduling: bool,
) -> None:
    engine = Engine(async_scheduling=async_scheduling, max_num_seqs=1)
    bad = [f"bad-{index}" for index in range(4 * MAX_FAILURES_IN_A_ROW)]
    engine.rank.num_nans |= dict.fromkeys(bad, 7)
    for index, name in enumerate(bad):
        engine.add(name, [index] * 4)
    engine.add("good", [1, 2, 3], max_tokens=30)
    engine.run()
    assert {engine.finish_reason(name) for name in bad} == {FinishReason.ERROR}
    assert engine.tokens("good") == expected([1, 2, 3], 30)
    num_probes = sum(PROBE_ID in step.num_scheduled_tokens for step in engine.rank.steps)
    assert 0 < num_probes <= 2 * 4, "steps in flight may fail meanwhile"
    engine.assert_idle()
    engine.core.close()


def test_a_failing_row_counts_as_no_failing_step() -> None:
    engine = Engine(max_num_seqs=1)
    error = RequestFailedError("a plugin").to_engine_error()
    bad = [f"bad-{index}" for index in range(3 * MAX_FAILURES_IN_A_ROW)]
    for index, name in enumerate(bad):
        engine.add(name, [index] * 4)
        engine.rank.errors[name] = error
    engine.run()
    assert not any(PROBE_ID in step.num_scheduled_tokens for step in engine.rank.steps)
    assert len(engine.scheduler.containers.isolated) == 0
    assert all(engine.outputs[name][-1].error == error for name in bad)
