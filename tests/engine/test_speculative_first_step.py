"""D's first step, which is speculative until P acknowledges the release (rule K4)."""

import threading
import time
from collections.abc import Callable

import pytest

from pdserve_common.types.engine import EngineError, ErrorCode, FinishReason
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.core.scheduler import PauseState
from pdserve_engine.request.request import RequestStatus
from pdserve_engine.request.sched_output import SchedulerOutput
from support.clock import Clock
from support.scripted_engine import BLOCK_SIZE, EOS, ON_D, Engine, ScriptedConsumer, expected

PROMPT = [7] * 15  # with P's token four full blocks


@pytest.fixture
def engine(clock: Clock) -> Engine:
    return Engine(consumer=ScriptedConsumer(), clock=clock)


def pull(engine: Engine, name: str = "a", **fields: object) -> None:
    """All of a request's blocks have landed."""
    engine.add(name, PROMPT, kv_transfer_params=ON_D, **fields)
    engine.consumer.claim(name)
    engine.step()
    engine.consumer.land_all(name)


def run_first_step(engine: Engine, name: str = "a", **fields: object) -> None:
    """And D's first step is over."""
    pull(engine, name, **fields)
    for _ in range(2):  # one with work, or the event and then the work
        if not num_computed(engine, name):
            engine.step()
    assert num_computed(engine, name) == 1


def num_computed(engine: Engine, name: str = "a") -> int:
    return sum(step.num_scheduled_tokens.get(name, 0) for step in engine.rank.steps)


# ---- until the release is acknowledged


def test_one_step_runs_and_nothing_of_it_gets_out(engine: Engine) -> None:
    engine.add("other", [1] * 4, max_tokens=20)
    run_first_step(engine)
    for _ in range(3):
        engine.step()
    assert num_computed(engine) == 1
    assert "a" not in engine.outputs
    assert engine.scheduler.requests["a"].num_output_tokens == 0
    hashes = engine.scheduler.requests["a"].block_hashes
    assert not any(engine.pool.get_cached_block(block_hash) for block_hash in hashes)


def test_it_waits_without_work(engine: Engine) -> None:
    run_first_step(engine)
    assert not engine.core.has_work()
    num_steps = len(engine.rank.steps)
    engine.consumer.accept("a")
    engine.step()
    assert len(engine.rank.steps) == num_steps
    assert engine.tokens("a") == expected(PROMPT, 2), "its tokens wait for no step"
    assert engine.pool.num_cached_blocks == 4
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 4)
    assert num_computed(engine) == 3
    engine.assert_idle()


def test_an_ack_that_comes_while_the_step_runs_holds_up_nothing(engine: Engine) -> None:
    engine.rank.on_step = lambda step: (
        engine.consumer.accept("a") if "a" in step.num_scheduled_tokens else None
    )
    pull(engine, max_tokens=2)
    engine.step()
    engine.step()
    assert engine.tokens("a") == expected(PROMPT, 2)
    assert engine.finish_reason("a") is FinishReason.LENGTH
    engine.run()
    engine.assert_idle()


def test_nobody_shares_its_blocks(engine: Engine) -> None:
    engine.add("fork", PROMPT, fork_of="a")
    engine.scheduler.finish_requests(["fork"], RequestStatus.FINISHED_ABORTED)
    run_first_step(engine)
    engine.add("fork", PROMPT, fork_of="a")
    engine.add("same", PROMPT)
    engine.step()
    assert num_computed(engine, "fork") == 0, "it waits for its source"
    assert num_computed(engine, "same") == len(PROMPT), "it does not"
    engine.consumer.accept("a")
    engine.run()
    assert num_computed(engine, "fork") == len(PROMPT) - 3 * BLOCK_SIZE + 3
    for name in ("a", "fork", "same"):
        assert engine.tokens(name)[:4] == expected(PROMPT, 4)
    engine.assert_idle()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_it_is_not_preempted(policy: str) -> None:
    engine = Engine(
        consumer=ScriptedConsumer(),
        num_blocks=8,
        enable_caching=False,
        scheduling_policy=policy,
    )
    engine.add("other", [1] * 8, max_tokens=20)
    engine.step()
    run_first_step(engine, priority=1)
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert engine.scheduler.requests["a"].status is RequestStatus.RUNNING
    engine.consumer.accept("a")
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 4)
    assert engine.tokens("other") == expected([1] * 8, 20)
    engine.assert_idle()


def test_during_a_pause_an_ack_still_counts(engine: Engine) -> None:
    run_first_step(engine)
    engine.scheduler.pause_state = PauseState.PAUSED_ALL
    engine.consumer.accept("a")
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 2)
    engine.scheduler.pause_state = PauseState.UNPAUSED
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 4)


# ---- ends that the ack brings


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_the_step_may_bring_the_end(engine: Engine, reason: FinishReason) -> None:
    is_stop = reason is FinishReason.STOP
    engine.rank.script["a"] = [EOS] if is_stop else []
    run_first_step(engine, max_tokens=9 if is_stop else 2)
    assert "a" not in engine.outputs
    engine.consumer.accept("a")
    engine.step()
    assert len(engine.tokens("a")) == 2
    assert engine.finish_reason("a") is reason
    engine.run()
    assert num_computed(engine) == 1
    engine.assert_idle()


def test_nothing_runs_if_ps_token_is_the_last(engine: Engine) -> None:
    pull(engine, max_tokens=1)
    engine.run()
    assert num_computed(engine) == 0
    engine.consumer.accept("a")
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 1)
    assert engine.finish_reason("a") is FinishReason.LENGTH
    assert num_computed(engine) == 0
    engine.assert_idle()


def test_ps_token_may_be_the_end_though_it_seemed_not(engine: Engine) -> None:
    (last,) = expected(PROMPT, 1)
    pull(engine, sampling_params=SamplingParams(max_tokens=9, stop_token_ids=(last,)))
    engine.step()
    engine.step()
    engine.consumer.accept("a")
    engine.run()
    assert engine.tokens("a") == [last]
    assert engine.finish_reason("a") is FinishReason.STOP
    engine.assert_idle()


def test_a_step_that_failed_for_it_alone_fails_it_with_the_ack(engine: Engine) -> None:
    engine.rank.num_nans["a"] = 3
    run_first_step(engine)
    assert "a" not in engine.outputs
    engine.consumer.accept("a")
    engine.run()
    assert engine.finish_reason("a") is FinishReason.ERROR
    assert engine.tokens("a") == expected(PROMPT, 1), "what P has sampled"
    engine.assert_idle()


# ---- the release is not acknowledged


def abort(engine: Engine) -> None:
    engine.core.abort_requests(["a"])


def pass_deadline(engine: Engine) -> None:
    engine.scheduler.expire_deadlines(time.monotonic() + 1000)


def hear_of_ps_end(engine: Engine) -> None:
    error = EngineError(code=ErrorCode.CANCELLED, message="", is_retryable=False)
    engine.consumer.fail("a", error)


def supersede(engine: Engine) -> None:
    engine.add("a", PROMPT, attempt=1, max_tokens=1)


@pytest.mark.parametrize("stage", [pull, run_first_step])
@pytest.mark.parametrize(
    "end",
    [abort, pass_deadline, hear_of_ps_end, supersede, lambda engine: engine.core.hand_back()],
)
def test_a_request_that_ends_takes_its_tokens_with_it(
    engine: Engine, stage: Callable[..., None], end: Callable[[Engine], None]
) -> None:
    stage(engine, deadline=time.monotonic() + 900)
    end(engine)
    engine.run()
    outputs = [output for output in engine.outputs["a"] if output.attempt == 0]
    assert not any(output.new_token_ids for output in outputs)
    assert engine.finish_reason("a") is not None
    assert engine.pool.num_cached_blocks == (3 if end is supersede else 0)
    engine.assert_idle()


@pytest.mark.parametrize("stage", [pull, run_first_step])
def test_the_first_step_of_a_lost_request_is_rolled_back(
    engine: Engine, stage: Callable[..., None]
) -> None:
    engine.rank.script["a"] = [3]  # as if it had read what is not its own
    stage(engine)
    request = engine.scheduler.requests["a"]
    engine.consumer.lose("a")
    engine.step()
    (output,) = engine.outputs["a"]
    assert output.kv_lost is not None
    assert (output.new_token_ids, output.first_token_index) == ((), 0)
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    progress = request.progress
    assert progress.num_computed_tokens == progress.num_output_placeholders == 0
    assert request.handoff.held_result is request.first_scheduled_time is None
    assert list(request.all_token_ids) == PROMPT
    assert engine.pool.num_cached_blocks == 0
    assert engine.kv.num_blocks_of("a") >= 4, "it holds them until its router has decided"
    engine.outputs.clear()
    engine.rank.script.clear()
    first = expected(PROMPT, 1)
    engine.add("a", PROMPT, attempt=1, resume_output_token_ids=tuple(first))
    engine.run()
    tokens = [token for output in engine.outputs["a"] for token in output.new_token_ids]
    assert first + tokens == expected(PROMPT, 4)
    engine.assert_idle()


def test_a_step_that_raises_takes_its_chance_but_not_its_blocks(engine: Engine) -> None:
    def fail(step: SchedulerOutput) -> None:
        if "a" in step.num_scheduled_tokens:
            raise RuntimeError("a passing fault")

    engine.add("other", [1] * 4, max_tokens=8)
    engine.rank.on_step = fail
    pull(engine)
    engine.step()
    for _ in range(4):
        engine.step()
    assert "a" not in engine.outputs
    assert engine.scheduler.requests["a"].progress.num_in_flight_tokens == 0
    engine.rank.on_step = lambda step: None
    engine.consumer.accept("a")
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 4)
    assert engine.tokens("other") == expected([1] * 4, 8)
    assert num_computed(engine) == 1 + 3, "the prompt is not computed here"
    engine.assert_idle()


def test_a_step_of_it_alone_that_raises_is_rolled_back(engine: Engine) -> None:
    def fail(step: SchedulerOutput) -> None:
        if step.num_scheduled_tokens:
            raise RuntimeError("a passing fault")

    engine.rank.on_step = fail
    pull(engine)
    engine.run()
    assert num_computed(engine) == 1
    assert "a" not in engine.outputs, "it waits for the ack, as if it had not run"
    engine.rank.on_step = lambda step: None
    engine.consumer.accept("a")
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 4)
    engine.assert_idle()


@pytest.mark.parametrize("stage", [pull, run_first_step])
@pytest.mark.parametrize(
    ("code", "reason"),
    [(ErrorCode.CANCELLED, FinishReason.ABORT), (ErrorCode.KV_EXPIRED, FinishReason.ERROR)],
)
def test_what_p_has_ended_is_no_error_of_ds(
    engine: Engine, stage: Callable[..., None], code: ErrorCode, reason: FinishReason
) -> None:
    stage(engine)
    error = EngineError(code=code, message="why")
    engine.consumer.fail("a", error)
    engine.run()
    assert engine.finish_reason("a") is reason
    assert engine.outputs["a"][-1].error == error, "the router tells by it that a ticket is void"
    engine.assert_idle()


# ---- steps in flight


@pytest.mark.parametrize("end", ["accept", "lose", "abort", "supersede"])
def test_the_ack_or_the_end_may_come_while_the_step_is_in_flight(end: str) -> None:
    engine = Engine(consumer=ScriptedConsumer(), async_scheduling=True, enable_caching=False)
    engine.pretend_last_step(0.0)  # as if steps were short
    pull(engine)
    is_open = threading.Event()
    engine.rank.on_step = lambda step: is_open.wait(60)
    engine.step()
    engine.step()
    request = engine.scheduler.requests["a"]
    assert request.progress.num_in_flight_tokens == 1, "it has no result yet"
    if end == "abort":
        abort(engine)
    elif end == "supersede":
        engine.add("a", PROMPT, attempt=1)
    else:
        getattr(engine.consumer, end)("a")
        engine.scheduler.update_from_kv_transfer()
    assert engine.pool.num_free_blocks <= engine.pool.num_blocks - 4, "the step still uses them"
    is_open.set()
    engine.run()
    assert request.handoff.held_result is None
    assert engine.tokens("a") == (expected(PROMPT, 4) if end in ("accept", "supersede") else [])
    if end == "lose":
        abort(engine)
        engine.run()
    engine.assert_idle()
    engine.core.close()


# ---- where the time went


def test_only_what_the_step_does_not_hide_counts_as_waiting_for_the_ack(
    engine: Engine, clock: Clock
) -> None:
    def compute(step: SchedulerOutput) -> None:
        clock.now_s += 2
        if "b" in step.num_scheduled_tokens:
            engine.consumer.accept("b")

    engine.rank.on_step = compute
    run_first_step(engine, max_tokens=2)
    clock.now_s += 20
    engine.consumer.accept("a")
    engine.step()
    pull(engine, "b", max_tokens=2)
    engine.run()
    for name, waited_s in (("a", 20), ("b", 0)):
        stats = engine.outputs[name][0].kv_transfer_stats
        assert stats is not None
        assert (stats.decode_admit_s, stats.first_decode_step_s) == (0, 2)
        assert stats.release_ack_s == waited_s
