"""What unknown clients can take of the router over gRPC."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from raw_http2 import RawHttp2, half_a_message

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.limits import receive_guard
from pdserve_common.limits.receive_slots import ReceiveLimits
from pdserve_common.rpc.channels import MAX_MESSAGE_BYTES
from support.refusals import refused
from support.waiting import until

KEY = "a-key-of-the-tests-0123"
GENERATE = "/pdserve.v1.InferenceService/Generate"
HEALTH = "/grpc.health.v1.Health/Check"
# What one stream may send before anybody asks for its message.
WINDOW_BYTES = 65535
MAX_BODY_BYTES = 8 * 1024 * 1024
LIMITED = "pdserve_connection_limits_total"


@contextlib.asynccontextmanager
async def sending(
    port: int, data: bytes, *, num_streams: int, method: str = GENERATE, **metadata: str
) -> AsyncIterator[RawHttp2]:
    """A connection with streams that all send `data`."""
    async with RawHttp2(port) as raw:
        streams = [raw.open_stream(method, **metadata) for _ in range(num_streams)]
        tasks = [asyncio.create_task(raw.send(stream, data)) for stream in streams]
        try:
            yield raw
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def tokenize(stack: Any, *, key: str | None = None) -> int:
    """An honest call, on a connection of its own."""
    metadata = [("authorization", f"Bearer {key}")] if key else None
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.server.grpc_port}") as channel:
        call = channel.unary_unary(
            "/pdserve.v1.InferenceService/Tokenize",
            request_serializer=pb2.TokenizeRequest.SerializeToString,
            response_deserializer=pb2.TokenizeResponse.FromString,
        )
        answer = await call(pb2.TokenizeRequest(text="hello"), metadata=metadata, timeout=60)
    return len(answer.token_ids)


def limit_receives(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    monkeypatch.setattr(receive_guard, "ReceiveLimits", lambda: ReceiveLimits(**changes))


async def test_a_call_without_a_key_ends_before_its_message(
    start_stack: Any, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    async with start_stack(api_keys_file=str(keys)) as stack:
        async with RawHttp2(stack.server.grpc_port) as raw:
            for method in (GENERATE, "/pdserve.v1.InferenceService/Tokenize"):
                stream = raw.open_stream(method)
                await until(lambda stream=stream: stream in raw.ended)
        assert (
            stack.metric("pdserve_requests_unauthorized_total", api="grpc", reason="missing") == 2
        )


@pytest.mark.parametrize("num_bytes", [MAX_BODY_BYTES, MAX_MESSAGE_BYTES])
async def test_of_unfinished_messages_few_are_held(
    start_stack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """40 streams one byte short of their messages, with a key."""
    limit_receives(monkeypatch, timeout_s=3600)
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    message = half_a_message(num_bytes)
    async with (
        start_stack(api_keys_file=str(keys)) as stack,
        sending(
            stack.server.grpc_port, message, num_streams=40, authorization=f"Bearer {KEY}"
        ) as raw,
    ):
        await until(lambda: all(sent > 5 for sent in raw.num_sent.values()))
        if num_bytes > MAX_BODY_BYTES:  # refused by its length
            await until(lambda: len(raw.ended) == 40)
        else:
            await until(lambda: list(raw.num_sent.values()).count(len(message)) == 4)
        for _ in range(3):
            assert await tokenize(stack, key=KEY) > 0
        held = [sent for stream, sent in raw.num_sent.items() if stream not in raw.ended]
        assert sum(held) <= 4 * len(message) + 36 * WINDOW_BYTES


async def test_others_get_their_turn_when_all_places_hold_unfinished_messages(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_receives(monkeypatch, timeout_s=3600, grace_s=0.05)
    async with start_stack() as stack, contextlib.AsyncExitStack() as attack:
        port = stack.server.grpc_port
        for _ in range(4):
            streams = sending(port, half_a_message(1 << 20), num_streams=8)
            await attack.enter_async_context(streams)
        await until(lambda: stack.metric(LIMITED, server="grpc", limit="made_room") > 0)
        assert await tokenize(stack) > 0


async def test_a_message_that_does_not_come_ends_its_call(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_receives(monkeypatch, timeout_s=0.1)
    async with start_stack() as stack:
        for data in (b"", half_a_message(100)):
            async with sending(stack.server.grpc_port, data, num_streams=1) as raw:
                await until(lambda raw=raw: len(raw.ended) == 1)
        assert stack.metric(LIMITED, server="grpc", limit="slow_message") == 2


async def test_a_message_above_the_limit_is_refused(start_stack: Any) -> None:
    async with start_stack(max_body_bytes=1000) as stack:
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
            await stack.stub.Tokenize(pb2.TokenizeRequest(text="a" * 1001))


async def test_what_is_no_message_is_refused(start_stack: Any) -> None:
    async with start_stack() as stack:
        call = stack.channel.unary_unary("/pdserve.v1.InferenceService/Tokenize")
        with refused(grpc.StatusCode.INVALID_ARGUMENT):
            await call(b"\xff\xff\xff")
        none = stack.channel.stream_unary("/pdserve.v1.InferenceService/Tokenize")
        with pytest.raises(grpc.aio.AioRpcError, match="no message, must have 1"):
            await none(iter([]))


async def test_health_and_reflection_answer_while_messages_hang(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_receives(monkeypatch, timeout_s=3600, grace_s=0.05)
    async with start_stack() as stack:
        port = stack.server.grpc_port
        async with (
            sending(port, half_a_message(1 << 20), num_streams=40),
            sending(port, half_a_message(1 << 20), num_streams=40, method=HEALTH) as raw,
        ):
            await until(lambda: all(sent > 5 for sent in raw.num_sent.values()))
            health = health_pb2_grpc.HealthStub(stack.channel)
            status = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
            assert status.status == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(stack.channel)
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            names = [
                service.name
                async for answer in reflection.ServerReflectionInfo(iter([ask]), timeout=60)
                for service in answer.list_services_response.service
            ]
            assert "pdserve.v1.InferenceService" in names
            held = [sent for stream, sent in raw.num_sent.items() if stream not in raw.ended]
            assert sum(held) <= (1 << 20) + 40 * WINDOW_BYTES


async def test_streams_that_need_no_key_are_few(start_stack: Any) -> None:
    async with start_stack() as stack:
        health = health_pb2_grpc.HealthStub(stack.channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(16)]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError, match="of this connection, at most") as error:
            await health.Watch(health_pb2.HealthCheckRequest(), timeout=60).read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watches.pop().cancel()
        while True:  # until the router has seen it
            again = health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await again.read()
                break
        for watch in (*watches, again):
            watch.cancel()


async def test_connections_that_say_nothing_are_cut(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve_common.rpc.channels.HANDSHAKE_TIMEOUT_S", 0.2)
    async with start_stack() as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.server.grpc_port)
        await asyncio.wait_for(reader.read(), 30)
        writer.close()
        monkeypatch.undo()


async def test_connections_without_calls_are_cut(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve_router.server.MAX_CONNECTION_IDLE_S", 0.2)
    async with start_stack() as stack:
        async with RawHttp2(stack.server.grpc_port) as raw:
            await until(lambda: raw.is_closed)
        assert await tokenize(stack) > 0
