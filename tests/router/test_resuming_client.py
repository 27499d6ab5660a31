"""The client library and a router whose connections break: its caller sees one answer."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import grpc
import pytest

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.client import AsyncClient
from pdserve_common.types.sampling_params import RequestOutputKind, SamplingParams
from support.cut_proxy import cut_proxies
from support.fake_worker import Running
from support.refusals import refused
from support.router_stack import ANSWER_TEXT, Stack

PARAMS = {
    "plain": SamplingParams(),
    "logprobs": SamplingParams(logprobs=1, prompt_logprobs=0),
    "stop string": SamplingParams(stop=("quick",)),
    "two": SamplingParams(n=2, logprobs=0),
}


class Pace:
    """Has workers bring a token when the client has all before it, those of other completions
    included: each output is one token, and none is under way when a connection breaks.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._is_cumulative = params.output_kind is RequestOutputKind.CUMULATIVE
        # Tokens of each completion that the client has; of a finished one it has any number.
        self._received = [0.0] * params.n
        self._changed = asyncio.Event()

    def take(self, output: pb2.RequestOutput) -> None:
        for part in output.outputs:
            before = 0 if self._is_cumulative else self._received[part.index]
            received = before + len(part.token_ids)
            self._received[part.index] = math.inf if part.finish_reason else received
        self._changed.set()
        self._changed = asyncio.Event()

    async def before_token(self, running: Running, num_tokens: int) -> None:
        request_id = running.request.request_id
        index = int(request_id.partition("_")[0]) if len(self._received) > 1 else 0
        while not self._is_turn(index, num_tokens):
            await self._changed.wait()

    def _is_turn(self, index: int, num_tokens: int) -> bool:
        return all(
            received >= num_tokens + (other < index)
            for other, received in enumerate(self._received)
        )


async def outputs_of(
    stack: Stack, client: AsyncClient, params: SamplingParams
) -> AsyncIterator[pb2.RequestOutput]:
    """Yield what a client gets. The next output is made when the caller comes back for it."""
    pace = Pace(params)
    for worker in stack.workers:
        worker.before_token = pace.before_token
    async for output in client.generate("hello", params, timeout_s=30):
        yield output
        pace.take(output)


async def ask(
    stack: Stack, params: SamplingParams, cuts: Sequence[int] = ()
) -> tuple[list[pb2.RequestOutput], int]:
    """Return the outputs, and how many requests the router had; connections break behind so many
    outputs each.
    """
    num_before = len(stack.prefill.requests)
    outputs: list[pb2.RequestOutput] = []
    async with cut_proxies(stack.server.grpc_port, len(cuts) + 1) as proxies:
        client = AsyncClient([proxy.address for proxy in proxies])
        try:
            async for output in outputs_of(stack, client, params):
                outputs.append(output)
                if (number := len(outputs)) in cuts:
                    proxies[cuts.index(number)].cut()
        finally:
            await client.close()
    return outputs, len(stack.prefill.requests) - num_before


def parts_of(outputs: list[pb2.RequestOutput], index: int) -> list[pb2.CompletionOutput]:
    return [part for output in outputs for part in output.outputs if part.index == index]


def sum_of(parts: list[pb2.CompletionOutput]) -> tuple[object, ...]:
    """Add up what deltas said of one completion."""
    return (
        "".join(part.text for part in parts),
        [token_id for part in parts for token_id in part.token_ids],
        [str(position) for part in parts for position in part.logprobs.positions],
        parts[-1].finish_reason,
        pytest.approx(parts[-1].cumulative_logprob),
    )


def frame_of(outputs: list[pb2.RequestOutput]) -> tuple[object, ...]:
    """What belongs to the answer as a whole."""
    return (
        [output.finished for output in outputs].count(True),
        outputs[-1].finished,
        [list(output.prompt_token_ids) for output in outputs if output.prompt_token_ids],
        [output.HasField("prompt_logprobs") for output in outputs].count(True),
        (outputs[-1].usage.num_prompt_tokens, outputs[-1].usage.num_output_tokens),
        len({output.request_id for output in outputs}),
        len({output.seed for output in outputs}),
    )


@pytest.mark.parametrize("name", PARAMS)
async def test_deltas_have_no_gap_and_no_overlap(stack, name) -> None:
    params = PARAMS[name]
    whole, _ = await ask(stack, params)
    for cut in range(1, len(whole), 1 if name == "plain" else 3):
        outputs, num_requests = await ask(stack, params, [cut])
        assert num_requests > 1
        assert frame_of(outputs) == frame_of(whole)
        for index in range(params.n):
            assert sum_of(parts_of(outputs, index)) == sum_of(parts_of(whole, index))


async def test_a_stream_may_break_more_than_once(stack) -> None:
    whole, _ = await ask(stack, SamplingParams(logprobs=1))
    outputs, num_requests = await ask(stack, SamplingParams(logprobs=1), [1, 3, 5])
    assert num_requests == 4
    assert sum_of(parts_of(outputs, 0)) == sum_of(parts_of(whole, 0))
    assert frame_of(outputs) == frame_of(whole)


async def test_cumulative_outputs_only_grow(stack) -> None:
    params = SamplingParams(output_kind=RequestOutputKind.CUMULATIVE, logprobs=1, n=2)
    whole, _ = await ask(stack, params)
    for cut in range(1, len(whole) - 1, 3):
        outputs, _ = await ask(stack, params, [cut])
        assert frame_of(outputs) == frame_of(whole)
        for index in range(2):
            parts = parts_of(outputs, index)
            for before, after in pairwise(parts):
                assert after.text.startswith(before.text)
                known = list(before.logprobs.positions)
                assert list(after.logprobs.positions)[: len(known)] == known
            assert sum_of(parts[-1:]) == sum_of(parts_of(whole, index)[-1:])
            assert [bool(part.finish_reason) for part in parts].count(True) == 1


async def test_an_answer_that_is_told_at_its_end_is_asked_for_again(stack) -> None:
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    async with cut_proxies(stack.server.grpc_port, 2) as proxies:
        client = AsyncClient([proxy.address for proxy in proxies])
        started = stack.decode.behave

        async def cut_once(running) -> None:
            proxies[0].cut()
            stack.decode.behave = started
            await started(running)

        stack.decode.behave = cut_once
        outputs = [output async for output in client.generate("hello", params, timeout_s=30)]
        await client.close()
    assert [output.outputs[0].text for output in outputs] == [ANSWER_TEXT]
    first, second = stack.decode.requests
    assert first.task.sampling_params.seed == second.task.sampling_params.seed == outputs[0].seed


async def test_another_models_router_is_passed_over(start_stack) -> None:
    """It refuses what its workers would go on with as another answer."""
    async with (
        start_stack() as stack,
        start_stack(info={"weights_digest": "b" * 64}) as other,
        cut_proxies(stack.server.grpc_port, 2) as (first, last),
    ):
        whole, _ = await ask(stack, SamplingParams())
        client = AsyncClient([first.address, f"127.0.0.1:{other.server.grpc_port}", last.address])
        outputs: list[pb2.RequestOutput] = []
        async for output in outputs_of(stack, client, SamplingParams()):
            outputs.append(output)
            if len(outputs) == 2:
                first.cut()
        await client.close()
        assert len(stack.prefill.requests) == 3
        assert sum_of(parts_of(outputs, 0)) == sum_of(parts_of(whole, 0))
        assert outputs[-1].metrics.determinism == "exact"
        assert other.server.router.num_in_flight == 0
        assert not [leg for worker in other.workers for leg in worker.requests]


async def test_without_a_router_of_its_model_an_answer_ends(start_stack) -> None:
    async with (
        start_stack() as stack,
        start_stack(info={"weights_digest": "b" * 64}) as other,
        cut_proxies(stack.server.grpc_port, 1) as (first,),
    ):
        client = AsyncClient([first.address, f"127.0.0.1:{other.server.grpc_port}"], max_resumes=1)
        outputs = outputs_of(stack, client, SamplingParams())
        await anext(outputs)
        first.cut()
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be resumed here") as raised:
            _ = [output async for output in outputs]
        await client.close()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_nothing_is_resumed_that_routers_cannot_go_on_with(stack) -> None:
    with refused(grpc.StatusCode.UNAVAILABLE):
        await ask(stack, SamplingParams(n=2, best_of=2), [1])
