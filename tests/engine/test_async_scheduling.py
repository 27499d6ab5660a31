"""Steps that are planned before the ones before them have finished."""

import math
import threading
from collections.abc import Callable, Iterator

import pytest

from pdserve_common.types.engine import FinishReason
from pdserve_engine.core import engine_core
from pdserve_engine.request.request import Request
from pdserve_engine.request.sched_output import SchedulerOutput
from support.scripted_engine import BLOCK_SIZE, EOS, ON_D, Engine, ScriptedConsumer, expected


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Of engines that look ahead of every step, also on a busy machine."""
    monkeypatch.setattr(engine_core, "MAX_LOOKAHEAD_STEP_S", math.inf)
    engines: list[Engine] = []
    before = set(threading.enumerate())

    def make(**config: object) -> Engine:
        engines.append(Engine(async_scheduling=True, **config))  # type: ignore[arg-type]
        engines[-1].pretend_last_step(0.0)
        return engines[-1]

    yield make
    for engine in engines:
        engine.core.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("model")]


class Gate:
    """Holds the model until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self._event = threading.Event()
        engine.rank.on_step = self._wait

    def open(self) -> None:
        self._event.set()

    def _wait(self, step: SchedulerOutput) -> None:
        assert self._event.wait(60)


def test_the_next_step_is_planned_while_one_runs(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    gate = Gate(engine)
    engine.add("a", [1] * 6, max_tokens=3)
    engine.step()
    request = engine.scheduler.requests["a"]
    assert request.progress.num_output_placeholders == 1
    assert request.progress.num_in_flight_tokens == 6
    assert not engine.outputs
    gate.open()
    engine.step()  # plans the decode step, then takes in the prompt's
    assert engine.tokens("a") == expected([1] * 6, 1)
    assert request.progress.num_computed_tokens == 7
    engine.run()
    assert engine.tokens("a") == expected([1] * 6, 3)
    num_computed = sum(step.total_num_scheduled_tokens for step in engine.rank.steps)
    assert num_computed == 8, "nothing is computed past max_tokens"
    engine.assert_idle()


def test_tokens_sampled_after_the_end_are_dropped_and_their_blocks_come_back_later(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(enable_caching=False)
    engine.add("a", [1] * BLOCK_SIZE, max_tokens=30)
    engine.rank.script["a"] = [5, EOS, 6, 7]
    engine.run()
    num_computed = sum(step.total_num_scheduled_tokens for step in engine.rank.steps)
    assert num_computed == BLOCK_SIZE + 2, "a third token was under way when EOS came"
    assert engine.tokens("a") == [5, EOS]
    assert engine.finish_reason("a") == FinishReason.STOP
    engine.assert_idle()


def test_blocks_of_a_request_that_ends_in_flight_are_not_given_to_a_pull(
    make_engine: Callable[..., Engine],
) -> None:
    """A pull's bytes land whenever they like, so its blocks must be out of every step's use."""
    consumer = ScriptedConsumer()
    engine = make_engine(consumer=consumer, enable_caching=False, num_blocks=8)
    engine.add("a", [1] * 12, max_tokens=20)
    gate = Gate(engine)
    engine.step()
    used = set(engine.kv.get_block_ids("a")[0])
    engine.core.abort_requests(["a"])
    assert engine.pool.num_free_blocks == 8 - len(used), "a step in flight still uses them"
    engine.add("d", [2] * 20, max_tokens=2, kv_transfer_params=ON_D)
    consumer.claim("d")
    engine.scheduler.update_from_kv_transfer()
    plan = engine.scheduler.schedule()
    assert not consumer.loading
    assert not plan.num_scheduled_tokens
    gate.open()
    engine.core.finish_steps()
    assert engine.pool.num_free_blocks == 8


def test_preemption_waits_until_nothing_is_in_flight(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(num_blocks=6, enable_caching=False)
    for name in ("a", "b"):
        engine.add(name, [ord(name)] * 8, max_tokens=12)
    num_in_flight: list[int] = []
    preempt = engine.scheduler.containers.preempt

    def watch(request: Request) -> None:
        num_in_flight.append(len(engine.scheduler.in_flight))
        preempt(request)

    monkeypatch.setattr(engine.scheduler.containers, "preempt", watch)
    engine.run()
    assert num_in_flight
    assert set(num_in_flight) == {0}
    for name in ("a", "b"):
        assert engine.tokens(name) == expected([ord(name)] * 8, 12)
    engine.assert_idle()


def test_long_steps_are_not_looked_ahead_of(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_core, "MAX_LOOKAHEAD_STEP_S", 0.02)
    engine = make_engine()
    engine.pretend_last_step(0.015)
    engine.add("a", [1] * 6, max_tokens=3)
    engine.step()  # six tokens would take 90 ms: a request that comes now joins the next step
    assert engine.tokens("a") == expected([1] * 6, 1)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_tokens_are_those_of_synchronous_scheduling(
    make_engine: Callable[..., Engine], policy: str
) -> None:
    engine = make_engine(num_blocks=16, scheduling_policy=policy, max_num_seqs=4)
    prompts = {f"r{i}": [i] * (3 * i + 1) for i in range(8)}
    for index, (name, prompt) in enumerate(prompts.items()):
        engine.add(name, prompt, max_tokens=10, priority=index % 3)
        engine.step()
    engine.run()
    for name, prompt in prompts.items():
        assert engine.tokens(name) == expected(prompt, 10)
    engine.assert_idle()
