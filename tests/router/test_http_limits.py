"""What unknown clients can take of the router over HTTP."""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from pdserve_router.api.http import connections as http_connections
from pdserve_router.api.http.connections import MAX_HEADER_BYTES, MAX_HEADERS
from support.router_stack import ANSWER_TEXT
from support.waiting import until

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 50}
LIMITED = "pdserve_connection_limits_total"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@contextlib.asynccontextmanager
async def connected(port: int, data: bytes = b"") -> AsyncIterator[Any]:
    """A connection that has sent `data`: (reader, writer)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def answer_to(port: int, data: bytes) -> bytes:
    """All that the server says before it closes; nothing if it cuts the connection."""
    async with connected(port, data) as (reader, _):
        with contextlib.suppress(ConnectionError):
            return bytes(await asyncio.wait_for(reader.read(), 30))
    return b""


async def complete(stack: Any, body: dict[str, Any] = BODY) -> httpx.Response:
    return await stack.api.post("/v1/completions", json=body)


@pytest.mark.parametrize(
    "data",
    [
        GET + b"a:\r\n" * 1000,
        GET + b"a: " + b"x" * (2 * MAX_HEADER_BYTES),
        GET + b"x" * (2 * MAX_HEADER_BYTES),
        b"GET /" + b"x" * (2 * MAX_HEADER_BYTES),
        b"x" * (2 * MAX_HEADER_BYTES),
        b"\r\n" * (2 * MAX_HEADER_BYTES),
    ],
    ids=["many", "value", "name", "url", "method", "lines"],
)
async def test_large_headers_are_refused_before_they_end(start_stack: Any, data: bytes) -> None:
    async with start_stack(http=True) as stack:
        answer = await answer_to(stack.server.http_port, data)
        assert answer.split(b"\r\n")[0].split()[1] in (b"431", b"400")
        assert (await complete(stack)).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"3\r\nabc\r\n0\r\n" + b"a: b\r\n" * 1000,
        b"3\r\nabc\r\n0\r\na: " + b"x" * (16 * MAX_HEADER_BYTES),
        b"3;" + b"x" * (16 * MAX_HEADER_BYTES),
    ],
    ids=["trailers", "trailer", "extension"],
)
async def test_what_a_body_has_besides_is_bounded_too(start_stack: Any, data: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    async with start_stack(http=True) as stack:
        assert await answer_to(stack.server.http_port, head + data) == b""
        assert stack.metric(LIMITED, server="http", limit="headers_too_large") == 1


async def test_headers_within_the_limits_pass_however_they_come(start_stack: Any) -> None:
    draw = random.Random(1)
    async with start_stack(http=True) as stack:
        for _ in range(40):
            room = MAX_HEADER_BYTES + draw.randint(-600, 600)
            num_headers = draw.choice((2, 50, MAX_HEADERS, MAX_HEADERS + 1))
            # As many bytes as `room`, counted as the limit is: the URL, names, values and 4 each.
            sizes = [room // num_headers] * num_headers
            sizes[0] += room - sum(sizes) - len("/health")
            block = b"".join(b"n: " + b"x" * (size - 5) + b"\r\n" for size in sizes)
            data = b"GET /health HTTP/1.1\r\n" + block + b"connection: close\r\n\r\n"
            is_small = room + len("connection: close\r\n") <= MAX_HEADER_BYTES
            async with connected(stack.server.http_port) as (reader, writer):
                while data:
                    size = draw.choice((1, 100, 5_000, 40_000, 300_000))
                    writer.write(data[:size])
                    data = data[size:]
                    if draw.random() < 0.2:
                        await asyncio.sleep(0)
                with contextlib.suppress(ConnectionError):
                    status = (await asyncio.wait_for(reader.readline(), 30)).split()[1]
            fits = is_small and num_headers < MAX_HEADERS
            assert status == (b"200" if fits else b"431"), (room, num_headers)


@pytest.mark.parametrize("data", [b"", b"\r\n", b"GET", GET + b"a: b"], ids=repr)
async def test_headers_that_do_not_come_end_the_connection(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(http_connections, "HEADERS_TIMEOUT_S", 0.2)
    async with start_stack(http=True) as stack:
        assert await answer_to(stack.server.http_port, data) == b""
        # Nor are those of a second request waited for.
        async with connected(stack.server.http_port, GET + b"\r\n") as (reader, writer):
            assert (await reader.readline()).split()[1] == b"200"
            writer.write(data or b"\r\n")
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 30)
        assert stack.metric(LIMITED, server="http", limit="slow_headers") == 2


async def test_line_ends_do_not_keep_a_connection(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "HEADERS_TIMEOUT_S", 0.2)
    async with start_stack(http=True) as stack, connected(stack.server.http_port) as (_, writer):
        while stack.metric(LIMITED, server="http", limit="slow_headers") == 0:
            writer.write(b"\r\n")
            await asyncio.sleep(0.01)


async def test_the_rest_of_a_body_that_was_answered_has_a_deadline(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "HEADERS_TIMEOUT_S", 0.2)
    head = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n"
    async with (
        start_stack(http=True) as stack,
        connected(stack.server.http_port, head) as (reader, writer),
    ):
        assert (await reader.readline()).split()[1] == b"404"
        while stack.metric(LIMITED, server="http", limit="slow_headers") == 0:
            writer.write(b"x")
            await asyncio.sleep(0.01)


async def test_an_idle_connection_is_closed_and_one_with_a_request_is_not(start_stack: Any) -> None:
    async with start_stack(http=True, http_idle_timeout_s=0.2) as stack:
        may_end = asyncio.Event()
        stack.decode.before_token = lambda running, num_tokens: may_end.wait()
        running = asyncio.create_task(complete(stack))
        await until(lambda: stack.decode.num_running == 1)
        async with connected(stack.server.http_port, GET + b"\r\n") as (reader, _):
            assert (await reader.readline()).split()[1] == b"200"
            await asyncio.wait_for(reader.read(), 30)
        may_end.set()
        assert (await running).json()["choices"][0]["text"] == ANSWER_TEXT


async def test_silent_connections_make_room(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "MIN_IDLE_S", 0)
    async with (
        start_stack(http=True, max_http_connections=20) as stack,
        contextlib.AsyncExitStack() as attack,
    ):
        for number in range(80):
            await attack.enter_async_context(
                connected(stack.server.http_port, b"" if number % 2 else GET)
            )
        for _ in range(5):
            assert (await complete(stack)).status_code == 200
        assert stack.metric(LIMITED, server="http", limit="made_room") > 0


async def test_whose_request_is_there_makes_no_room_however_late_it_is_read(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "MIN_IDLE_S", 0)
    async with start_stack(http=True, max_http_connections=1) as stack:
        address = "127.0.0.1", stack.server.http_port
        for _ in range(5):
            reader, writer = await asyncio.open_connection(*address)
            await asyncio.sleep(0.05)  # until it is taken
            # The router's loop, which is this one, finds both at once.
            with socket.create_connection(address):
                writer.write(GET + b"connection: close\r\n\r\n")
                assert (await reader.read(-1)).startswith(b"HTTP/1.1 ")
            writer.close()


@pytest.mark.parametrize(
    ("flags", "limit", "message"),
    [
        ({"max_http_connections": 4, "max_http_connections_of_address": 4}, "too_many_of_address",
         "more than 4 connections of one address"),
        ({"max_http_connections": 4, "max_http_connections_of_address": 5}, "too_many_of_address",
         "more than 4 connections of one address"),
    ],
)  # fmt: skip
async def test_one_too_many_is_told_when_to_come_back(
    start_stack: Any, flags: dict[str, int], limit: str, message: str
) -> None:
    async with start_stack(http=True, **flags) as stack:
        may_end = asyncio.Event()
        stack.decode.before_token = lambda running, num_tokens: may_end.wait()
        running = [asyncio.create_task(complete(stack)) for _ in range(4)]
        await until(lambda: stack.decode.num_running == 4)
        for _ in range(3):
            refused = await complete(stack)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["message"] == message
        assert (await stack.api.get("/health")).status_code == 200
        assert stack.metric(LIMITED, server="http", limit=limit) >= 3
        may_end.set()
        assert [(await task).status_code for task in running] == [200] * 4
        assert (await complete(stack)).status_code == 200


async def test_a_pipelined_request_ends_the_connection_behind_the_first_answer(
    start_stack: Any,
) -> None:
    async with start_stack(http=True) as stack:
        answers = await answer_to(stack.server.http_port, (GET + b"\r\n") * 100)
        assert answers.count(b"HTTP/1.1 200 OK") == 1
        assert b"connection: close" in answers
        assert stack.metric(LIMITED, server="http", limit="pipelined") == 1


async def test_handshakes_have_a_deadline(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch, make_certificate_authority: Any
) -> None:
    monkeypatch.setattr(http_connections, "HANDSHAKE_TIMEOUT_S", 0.2)
    authority = make_certificate_authority()
    cert, key = authority.issue("router", "IP:127.0.0.1")
    flags = {"tls_cert_file": cert, "tls_key_file": key}
    async with start_stack(http=True, **flags) as stack:
        for data in (b"", b"no handshake", b"\x16\x03\x01"):
            await answer_to(stack.server.http_port, data)
        await until(lambda: stack.metric(LIMITED, server="http", limit="bad_handshake") == 3)


async def test_of_unfinished_bodies_few_are_held_and_others_come_through(
    start_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 1000000\r\n\r\n"
    )
    async with start_stack(http=True) as stack, contextlib.AsyncExitStack() as attack:
        for _ in range(40):
            await attack.enter_async_context(
                connected(stack.server.http_port, head + b" " * 999_999)
            )
        await until(lambda: stack.metric(LIMITED, server="http", limit="made_room") > 0)
        assert (await complete(stack)).status_code == 200
        long = {**BODY, "prompt": "a" * 3000, "user": "u" * 100_000}
        assert (await complete(stack, long)).status_code == 200
