"""A router's link to a real worker, over connections that are reset again and again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve_common.engine_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    SamplingParams,
    WorkerRole,
)
from pdserve_router.attach_client import LinkTimings
from pdserve_router.worker_client import WorkerClient, WorkerState

pytestmark = pytest.mark.slow

NUM_TOKENS = 200
NUM_CUTS = 5
# Of the 5 s for which a worker keeps a router's requests.
PARTED_S = 3.0


class Relay:
    """Passes bytes on to a port; `cut` resets all connections, and new ones are taken at once."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        # Who comes while it is clear waits.
        self.is_passing = asyncio.Event()
        self.is_passing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def address(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield "{}:{}".format(*server.sockets[0].getsockname())
            self.cut()
            await asyncio.gather(*self._tasks)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def pause(self, duration_s: float) -> None:
        """Take new connections, but pass nothing on for a while."""
        self.is_passing.clear()
        asyncio.get_running_loop().call_later(duration_s, self.is_passing.set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.is_passing.wait()
        target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers |= {writer, target_writer}
        for source, sink in ((reader, target_writer), (target_reader, writer)):
            self._tasks.add(asyncio.create_task(_pass_on(source, sink)))


async def _pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    sink.transport.abort()


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 20
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "timed out"
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def attached(
    relay: Relay, timings: LinkTimings
) -> AsyncIterator[tuple[WorkerClient, list[WorkerState]]]:
    """A router's client over the relay, and the states it has been in."""
    states: list[WorkerState] = []
    async with relay.address() as address:
        client = WorkerClient(
            address,
            role=WorkerRole.DECODE,
            router_id="other",
            router_epoch="0" * 32,
            on_change=lambda: states.append(client.state),
            timings=timings,
        )
        client.start()
        try:
            await until(lambda: client.is_ready)
            yield client, states
        finally:
            await client.close()


async def test_a_request_survives_every_reset_with_the_same_tokens(
    make_served_model: Callable[..., Path], start_stack: Any
) -> None:
    model = make_served_model("LlamaForCausalLM", max_position_embeddings=256)
    with start_stack(model=model, dtype="float32", prefill=0) as stack:
        (worker,) = stack.workers
        relay = Relay(worker.port)
        timings = LinkTimings(heartbeat_s=0.1, min_backoff_s=0.01)
        async with attached(relay, timings) as (client, states):
            whole = await generate(client, "whole", lambda num_tokens: None)
            cuts = iter(range(1, NUM_TOKENS, NUM_TOKENS // NUM_CUTS))
            next_cut = next(cuts)

            def cut_sometimes(num_tokens: int) -> None:
                nonlocal next_cut
                if num_tokens >= next_cut:
                    next_cut = next(cuts, NUM_TOKENS + 1)
                    asyncio.get_running_loop().call_soon(relay.cut)

            assert await generate(client, "cut", cut_sometimes) == whole
            assert states.count(WorkerState.REATTACHING) >= 3
            assert WorkerState.DOWN not in states
        async with attached(relay, LinkTimings()) as (client, states):
            began = asyncio.get_running_loop().time()

            def part_once(num_tokens: int) -> None:
                if relay.is_passing.is_set() and WorkerState.REATTACHING not in states:
                    asyncio.get_running_loop().call_soon(relay.cut)
                    relay.pause(PARTED_S)

            assert await generate(client, "parted", part_once) == whole
            assert asyncio.get_running_loop().time() - began > PARTED_S
            assert states.count(WorkerState.REATTACHING) == 1
            assert WorkerState.DOWN not in states
        stack.assert_idle()


async def generate(
    client: WorkerClient, request_id: str, on_tokens: Callable[[int], None]
) -> list[int]:
    """Return the tokens of one request, which have to come in order and to end well."""
    token_ids: list[int] = []
    ends: list[EngineCoreOutput] = []

    def take(output: EngineCoreOutput) -> None:
        assert output.first_token_index == len(token_ids) or not output.new_token_ids
        token_ids.extend(output.new_token_ids)
        on_tokens(len(token_ids))
        if output.finished:
            ends.append(output)

    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    request = EngineCoreRequest(
        request_id=request_id, prompt_token_ids=(5, 6, 7), sampling_params=params
    )
    client.add_request(request, take)
    await until(lambda: bool(ends))
    assert ends[0].finish_reason is FinishReason.LENGTH, ends[0].error
    assert len(token_ids) == NUM_TOKENS
    return token_ids
