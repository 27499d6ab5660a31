"""D's scheduler: who gets blocks for KV that another worker computes, and what becomes of it."""

from typing import Any

import pytest

from pdserve_common.types.engine import EngineCoreOutput
from pdserve_engine.core.handoff import decode_grants
from pdserve_engine.core.scheduler import PauseState
from support.clock import Clock
from support.scripted_engine import ON_D, Engine, decode_engine, expected


def add_ticket(engine: Engine, name: str, num_tokens: int, **fields: object) -> None:
    engine.add(name, [ord(name[0])] * num_tokens, kv_transfer_params=ON_D, **fields)


def add_claimed(engine: Engine, name: str, num_tokens: int, **fields: object) -> None:
    """Add a ticket for which P asks for blocks."""
    add_ticket(engine, name, num_tokens, **fields)
    engine.consumer.claim(name)


def test_grants_that_do_not_run_stay_under_a_quarter_of_the_pool() -> None:
    engine = decode_engine(num_blocks=32)
    for name in ("a", "b", "c"):
        add_claimed(engine, name, 16)
    engine.step()
    assert list(engine.consumer.loading) == ["a", "b"]
    assert engine.consumer.deferred == ["c"]
    engine.consumer.finish_load("a")
    engine.step()
    assert "c" in engine.consumer.loading


def test_what_has_landed_and_finds_no_place_in_the_batch_counts_as_well() -> None:
    engine = decode_engine(num_blocks=64, max_num_seqs=4, enable_caching=False)
    scheduler = engine.scheduler
    engine.add("local", [1] * 4, max_tokens=60)
    names = [f"{index}" for index in range(15)]
    for name in names:
        add_claimed(engine, name, 12, max_tokens=9)
    while "local" in scheduler.requests:
        engine.step()
        for name in list(engine.consumer.loading):
            engine.consumer.finish_load(name)
        idle = (*scheduler.containers.kv_ready, *scheduler.containers.remote_prefills.with_blocks())
        assert sum(engine.kv.num_blocks_of(request.request_id) for request in idle) <= 16
        stats = scheduler.make_stats(step_num_tokens=0, step_duration_s=0.0)
        assert stats.num_running_reqs == len(scheduler.running) <= 4
        assert stats.num_running_reqs + stats.num_waiting_reqs == len(scheduler.requests)
    for name in names:
        assert engine.tokens(name) == expected([ord(name[0])] * 12, 9)
    engine.assert_idle()


def test_a_grant_leaves_the_watermark_free_unless_nothing_is_admitted() -> None:
    engine = decode_engine(num_blocks=20, kv_watermark=0.5, enable_caching=False)
    engine.add("running", [1] * 4, max_tokens=9)
    engine.step()
    add_claimed(engine, "a", 40)
    engine.step()
    assert engine.consumer.deferred == ["a"], "it would fit, and leave 7 blocks of 20"
    engine.run()
    assert "a" in engine.consumer.loading, "alone it may have them"


def test_an_overdue_claim_is_not_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = decode_engine(num_blocks=16, enable_caching=False)
    engine.add("running", [1] * 30, max_tokens=16)
    engine.step()
    engine.step()
    add_claimed(engine, "big", 40)
    engine.step()
    add_claimed(engine, "small", 4)
    engine.step()
    assert list(engine.consumer.loading) == ["small"], "it is not overdue yet"
    monkeypatch.setattr(decode_grants, "OVERDUE_S", 0.0)
    engine.add("new", [2] * 4)
    add_claimed(engine, "tiny", 4)
    engine.consumer.finish_load("small")
    while "big" not in engine.consumer.loading:
        assert "new" not in engine.outputs
        assert "tiny" not in engine.consumer.loading
        engine.step()
    engine.consumer.finish_load("big")
    engine.run()
    assert engine.tokens("new") == expected([2] * 4, 4)


def test_an_unannounced_grant_gives_way_before_a_running_request() -> None:
    engine = decode_engine(num_blocks=8, enable_caching=False)
    engine.add("running", [1] * 4, max_tokens=24)
    engine.step()
    add_claimed(engine, "a", 16)
    engine.step()
    assert "a" in engine.consumer.loading
    while "a" in engine.consumer.loading:
        engine.step()
    assert engine.scheduler.num_preemptions == 0
    engine.run()
    assert engine.scheduler.num_preemptions == 0
    assert "a" in engine.consumer.loading, "it gets them again when there is room"
    engine.consumer.finish_load("a")
    engine.run()
    assert engine.tokens("a") == expected([ord("a")] * 16, 4)


def test_a_grant_that_gives_way_does_not_cost_an_older_claim_its_turn(clock: Clock) -> None:
    engine = decode_engine(clock=clock, num_blocks=16, enable_caching=False)
    engine.add("running", [1] * 20, max_tokens=40)
    engine.step()
    engine.step()
    add_claimed(engine, "big", 40)
    engine.step()
    clock.now_s += decode_grants.OVERDUE_S / 2
    add_claimed(engine, "small", 16)
    engine.step()
    assert list(engine.consumer.loading) == ["small"], "big does not fit"
    clock.now_s += decode_grants.OVERDUE_S
    engine.add("new", [2] * 4)
    while "small" in engine.consumer.loading:
        engine.step()
    while "running" in engine.scheduler.requests:
        engine.step()
        assert "new" not in engine.outputs
        assert not engine.consumer.loading
    engine.step()
    assert next(iter(engine.consumer.loading)) == "big"


def test_a_claim_that_comes_during_a_step_is_as_old_as_when_it_came(clock: Clock) -> None:
    engine = decode_engine(clock=clock, num_blocks=8, enable_caching=False)
    add_claimed(engine, "a", 24)
    clock.now_s += 5
    engine.add("local", [1] * 24)
    clock.now_s += 5
    engine.step()
    assert "a" in engine.consumer.loading
    assert not engine.scheduler.running
    engine.consumer.finish_load("a")
    engine.run()
    assert engine.tokens("local") == expected([1] * 24, 4)
    engine.assert_idle()


def test_a_local_request_that_came_before_the_claim_has_its_turn_before_it(clock: Clock) -> None:
    engine = decode_engine(clock=clock, num_blocks=8, enable_caching=False)
    engine.add("local", [1] * 24)
    clock.now_s += 0.5
    add_claimed(engine, "a", 24)
    clock.now_s += 5
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == ["local"]
    assert not engine.consumer.loading
    engine.run()
    assert "a" in engine.consumer.loading


def test_a_claim_is_before_younger_ones_also_if_its_ticket_was_late(clock: Clock) -> None:
    engine = decode_engine(clock=clock, num_blocks=8, enable_caching=False)
    engine.scheduler.pause_state = PauseState.PAUSED_NEW
    for name, asked_time in (("b", clock.now_s + 1), ("a", clock.now_s), ("c", clock.now_s + 2)):
        add_ticket(engine, name, 24)
        engine.consumer.claim(name, asked_time)
    clock.now_s += 5
    engine.step()
    engine.scheduler.pause_state = PauseState.UNPAUSED
    order = []
    while engine.scheduler.requests:
        engine.step()
        for name in list(engine.consumer.loading):
            order.append(name)
            engine.consumer.finish_load(name)
    assert order == ["a", "b", "c"]


def lose_pull(**options: Any) -> tuple[Engine, EngineCoreOutput]:
    """Lose "a" of 16 tokens behind the 12th; return its output, which tells it."""
    engine = decode_engine(**options)
    add_claimed(engine, "a", 16)
    engine.step()
    engine.consumer.confirm("a", 12)
    engine.consumer.lose("a")
    engine.step()
    (output,) = engine.outputs["a"]
    assert output.kv_lost is not None
    return engine, output


def test_a_lost_pull_is_told_and_its_blocks_wait_for_the_next_attempt() -> None:
    engine, output = lose_pull()
    assert output.kv_lost is not None
    assert output.kv_lost.num_confirmed_tokens == 12
    assert not output.finished
    assert engine.kv.num_blocks_of("a") == 4
    engine.consumer.loading.clear()  # nothing is being read
    engine.outputs.clear()
    prompt = [ord("a")] * 16
    first = expected(prompt, 1)
    engine.add("a", prompt, attempt=1, resume_output_token_ids=tuple(first))
    engine.run()
    computed = sum(step.total_num_scheduled_tokens for step in engine.rank.steps)
    assert computed == 4 + 1 + 2, "the confirmed tokens are not computed again"
    tokens = [t for output in engine.outputs["a"] for t in output.new_token_ids]
    assert first + tokens == expected(prompt, 4)
    assert {output.attempt for output in engine.outputs["a"]} == {1}
    assert [output.first_token_index for output in engine.outputs["a"]] == [1, 2, 3]
    engine.assert_idle()


@pytest.mark.parametrize("options", [{"enable_caching": False}, {"windows": (None, 8)}])
def test_d_tells_the_router_only_what_the_next_attempt_finds(options: dict[str, Any]) -> None:
    engine, output = lose_pull(**options)
    assert output.kv_lost is not None
    told = output.kv_lost.num_confirmed_tokens
    engine.consumer.loading.clear()  # nothing is being read
    engine.outputs.clear()
    engine.add("a", [ord("a")] * 16, attempt=1)
    engine.run()
    computed = sum(step.total_num_scheduled_tokens for step in engine.rank.steps)
    assert computed == 16 - told + 3
    assert told == 0


def test_a_lost_claim_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would get no blocks, as P does not ask for them any more, but waits for the router."""
    monkeypatch.setattr(decode_grants, "OVERDUE_S", 0.0)
    engine = decode_engine(num_blocks=16, enable_caching=False)
    engine.add("running", [1] * 30, max_tokens=30)
    engine.step()
    add_claimed(engine, "lost", 40)
    engine.step()
    engine.consumer.lose("lost")
    engine.add("new", [2] * 4)
    add_claimed(engine, "small", 4)
    while "new" not in engine.outputs or "small" not in engine.consumer.loading:
        engine.step()
        assert "running" in engine.scheduler.requests, "no blocks have come back yet"


def test_many_claims_that_wait_cost_a_step_little(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decode_engine(clock=clock, num_blocks=16)
    engine.add("running", [1] * 40, max_tokens=20)
    for _ in range(4):
        engine.step()
    for i in range(100):
        add_claimed(engine, f"{i}", 20)
    lookups = []
    look_up = engine.kv.get_computed_blocks
    monkeypatch.setattr(
        engine.kv, "get_computed_blocks", lambda *args: (lookups.append(args), look_up(*args))[1]
    )
    engine.step()
    assert not engine.consumer.loading
    assert len(lookups) == decode_grants.MAX_SKIPPED
    assert len(engine.consumer.deferred) == 100


def test_p_hears_of_every_claim_that_has_to_wait(clock: Clock) -> None:
    """Also of those behind one that is overdue."""
    engine = decode_engine(clock=clock, num_blocks=256, max_num_seqs=4)
    for name in "wxyz":
        engine.add(name, [1] * 4, max_tokens=100)
    engine.step()
    names = [f"{number}" for number in range(20)]
    for name in names:
        add_claimed(engine, name, 4)
        clock.now_s += 2 * decode_grants.OVERDUE_S
        engine.step()
    assert not engine.consumer.loading
    assert engine.consumer.deferred == names


def test_p_hears_of_claims_that_wait_for_a_preempted_request() -> None:
    engine = decode_engine(num_blocks=16, enable_caching=False)
    for name in "xy":
        engine.add(name, [1] * 8, max_tokens=40)
    for _ in range(50):
        engine.step()
        if engine.scheduler.containers.num_preempted:
            break
    add_claimed(engine, "a", 4)
    engine.step()
    assert engine.scheduler.containers.num_preempted == 1
    assert engine.consumer.deferred == ["a"]


def test_a_paused_worker_grants_nothing() -> None:
    engine = decode_engine()
    engine.scheduler.pause_state = PauseState.PAUSED_NEW
    add_claimed(engine, "a", 16)
    engine.step()
    assert not engine.consumer.loading
    engine.scheduler.pause_state = PauseState.UNPAUSED
    engine.step()
    assert "a" in engine.consumer.loading
