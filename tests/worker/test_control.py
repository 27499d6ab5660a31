"""A worker's services around a real engine: what operators, health checks and routers see."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from pdserve.v1 import control_service_pb2 as control_pb2
from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve_engine.core.engine_core import EngineCore
from pdserve_engine.runner.load import model_source
from support.refusals import refused
from support.steps import held_steps, slowed_steps
from support.waiting import until
from support.worker import (
    LONG,
    TIMEOUT_S,
    Worker,
    add,
    collect,
    ends,
    has_started,
    read_until,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_paused_worker_tells_everyone_and_comes_back(worker: Worker) -> None:
    assert await worker.health() == {SERVING}
    async with worker.attach("one") as router:
        request = control_pb2.PauseRequest(mode=control_pb2.PAUSE_MODE_WAIT, clear_cache=True)
        await worker.control.Pause(request, timeout=TIMEOUT_S)
        assert await worker.health() == {NOT_SERVING}
        assert await worker.is_alive()
        *_, heartbeat = await read_until(router, lambda m: m.heartbeat.paused)
        assert not heartbeat.heartbeat.draining
        load = await worker.load()
        assert load.paused
        assert not load.HasField("sleep_level")
        async with worker.attach("late") as late:
            await read_until(late, lambda m: m.heartbeat.paused)
        await router.write(add("waits", 4))
        await worker.control.Resume(control_pb2.ResumeRequest(), timeout=TIMEOUT_S)
        await read_until(router, ends)
        assert await worker.health() == {SERVING}
        assert not (await worker.load()).paused


async def test_routers_hear_how_many_they_are(worker: Worker) -> None:
    async with worker.attach("one") as one:
        await read_until(one, lambda m: m.heartbeat.num_routers == 1)
        async with worker.attach("two") as two:
            for router in (one, two):
                await read_until(router, lambda m: m.heartbeat.num_routers == 2)
            await two.done_writing()
            while await two.read() is not grpc.aio.EOF:
                pass
        await read_until(one, lambda m: m.heartbeat.num_routers == 1)


@pytest.mark.parametrize("worker", [{"step_timeout_s": 0.5}], indirect=True)
async def test_a_worker_whose_engine_hangs_asks_to_be_restarted(worker: Worker) -> None:
    assert await worker.is_alive()
    async with worker.attach("one") as router:
        with held_steps():
            await router.write(add("long", 4))
            deadline = time.monotonic() + TIMEOUT_S
            while await worker.is_alive():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)


async def test_sleep_and_wake_up(worker: Worker) -> None:
    slept = await worker.control.Sleep(control_pb2.SleepRequest(level=2), timeout=TIMEOUT_S)
    assert slept.freed_bytes > 7 << 20
    assert await worker.health() == {NOT_SERVING}
    assert (await worker.load()).sleep_level == 2
    await worker.control.WakeUp(control_pb2.WakeUpRequest(tags=["weights"]), timeout=TIMEOUT_S)
    assert await worker.health() == {NOT_SERVING}
    await worker.control.WakeUp(control_pb2.WakeUpRequest(), timeout=TIMEOUT_S)
    assert await worker.health() == {SERVING}


async def test_a_cancelled_pause_leaves_the_worker_serving(worker: Worker) -> None:
    async with worker.attach("one") as router:
        with slowed_steps():
            await router.write(add("long", 100))
            await read_until(router, has_started)
            call = worker.control.Pause(control_pb2.PauseRequest(mode=control_pb2.PAUSE_MODE_WAIT))
            await until(lambda: worker.engine.state().is_paused)
            call.cancel()
            await until(lambda: not worker.engine.state().is_paused)
        await read_until(router, ends)
        await until_serving(worker)


async def until_serving(worker: Worker) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while await worker.health() != {SERVING}:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_a_wake_up_whose_caller_gives_up_ends_in_a_worker_that_serves(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model = model_source.load_model

    def load_slowly(*args: Any, **kwargs: Any) -> object:
        time.sleep(0.5)
        return load_model(*args, **kwargs)

    monkeypatch.setattr(model_source, "load_model", load_slowly)
    await worker.control.Sleep(control_pb2.SleepRequest(level=2), timeout=TIMEOUT_S)
    with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
        await worker.control.WakeUp(control_pb2.WakeUpRequest(), timeout=0.2)
    await until_serving(worker)
    assert not (await worker.load()).paused


async def test_an_id_of_another_router_is_refused_and_ones_own_is_ignored(worker: Worker) -> None:
    async with worker.attach("one") as one, worker.attach("two") as two:
        with slowed_steps():
            await one.write(add("same", 60))
            await read_until(one, has_started)
            await one.write(add("same", 1))
            await two.write(add("same", 1))
            *_, refusal = await read_until(two, ends)
        (output,) = refusal.outputs.outputs
        assert output.error.code == core_pb2.ERROR_CODE_INVALID_ARGUMENT
        assert "'same' is running already" in output.error.message
        *_, end = await read_until(one, ends)
        assert end.outputs.outputs[-1].finish_reason == core_pb2.FINISH_REASON_LENGTH


def lora(name: str) -> control_pb2.AddLoraRequest:
    return control_pb2.AddLoraRequest(lora_request=core_pb2.LoraRequest(lora_name=name))


REFUSED: list[tuple[str, Any, str, str]] = [
    ("Resume", control_pb2.ResumeRequest(), "FAILED_PRECONDITION", "not paused"),
    ("WakeUp", control_pb2.WakeUpRequest(), "FAILED_PRECONDITION", "not asleep"),
    ("WakeUp", control_pb2.WakeUpRequest(tags=["x"]), "INVALID_ARGUMENT", "tags has 'x'"),
    ("Sleep", control_pb2.SleepRequest(level=7), "INVALID_ARGUMENT", "level is 7"),
    ("Pause", control_pb2.PauseRequest(mode=9), "INVALID_ARGUMENT", "mode is 9, known"),  # type: ignore[arg-type]
    ("Profile", control_pb2.ProfileRequest(), "FAILED_PRECONDITION", "no profile is running"),
    ("AddLora", control_pb2.AddLoraRequest(), "INVALID_ARGUMENT", "lora_request.lora_name is ''"),
    ("AddLora", lora("a"), "FAILED_PRECONDITION", "lora_root is not set"),
    ("RemoveLora", control_pb2.RemoveLoraRequest(), "INVALID_ARGUMENT", "lora_name is ''"),
    ("RemoveLora", control_pb2.RemoveLoraRequest(lora_name="a"), "FAILED_PRECONDITION", "is 'a'"),
    ("PinLora", control_pb2.PinLoraRequest(lora_name="a"), "FAILED_PRECONDITION", "is 'a', no"),
]


async def test_what_cannot_be_done_is_said_by_status(worker: Worker) -> None:
    for method, request, code, detail in REFUSED:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await getattr(worker.control, method)(request, timeout=TIMEOUT_S)
        assert error.value.code().name == code
        assert detail in (error.value.details() or "")
    assert await worker.health() == {SERVING}
    assert not (await worker.load()).paused


async def test_a_drain_reports_until_nothing_is_left_and_is_shared(worker: Worker) -> None:
    async with worker.attach("one") as router:
        with slowed_steps():
            await router.write(add("long", 100))
            await read_until(router, has_started)
            drain = control_pb2.DrainRequest(timeout_ms=60_000)
            first = worker.control.Drain(drain, timeout=2 * TIMEOUT_S)
            progress = await first.read()
            assert (progress.num_requests, progress.drained) == (1, False)
            assert await worker.health() == {NOT_SERVING}
            await read_until(router, lambda m: m.heartbeat.draining)
            drain = control_pb2.DrainRequest(timeout_ms=0)
            second = worker.control.Drain(drain, timeout=2 * TIMEOUT_S)
            progress = await second.read()
            assert not progress.drained, "it follows the first one, with its timeout"
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await worker.control.Pause(control_pb2.PauseRequest(), timeout=TIMEOUT_S)
            assert error.value.details() == "the worker is draining"
            first.cancel()
        while (message := await second.read()) is not grpc.aio.EOF:
            progress = message
        assert (progress.num_requests, progress.drained) == (0, True)
        assert progress.num_handed_back == 0
        (end,) = [m for m in await read_until(router, ends) if ends(m)]
        assert end.outputs.outputs[-1].finish_reason == core_pb2.FINISH_REASON_LENGTH
        assert (await worker.load()).draining


async def test_a_drain_hands_back_what_is_left_at_its_timeout(worker: Worker) -> None:
    async with worker.attach("one") as router:
        await router.write(add("long", LONG))
        await read_until(router, has_started)
        call = worker.control.Drain(control_pb2.DrainRequest(timeout_ms=1), timeout=TIMEOUT_S)
        *_, last = await collect(call)
        assert (last.num_requests, last.drained, last.num_handed_back) == (0, True, 1)
        (end,) = [m for m in await read_until(router, ends) if ends(m)]
        assert end.outputs.outputs[-1].error.code == core_pb2.ERROR_CODE_DRAINING
        assert end.outputs.outputs[-1].error.retryable


async def test_a_drain_timeout_has_a_limit(worker: Worker) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT):
        await worker.control.Drain(
            control_pb2.DrainRequest(timeout_ms=1 << 60), timeout=TIMEOUT_S
        ).read()
    assert await worker.health() == {SERVING}


async def test_every_router_hears_of_its_own_requests_and_of_the_engines_death(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no more")

    async with worker.attach("one") as one, worker.attach("two") as two:
        for router, request_id in ((one, "a"), (two, "b")):
            await router.write(add(request_id, 5))
            outputs = [o for m in await read_until(router, ends) for o in m.outputs.outputs]
            assert {output.request_id for output in outputs} == {request_id}
        await one.write(add("c", LONG))
        await read_until(one, has_started)
        monkeypatch.setattr(EngineCore, "begin_step", fail)
        for router in (one, two):
            *_, last = await read_until(router, lambda m: m.outputs.HasField("engine_dead"))
            assert last.outputs.engine_dead.code == core_pb2.ERROR_CODE_ENGINE_DEAD
            assert "no more" in last.outputs.engine_dead.message
    assert "no more" in (worker.engine.problem() or "")
    with refused(grpc.StatusCode.UNAVAILABLE):
        await worker.control.Pause(control_pb2.PauseRequest(), timeout=TIMEOUT_S)
