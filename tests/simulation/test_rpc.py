"""The simulation's gRPC behaves as grpc.aio does: the same calls over both."""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from pdserve.v1 import engine_core_service_pb2 as pb2
from pdserve.v1 import engine_core_service_pb2_grpc as pb2_grpc
from support.simulation.journal import Journal
from support.simulation.loop import Process, VirtualLoop, run
from support.simulation.network import Network
from support.simulation.rpc import Channel, Server

# Makes a channel and a server of the kind under test.
Make = Callable[[], Awaitable[tuple[Any, Any]]]
WAIT_S = 5.0


def number(value: int) -> pb2.AttachRequest:
    return pb2.AttachRequest(handle=value)


def answer(value: int) -> pb2.AttachResponse:
    return pb2.AttachResponse(frame_seq=value)


class Servicer(pb2_grpc.EngineCoreServiceServicer):
    """Does what the first message of an Attach asks for; the other calls are of the other kinds."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.is_over = asyncio.Event()

    async def GetInfo(self, request: Any, context: Any) -> Any:
        return pb2.GetInfoResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for _ in range(3):
            yield pb2.EngineCoreServiceGenerateResponse()

    async def PutTensor(self, requests: Any, context: Any) -> Any:
        self.seen = [request async for request in requests]
        return pb2.PutTensorResponse()

    async def Attach(self, requests: Any, context: Any) -> None:
        try:
            first = await requests.__aiter__().__anext__()
            await getattr(self, f"_on_{first.handle}")(requests, context)
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise
        finally:
            self.is_over.set()

    async def _on_1(self, requests: Any, context: Any) -> None:
        """Echo until the client half-closes, then say one thing more."""
        async for request in requests:
            await context.write(answer(request.handle))
        await context.write(answer(99))

    async def _on_2(self, requests: Any, context: Any) -> None:
        """Say two things and abort."""
        await context.write(answer(1))
        await context.write(answer(2))
        context.set_trailing_metadata((("retry-after-ms", "5"),))
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    async def _on_3(self, requests: Any, context: Any) -> None:
        raise ValueError("a defect")

    async def _on_4(self, requests: Any, context: Any) -> None:
        """Wait for ever, and then try to write to whoever is gone."""
        try:
            await asyncio.Event().wait()
        finally:
            with contextlib.suppress(grpc.aio.InternalError):
                await context.write(answer(1))
                self.seen.append("written")

    async def _on_5(self, requests: Any, context: Any) -> None:
        await context.write(answer(1))


async def real() -> tuple[Any, Any]:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}"), server


async def simulated() -> tuple[Any, Any]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    network = Network(loop, random.Random(1), Journal(loop.time, str))
    server = Server(network, Process(loop, "server"), "server:1")
    return Channel(network, Process(loop, "client"), "server:1"), server


@pytest.fixture(params=[real, simulated])
def play(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Run a case over a server and a stub."""
    make: Make = request.param

    def play(case: Callable[[Any, Servicer], Awaitable[None]]) -> None:
        async def body() -> None:
            channel, server = await make()
            servicer = Servicer()
            pb2_grpc.add_EngineCoreServiceServicer_to_server(servicer, server)
            await server.start()
            stub = pb2_grpc.EngineCoreServiceStub(channel)
            try:
                await asyncio.wait_for(case(stub, servicer), WAIT_S)
            finally:
                await channel.close()
                await server.stop(0.0)

        if make is real:
            asyncio.run(body())
        else:
            run(VirtualLoop(), body())

    return play


async def attach(stub: Any, kind: int) -> Any:
    call = stub.Attach()
    await call.write(number(kind))
    return call


def test_all_kinds_of_calls(play: Any) -> None:
    async def case(stub: Any, servicer: Servicer) -> None:
        assert isinstance(await stub.GetInfo(pb2.GetInfoRequest()), pb2.GetInfoResponse)
        responses = [each async for each in stub.Generate(pb2.EngineCoreServiceGenerateRequest())]
        assert len(responses) == 3
        put = stub.PutTensor()
        await put.write(pb2.PutTensorRequest())
        await put.done_writing()
        assert isinstance(await put, pb2.PutTensorResponse)
        assert len(servicer.seen) == 1

    play(case)


def test_a_half_close_leaves_the_other_direction_open(play: Any) -> None:
    async def case(stub: Any, servicer: Servicer) -> None:
        call = await attach(stub, 1)
        for value in (5, 6, 7):
            await call.write(number(value))
        await call.done_writing()
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(number(8))
        assert [(await call.read()).frame_seq for _ in range(4)] == [5, 6, 7, 99]
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert await call.read() is grpc.aio.EOF

    play(case)


def test_what_comes_before_an_abort_is_read_before_it(play: Any) -> None:
    async def case(stub: Any, servicer: Servicer) -> None:
        call = await attach(stub, 2)
        assert [(await call.read()).frame_seq for _ in range(2)] == [1, 2]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "full"
        assert ("retry-after-ms", "5") in tuple(caught.value.trailing_metadata())
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(number(1))
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()

    play(case)


def test_a_defect_of_a_handler_is_unknown(play: Any) -> None:
    async def case(stub: Any, servicer: Servicer) -> None:
        call = await attach(stub, 3)
        with pytest.raises(grpc.aio.AioRpcError, match="a defect") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNKNOWN

    play(case)


@pytest.mark.parametrize("how", ["call", "read"])
def test_a_cancelled_call_ends_its_handler(play: Any, how: str) -> None:
    async def case(stub: Any, servicer: Servicer) -> None:
        call = await attach(stub, 4)
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0.1)
        (call if how == "call" else reading).cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await call.code() is grpc.StatusCode.CANCELLED
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(number(1))
        await servicer.is_over.wait()
        assert servicer.seen == ["cancelled"]

    play(case)


def test_an_end_without_an_error(play: Any) -> None:
    async def case(stub: Any, servicer: Servicer) -> None:
        call = await attach(stub, 5)
        assert (await call.read()).frame_seq == 1
        assert await call.read() is grpc.aio.EOF
        assert (await call.code(), await call.details()) == (grpc.StatusCode.OK, "")

    play(case)


def test_a_deadline(play: Any) -> None:
    async def case(stub: Any, servicer: Servicer) -> None:
        call = stub.Attach(timeout=0.2)
        await call.write(number(4))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await servicer.is_over.wait()

    play(case)


def test_nobody_listens() -> None:
    async def error_of(make_channel: Callable[[], Any]) -> grpc.aio.AioRpcError:
        async with make_channel() as channel:
            call = pb2_grpc.EngineCoreServiceStub(channel).Attach()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(number(1))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        return caught.value

    def simulated_channel() -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        network = Network(loop, random.Random(1), Journal(loop.time, str))
        return Channel(network, Process(loop, "client"), "server:1")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    errors = [
        asyncio.run(error_of(lambda: grpc.aio.insecure_channel(address))),
        run(VirtualLoop(), error_of(simulated_channel)),
    ]
    assert [error.code() for error in errors] == [grpc.StatusCode.UNAVAILABLE] * 2
    # As routers look for it.
    assert all("Connection refused" in str(error.details()) for error in errors)
