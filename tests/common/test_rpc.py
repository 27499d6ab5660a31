"""The health that every server of pdserve tells."""

import asyncio
import contextlib
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from pdserve_common.errors import InvalidRequestError
from pdserve_common.metrics.port import MetricsServer
from pdserve_common.rpc import channels as rpc
from pdserve_common.rpc.channels import LIVENESS_SERVICE, RpcServer, end_call
from support.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(port: int, service: str) -> Any:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(check, timeout=60)).status


async def test_a_server_is_alive_whether_it_is_ready_or_not_until_it_says_otherwise() -> None:
    server = RpcServer("127.0.0.1", 0)
    await server.start(["a.Service"])
    try:
        for is_serving in (False, True, False):
            await server.set_serving(is_serving)
            expected = SERVING if is_serving else NOT_SERVING
            assert {await health(server.port, name) for name in ("", "a.Service")} == {expected}
            assert await health(server.port, LIVENESS_SERVICE) == SERVING
        await server.set_alive(False)
        assert await health(server.port, LIVENESS_SERVICE) == NOT_SERVING
    finally:
        await server.stop(0)


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


async def test_http_probes_say_what_the_health_service_says() -> None:
    server = RpcServer("127.0.0.1", 0)
    metrics = MetricsServer("127.0.0.1", 0, CollectorRegistry(), probes=server.probes())

    async def found() -> list[int]:
        base = f"http://127.0.0.1:{metrics.port}"
        return [await asyncio.to_thread(status_of, base + path) for path in ("/live", "/ready")]

    try:
        assert await found() == [503, 503], "it has not started"
        await server.start([])
        assert await found() == [200, 503]
        await server.set_serving(True)
        assert await found() == [200, 200]
        await server.set_alive(False)
        assert await found() == [503, 200]
    finally:
        metrics.close()
        await server.stop(0)


async def test_nothing_is_healthy_whose_event_loop_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    server = RpcServer("127.0.0.1", 0)
    await server.start([])
    try:
        probe = server.probes()["/live"]
        assert await asyncio.to_thread(probe)
        monkeypatch.setattr(rpc, "HEALTH_TIMEOUT_S", 0.05)
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(probe).result(60), "while this thread waits, the loop hangs"
    finally:
        await server.stop(0)


async def test_a_caller_that_leaves_while_it_is_refused_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    has_begun, is_over = asyncio.Event(), asyncio.Event()

    async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> None:
        try:
            async with rpc.rpc_errors(context), rpc.rpc_errors(context):
                has_begun.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                raise InvalidRequestError("nobody is there to hear it")
        finally:
            is_over.set()

    server = RpcServer("127.0.0.1", 0)
    handlers = {"Refuse": grpc.unary_unary_rpc_method_handler(refuse)}
    generic = grpc.method_handlers_generic_handler("a.Service", handlers)
    server.server.add_generic_rpc_handlers((generic,))
    await server.start(["a.Service"])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.unary_unary("/a.Service/Refuse")(b"")
        await has_begun.wait()
        call.cancel()
        await asyncio.wait_for(is_over.wait(), 60)
    await server.stop(0)
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


async def test_a_refusal_may_quote_half_a_character() -> None:
    async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> None:
        async with rpc.rpc_errors(context), rpc.rpc_errors(context):
            raise InvalidRequestError("no field is called \ud800")

    server = RpcServer("127.0.0.1", 0)
    handlers = {"Refuse": grpc.unary_unary_rpc_method_handler(refuse)}
    generic = grpc.method_handlers_generic_handler("a.Service", handlers)
    server.server.add_generic_rpc_handlers((generic,))
    await server.start(["a.Service"])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"is called \\ud800") as refused:
            await channel.unary_unary("/a.Service/Refuse")(b"", timeout=60)
    await server.stop(0)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_call_whose_write_fails_leaves_nothing_behind_though_not_all_is_read() -> None:
    before = asyncio.all_tasks()

    async def talk(requests: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        for _ in range(5):
            await context.write(b"more than is read")

    handlers = {"Talk": grpc.stream_stream_rpc_method_handler(talk)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Test", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def write_until_it_fails(call: Any) -> None:
        while True:
            await call.write(b"")

    async with rpc.open_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.stream_stream("/test.Test/Talk")()
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(write_until_it_fails(call), 60)
        assert call.done()
        end_call(call)
    await server.stop(None)
    await until(lambda: asyncio.all_tasks() <= before)
