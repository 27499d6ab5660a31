"""Routers' probes: a worker computes them at once, however full it is, and only few at a time."""

import pytest

from pdserve_common.limits.validation import MAX_PROBE_BLOCKS, MAX_PROBE_TOKENS, PROBE_PRIORITY
from pdserve_engine.config import NUM_PROBE_SLOTS
from pdserve_engine.core.handoff import decode_grants
from pdserve_engine.core.scheduler import PauseState
from support.clock import Clock
from support.scripted_engine import (
    BLOCK_SIZE,
    ON_D,
    ON_P,
    Engine,
    ScriptedProducer,
    decode_engine,
    expected,
)

PROMPT = [7] * (MAX_PROBE_BLOCKS * BLOCK_SIZE)
# In chunks as small as these prompts, and with the steps that async scheduling plans ahead.
NUM_STEPS = 6


def add_probe(engine: Engine, name: str, **fields: object) -> None:
    engine.add(name, PROMPT, MAX_PROBE_TOKENS, priority=PROBE_PRIORITY, **fields)


def fill(engine: Engine, *, num_tokens: int = 4, max_tokens: int = 40) -> None:
    """All slots are taken, and as many requests wait."""
    for index in range(2 * engine.scheduler.config.max_num_seqs):
        engine.add(f"{index}", [index] * num_tokens, max_tokens)
    engine.step()
    assert len(engine.scheduler.running) == engine.scheduler.config.max_num_seqs


def step_until_ended(engine: Engine, name: str, max_steps: int = NUM_STEPS) -> None:
    for _ in range(max_steps):
        engine.step()
        if name not in engine.scheduler.requests:
            return
    raise AssertionError(f"{name} has not ended in {max_steps} steps")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("mode", ["v1", "v0"])
def test_a_full_decode_worker_grants_a_probe_and_runs_it(
    clock: Clock, policy: str, mode: str
) -> None:
    engine = decode_engine(
        clock=clock, max_num_seqs=2, scheduling_policy=policy, scheduling_mode=mode
    )
    engine.add("claims", [1] * 8, kv_transfer_params=ON_D)
    fill(engine)
    engine.consumer.claim("claims")
    engine.step()
    clock.now_s += 10 * decode_grants.OVERDUE_S  # nobody may overtake them
    add_probe(engine, "probe", kv_transfer_params=ON_D)
    engine.consumer.claim("probe")
    engine.step()
    assert list(engine.consumer.loading) == ["probe"]
    engine.consumer.finish_load("probe")
    step_until_ended(engine, "probe")
    assert engine.tokens("probe") == expected(PROMPT, MAX_PROBE_TOKENS)
    assert not engine.consumer.loading, "a probe's slot is nobody else's"
    assert engine.consumer.deferred == ["claims"]


def test_a_prefill_worker_asks_for_a_probe_at_once_and_computes_it_beside_a_long_prompt() -> None:
    producer = ScriptedProducer()
    producer.grants_at_once = False
    engine = Engine(producer=producer, max_num_batched_tokens=2 * len(PROMPT), num_blocks=64)
    for index in range(5):
        engine.add(f"{index}", [index] * 40, kv_transfer_params=ON_P)
    engine.step()
    producer.allow("0")
    while not engine.scheduler.running:
        engine.step()
    (running,) = engine.scheduler.running
    assert running.num_uncomputed_tokens > engine.scheduler.config.max_num_batched_tokens
    add_probe(engine, "probe", kv_transfer_params=ON_P)
    engine.scheduler.update_from_kv_transfer()
    assert "probe" in producer.asked
    assert "4" not in producer.asked
    producer.allow("probe")
    engine.step()
    assert engine.tokens("probe") == expected(PROMPT, 1)
    assert list(engine.scheduler.running) == [running]


def test_a_preempted_request_and_blocks_that_are_spoken_for_do_not_hold_up_a_probe() -> None:
    engine = decode_engine(num_blocks=12, max_num_seqs=2, enable_caching=False)
    engine.add("a", [1] * 16, 20)
    engine.add("b", [2] * 16, 20)
    while not engine.scheduler.num_preemptions:
        engine.step()
    for _ in range(2):
        engine.step()
    assert len(engine.scheduler.waiting) == 1
    add_probe(engine, "probe", kv_transfer_params=ON_D)
    engine.consumer.claim("probe")
    engine.step()
    assert list(engine.consumer.loading) == ["probe"]
    engine.consumer.finish_load("probe")
    step_until_ended(engine, "probe")
    engine.run()
    assert engine.tokens("a") == expected([1] * 16, 20)
    assert engine.tokens("b") == expected([2] * 16, 20)
    engine.assert_idle()


def test_probes_run_few_at_a_time_and_take_no_slot_of_others() -> None:
    engine = decode_engine(num_blocks=128, max_num_seqs=2)
    fill(engine, max_tokens=30)
    names = [f"p{index}" for index in range(5 * NUM_PROBE_SLOTS)]
    for index, name in enumerate(names):
        add_probe(engine, name, kv_transfer_params=ON_D if index % 2 else None)
        if index % 2:
            engine.consumer.claim(name)
    most = 0
    while not set(names).isdisjoint(engine.scheduler.requests):
        engine.step()
        running, ready = engine.scheduler.running, engine.scheduler.containers.kv_ready
        held = [*running, *ready, *engine.scheduler.containers.remote_prefills.with_blocks()]
        most = max(most, sum(request.is_probe for request in held))
        assert sum(not request.is_probe for request in running) == 2, "they go on"
        for name in list(engine.consumer.loading):
            engine.consumer.finish_load(name)
    assert most == NUM_PROBE_SLOTS
    for name in names:
        assert engine.tokens(name) == expected(PROMPT, MAX_PROBE_TOKENS)
    engine.run()
    engine.assert_idle()


def test_as_many_probes_run_at_once_as_have_slots() -> None:
    engine = Engine(max_num_seqs=2, max_num_batched_tokens=(NUM_PROBE_SLOTS + 2) * len(PROMPT))
    fill(engine)
    for index in range(NUM_PROBE_SLOTS + 1):
        add_probe(engine, f"p{index}")
    engine.step()
    assert engine.scheduler.running.num_probes == NUM_PROBE_SLOTS
    engine.run()
    engine.assert_idle()


def test_a_probe_that_has_landed_comes_before_a_prompt_that_fills_the_step() -> None:
    engine = decode_engine()
    add_probe(engine, "probe", kv_transfer_params=ON_D)
    engine.consumer.claim("probe")
    engine.step()
    engine.add("long", [1] * 60, 2)
    engine.step()
    engine.consumer.finish_load("probe")
    step = engine.step()
    assert step is not None
    assert step.num_scheduled_tokens["probe"] == 1
    assert step.num_scheduled_tokens["long"] == engine.scheduler.config.max_num_batched_tokens - 1
    engine.run()
    engine.assert_idle()


def test_a_paused_worker_starts_no_probe() -> None:
    engine = Engine()
    engine.scheduler.pause_state = PauseState.PAUSED_NEW
    add_probe(engine, "probe")
    engine.step()
    assert not engine.scheduler.running
    engine.scheduler.pause_state = PauseState.UNPAUSED
    engine.run()
    assert engine.tokens("probe") == expected(PROMPT, MAX_PROBE_TOKENS)
