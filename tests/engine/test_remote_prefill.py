"""D's scheduler: who gets blocks for KV that another worker computes, and what becomes of it."""

from typing import Any

import pytest
from scripted_engine import ON_D, Clock, Engine, ScriptedConnector, expected

from pdserve_common.engine_types import FinishReason
from pdserve_engine.core import remote_prefill
from pdserve_engine.core.scheduler import PauseState


@pytest.fixture
def connector() -> ScriptedConnector:
    return ScriptedConnector()


def add_ticket(engine: Engine, name: str, num_tokens: int, **fields: object) -> None:
    engine.add(name, [ord(name[0])] * num_tokens, kv_transfer_params=ON_D, **fields)


def test_grants_that_do_not_run_stay_under_a_quarter_of_the_pool(
    connector: ScriptedConnector,
) -> None:
    engine = Engine(connector=connector, num_blocks=32)
    for name in ("a", "b", "c"):
        add_ticket(engine, name, 16)
        connector.claim(name)
    engine.step()
    assert list(connector.loading) == ["a", "b"]
    assert connector.deferred == ["c"]
    connector.finish_load("a")
    engine.step()
    assert "c" in connector.loading


def test_what_has_landed_and_finds_no_place_in_the_batch_counts_as_well(
    connector: ScriptedConnector,
) -> None:
    engine = Engine(connector=connector, num_blocks=64, max_num_seqs=4, enable_caching=False)
    scheduler = engine.scheduler
    engine.add("local", [1] * 4, max_tokens=60)
    names = [f"{index}" for index in range(15)]
    for name in names:
        add_ticket(engine, name, 12, max_tokens=9)
        connector.claim(name)
    while "local" in scheduler.requests:
        engine.step()
        for name in list(connector.loading):
            connector.finish_load(name)
        idle = (*scheduler.kv_ready, *scheduler.remote_prefills.with_blocks())
        assert sum(engine.kv.num_blocks_of(request.request_id) for request in idle) <= 16
        stats = scheduler.make_stats(step_num_tokens=0, step_duration_s=0.0)
        assert stats.num_running_reqs == len(scheduler.running) <= 4
        assert stats.num_running_reqs + stats.num_waiting_reqs == len(scheduler.requests)
    for name in names:
        assert engine.tokens(name) == expected([ord(name[0])] * 12, 9)
    engine.assert_idle()


def test_a_grant_leaves_the_watermark_free_unless_nothing_is_admitted(
    connector: ScriptedConnector,
) -> None:
    engine = Engine(connector=connector, num_blocks=20, kv_watermark=0.5, enable_caching=False)
    engine.add("running", [1] * 4, max_tokens=9)
    engine.step()
    add_ticket(engine, "a", 40)
    connector.claim("a")
    engine.step()
    assert connector.deferred == ["a"], "it would fit, and leave 7 blocks of 20"
    engine.run()
    assert "a" in connector.loading, "alone it may have them"


def test_one_grant_may_take_more_than_a_quarter(connector: ScriptedConnector) -> None:
    engine = Engine(connector=connector, num_blocks=16)
    add_ticket(engine, "a", 40)
    connector.claim("a")
    engine.step()
    assert "a" in connector.loading


def test_an_overdue_claim_is_not_overtaken(
    connector: ScriptedConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(connector=connector, num_blocks=16, enable_caching=False)
    engine.add("running", [1] * 30, max_tokens=16)
    engine.step()
    engine.step()
    add_ticket(engine, "big", 40)
    connector.claim("big")
    engine.step()
    add_ticket(engine, "small", 4)
    connector.claim("small")
    engine.step()
    assert list(connector.loading) == ["small"], "it is not overdue yet"
    monkeypatch.setattr(remote_prefill, "OVERDUE_S", 0.0)
    engine.add("new", [2] * 4)
    add_ticket(engine, "tiny", 4)
    connector.claim("tiny")
    connector.finish_load("small")
    while "big" not in connector.loading:
        assert "new" not in engine.outputs
        assert "tiny" not in connector.loading
        engine.step()
    connector.finish_load("big")
    engine.run()
    assert engine.tokens("new") == expected([2] * 4, 4)


def test_an_unannounced_grant_gives_way_before_a_running_request(
    connector: ScriptedConnector,
) -> None:
    engine = Engine(connector=connector, num_blocks=8, enable_caching=False)
    engine.add("running", [1] * 4, max_tokens=24)
    engine.step()
    add_ticket(engine, "a", 16)
    connector.claim("a")
    engine.step()
    assert "a" in connector.loading
    while "a" in connector.loading:
        engine.step()
    assert engine.scheduler.num_preemptions == 0
    engine.run()
    assert engine.scheduler.num_preemptions == 0
    assert "a" in connector.loading, "it gets them again when there is room"
    connector.finish_load("a")
    engine.run()
    assert engine.tokens("a") == expected([ord("a")] * 16, 4)


def test_a_grant_that_gives_way_does_not_cost_an_older_claim_its_turn(
    connector: ScriptedConnector, clock: Clock
) -> None:
    engine = Engine(clock=clock, connector=connector, num_blocks=16, enable_caching=False)
    engine.add("running", [1] * 20, max_tokens=40)
    engine.step()
    engine.step()
    add_ticket(engine, "big", 40)
    connector.claim("big")
    engine.step()
    clock.now_s += remote_prefill.OVERDUE_S / 2
    add_ticket(engine, "small", 16)
    connector.claim("small")
    engine.step()
    assert list(connector.loading) == ["small"], "big does not fit"
    clock.now_s += remote_prefill.OVERDUE_S
    engine.add("new", [2] * 4)
    while "small" in connector.loading:
        engine.step()
    while "running" in engine.scheduler.requests:
        engine.step()
        assert "new" not in engine.outputs
        assert not connector.loading
    engine.step()
    assert next(iter(connector.loading)) == "big"


def test_a_claim_that_comes_during_a_step_is_as_old_as_when_it_came(
    connector: ScriptedConnector, clock: Clock
) -> None:
    engine = Engine(clock=clock, connector=connector, num_blocks=8, enable_caching=False)
    add_ticket(engine, "a", 24)
    connector.claim("a")
    clock.now_s += 5
    engine.add("local", [1] * 24)
    clock.now_s += 5
    engine.step()
    assert "a" in connector.loading
    assert not engine.scheduler.running
    connector.finish_load("a")
    engine.run()
    assert engine.tokens("local") == expected([1] * 24, 4)
    engine.assert_idle()


def test_a_claim_is_before_younger_ones_also_if_its_ticket_was_late(
    connector: ScriptedConnector, clock: Clock
) -> None:
    engine = Engine(clock=clock, connector=connector, num_blocks=8, enable_caching=False)
    engine.scheduler.pause_state = PauseState.PAUSED_NEW
    for name, asked_time in (("b", clock.now_s + 1), ("a", clock.now_s), ("c", clock.now_s + 2)):
        add_ticket(engine, name, 24)
        connector.claim(name, asked_time)
    clock.now_s += 5
    engine.step()
    engine.scheduler.pause_state = PauseState.UNPAUSED
    order = []
    while engine.scheduler.requests:
        engine.step()
        for name in list(connector.loading):
            order.append(name)
            connector.finish_load(name)
    assert order == ["a", "b", "c"]


def test_confirmed_blocks_are_shared_before_the_rest_is_here(
    connector: ScriptedConnector,
) -> None:
    engine = Engine(connector=connector)
    add_ticket(engine, "a", 16)
    connector.claim("a")
    engine.step()
    assert engine.pool.num_cached_blocks == 0
    connector.confirm("a", 8)
    engine.step()
    assert engine.pool.num_cached_blocks == 2


def test_a_lost_pull_is_told_and_its_blocks_wait_for_the_next_attempt(
    connector: ScriptedConnector,
) -> None:
    engine = Engine(connector=connector)
    add_ticket(engine, "a", 16)
    connector.claim("a")
    engine.step()
    connector.confirm("a", 12)
    connector.lose("a")
    engine.step()
    (output,) = engine.outputs["a"]
    assert output.kv_lost is not None
    assert output.kv_lost.num_confirmed_tokens == 12
    assert not output.finished
    assert engine.kv.num_blocks_of("a") == 4
    connector.loading.clear()  # nothing is being read
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
def test_d_tells_the_router_only_what_the_next_attempt_finds(
    connector: ScriptedConnector, options: dict[str, Any]
) -> None:
    engine = Engine(connector=connector, **options)
    add_ticket(engine, "a", 16)
    connector.claim("a")
    engine.step()
    connector.confirm("a", 12)
    connector.lose("a")
    engine.step()
    (output,) = engine.outputs["a"]
    assert output.kv_lost is not None
    told = output.kv_lost.num_confirmed_tokens
    connector.loading.clear()  # nothing is being read
    engine.outputs.clear()
    engine.add("a", [ord("a")] * 16, attempt=1)
    engine.run()
    computed = sum(step.total_num_scheduled_tokens for step in engine.rank.steps)
    assert computed == 16 - told + 3
    assert told == 0


def test_a_superseded_attempt_says_nothing_more() -> None:
    engine = Engine()
    engine.add("a", [1] * 6, max_tokens=8)
    engine.step()
    engine.step()
    engine.outputs.clear()
    delivered = tuple(expected([1] * 6, 2))
    engine.add("a", [1] * 6, max_tokens=8, attempt=1, resume_output_token_ids=delivered)
    engine.run()
    assert {output.attempt for output in engine.outputs["a"]} == {1}
    tokens = [t for output in engine.outputs["a"] for t in output.new_token_ids]
    assert [*delivered, *tokens] == expected([1] * 6, 8)
    assert engine.outputs["a"][-1].finish_reason == FinishReason.LENGTH
    engine.assert_idle()


def test_a_resumed_request_is_pulled_with_what_was_generated_before(
    connector: ScriptedConnector,
) -> None:
    engine = Engine(connector=connector)
    prompt = [3] * 6
    delivered = tuple(expected(prompt, 3))
    engine.add(
        "a",
        prompt,
        max_tokens=8,
        attempt=1,
        resume_output_token_ids=delivered,
        kv_transfer_params=ON_D,
    )
    connector.claim("a")
    engine.step()
    assert connector.loading["a"][1] == 9
    connector.finish_load("a")
    engine.run()
    tokens = [t for output in engine.outputs["a"] for t in output.new_token_ids]
    assert [*delivered, *tokens] == expected(prompt, 8)
    assert engine.outputs["a"][0].first_token_index == 3
    engine.assert_idle()


def test_blocks_of_a_withdrawn_claim_come_back_but_for_those_being_read(
    connector: ScriptedConnector,
) -> None:
    engine = Engine(connector=connector)
    add_ticket(engine, "a", 16)
    connector.claim("a")
    engine.step()
    connector.give_back("a", is_reading=True)
    engine.step()
    assert engine.pool.num_free_blocks == engine.pool.num_blocks - 4
    connector.claim("a")
    engine.step()
    assert engine.pool.num_free_blocks == engine.pool.num_blocks - 8, "other blocks than those"
    connector.land("a")
    engine.step()
    connector.finish_load("a")
    engine.run()
    assert engine.tokens("a") == expected([ord("a")] * 16, 4)
    engine.assert_idle()


def test_a_lost_claim_holds_up_nobody(
    connector: ScriptedConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would get no blocks, as P does not ask for them any more, but waits for the router."""
    monkeypatch.setattr(remote_prefill, "OVERDUE_S", 0.0)
    engine = Engine(connector=connector, num_blocks=16, enable_caching=False)
    engine.add("running", [1] * 30, max_tokens=30)
    engine.step()
    add_ticket(engine, "lost", 40)
    connector.claim("lost")
    engine.step()
    connector.lose("lost")
    engine.add("new", [2] * 4)
    add_ticket(engine, "small", 4)
    connector.claim("small")
    while "new" not in engine.outputs or "small" not in connector.loading:
        engine.step()
        assert "running" in engine.scheduler.requests, "no blocks have come back yet"


def test_many_claims_that_wait_cost_a_step_little(
    connector: ScriptedConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(connector=connector, num_blocks=16)
    engine.add("running", [1] * 40, max_tokens=20)
    for _ in range(4):
        engine.step()
    for i in range(100):
        add_ticket(engine, f"{i}", 20)
        connector.claim(f"{i}")
    lookups = []
    look_up = engine.kv.get_computed_blocks
    monkeypatch.setattr(
        engine.kv, "get_computed_blocks", lambda *args: (lookups.append(args), look_up(*args))[1]
    )
    engine.step()
    assert not connector.loading
    assert len(lookups) == len(connector.deferred) == remote_prefill.MAX_SKIPPED


def test_a_paused_worker_grants_nothing(connector: ScriptedConnector) -> None:
    engine = Engine(connector=connector)
    engine.scheduler.pause_state = PauseState.PAUSED_NEW
    add_ticket(engine, "a", 16)
    connector.claim("a")
    engine.step()
    assert not connector.loading
    engine.scheduler.pause_state = PauseState.UNPAUSED
    engine.step()
    assert "a" in connector.loading
