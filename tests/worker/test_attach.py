"""Attach streams over a network that fails: what a router keeps, and what it loses."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import engine_core_service_pb2_grpc as service_grpc
from pdserve_common.rpc.attach_protocol import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from pdserve_worker import attached_router as attached_router_module
from pdserve_worker import router_stream as stream_module
from support.cut_proxy import CutProxy, cut_proxies
from support.refusals import refused
from support.steps import slowed_steps
from support.waiting import until
from support.worker import LONG, TIMEOUT_S, Worker, add, beat, until_idle

Stub = service_grpc.EngineCoreServiceStub


class Router:
    """A router that takes in what comes as it should, and can attach again."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.call: Any = None
        self.adopted: list[tuple[str, int]] = []
        self.next_frame_seq = 1
        self.tokens: list[int] = []
        self.ends: dict[str, core_pb2.EngineCoreOutput] = {}
        self._worker_epoch = ""
        self._beating: asyncio.Future[None] = asyncio.Future()

    async def close(self) -> None:
        self.call.cancel()
        await self.stop_beating()

    async def stop_beating(self) -> None:
        """Writing to a stream that has ended would hide its status."""
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)

    async def attach(self, *requests: tuple[str, int], resumes: bool = False) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.insecure_channel(self.address, options=options)
        self.call = Stub(channel).Attach(timeout=2 * TIMEOUT_S)
        hello = service_pb2.AttachHello(
            router_id="r", router_epoch="0" * 32, max_protocol_version=PROTOCOL_VERSION
        )
        if resumes:
            hello.resume.worker_epoch = self._worker_epoch
            hello.resume.next_frame_seq = self.next_frame_seq
            for request_id, attempt in requests:
                hello.resume.requests.add(request_id=request_id, attempt=attempt)
        else:
            self.next_frame_seq = 1
        await self.call.write(service_pb2.AttachRequest(hello=hello))
        await self.stop_beating()
        self._beating = asyncio.create_task(beat(self.call))
        welcome = (await asyncio.wait_for(self.call.read(), TIMEOUT_S)).welcome
        self._worker_epoch = welcome.info.epoch
        self.adopted = [(request.request_id, request.attempt) for request in welcome.adopted]

    async def read(self) -> None:
        message = await asyncio.wait_for(self.call.read(), TIMEOUT_S)
        assert message is not grpc.aio.EOF
        if message.WhichOneof("message") != "outputs":
            return
        assert message.frame_seq == self.next_frame_seq
        self.next_frame_seq += 1
        for output in message.outputs.outputs:
            assert output.first_token_index == len(self.tokens)
            self.tokens += output.new_token_ids
            if output.finish_reason:
                self.ends[output.request_id] = output

    async def read_tokens(self, num_tokens: int) -> None:
        target = len(self.tokens) + num_tokens
        while len(self.tokens) < target:
            await self.read()

    async def read_end(self, request_id: str) -> core_pb2.EngineCoreOutput:
        while request_id not in self.ends:
            await self.read()
        return self.ends[request_id]

    async def read_status(self) -> grpc.StatusCode:
        """Lose what comes until the stream's end."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return await self.call.code()

    async def acknowledge(self) -> None:
        heartbeat = service_pb2.Heartbeat(next_frame_seq=self.next_frame_seq)
        await self.call.write(service_pb2.AttachRequest(heartbeat=heartbeat))

    async def add(self, request_id: str, max_tokens: int) -> None:
        await self.call.write(add(request_id, max_tokens))


@pytest.fixture
async def network(worker: Worker) -> AsyncIterator[CutProxy]:
    """A way to the worker that the test can cut."""
    async with cut_proxies(worker.port, 1) as (proxy,):
        yield proxy


@pytest.fixture
async def router(network: CutProxy) -> AsyncIterator[Router]:
    router = Router(network.address)
    await router.attach()
    yield router
    await router.close()


async def tokens_without_faults(worker: Worker, max_tokens: int) -> list[int]:
    router = Router(f"127.0.0.1:{worker.port}")
    await router.attach()
    await router.add("reference", max_tokens)
    await router.read_end("reference")
    await router.close()
    return router.tokens


@pytest.mark.parametrize("acknowledges", [True, False])
async def test_a_router_goes_on_after_its_stream_broke(
    worker: Worker,
    network: CutProxy,
    router: Router,
    acknowledges: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with slowed_steps():
        await router.add("a", 150)
        for _ in range(3):
            await router.read_tokens(5)
            if acknowledges:
                await router.acknowledge()
            network.reset()
            await asyncio.sleep(0.1)
            await router.attach(("a", 0), resumes=True)
            assert router.adopted == [("a", 0)]
        await router.read_tokens(5)
    end = await router.read_end("a")
    assert end.finish_reason == core_pb2.FINISH_REASON_LENGTH
    assert router.tokens == await tokens_without_faults(worker, 150)
    assert "unexpected error" not in caplog.text


async def test_an_end_that_was_lost_on_the_way_comes_again(
    worker: Worker, network: CutProxy, router: Router
) -> None:
    network.freeze(only_answers=True)
    await router.add("a", 30)
    await until(lambda: worker.engine.step_seq() == 30)
    await until_idle(worker)
    await asyncio.sleep(0.1)
    network.reset()
    await router.attach(("a", 0), ("unknown", 0), resumes=True)
    assert router.adopted == [("a", 0)]
    assert (await router.read_end("a")).finish_reason == core_pb2.FINISH_REASON_LENGTH
    assert len(router.tokens) == 30


@pytest.mark.parametrize("is_frozen", [False, True])
async def test_a_newer_stream_takes_over_from_one_that_seems_open(
    worker: Worker, network: CutProxy, router: Router, is_frozen: bool
) -> None:
    with slowed_steps():
        await router.add("a", 60)
        await router.read_tokens(5)
        old = router.call
        if is_frozen:
            network.freeze()
            await asyncio.sleep(0.1)
        await router.attach(("a", 0), resumes=True)
        assert router.adopted == [("a", 0)]
    await router.read_end("a")
    assert len(router.tokens) == 60
    if not is_frozen:
        router.call = old
        assert await router.read_status() is grpc.StatusCode.FAILED_PRECONDITION


async def test_what_a_router_does_not_list_is_aborted(
    worker: Worker, network: CutProxy, router: Router
) -> None:
    await router.add("a", LONG)
    await router.read_tokens(5)
    network.reset()
    await router.attach(resumes=True)
    assert router.adopted == []
    assert (await router.read_end("a")).finish_reason == core_pb2.FINISH_REASON_ABORT
    await until_idle(worker)


async def test_outputs_that_are_in_no_frame_are_not_resumed_behind(
    worker: Worker, network: CutProxy, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect between taking outputs and keeping them leaves a hole that no router may adopt."""
    next_frames = attached_router_module.AttachedRouter.next_frames
    is_broken = [False]

    def broken_once(self: Any, stream: int, outputs: Any, step_seq: int) -> Any:
        if is_broken[0] and any(part.outputs for part in outputs):
            is_broken[0] = False
            raise KeyError("broken on purpose")
        return next_frames(self, stream, outputs, step_seq)

    monkeypatch.setattr(attached_router_module.AttachedRouter, "next_frames", broken_once)
    await router.add("a", LONG)
    await router.read_tokens(5)
    is_broken[0] = True
    assert await router.read_status() is not grpc.StatusCode.OK
    await until_idle(worker)
    await router.attach(("a", 0), resumes=True)
    assert router.adopted == []


async def test_a_router_without_anything_to_resume_starts_anew(
    worker: Worker, network: CutProxy, router: Router
) -> None:
    await router.add("a", LONG)
    await router.read_tokens(5)
    network.reset()
    await router.attach()
    await until_idle(worker)
    router.tokens.clear()
    await router.add("a", 20)
    await router.read_end("a")
    assert len(router.tokens) == 20


async def test_a_router_that_does_not_come_back_loses_its_requests(
    worker: Worker, network: CutProxy, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached_router_module, "REATTACH_S", 0.3)
    await router.add("a", LONG)
    await router.read_tokens(5)
    cut = time.monotonic()
    network.reset()
    await until_idle(worker)
    assert time.monotonic() - cut >= 0.3
    assert worker.engine.step_seq() < LONG, "it has not ended by itself"
    await router.attach(("a", 0), resumes=True)
    assert router.adopted == []


async def test_a_silent_router_is_taken_for_gone_and_may_come_back(
    worker: Worker, network: CutProxy, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    await router.stop_beating()
    monkeypatch.setattr(stream_module, "ROUTER_TIMEOUT_S", 0.2)
    await router.add("a", 60)
    assert await router.read_status() is grpc.StatusCode.DEADLINE_EXCEEDED
    monkeypatch.undo()
    await router.attach(("a", 0), resumes=True)
    assert router.adopted == [("a", 0)]
    await router.read_end("a")
    assert len(router.tokens) == 60


async def test_a_router_that_ends_its_stream_in_order_detaches_at_once(
    worker: Worker, network: CutProxy, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached_router_module, "REATTACH_S", 1000.0)
    await router.add("a", LONG)
    await router.read_tokens(5)
    await router.call.done_writing()
    assert await asyncio.wait_for(router.read_status(), TIMEOUT_S) is grpc.StatusCode.OK
    await until_idle(worker)
    assert worker.engine.step_seq() < LONG, "it has not ended by itself"


async def test_a_message_that_makes_no_sense_ends_everything_of_its_router(
    worker: Worker, network: CutProxy, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached_router_module, "REATTACH_S", 1000.0)
    await router.add("a", LONG)
    await router.read_tokens(5)
    hello = service_pb2.AttachHello(
        router_id="again", router_epoch="0" * 32, max_protocol_version=PROTOCOL_VERSION
    )
    await router.call.write(service_pb2.AttachRequest(hello=hello))
    assert await router.read_status() is grpc.StatusCode.INVALID_ARGUMENT
    await until_idle(worker)
    assert worker.engine.step_seq() < LONG, "it has not ended by itself"


@pytest.mark.parametrize(
    ("versions", "spoken"),
    [
        # As routers send that know of no versions.
        ({}, "0 to 0"),
        (
            {"min_protocol_version": PROTOCOL_VERSION + 1, "max_protocol_version": 99},
            f"{PROTOCOL_VERSION + 1} to 99",
        ),
        ({"max_protocol_version": MIN_PROTOCOL_VERSION - 1}, f"0 to {MIN_PROTOCOL_VERSION - 1}"),
    ],
)
async def test_a_router_of_other_versions_is_refused_by_name(
    worker: Worker, versions: dict[str, int], spoken: str
) -> None:
    call = worker.core.Attach(timeout=TIMEOUT_S)
    hello = service_pb2.AttachHello(router_id="other", router_epoch="0" * 32, **versions)
    await call.write(service_pb2.AttachRequest(hello=hello))
    speaks = f"speaks {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}, router other {spoken}"
    with refused(grpc.StatusCode.FAILED_PRECONDITION, speaks):
        await call.read()


async def test_the_highest_version_that_both_know_is_spoken(worker: Worker) -> None:
    call = worker.core.Attach(timeout=TIMEOUT_S)
    hello = service_pb2.AttachHello(
        router_id="newer", router_epoch="0" * 32, max_protocol_version=PROTOCOL_VERSION + 1
    )
    await call.write(service_pb2.AttachRequest(hello=hello))
    assert (await call.read()).welcome.protocol_version == PROTOCOL_VERSION
    call.cancel()
