"""When a client goes on with another router, and when it gives up."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve.v1 import inference_service_pb2_grpc as pb2_grpc
from pdserve_client import attempts, resumable_answer
from pdserve_client.client import AsyncClient, Client, build_request
from pdserve_common.rpc.channels import server_options
from pdserve_common.types.sampling_params import SamplingParams
from support.refusals import refused

NUM_TOKENS = 6
LOST = grpc.StatusCode.UNAVAILABLE


def token_of(seed: int, index: int) -> int:
    return (seed + 31 * index) % 1000


class FakeRouter(pb2_grpc.InferenceServiceServicer):
    """Answers with NUM_TOKENS tokens that depend on the seed, one a message. Each call takes the
    next of `fates`: after how many messages it ends, and with which status.
    """

    def __init__(self) -> None:
        self.fates: list[tuple[int, grpc.StatusCode]] = []
        self.requests: list[pb2.GenerateRequest] = []
        self.pooled: list[pb2.PoolRequest] = []
        self.remaining_s: list[float] = []
        self.times: list[float] = []
        self.last_error: core.EngineError | None = None
        # Index of a token that never comes.
        self.hangs_at = NUM_TOKENS
        self.is_cancelled = asyncio.Event()
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server(options=server_options())
        pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)

    async def Generate(
        self, request: pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb2.GenerateResponse]:
        self.requests.append(request)
        self.remaining_s.append(context.time_remaining() or 0.0)
        self.times.append(time.monotonic())
        fate = self.fates.pop(0) if self.fates else None
        (known,) = [each.token_ids for each in request.resume] or [[]]
        for number, index in enumerate(range(len(known), NUM_TOKENS)):
            if fate is not None and number == fate[0]:
                await context.abort(fate[1], "scripted")
            if index == self.hangs_at:
                await self._hang()
            yield pb2.GenerateResponse(output=self._output(request, index))
        if fate is not None:
            await context.abort(fate[1], "scripted")

    async def Pool(
        self, request: pb2.PoolRequest, context: grpc.aio.ServicerContext
    ) -> pb2.PoolResponse:
        self.pooled.append(request)
        fate = self.fates.pop(0) if self.fates else None
        if fate is not None:
            await context.abort(fate[1], "scripted")
        return pb2.PoolResponse(pooling_output=[0.5, 0.25], num_prompt_tokens=3)

    async def _hang(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.is_cancelled.set()

    def _output(self, request: pb2.GenerateRequest, index: int) -> pb2.RequestOutput:
        is_last = index == NUM_TOKENS - 1
        output = pb2.RequestOutput(
            request_id=request.request_id or f"req-{len(self.requests)}",
            seed=request.sampling_params.seed,
            finished=is_last,
        )
        completion = output.outputs.add(
            text=f"{index} ",
            token_ids=[token_of(request.sampling_params.seed, index)],
            model_version=f"of {index}",
        )
        if is_last:
            completion.finish_reason = core.FINISH_REASON_LENGTH
            if self.last_error is not None:
                completion.error.CopyFrom(self.last_error)
        return output


@contextlib.asynccontextmanager
async def running(count: int) -> AsyncIterator[list[FakeRouter]]:
    routers = [FakeRouter() for _ in range(count)]
    for router in routers:
        await router.start()
    try:
        yield routers
    finally:
        for router in routers:
            await router.stop()


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    async with running(1) as routers:
        yield routers[0]


@pytest.fixture
async def pair() -> AsyncIterator[list[FakeRouter]]:
    async with running(2) as routers:
        yield routers


async def ask(
    routers: Sequence[FakeRouter],
    params: SamplingParams | None = None,
    *,
    max_resumes: int = 3,
    timeout_s: float | None = 30.0,
    outputs: list[pb2.RequestOutput] | None = None,
) -> list[pb2.RequestOutput]:
    """Return all outputs; `outputs` gets them also if an error ends the call."""
    outputs = [] if outputs is None else outputs
    client = AsyncClient([router.address for router in routers], max_resumes=max_resumes)
    try:
        async for output in client.generate([1, 2], params, timeout_s=timeout_s):
            outputs.append(output)
    finally:
        await client.close()
    return outputs


def check(outputs: Sequence[pb2.RequestOutput]) -> None:
    """It is one whole answer."""
    seed = outputs[0].seed
    tokens = [token_id for output in outputs for token_id in output.outputs[0].token_ids]
    assert tokens == [token_of(seed, index) for index in range(NUM_TOKENS)]
    assert [output.finished for output in outputs] == [False] * (NUM_TOKENS - 1) + [True]
    assert {output.seed for output in outputs} == {seed}
    assert len({output.request_id for output in outputs}) == 1


@pytest.mark.parametrize("cut", range(NUM_TOKENS + 1))
async def test_a_stream_cut_anywhere_goes_on_at_the_next_router(pair, cut) -> None:
    pair[0].fates = [(cut, LOST)]
    outputs = await ask(pair)
    check(outputs)
    # After its last message nothing is missing any more.
    assert len(pair[1].requests) == (cut < NUM_TOKENS)
    for request in pair[1].requests:
        resumed = [
            (each.index, len(each.token_ids), each.finished, each.model_version)
            for each in request.resume
        ]
        assert resumed == ([(0, cut, False, f"of {cut - 1}")] if cut else [])


async def test_the_same_is_asked_for_again_but_for_what_has_come(pair) -> None:
    pair[0].fates = [(2, LOST)]
    check(await ask(pair, SamplingParams(top_k=5, stop=("x",))))
    first, second = pair[0].requests[0], pair[1].requests[0]
    assert first.sampling_params.seed > 0, "it is drawn before anything is sent"
    assert second.request_id == "req-1", "as the answer told"
    del second.resume[:]
    second.request_id = first.request_id
    assert second == first


async def test_a_seed_that_the_caller_chose_stays(router) -> None:
    outputs = await ask([router], SamplingParams(seed=0))
    assert outputs[0].seed == 0


async def test_a_single_router_is_tried_again_after_pauses_that_grow(router) -> None:
    router.fates = [(1, LOST), (0, LOST), (1, LOST)]
    check(await ask([router]))
    pauses = [b - a for a, b in zip(router.times, router.times[1:], strict=False)]
    for pause, expected in zip(pauses, (0.1, 0.2, 0.4), strict=True):
        assert pause >= expected


def test_pauses_are_between_rounds_and_have_an_end() -> None:
    answer = resumable_answer.ResumableAnswer(
        build_request("x"), num_routers=2, router=1, max_resumes=10_000, timeout_s=None
    )
    error = grpc.aio.AioRpcError(LOST, grpc.aio.Metadata(), grpc.aio.Metadata())
    steps = [(answer.on_loss(error), answer.router) for _ in range(10_000)]
    assert steps[:6] == [(0, 0), (0.1, 1), (0, 0), (0.2, 1), (0, 0), (0.4, 1)]
    assert max(delay_s for delay_s, _ in steps) == attempts.MAX_BACKOFF_S


async def test_it_gives_up_after_so_many_tries(pair) -> None:
    for router in pair:
        router.fates = [(1, LOST)] * 9
    outputs: list[pb2.RequestOutput] = []
    with refused(LOST):
        await ask(pair, max_resumes=2, outputs=outputs)
    assert [len(router.requests) for router in pair] == [2, 1]
    assert len(outputs) == 3, "what came stays with the caller"


async def test_every_try_has_what_is_left_of_the_deadline(router, monkeypatch) -> None:
    # The two pauses end far from the deadline, before and behind it.
    monkeypatch.setattr(attempts, "MIN_BACKOFF_S", 2.0)
    monkeypatch.setattr(attempts, "MAX_BACKOFF_S", 4.0)
    router.fates = [(1, LOST)] * 9
    started = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask([router], max_resumes=9, timeout_s=5.9)
    assert raised.value.code() is LOST, "the second pause would have ended behind the deadline"
    assert time.monotonic() - started < 5.9
    assert len(router.remaining_s) == 2
    for remaining_s, most in zip(router.remaining_s, (5.9, 3.9), strict=True):
        # gRPC rounds what it sends up, by a few per cent.
        assert 0 < remaining_s <= 1.05 * most


@pytest.mark.parametrize(
    "name",
    [
        "INVALID_ARGUMENT",
        "RESOURCE_EXHAUSTED",
        "DEADLINE_EXCEEDED",
        "CANCELLED",
        "INTERNAL",
        "NOT_FOUND",
    ],
)
@pytest.mark.parametrize("cut", [0, 2])
async def test_other_statuses_end_the_call(pair, name, cut) -> None:
    pair[0].fates = [(cut, grpc.StatusCode[name])]
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask(pair)
    assert raised.value.code().name == name
    assert not pair[1].requests


async def test_an_error_in_the_last_message_is_the_answers_end(pair) -> None:
    pair[0].last_error = core.EngineError(code=core.ERROR_CODE_ENGINE_DEAD, retryable=True)
    outputs = await ask(pair)
    assert outputs[-1].outputs[0].error.retryable
    assert not pair[1].requests


async def test_an_answer_that_a_router_hands_back_goes_on_at_the_next(pair) -> None:
    pair[0].last_error = core.EngineError(code=core.ERROR_CODE_DRAINING, retryable=True)
    check(await ask(pair))
    (request,) = pair[1].requests
    assert [len(each.token_ids) for each in request.resume] == [NUM_TOKENS - 1]


async def test_the_caller_hears_of_it_when_nobody_else_may_go_on(pair) -> None:
    pair[0].last_error = core.EngineError(code=core.ERROR_CODE_DRAINING, retryable=True)
    outputs = await ask(pair, max_resumes=0)
    assert outputs[-1].outputs[0].error.code == core.ERROR_CODE_DRAINING
    assert not pair[1].requests


async def test_the_blocking_client_goes_on_after_a_hand_back(pair) -> None:
    pair[0].last_error = core.EngineError(code=core.ERROR_CODE_DRAINING, retryable=True)

    def collect() -> list[pb2.RequestOutput]:
        with Client([router.address for router in pair]) as client:
            return list(client.generate([1], timeout_s=30))

    check(await asyncio.to_thread(collect))


@pytest.mark.parametrize(
    "params",
    [SamplingParams(best_of=2), SamplingParams(use_beam_search=True, n=2, best_of=2)],
    ids=["best_of", "beam search"],
)
async def test_ranked_answers_are_sent_again_only_if_nothing_came(pair, params) -> None:
    pair[0].fates = [(0, LOST)]
    check(await ask(pair, params))
    pair[0].fates = [(1, LOST)]
    with pytest.raises(grpc.aio.AioRpcError):
        await ask(pair, params)
    assert len(pair[1].requests) == 1


async def test_later_calls_do_not_begin_with_a_router_that_was_lost(pair) -> None:
    pair[0].fates = [(0, LOST)]
    client = AsyncClient([router.address for router in pair])
    for _ in range(3):
        check([output async for output in client.generate([1])])
    await client.close()
    assert [len(router.requests) for router in pair] == [1, 3]


async def test_a_router_that_is_not_there_is_passed_over(router) -> None:
    # Bound, so that nobody gets its port meanwhile, and not listening.
    with socket.socket() as reservation:
        reservation.bind(("127.0.0.1", 0))
        host, port = reservation.getsockname()
        client = AsyncClient([f"{host}:{port}", router.address])
        check([output async for output in client.generate([1], timeout_s=30)])
        await client.close()


@pytest.mark.parametrize("cut", range(NUM_TOKENS + 1))
async def test_the_blocking_client_does_the_same(pair, cut) -> None:
    pair[0].fates = [(cut, LOST)]

    def collect() -> list[pb2.RequestOutput]:
        with Client([router.address for router in pair]) as client:
            return list(client.generate([1], timeout_s=30))

    check(await asyncio.to_thread(collect))


async def test_closing_the_iterator_cancels_the_stream_that_is_read(pair) -> None:
    pair[0].fates = [(1, LOST)]
    pair[1].hangs_at = 2

    def take_two() -> list[pb2.RequestOutput]:
        with Client([router.address for router in pair]) as client:
            outputs = client.generate([1], timeout_s=60)
            taken = [next(outputs), next(outputs)]
            outputs.close()
            return taken

    # Long before the call's own deadline.
    await asyncio.wait_for(asyncio.to_thread(take_two), 20)
    await asyncio.wait_for(pair[1].is_cancelled.wait(), 20)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="routers is empty"):
        Client([])
    with pytest.raises(ValueError, match="max_resumes is -1"):
        Client("127.0.0.1:1", max_resumes=-1)


# ---- vectors


async def test_what_is_pooled_has_three_forms(router) -> None:
    async with asyncio_client([router]) as client:
        assert await client.embed("a fox", dimensions=2, model="m") == [0.5, 0.25]
        answer = await client.pool(("query", "document"), "score", use_activation=False)
        assert answer.num_prompt_tokens == 3
        await client.pool([5, 6], "classify", priority=-1)
    text, pair, tokens = router.pooled
    assert (text.text, text.model, text.pooling_params.task) == ("a fox", "m", "embed")
    assert text.pooling_params.dimensions == 2
    assert not text.pooling_params.HasField("use_activation")
    assert (pair.pair.text, pair.pair.text_pair) == ("query", "document")
    assert pair.pooling_params.HasField("use_activation")
    assert list(tokens.tokens.token_ids) == [5, 6]
    assert (tokens.priority, tokens.pooling_params.task) == (-1, "classify")


async def test_the_next_router_pools_what_one_has_lost(pair) -> None:
    pair[0].fates = [(0, LOST)]
    async with asyncio_client(pair) as client:
        assert await client.embed("a") == [0.5, 0.25]
        await client.embed("b")
    assert [len(each.pooled) for each in pair] == [1, 2]
    for router in pair:
        router.fates = [(0, LOST)] * 9
    address = [router.address for router in pair]

    def block() -> None:
        with Client(address, max_resumes=2) as client:
            client.embed("a", timeout_s=20)

    with pytest.raises(grpc.RpcError) as raised:
        await asyncio.to_thread(block)
    assert raised.value.code() is LOST
    assert sum(len(each.pooled) for each in pair) == 3 + 3


async def test_what_is_refused_is_not_pooled_elsewhere(pair) -> None:
    pair[0].fates = [(0, grpc.StatusCode.INVALID_ARGUMENT)]
    async with asyncio_client(pair) as client:
        with pytest.raises(grpc.aio.AioRpcError):
            await client.embed("a")
    assert not pair[1].pooled


@contextlib.asynccontextmanager
async def asyncio_client(routers: Sequence[FakeRouter]) -> AsyncIterator[AsyncClient]:
    client = AsyncClient([router.address for router in routers])
    try:
        yield client
    finally:
        await client.close()
