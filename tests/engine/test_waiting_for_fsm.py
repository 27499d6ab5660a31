"""Requests whose grammar is being compiled, and steps that brought no token as masks were late."""

import random
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import pytest

from pdserve_common.errors import OverloadedError
from pdserve_common.types.engine import ErrorCode, FinishReason
from pdserve_common.types.sampling_params import SamplingParams, StructuredOutputsParams
from pdserve_engine.core import engine_core
from pdserve_engine.grammar.native import CompiledGrammar
from pdserve_engine.kv_transfer.ports import KVEvent
from pdserve_engine.request.request import RequestStatus
from support.clock import Clock
from support.grammars import ScriptedCompiler
from support.samples import seeds
from support.scripted_engine import (
    ON_D,
    ON_P,
    Engine,
    ScriptedConsumer,
    ScriptedProducer,
    check_containers,
    expected,
)

PROMPT = [7] * 15


class GrammarEngine(Engine):
    """An engine whose grammars are compiled when the test says so."""

    def __init__(self, **options: object) -> None:
        self.compiler = ScriptedCompiler()
        super().__init__(
            producer=ScriptedProducer(),
            consumer=ScriptedConsumer(),
            compile_grammar=self.compiler,
            **options,
        )


def add(
    engine: Engine, name: str, grammar: str | None = None, max_tokens: int = 4, **fields: object
) -> None:
    params = SamplingParams(
        max_tokens=max_tokens,
        structured_outputs=StructuredOutputsParams(regex=grammar or name),
    )
    engine.add(name, PROMPT, sampling_params=params, **fields)


def status(engine: Engine, name: str) -> RequestStatus:
    return engine.scheduler.requests[name].status


def test_it_waits_for_its_grammar_and_then_runs_with_it() -> None:
    engine = GrammarEngine()
    add(engine, "a")
    assert status(engine, "a") is RequestStatus.WAITING_FOR_FSM
    engine.run()
    assert status(engine, "a") is RequestStatus.WAITING_FOR_FSM
    assert not engine.core.has_work()
    check_containers(engine.scheduler)
    engine.compiler.finish("a")
    assert engine.num_wakeups == 1
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 4)
    (new,) = [new for step in engine.rank.steps for new in step.scheduled_new_reqs]
    assert new.grammar is ScriptedCompiler.GRAMMAR
    engine.assert_idle()


def test_one_whose_grammar_is_known_does_not_wait() -> None:
    engine = GrammarEngine()
    engine.compiler.finish("a")
    add(engine, "a")
    assert status(engine, "a") is RequestStatus.WAITING
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 4)
    assert not engine.num_wakeups


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_it_keeps_its_place_by_arrival(policy: str, clock: Clock) -> None:
    engine = GrammarEngine(clock=clock, max_num_seqs=1, scheduling_policy=policy)
    engine.add("first", [1] * 4, max_tokens=9, arrival_time=0.0)
    engine.step()
    for number, name in enumerate("abc"):
        clock.now_s += 1
        if name == "b":
            add(engine, name, arrival_time=float(number))
        else:
            engine.add(name, PROMPT, arrival_time=float(number))
    engine.compiler.finish("b")
    engine.step()
    assert [request.request_id for request in engine.scheduler.waiting] == ["a", "b", "c"]
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("transfer", [None, ON_P, ON_D], ids=["local", "P", "D"])
def test_one_that_is_refused_ends_with_the_reason(is_known: bool, transfer: object) -> None:
    engine = GrammarEngine()
    if is_known:
        engine.compiler.refuse("a")
    add(engine, "a", kv_transfer_params=transfer)
    if not is_known:
        engine.step()
        assert "a" not in engine.outputs
        engine.compiler.refuse("a")
    engine.run()
    (output,) = engine.outputs["a"]
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    assert output.error.code is ErrorCode.INVALID_ARGUMENT
    assert output.error.message == "no such pattern"
    engine.assert_idle()


def test_without_a_compiler_it_is_refused(clock: Clock) -> None:
    engine = Engine(clock=clock)
    add(engine, "a")
    engine.run()
    (output,) = engine.outputs["a"]
    assert output.error is not None
    assert "this worker serves none" in output.error.message


def test_one_that_ends_meanwhile_is_forgotten(clock: Clock) -> None:
    engine = GrammarEngine(clock=clock)
    add(engine, "aborted")
    add(engine, "late", deadline=clock() + 5)
    engine.core.abort_requests(["aborted"])
    clock.now_s += 6
    engine.run()
    for name, reason in (("aborted", FinishReason.ABORT), ("late", FinishReason.ERROR)):
        assert engine.finish_reason(name) is reason
        engine.compiler.finish(name)
    engine.run()
    assert not engine.scheduler.containers.waiting_for_fsm
    engine.assert_idle()


# ---- P and D


def test_p_asks_d_for_blocks_when_the_grammar_is_there() -> None:
    engine = GrammarEngine()
    add(engine, "a", kv_transfer_params=ON_P)
    engine.run()
    assert not engine.producer.asked
    engine.compiler.finish("a")
    engine.run()
    assert "a" in engine.producer.asked
    assert engine.tokens("a") == expected(PROMPT, 1)


@pytest.mark.parametrize("is_acknowledged", [False, True])
def test_what_has_landed_on_d_waits_for_the_grammar(is_acknowledged: bool) -> None:
    engine = GrammarEngine()
    add(engine, "a", kv_transfer_params=ON_D)
    assert status(engine, "a") is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.consumer.claim("a")
    engine.step()
    assert "a" in engine.consumer.loading, "its blocks do not wait"
    engine.consumer.land_all("a")
    if is_acknowledged:
        engine.consumer.accept("a")
    engine.run()
    assert not [step for step in engine.rank.steps if step.num_scheduled_tokens]
    check_containers(engine.scheduler)
    engine.compiler.finish("a")
    engine.run()
    if not is_acknowledged:
        engine.consumer.accept("a")
        engine.run()
    assert engine.tokens("a") == expected(PROMPT, 4)
    assert sum(step.total_num_scheduled_tokens for step in engine.rank.steps) == 3
    engine.assert_idle()


@pytest.mark.parametrize("then", ["refused", "aborted"])
def test_landed_blocks_come_back_if_it_never_runs(then: str) -> None:
    engine = GrammarEngine()
    add(engine, "a", kv_transfer_params=ON_D)
    engine.consumer.claim("a")
    engine.step()
    engine.consumer.land_all("a")
    engine.step()
    if then == "refused":
        engine.compiler.refuse("a")
    else:
        engine.core.abort_requests(["a"])
    engine.run()
    expected_reason = FinishReason.ERROR if then == "refused" else FinishReason.ABORT
    assert engine.finish_reason("a") is expected_reason
    engine.assert_idle()


def come_with_kv(consumer: ScriptedConsumer, come: Callable[[], object]) -> None:
    """The compiler is done just before the engine takes what D's connector tells next."""
    take_events = consumer.take_events

    def come_and_take_events() -> list[KVEvent]:
        consumer.take_events = take_events  # type: ignore[method-assign]
        come()
        return take_events()

    consumer.take_events = come_and_take_events  # type: ignore[method-assign]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_refused", [False, True])
def test_a_grammar_that_comes_as_the_blocks_land_starts_its_request_once_or_never(
    is_refused: bool, is_async: bool
) -> None:
    engine = GrammarEngine(async_scheduling=is_async)
    add(engine, "a", kv_transfer_params=ON_D)
    engine.consumer.claim("a")
    engine.step()
    engine.add("b", PROMPT)
    engine.consumer.finish_load("a")
    come_with_kv(
        engine.consumer,
        partial(engine.compiler.refuse if is_refused else engine.compiler.finish, "a"),
    )
    engine.step()
    check_containers(engine.scheduler)
    engine.run()
    assert engine.tokens("b") == expected(PROMPT, 4)
    if is_refused:
        assert engine.finish_reason("a") is FinishReason.ERROR
    else:
        assert engine.tokens("a") == expected(PROMPT, 4)
    new = [each.request_id for step in engine.rank.steps for each in step.scheduled_new_reqs]
    assert sorted(new) == (["b"] if is_refused else ["a", "b"])
    engine.core.close()
    engine.assert_idle()


def test_none_is_missed_of_grammars_that_come_while_the_engine_looks() -> None:
    engine = GrammarEngine()
    for name in "abc":
        add(engine, name)
    engine.compiler.finish("b")
    looks = iter(range(1000))
    when = {2: "a", 4: "c"}
    engine.compiler.on_look = lambda: (
        engine.compiler.finish(when.pop(n)) if (n := next(looks)) in when else None
    )
    engine.run()
    engine.run()
    assert not when
    for name in "abc":
        assert engine.tokens(name) == expected(PROMPT, 4)
    engine.assert_idle()


# ---- masks that are late


def test_a_prompt_whose_mask_is_late_is_not_computed_again() -> None:
    engine = GrammarEngine()
    tries = iter([True, True, False])
    engine.rank.is_late = lambda request_id, num_tokens: next(tries, False)
    engine.add("a", PROMPT)
    engine.run()
    assert engine.tokens("a") == expected(PROMPT, 4)
    num_tokens = [step.total_num_scheduled_tokens for step in engine.rank.steps]
    assert [n for n in num_tokens if n] == [15, 1, 1, 1, 1, 1]
    engine.assert_idle()


@pytest.fixture
def looks_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core, "MAX_LOOKAHEAD_STEP_S", float("inf"))


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", seeds(10))
@pytest.mark.usefixtures("looks_ahead")
def test_tokens_are_the_same_however_late_masks_are(seed: int, async_scheduling: bool) -> None:
    rng = random.Random(seed)
    engine = GrammarEngine(num_blocks=14, max_num_seqs=4, async_scheduling=async_scheduling)
    engine.rank.is_late = lambda request_id, num_tokens: rng.random() < 0.3
    names = [f"{number}" for number in range(8)]
    lengths = {}
    for name in names:
        lengths[name] = rng.randint(1, 12)
        add(engine, name, rng.choice("xyz"), max_tokens=lengths[name])
    for name in rng.sample("xyz", 3):
        for _ in range(rng.randint(0, 5)):
            engine.step()
            check_containers(engine.scheduler)
        engine.compiler.finish(name)
    engine.run()
    for name in names:
        assert engine.tokens(name) == expected(PROMPT, lengths[name])
    engine.core.close()
    engine.assert_idle()


def test_a_full_queue_of_the_compiler_is_told(clock: Clock) -> None:
    def overloaded(*_: object) -> "Future[CompiledGrammar]":
        future: Future[CompiledGrammar] = Future()
        future.set_exception(OverloadedError("too many", retry_after_ms=1000))
        return future

    engine = Engine(compile_grammar=overloaded, clock=clock)
    add(engine, "a")
    engine.run()
    (output,) = engine.outputs["a"]
    assert output.error is not None
    assert output.error.code is ErrorCode.OVERLOADED
    assert output.error.retry_after_ms == 1000
