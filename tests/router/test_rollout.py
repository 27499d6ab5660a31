"""Routers come and go behind one address: clients that hold a connection notice nothing."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import grpc
import httpx

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve.v1 import inference_service_pb2_grpc as inference_grpc
from pdserve_client.client import AsyncClient
from support.cut_proxy import CutProxy, cut_proxies
from support.fake_worker import Running
from support.router_stack import ANSWER_TEXT, Stack, WatchedHttpServer
from support.waiting import until

BODY = {"model": "tiny", "prompt": "short", "max_tokens": 50}


def hold_back(stack: Stack, text: str) -> asyncio.Event:
    """The answers to this prompt wait until it is set."""
    may_go = asyncio.Event()
    held = stack.server.router.tokenizer.backend.encode(text).ids

    async def before_token(running: Running, num_tokens: int) -> None:
        if list(running.request.prompt_token_ids) == held:
            await may_go.wait()

    for worker in stack.workers:
        worker.before_token = before_token
    return may_go


async def ask(channel: grpc.aio.Channel, text: str) -> str:
    call = inference_grpc.InferenceServiceStub(channel).Generate(
        pb2.GenerateRequest(text=text), timeout=60
    )
    return "".join([answer.output.outputs[0].text async for answer in call])


async def post(http: httpx.AsyncClient, **changes: object) -> httpx.Response:
    return await http.post("/v1/completions", json=BODY | changes)


@contextlib.asynccontextmanager
async def held_channel(proxy: CutProxy) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(proxy.address) as channel:
        assert await ask(channel, "short") == ANSWER_TEXT
        yield channel


async def test_a_grpc_channel_goes_on_at_another_router(start_stack) -> None:
    async with (
        start_stack() as old,
        start_stack() as new,
        cut_proxies(old.server.grpc_port, 1) as (proxy,),
        held_channel(proxy) as channel,
    ):
        may_end = hold_back(old, "long")
        running = asyncio.create_task(ask(channel, "long"))
        await until(lambda: len(old.decode.requests) == 2)
        proxy.redirect(new.server.grpc_port)
        stopping = asyncio.create_task(old.server.stop(60))
        ready = grpc.ChannelConnectivity.READY
        await until(lambda: channel.get_state() is not ready)
        assert await ask(channel, "short") == ANSWER_TEXT
        assert new.decode.requests
        assert not running.done()
        may_end.set()
        assert await running == ANSWER_TEXT
        await stopping


async def test_our_client_loses_no_call_at_the_moment_of_the_change(start_stack) -> None:
    """gRPC ends with CANCELLED what is on its way to a server that stops."""
    async with start_stack() as old, start_stack() as new:
        client = AsyncClient([f"127.0.0.1:{each.server.grpc_port}" for each in (old, new)])
        may_end = hold_back(old, "long")

        async def ask_client(text: str) -> str:
            outputs = [output async for output in client.generate(text, timeout_s=60)]
            return "".join(output.outputs[0].text for output in outputs)

        # Until then the old one has to run.
        running = asyncio.create_task(ask_client("long"))
        await until(lambda: len(old.decode.requests) == 1)
        callers = [asyncio.create_task(ask_client("short")) for _ in range(50)]
        await asyncio.sleep(0)
        # Nothing else runs meanwhile: the calls get as far as the server's queue.
        time.sleep(0.1)  # noqa: ASYNC251
        stopping = asyncio.create_task(old.server.stop(60))
        assert await asyncio.gather(*callers) == [ANSWER_TEXT] * 50
        assert new.decode.requests
        may_end.set()
        assert await running == ANSWER_TEXT
        await stopping
        await client.close()


async def test_an_http_connection_goes_on_at_another_router(start_stack) -> None:
    async with (
        start_stack(http=WatchedHttpServer) as old,
        start_stack(http=WatchedHttpServer) as new,
        cut_proxies(old.server.http_port, 2) as (busy, idle),
        httpx.AsyncClient(base_url=f"http://{busy.address}", timeout=300) as long,
        httpx.AsyncClient(base_url=f"http://{idle.address}", timeout=300) as short,
    ):
        may_end = hold_back(old, "long")
        assert (await post(short)).status_code == 200
        running = asyncio.create_task(post(long, prompt="long"))
        await until(lambda: len(old.decode.requests) == 2)
        for proxy in (busy, idle):
            proxy.redirect(new.server.http_port)
        stopping = asyncio.create_task(old.server.stop(60))
        await until(lambda: not idle.has_connections)
        assert (await post(short)).json()["choices"][0]["text"] == ANSWER_TEXT
        assert not running.done()
        may_end.set()
        answer = await running
        assert answer.json()["choices"][0]["text"] == ANSWER_TEXT
        assert answer.headers["connection"] == "close"
        assert (await post(long)).status_code == 200
        assert len(new.decode.requests) == 2
        await stopping


async def test_old_connections_are_replaced_and_their_streams_run_on(
    start_stack, monkeypatch
) -> None:
    monkeypatch.setattr("pdserve_router.server.MAX_CONNECTION_AGE_S", 0.2)
    async with (
        start_stack() as stack,
        cut_proxies(stack.server.grpc_port, 1) as (proxy,),
        held_channel(proxy) as channel,
    ):
        may_end = hold_back(stack, "long")
        running = asyncio.create_task(ask(channel, "long"))
        await until(lambda: len(stack.decode.requests) == 2)
        deadline = asyncio.get_running_loop().time() + 20
        while proxy.num_accepted < 3:
            assert asyncio.get_running_loop().time() < deadline, "one connection for ever"
            assert await ask(channel, "short") == ANSWER_TEXT
        assert not running.done()
        may_end.set()
        assert await running == ANSWER_TEXT


async def test_idle_http_connections_can_outlast_those_of_load_balancers(start_stack) -> None:
    async with (
        start_stack(http=True, http_idle_timeout_s=620) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=300) as http,
    ):
        assert (await http.get("/health")).status_code == 200
        (connection,) = stack.http.connections
        closes_at = connection.timeout_keep_alive_task.when()
        assert closes_at - asyncio.get_running_loop().time() > 600
