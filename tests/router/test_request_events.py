"""What clients are told of what workers' engines did with their requests."""

import grpc

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.engine import EngineCoreEvent, EngineCoreEventType, KVLost, WorkerRole
from pdserve_router.requests.records.request_events import MAX_EVENTS
from support.fake_worker import Running, decode, hang, prefill
from support.refusals import refused

# By each worker's own clock (s).
STARTS = {WorkerRole.PREFILL: 5.0, WorkerRole.DECODE: 90_000.0}
TIMES_MS = {"QUEUED": 0, "KV_TRANSFER_STARTED": 2, "SCHEDULED": 7}


def request(**fields) -> pb2.GenerateRequest:
    params = core.SamplingParams(**{"seed": 7, **fields.pop("params", {})})
    return pb2.GenerateRequest(text="hello", sampling_params=params, **fields)


def events_at(start_s: float, *names: str) -> tuple[EngineCoreEvent, ...]:
    kinds = [(EngineCoreEventType[name], TIMES_MS[name]) for name in names]
    return tuple(EngineCoreEvent(kind, start_s + ms / 1e3) for kind, ms in kinds)


def telling(*names: str, num_times: int = 1):
    """Answer as usual, with these milestones on the first output."""

    async def behave(running: Running) -> None:
        role = running.worker.info.role
        told = list(events_at(STARTS[role], *names) * num_times)
        emit = running.emit

        def emit_telling(*tokens, **fields) -> None:
            emit(*tokens, events=tuple(told), **fields)
            told.clear()

        running.emit = emit_telling
        await (prefill if role is WorkerRole.PREFILL else decode)(running)

    return behave


def told_by(completion: pb2.CompletionOutput) -> set[tuple[str, int, str, int]]:
    return {
        (event.engine_id, event.attempt, name_of(event), event.since_queued_ns)
        for event in completion.events
    }


def name_of(event: pb2.RequestEvent) -> str:
    return core.EngineCoreEvent.Type.Name(event.type).removeprefix("TYPE_")


async def test_a_client_is_told_since_when_each_worker_had_its_request(stack) -> None:
    stack.prefill.behave = telling("QUEUED", "SCHEDULED")
    stack.decode.behave = telling("QUEUED", "KV_TRANSFER_STARTED", "SCHEDULED")
    *others, last = await stack.generate(request(include_events=True))
    assert not any(completion.events for output in others for completion in output.outputs)
    (completion,) = last.outputs
    assert told_by(completion) == {
        ("prefill-0", 0, "QUEUED", 0),
        ("prefill-0", 0, "SCHEDULED", 7_000_000),
        ("decode-0", 0, "QUEUED", 0),
        ("decode-0", 0, "KV_TRANSFER_STARTED", 2_000_000),
        ("decode-0", 0, "SCHEDULED", 7_000_000),
    }
    *_, last = await stack.generate(request())
    assert not last.outputs[0].events


async def test_each_completion_has_its_own(stack) -> None:
    stack.prefill.behave = stack.decode.behave = telling("QUEUED")
    outputs = await stack.generate(request(include_events=True, params={"n": 2}))
    ended = {each.index: each for output in outputs for each in output.outputs if each.events}
    assert [len(ended[index].events) for index in (0, 1)] == [2, 1]


async def test_they_are_bounded(stack) -> None:
    stack.decode.behave = telling("QUEUED", "SCHEDULED", num_times=MAX_EVENTS)
    *_, last = await stack.generate(request(include_events=True))
    assert len(last.outputs[0].events) == MAX_EVENTS


async def test_a_lost_attempt_is_told_too(stack) -> None:
    async def lose(running: Running) -> None:
        running.worker.behave = telling("QUEUED", "SCHEDULED")
        running.emit(
            at=0,
            kv_lost=KVLost(num_confirmed_tokens=0, reason="stall", message="stalled"),
            events=events_at(0.0, "QUEUED", "KV_TRANSFER_STARTED"),
        )
        await hang(running)

    stack.prefill.behave = hang
    stack.decode.behave = lose
    *_, last = await stack.generate(request(include_events=True))
    told = told_by(last.outputs[0])
    assert {("decode-0", 0, "QUEUED", 0), ("decode-0", 0, "KV_TRANSFER_STARTED", 2_000_000)} < told
    assert ("decode-0", 1, "SCHEDULED", 7_000_000) in told


async def test_beam_search_tells_none(stack) -> None:
    params = {"n": 2, "use_beam_search": True}
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "include_events"):
        await stack.generate(request(include_events=True, params=params))
