"""A request's life inside an engine: its statuses, what is told of them, and its early end."""

import pytest

from pdserve_common.types.engine import (
    EngineCoreEventType,
    EngineError,
    ErrorCode,
    FinishReason,
)
from pdserve_common.types.sampling_params import RepetitionDetectionParams, SamplingParams
from pdserve_engine.core.engine_core import EngineCore
from pdserve_engine.request.request import Request, RequestStatus
from support.scripted_engine import (
    MAX_MODEL_LEN,
    ON_D,
    Engine,
    ScriptedConsumer,
    decode_engine,
    expected,
)

E = EngineCoreEventType
S = RequestStatus
LOST = EngineError(code=ErrorCode.KV_EXPIRED, message="gone")


@pytest.fixture
def transitions(monkeypatch: pytest.MonkeyPatch) -> set[tuple[S | None, S]]:
    """(before, after) of every change of any request's status; before is None at its birth."""
    seen: set[tuple[S | None, S]] = set()
    slot = Request.status

    class Watched:
        def __get__(self, request: Request, owner: type) -> S:
            return slot.__get__(request, owner)

        def __set__(self, request: Request, status: S) -> None:
            seen.add((getattr(request, "status", None), status))
            slot.__set__(request, status)

    monkeypatch.setattr(Request, "status", Watched())
    return seen


def tight_engine() -> Engine:
    """Two requests of sixteen tokens behind eight do not fit together: one is preempted."""
    engine = Engine(num_blocks=8, max_num_batched_tokens=64, enable_caching=False)
    for name, first in (("a", 0), ("b", 20)):
        engine.add(name, list(range(first, first + 8)), max_tokens=16, trace_headers={"t": name})
    return engine


def events(engine: Engine, request_id: str) -> list[E]:
    found = [event for output in engine.outputs[request_id] for event in output.events]
    assert [e.timestamp for e in found] == sorted(e.timestamp for e in found)
    return [event.type for event in found]


def pulled(engine: Engine, consumer: ScriptedConsumer, name: str, *, is_lost: bool) -> None:
    prompt = [len(name)] * 10
    engine.add(name, prompt, kv_transfer_params=ON_D)
    consumer.claim(name)
    engine.step()
    engine.step()
    assert name in consumer.loading
    if is_lost:
        consumer.lose(name)
        engine.step()
        consumer.fail(name, LOST)
    else:
        consumer.finish_load(name)
    engine.run()
    engine.step()


def test_every_status_is_reached_from_where_it_may_be(
    transitions: set[tuple[S | None, S]],
) -> None:
    tight_engine().run()
    engine = decode_engine()
    pulled(engine, engine.consumer, "pulled", is_lost=False)
    pulled(engine, engine.consumer, "lost", is_lost=True)
    whole = expected([1, 2], 3)
    engine.add("stopped", [1, 2], sampling_params=SamplingParams(stop_token_ids=(whole[1],)))
    loop = RepetitionDetectionParams(max_pattern_size=1)
    engine.add("looping", [3], sampling_params=SamplingParams(repetition_detection=loop))
    engine.rank.script["looping"] = [7, 7]
    engine.add("aborted", [4])
    engine.core.abort_requests(["aborted"])
    engine.run()
    assert transitions == {
        (None, S.WAITING),
        (S.WAITING, S.RUNNING),
        (S.RUNNING, S.PREEMPTED),
        (S.PREEMPTED, S.RUNNING),
        # D: a ticket, and then its KV is here or lost.
        (S.WAITING, S.WAITING_FOR_REMOTE_KVS),
        (S.WAITING_FOR_REMOTE_KVS, S.WAITING),
        (S.WAITING_FOR_REMOTE_KVS, S.FINISHED_ERROR),
        (S.RUNNING, S.FINISHED_STOPPED),
        (S.RUNNING, S.FINISHED_LENGTH_CAPPED),
        (S.RUNNING, S.FINISHED_REPETITION),
        (S.WAITING, S.FINISHED_ABORTED),
    }
    # Grammars are refused, and so are prompts that are too long, before they become requests.
    assert set(S) - {after for _, after in transitions} == {S.WAITING_FOR_FSM, S.FINISHED_IGNORED}


def test_events_come_with_the_next_output_and_once() -> None:
    engine = tight_engine()
    engine.step()
    for name in ("a", "b"):
        assert events(engine, name) == [E.QUEUED, E.SCHEDULED]
    engine.run()
    assert events(engine, "a") == [E.QUEUED, E.SCHEDULED]
    assert events(engine, "b")[:3] == [E.QUEUED, E.SCHEDULED, E.PREEMPTED]


def test_a_pull_has_events_of_its_own() -> None:
    engine = decode_engine()
    pulled(engine, engine.consumer, "pulled", is_lost=False)
    pulled(engine, engine.consumer, "lost", is_lost=True)
    accepted, lost = events(engine, "pulled"), events(engine, "lost")
    assert accepted[0] == lost[0] == E.QUEUED
    assert accepted.index(E.KV_ACCEPTED) < accepted.index(E.SCHEDULED)
    assert lost[-1] == E.KV_LOST
    assert E.KV_TRANSFER_STARTED in lost
    assert E.KV_ACCEPTED not in lost


def test_trace_headers_come_back_with_the_end() -> None:
    engine = tight_engine()
    engine.run()
    for name in ("a", "b"):
        *before, last = engine.outputs[name]
        assert last.trace_headers == {"t": name}
        assert not any(output.trace_headers for output in before)


def test_an_abort_that_comes_while_the_model_runs_keeps_the_steps_token_back() -> None:
    engine = Engine()
    aborts: list[str] = []

    def take_aborts() -> list[str]:
        taken = aborts.copy()
        aborts.clear()
        return taken

    engine.core = EngineCore(
        scheduler=engine.scheduler,
        executor=engine.core.executor,
        max_model_len=MAX_MODEL_LEN,
        take_aborts=take_aborts,
    )
    engine.add("a", [1, 2, 3], max_tokens=8)
    engine.add("b", [4, 5], max_tokens=8)
    engine.step()
    engine.rank.on_step = lambda step: aborts.append("a") if not aborts else None
    engine.step()
    assert engine.rank.steps[-1].num_scheduled_tokens == {"a": 1, "b": 1}
    assert engine.tokens("a") == expected([1, 2, 3], 1), "of the first step only"
    assert engine.finish_reason("a") == FinishReason.ABORT
    engine.run()
    assert engine.tokens("b") == expected([4, 5], 8)
    engine.assert_idle()
