"""A router's link to a real worker, over connections that are reset again and again."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Generate,
    WorkerRole,
)
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.text.served_model import ServedModel
from pdserve_router.workers.clients.attach_client import LinkTimings
from pdserve_router.workers.clients.worker_client import WorkerClient
from pdserve_router.workers.worker import WorkerState

# With logprobs an answer has several times as many bytes as come between all cuts. Tokens alone,
# of which many come together after a cut, have too few.
NUM_TOKENS = 400
NUM_LOGPROBS = 5
NUM_CUTS = 5
BYTES_BETWEEN_CUTS = 1000
# Of the 5 s for which a worker keeps a router's requests.
PARTED_S = 2.5


class Relay:
    """Passes bytes on to a port, and resets all connections where it is told to: at bytes, not at
    times, so that it is in the midst of an answer however fast that comes.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        # Who comes while it is clear waits.
        self._is_passing = asyncio.Event()
        self._is_passing.set()
        self.num_cuts_left = 0
        self._bytes_left = sys.maxsize
        self._pause_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def address(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield "{}:{}".format(*server.sockets[0].getsockname())
            self._cut()
            await asyncio.gather(*self._tasks)

    def cut_soon(self, *, times: int, pause_s: float = 0.0) -> None:
        """Reset all connections whenever BYTES_BETWEEN_CUTS have come from the target, so many
        times. New ones are taken at once, but pass nothing on for `pause_s`.
        """
        self.num_cuts_left, self._pause_s = times, pause_s
        self._bytes_left = BYTES_BETWEEN_CUTS

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def _count(self, num_bytes: int) -> None:
        self._bytes_left -= num_bytes
        if self._bytes_left > 0:
            return
        self.num_cuts_left -= 1
        self._bytes_left = BYTES_BETWEEN_CUTS if self.num_cuts_left else sys.maxsize
        if self._pause_s:
            self._is_passing.clear()
            asyncio.get_running_loop().call_later(self._pause_s, self._is_passing.set)
        self._cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._is_passing.wait()
        target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers |= {writer, target_writer}
        for part in (self._ask(reader, target_writer), self._answer(target_reader, writer)):
            self._tasks.add(asyncio.create_task(part))

    async def _ask(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.transport.abort()

    async def _answer(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                sink.write(data[: self._bytes_left])
                await sink.drain()
                self._count(len(data))
        sink.transport.abort()


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "timed out"
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def attached(
    relay: Relay, model: ServedModel, timings: LinkTimings
) -> AsyncIterator[tuple[WorkerClient, list[WorkerState]]]:
    """A router's client over the relay, and the states it has been in."""
    states: list[WorkerState] = []
    async with relay.address() as address:
        client = WorkerClient(
            address,
            role=WorkerRole.DECODE,
            model=model,
            router_id="other",
            on_change=lambda: states.append(client.state),
            runtime=Runtime(),
            timings=timings,
        )
        client.start()
        try:
            await until(lambda: client.is_ready)
            yield client, states
        finally:
            await client.close()


async def test_a_request_survives_every_reset_with_the_same_tokens(stack: Any) -> None:
    relay = Relay(decode_port(stack))
    timings = LinkTimings(heartbeat_s=0.1, min_backoff_s=0.01)
    async with attached(relay, stack.served_model, timings) as (client, states):
        whole = await generate(client, "whole")
        relay.cut_soon(times=NUM_CUTS)
        assert await generate(client, "cut", logprobs=NUM_LOGPROBS) == whole
        assert relay.num_cuts_left == 0
        # A cut may come before the client has read that it is attached again.
        assert 1 <= states.count(WorkerState.REATTACHING) <= NUM_CUTS
        assert WorkerState.DOWN not in states
    async with attached(relay, stack.served_model, LinkTimings()) as (client, states):
        began = asyncio.get_running_loop().time()
        relay.cut_soon(times=1, pause_s=PARTED_S)
        assert await generate(client, "parted") == whole
        assert asyncio.get_running_loop().time() - began > PARTED_S
        assert states.count(WorkerState.REATTACHING) == 1
        assert WorkerState.DOWN not in states


def decode_port(stack: Any) -> int:
    (worker,) = [worker for worker in stack.workers if worker.name == "decode-0"]
    return int(worker.port)


async def generate(
    client: WorkerClient, request_id: str, *, logprobs: int | None = None
) -> list[int]:
    """Return the tokens of one request, which have to come in order and to end well."""
    token_ids: list[int] = []
    ends: list[EngineCoreOutput] = []

    def take(output: EngineCoreOutput) -> None:
        assert output.first_token_index == len(token_ids) or not output.new_token_ids
        token_ids.extend(output.new_token_ids)
        if output.finished:
            ends.append(output)

    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=logprobs
    )
    request = EngineCoreRequest(
        request_id=request_id, prompt_token_ids=(5, 6, 7), task=Generate(params)
    )
    client.add_request(request, take)
    await until(lambda: bool(ends))
    assert ends[0].finish_reason is FinishReason.LENGTH, ends[0].error
    assert len(token_ids) == NUM_TOKENS
    return token_ids
