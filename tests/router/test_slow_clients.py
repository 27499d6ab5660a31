"""Clients that stop reading: they stall nobody, cost bounded memory, and are cut."""

import asyncio
import json
import math
import re
import socket
import ssl
import time

import grpc
import pytest

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.engine import FinishReason
from support.router_stack import WatchedHttpServer
from support.waiting import until

# Small windows, so that a few hundred kilobytes block the writer.
SMALL_WINDOWS = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.http2.max_frame_size", 16384),
]
CUMULATIVE = core.REQUEST_OUTPUT_KIND_CUMULATIVE
NUM_TOKENS = 20_000
TOKENS_PER_STEP = 200
LONG = {"max_model_len": 2 * NUM_TOKENS}


def endless(worker):
    """Answer on and on, with the tokens that have the longest texts."""
    first = worker.info.vocab_size - 8

    async def behave(running) -> None:
        for at in range(0, NUM_TOKENS, TOKENS_PER_STEP):
            running.emit(*(first + i % 8 for i in range(at, at + TOKENS_PER_STEP)), at=at)
            await asyncio.sleep(0.005)
        await asyncio.Event().wait()

    worker.behave = behave


def start_watched(start_stack, **options):
    return start_stack(
        prefill=0, http=WatchedHttpServer, channel_options=SMALL_WINDOWS, info=LONG, **options
    )


@pytest.fixture
async def slow_stack(start_stack):
    async with start_watched(start_stack, client_stall_timeout_s=0.5) as stack:
        yield stack


@pytest.fixture
async def patient_stack(start_stack):
    """One that leaves a client that reads now and then its time."""
    async with start_watched(start_stack, client_stall_timeout_s=6.0) as stack:
        yield stack


def grpc_request(n: int = 1) -> pb2.GenerateRequest:
    # Cumulative, so that messages grow and fill the windows quickly.
    return pb2.GenerateRequest(
        text="hello", sampling_params=core.SamplingParams(output_kind=CUMULATIVE, n=n)
    )


async def read_to_end(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def http_request(path: bytes, body: bytes) -> bytes:
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (path, len(body))
    return head + body


def sse_request(n: int = 1) -> bytes:
    body = json.dumps(
        {"model": "tiny", "prompt": "hello", "max_tokens": NUM_TOKENS, "stream": True, "n": n}
    )
    return http_request(b"/v1/completions", body.encode())


def large_request(num_tokens: int, *, stream: bool = False) -> bytes:
    """Of an answer of megabytes; 1 KiB for each token."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": num_tokens,
        "logprobs": True,
        "top_logprobs": 20,
        "stream": stream,
    }
    return http_request(b"/v1/chat/completions", json.dumps(body).encode())


async def read_slowly(sock: socket.socket) -> bytes:
    """Read 1 MiB/s at most, until the answer ends or the connection is closed."""
    received = bytearray()
    while data := await asyncio.get_running_loop().sock_recv(sock, 32768):
        received += data
        if received.endswith(b"0\r\n\r\n") or len(received) >= _length_of(received):
            break
        await asyncio.sleep(0.03)
    return bytes(received)


def _length_of(answer: bytearray) -> float:
    head, separator, _ = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    return len(head) + len(separator) + int(length[1]) if separator and length else math.inf


async def open_http(stack, data: bytes, *, buffer_bytes: int = 1024):
    """Ask for an answer and do not read it; the receive buffer is as small as the kernel allows."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", stack.server.http_port))
    await loop.sock_sendall(sock, data)
    return sock


def open_tls(port: int, ca_file: str, data: bytes) -> ssl.SSLSocket:
    """Connect, send and return, with the smallest receive buffer; in a thread."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    sock.connect(("127.0.0.1", port))
    context = ssl.create_default_context(cafile=ca_file)
    connection = context.wrap_socket(sock, server_hostname="127.0.0.1")
    connection.sendall(data)
    return connection


@pytest.mark.parametrize("n", [1, 3])
async def test_a_grpc_client_that_stops_reading_is_cut(slow_stack, n) -> None:
    endless(slow_stack.decode)
    call = slow_stack.stub.Generate(grpc_request(n))
    await call.read()
    await until(lambda: len(slow_stack.decode.aborted) == n)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_to_end(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "the client read nothing for 0.5 s"
    assert slow_stack.metric("pdserve_requests_total", model="tiny", outcome="abort") == 1


@pytest.mark.parametrize("n", [1, 3])
async def test_an_sse_client_that_stops_reading_is_cut(slow_stack, n) -> None:
    slow_stack.http.shrink_send_buffers()
    endless(slow_stack.decode)
    sock = await open_http(slow_stack, sse_request(n))
    await until(lambda: len(slow_stack.decode.aborted) == n)
    received = bytearray()
    while data := await asyncio.get_running_loop().sock_recv(sock, 65536):
        received += data
    sock.close()
    # Closed in the middle: neither the end of the stream nor that of the body.
    assert received
    assert not received.endswith(b"0\r\n\r\n")
    assert b"[DONE]" not in received
    assert slow_stack.metric("pdserve_requests_total", model="tiny", outcome="abort") == 1


async def test_a_client_that_does_not_read_a_whole_answer_is_cut(start_stack) -> None:
    num_tokens = 3000
    async with start_stack(
        prefill=0,
        http=WatchedHttpServer,
        client_stall_timeout_s=0.5,
        info=LONG,
        answer=[5] * num_tokens,
    ) as stack:
        stack.decode.step_s = 0.0
        stack.http.shrink_send_buffers()
        sock = await open_http(stack, large_request(num_tokens))
        length = {"model": "tiny", "outcome": "length"}
        await until(lambda: stack.metric("pdserve_requests_total", **length) == 1)
        await until(lambda: not stack.http.connections)
        sock.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_reads_slowly_gets_a_large_answer(start_stack, stream) -> None:
    """It takes several times as long as a client may read nothing."""
    num_tokens = 3000

    async def at_once(running) -> None:
        running.emit(*running.worker.answer, at=0, finish=FinishReason.LENGTH)

    async with start_stack(
        prefill=0,
        http=WatchedHttpServer,
        client_stall_timeout_s=1.0,
        info=LONG,
        answer=[5] * num_tokens,
    ) as stack:
        stack.decode.behave = at_once
        stack.http.shrink_send_buffers()
        sock = await open_http(stack, large_request(num_tokens, stream=stream), buffer_bytes=65536)
        received = await read_slowly(sock)
        sock.close()
        assert len(received) > 1 << 20
        body = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", received)
        assert body.count(b'"bytes"') == 21 * num_tokens
        assert received.endswith(b"0\r\n\r\n" if stream else b"}")


async def test_a_router_that_stops_goes_on_sending_until_the_drain_timeout(
    start_stack,
) -> None:
    num_tokens = 3000
    async with start_stack(
        prefill=0, http=WatchedHttpServer, info=LONG, answer=[5] * num_tokens, close_grace_s=1.0
    ) as stack:
        stack.decode.step_s = 0.0
        stack.http.shrink_send_buffers()
        sock = await open_http(stack, large_request(num_tokens), buffer_bytes=65536)
        length = {"model": "tiny", "outcome": "length"}
        await until(lambda: stack.metric("pdserve_requests_total", **length) == 1)
        stopping = asyncio.create_task(stack.server.stop(60))
        received = await read_slowly(sock)
        sock.close()
        assert received.endswith(b"}")
        await asyncio.wait_for(stopping, 20)


async def test_a_grpc_client_that_pauses_while_the_router_stops_loses_nothing(
    start_stack,
) -> None:
    num_tokens = 3000
    async with start_stack(
        prefill=0,
        channel_options=SMALL_WINDOWS,
        info=LONG,
        answer=[5] * num_tokens,
        close_grace_s=0.5,
    ) as stack:
        stack.decode.step_s = 0.0
        params = core.SamplingParams(
            logprobs=20,
            max_tokens=num_tokens,
            output_kind=core.REQUEST_OUTPUT_KIND_FINAL_ONLY,
        )
        call = stack.stub.Generate(pb2.GenerateRequest(text="hello", sampling_params=params))
        length = {"model": "tiny", "outcome": "length"}
        await until(lambda: stack.metric("pdserve_requests_total", **length) == 1)
        stopping = asyncio.create_task(stack.server.stop(60))
        await asyncio.sleep(1.5)
        output = (await call.read()).output
        assert len(output.outputs[0].token_ids) == num_tokens
        assert await call.read() is grpc.aio.EOF
        await asyncio.wait_for(stopping, 20)


async def test_a_client_over_tls_that_stops_reading_is_cut(
    start_stack, make_certificate_authority
) -> None:
    n = 8  # enough to fill what asyncio buffers for TLS, 512 KiB
    authority = make_certificate_authority()
    cert, key = authority.issue("router", "IP:127.0.0.1")
    async with start_stack(
        prefill=0,
        http=WatchedHttpServer,
        client_stall_timeout_s=0.5,
        info=LONG,
        tls_cert_file=cert,
        tls_key_file=key,
    ) as stack:
        stack.http.shrink_send_buffers()
        endless(stack.decode)
        port = stack.server.http_port
        connection = await asyncio.to_thread(open_tls, port, authority.ca_file, sse_request(n))
        # What fills the buffers takes seconds of CPU.
        await until(lambda: len(stack.decode.aborted) == n, timeout_s=300.0)
        connection.close()
        await stack.assert_idle()
        assert stack.metric("pdserve_requests_total", model="tiny", outcome="abort") == 1


async def test_a_client_that_only_pauses_loses_nothing(start_stack) -> None:
    async with start_stack(
        prefill=0,
        http=WatchedHttpServer,
        client_stall_timeout_s=5.0,
        channel_options=SMALL_WINDOWS,
        info=LONG,
    ) as stack:
        endless(stack.decode)
        request = pb2.GenerateRequest(
            text="hello", sampling_params=core.SamplingParams(max_tokens=NUM_TOKENS)
        )
        call = stack.stub.Generate(request)
        token_ids: list[int] = []
        while len(token_ids) < NUM_TOKENS:
            token_ids += (await call.read()).output.outputs[0].token_ids
            if len(token_ids) <= TOKENS_PER_STEP:
                await asyncio.sleep(0.5)
        assert token_ids == [stack.decode.info.vocab_size - 8 + i % 8 for i in range(NUM_TOKENS)]
        call.cancel()


@pytest.mark.parametrize("api", ["grpc", "sse"])
async def test_a_client_that_does_not_read_stalls_nobody_else(patient_stack, api) -> None:
    stack = patient_stack
    endless(stack.decode)
    stack.http.shrink_send_buffers()
    if api == "grpc":
        stalled = stack.stub.Generate(grpc_request())
        await stalled.read()
    else:
        stalled = await open_http(stack, sse_request())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.server.grpc_port}") as channel:
        reader = stack.stub.__class__(channel).Generate(pb2.GenerateRequest(text="hello"))
        num_tokens = 0
        while num_tokens < 3000:
            num_tokens += len((await reader.read()).output.outputs[0].token_ids)
        assert stack.decode.aborted == [], "it waited until the other one was cut"
        reader.cancel()
    await until(lambda: len(stack.decode.aborted) >= 2)
    if api == "sse":
        stalled.close()
    else:
        stalled.cancel()


async def test_a_stalled_client_does_not_hold_up_the_shutdown(start_stack) -> None:
    async with start_stack(
        prefill=0,
        http=WatchedHttpServer,
        client_stall_timeout_s=60.0,
        channel_options=SMALL_WINDOWS,
        info=LONG,
    ) as stack:
        stack.http.shrink_send_buffers()
        endless(stack.decode)
        call = stack.stub.Generate(grpc_request())
        await call.read()
        sock = await open_http(stack, sse_request())
        await asyncio.sleep(1.0)
        began = time.monotonic()
        await stack.server.stop(0.1)
        assert time.monotonic() - began < 30
        call.cancel()
        sock.close()
