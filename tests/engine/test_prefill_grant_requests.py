"""P's scheduler: nothing is computed for another worker before it has reserved blocks."""

from collections import deque
from typing import Any

import pytest

from pdserve_common.types.engine import KVTransferParams
from pdserve_engine.core.scheduler import PauseState
from support.clock import Clock
from support.scripted_engine import ON_P, Engine, ScriptedProducer, check_containers, expected

ON_P_FOR_E = KVTransferParams(do_remote_decode=True, remote_engine_id="e")


def prefill_engine(**options: Any) -> Engine:
    """A P whose D answers when the test says so."""
    producer = ScriptedProducer()
    producer.grants_at_once = False
    return Engine(producer=producer, **options)


def started(engine: Engine) -> list[str]:
    return [new.request_id for step in engine.rank.steps for new in step.scheduled_new_reqs]


@pytest.mark.parametrize("num_steps_late", [0, 1, 3])
def test_steps_are_full_however_late_a_decode_worker_answers(num_steps_late: int) -> None:
    engine = prefill_engine(max_num_batched_tokens=16, num_blocks=1000)
    for i in range(100):
        engine.add(f"r{i}", [i] * 11, kv_transfer_params=ON_P)
    unanswered: deque[set[str]] = deque(set() for _ in range(num_steps_late + 1))
    answered: set[str] = set()
    while len(answered) < 100:
        engine.step()
        unanswered.append(engine.producer.asked.keys() - answered.union(*unanswered))
        for request_id in sorted(unanswered.popleft()):
            engine.producer.allow(request_id)
            answered.add(request_id)
    sizes = [sum(step.num_scheduled_tokens.values()) for step in engine.rank.steps]
    # But for those in which it is learned how late the answers are.
    assert set(sizes[20:-1]) == {16}


def test_only_the_next_requests_of_each_decode_worker_are_asked_for() -> None:
    engine = prefill_engine(max_num_batched_tokens=16)
    for i in range(4):
        engine.add(f"d{i}", [1] * 10, kv_transfer_params=ON_P)
        engine.add(f"e{i}", [2] * 10, kv_transfer_params=ON_P_FOR_E)
    engine.run()
    assert sorted(engine.producer.asked) == ["d0", "d1", "e0", "e1"], (
        "as many as fill a step, or two"
    )
    engine.producer.allow("e0")
    engine.run()
    assert "e2" in engine.producer.asked
    assert "d2" not in engine.producer.asked


def test_a_grant_revoked_behind_the_schedulers_back_does_not_start() -> None:
    """D has granted it, but the scheduler has not applied that yet."""
    engine = prefill_engine()
    engine.add("a", [1] * 10, kv_transfer_params=ON_P)
    engine.run()
    engine.producer.revoked.add("a")
    engine.producer.allow("a")
    for _ in range(3):  # the first one only applies the grant
        engine.step()
    assert not started(engine)
    assert len(engine.scheduler.waiting) == 1
    assert engine.pool.num_free_blocks == engine.pool.num_blocks
    check_containers(engine.scheduler)


def test_blocks_are_announced_when_they_are_whole_and_computed() -> None:
    engine = prefill_engine(max_num_batched_tokens=6)
    engine.add("a", [1] * 16, kv_transfer_params=ON_P)
    engine.run()
    engine.producer.allow("a")
    seen = []
    while "a" not in engine.outputs:
        engine.step()
        seen.append(engine.producer.announced.get("a"))
    assert seen == [None, 6, 12, 16]


def test_a_cached_prefix_is_announced_before_anything_is_computed() -> None:
    engine = Engine(producer=ScriptedProducer())
    engine.add("first", [1] * 12)
    engine.run()
    announced_at_first: list[int | None] = []
    engine.rank.on_step = lambda step: announced_at_first.append(engine.producer.announced.get("a"))
    engine.add("a", [1] * 16, kv_transfer_params=ON_P)
    engine.run()
    assert announced_at_first[0] == 12


def test_requests_sent_again_come_before_new_ones() -> None:
    engine = prefill_engine()
    for name in ("a", "b", "c"):
        engine.add(name, [1] * 20, kv_transfer_params=ON_P)
    engine.add("again", [2] * 20, kv_transfer_params=ON_P, attempt=1)
    engine.run()
    assert list(engine.producer.asked) == ["again", "a"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_what_was_running_ends_during_a_pause_though_others_have_been_asked_for(
    policy: str,
) -> None:
    engine = prefill_engine(max_num_batched_tokens=4, scheduling_policy=policy)
    engine.add("a", [1] * 12, kv_transfer_params=ON_P, priority=1)
    engine.run()
    engine.producer.allow("a")
    while not engine.scheduler.running:
        engine.step()
    for i in range(3):
        engine.add(f"{i}", [2] * 12, kv_transfer_params=ON_P)
    engine.step()
    assert list(engine.producer.asked) == ["a", "0", "1"]
    engine.scheduler.containers.preempt(engine.scheduler.requests["a"])
    engine.producer.asked.clear()
    engine.scheduler.pause_state = PauseState.PAUSED_ALL
    engine.step()
    assert not engine.producer.asked
    engine.scheduler.pause_state = PauseState.PAUSED_NEW
    engine.step()
    assert list(engine.producer.asked) == ["a"]
    engine.producer.allow("a")
    engine.run()
    assert engine.tokens("a") == expected([1] * 12, 1)
    assert not engine.scheduler.has_admitted_requests()


@pytest.mark.parametrize("pause_state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_pause_gives_back_what_decode_workers_hold_for_it(pause_state: PauseState) -> None:
    engine = prefill_engine()
    for name in ("a", "b", "c"):
        engine.add(name, [ord(name)] * 20, kv_transfer_params=ON_P)
    engine.run()
    assert list(engine.producer.asked) == ["a", "b"]
    engine.producer.allow("b")
    engine.scheduler.pause_state = pause_state
    engine.run()
    assert engine.producer.preempted == ["a", "b"]
    assert not started(engine)
    engine.producer.allow("a")  # the grant was on its way
    engine.producer.asked.clear()
    engine.run()
    assert not engine.producer.asked
    engine.scheduler.pause_state = PauseState.UNPAUSED
    engine.run()
    assert list(engine.producer.asked) == ["a", "b"], "in their old order"
    for name in ("a", "b", "c"):
        engine.producer.allow(name)
        engine.run()
        assert engine.tokens(name) == expected([ord(name)] * 20, 1)
        engine.producer.release(name)
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_tokens_that_wait_are_counted(policy: str) -> None:
    engine = prefill_engine(scheduling_policy=policy)

    def num_waiting() -> int:
        stats = engine.scheduler.make_stats(step_num_tokens=0, step_duration_s=0.0)
        return stats.num_waiting_tokens

    for i in range(4):
        engine.add(f"{i}", [1] * 10, kv_transfer_params=ON_P)
    engine.run()
    assert len(engine.producer.asked) < 4
    assert num_waiting() == 40
    engine.producer.allow("0")
    engine.scheduler.update_from_kv_transfer()
    assert num_waiting() == 40, "it may start, and waits as others do"
    engine.core.abort_requests(["1", "3"])
    assert num_waiting() == 20


def test_what_is_cached_of_a_waiting_prompt_is_not_counted() -> None:
    engine = prefill_engine()
    block_size = engine.scheduler.kv.block_size
    prompt = list(range(2 * block_size + 3))
    engine.add("a", prompt, kv_transfer_params=ON_P)
    engine.run()
    engine.producer.allow("a")
    engine.run()
    engine.producer.release("a")
    engine.run()
    engine.add("b", prompt, kv_transfer_params=ON_P)
    engine.run()
    assert load_of(engine)[1] == 3
    engine.producer.allow("b")
    engine.run()
    assert load_of(engine) == (0, 0)
    engine.producer.release("b")
    engine.run()
    engine.assert_idle()


def load_of(engine: Engine) -> tuple[int, int]:
    """Requests that wait for a decode worker, and tokens that wait for P."""
    stats = engine.scheduler.make_stats(step_num_tokens=0, step_duration_s=0.0)
    return stats.num_waiting_for_decode_reqs, stats.num_waiting_tokens


def decode_queue_s(engine: Engine, name: str) -> float:
    stats = engine.outputs[name][0].prefill_stats
    assert stats is not None
    assert stats.decode_queue_s <= stats.queue_s
    return stats.decode_queue_s


def test_what_is_behind_a_later_waits_for_d_as_well(clock: Clock) -> None:
    engine = prefill_engine(clock=clock)
    for name in ("a", "b", "c", "d"):
        engine.add(name, [1] * 10, kv_transfer_params=ON_P)
    engine.add("other", [2] * 10, kv_transfer_params=ON_P_FOR_E)
    engine.run()
    assert sorted(engine.producer.asked) == ["a", "b", "other"]
    assert load_of(engine) == (0, 50)
    clock.now_s += 1  # D has not answered: it is in the midst of a step
    for name in ("a", "b"):
        engine.producer.later(name)
    engine.run()
    assert load_of(engine) == (4, 10)
    clock.now_s += 5
    for name in ("a", "b", "other"):
        engine.producer.allow(name)
    engine.run()
    for name in ("c", "d"):
        engine.producer.allow(name)
    engine.run()
    assert load_of(engine) == (0, 0)
    assert {name: decode_queue_s(engine, name) for name in ("a", "b", "c", "d", "other")} == {
        "a": 6, "b": 6, "c": 6, "d": 6, "other": 6
    }  # fmt: skip


def test_while_p_has_granted_ones_to_start_it_waits_for_itself(clock: Clock) -> None:
    engine = prefill_engine(clock=clock, num_blocks=128, max_num_seqs=1)
    for name in ("a", "b", "c", "d"):
        engine.add(name, [ord(name)] * 60, kv_transfer_params=ON_P)
    engine.run()
    engine.producer.allow("a")
    engine.producer.allow("b")
    for _ in range(3):
        engine.step()
    assert "c" in engine.producer.asked
    engine.producer.later("c")
    engine.step()
    clock.now_s += 3  # P computes a, and has b
    assert load_of(engine)[0] == 0
    while "b" not in started(engine):
        engine.step()
    clock.now_s += 4
    assert load_of(engine)[0] == 2
    engine.producer.allow("c")
    engine.run()
    engine.producer.allow("d")
    engine.run()
    assert decode_queue_s(engine, "b") == 0
    assert decode_queue_s(engine, "c") == decode_queue_s(engine, "d") == 4


@pytest.mark.parametrize("step_tokens", [16, 96])
def test_a_grant_of_a_full_d_waits_for_p_only_if_a_step_has_no_room_for_it(
    clock: Clock, step_tokens: int
) -> None:
    engine = prefill_engine(clock=clock, num_blocks=128, max_num_batched_tokens=step_tokens)
    for name in ("a", "b", "c", "d"):
        engine.add(name, [ord(name)] * 40, kv_transfer_params=ON_P)
    engine.run()
    for name in ("a", "b"):
        engine.producer.later(name)
    engine.run()
    clock.now_s += 3
    for name in ("a", "b"):
        engine.scheduler.containers.remote_decodes.allow(engine.producer.asked[name], clock())
    assert load_of(engine)[0] == 2, "no step was planned since"
    engine.step()
    has_room = step_tokens > 80
    assert ("b" in started(engine)) == has_room
    engine.producer.later("c")
    engine.step()
    clock.now_s += 2
    assert load_of(engine)[0] == (2 if has_room else 0)
    while "b" not in started(engine):
        engine.step()
    clock.now_s += 4
    assert load_of(engine)[0] == 2
    for name in ("c", "d"):
        engine.producer.allow(name)
        engine.run()
    behind_s = 9 if has_room else 7
    assert [decode_queue_s(engine, name) for name in "abcd"] == [3, 3, behind_s, behind_s]


def test_a_grant_taken_back_waits_for_d_again(clock: Clock) -> None:
    engine = prefill_engine(clock=clock)
    engine.add("a", [1] * 10, kv_transfer_params=ON_P)
    engine.run()
    engine.producer.allow("a")
    engine.producer.forbid("a")
    engine.run()
    engine.producer.revoked.clear()
    assert load_of(engine) == (1, 0)
    clock.now_s += 2
    engine.producer.allow("a")
    engine.run()
    assert decode_queue_s(engine, "a") == 2


def test_one_that_ends_holds_up_nobody(clock: Clock) -> None:
    engine = prefill_engine(clock=clock)
    for name in ("a", "b"):
        engine.add(name, [1] * 20, kv_transfer_params=ON_P)
    engine.run()
    engine.producer.later("a")
    engine.run()
    clock.now_s += 2
    engine.core.abort_requests(["a"])
    engine.run()
    assert load_of(engine) == (0, 20)
    clock.now_s += 1
    engine.producer.allow("b")
    engine.run()
    assert decode_queue_s(engine, "b") == 3


def test_whoever_queues_behind_waits_for_p_while_d_only_takes_its_time_to_answer(
    clock: Clock,
) -> None:
    engine = prefill_engine(clock=clock)
    names = [f"{number}" for number in range(20)]
    for name in names:
        engine.add(name, [1] * 60, kv_transfer_params=ON_P)
    for _ in range(100):
        for name in list(engine.producer.held):
            engine.producer.release(name)
        engine.step()  # asks, and computes what was granted before
        asked = engine.producer.asked.keys() - engine.outputs
        clock.now_s += 0.1
        for name in asked:
            engine.producer.allow(name)
        clock.now_s += 0.1
    waits = [stats.queue_s for name in names if (stats := engine.outputs[name][0].prefill_stats)]
    assert max(waits) > 2
    assert max(decode_queue_s(engine, name) for name in names) == pytest.approx(0.1)
