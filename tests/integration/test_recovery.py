"""Workers that die, leave and are replaced under streams, two of each role: no client notices."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve.v1 import inference_service_pb2_grpc as pb2_grpc
from pdserve_client.client import build_request
from pdserve_common.types.sampling_params import SamplingParams
from support.waiting import until

NUM_TOKENS = 600
PROMPT = random.Random(0).choices(range(3, 290), k=100)
PARAMS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1),
    "sampled": SamplingParams(
        seed=7, presence_penalty=0.5, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1
    ),
}
SHORT = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
# Chosen so that a long prompt takes a second or two and a stream outlives a drain.
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
}
DRAIN_TIMEOUT_S = 0.2
TIMEOUT_S = 300.0


class Answer(NamedTuple):
    """What one client got."""

    tokens: list[int]
    text: str
    logprobs: list[str]
    num_prompt_tokens: int
    num_output_tokens: int


class Told(NamedTuple):
    """An answer, and what the router says of its way."""

    answer: Answer
    metrics: pb2.RequestMetrics
    trailers: dict[str, str]


@pytest.fixture(scope="module")
def two_of_each(make_served_model: Callable[..., Path], start_stack: Any) -> Iterator[Any]:
    model = make_served_model("LlamaForCausalLM", **SHAPE)
    with start_stack(
        model=model,
        dtype="float32",
        num_threads=1,
        prefill=2,
        decode=2,
        max_num_batched_tokens=64,
        drain_timeout_s=DRAIN_TIMEOUT_S,
    ) as stack:
        yield stack


@pytest.fixture
def stack(two_of_each: Any) -> Iterator[Any]:
    """The stack, whole again after each test."""
    yield two_of_each
    two_of_each.restore()


@pytest.fixture
async def stub(stack: Any) -> AsyncIterator[pb2_grpc.InferenceServiceStub]:
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        yield pb2_grpc.InferenceServiceStub(channel)


async def ask(
    stub: pb2_grpc.InferenceServiceStub,
    params: SamplingParams,
    prompt: list[int] = PROMPT,
    begun: asyncio.Event | None = None,
) -> Told:
    """`begun` is set with the first message."""
    call = stub.Generate(build_request(prompt, params), timeout=TIMEOUT_S)
    outputs: list[pb2.RequestOutput] = []
    async for response in call:
        outputs.append(response.output)
        if begun is not None:
            begun.set()
    completions = [completion for output in outputs for completion in output.outputs]
    assert not [each.error for each in completions if each.HasField("error")]
    assert [output.finished for output in outputs].count(True) == 1
    answer = Answer(
        [token for each in completions for token in each.token_ids],
        "".join(each.text for each in completions),
        [str(position) for each in completions for position in each.logprobs.positions],
        outputs[-1].usage.num_prompt_tokens,
        outputs[-1].usage.num_output_tokens,
    )
    trailers = {str(key): str(value) for key, value in await call.trailing_metadata()}
    return Told(answer, outputs[-1].metrics, trailers)


async def ask_during(stub: Any, strike: Callable[[], None]) -> list[Told]:
    """Run two greedy and two sampled streams, on both Ds; `strike` comes when all have begun."""
    undisturbed = await asyncio.gather(*(ask(stub, params) for params in PARAMS.values()))
    expected = {kind: told.answer for kind, told in zip(PARAMS, undisturbed, strict=True)}
    kinds = ["greedy", "greedy", "sampled", "sampled"]
    begun = [asyncio.Event() for _ in kinds]
    asked = [
        asyncio.create_task(ask(stub, PARAMS[kind], begun=event))
        for kind, event in zip(kinds, begun, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    strike()
    told = await asyncio.gather(*asked)
    assert [each.answer for each in told] == [expected[kind] for kind in kinds]
    return told


def num_recovered(told: list[Told]) -> int:
    """Count the streams that moved, each once, to decode-0; metrics and trailers have to agree."""
    for _, metrics, trailers in told:
        assert metrics.num_redrives in (0, 1)
        assert metrics.decode_engine_id == "decode-0"
        assert trailers["pdserve-num-redrives"] == str(metrics.num_redrives)
        assert trailers["pdserve-recovered"] == str(metrics.num_redrives)
        assert trailers["pdserve-determinism"] == metrics.determinism == "exact"
    return sum(metrics.num_redrives for _, metrics, _ in told)


async def test_a_decode_worker_hands_streams_back_at_the_end_of_its_drain(
    stack: Any, stub: Any
) -> None:
    told = await ask_during(stub, lambda: stack.send_signal("decode-1", signal.SIGTERM))
    assert 0 < num_recovered(told) < len(told)
    assert stack.process("decode-1").wait(60) == 0
    stack.assert_idle(without="decode-1")


async def test_every_worker_is_replaced_under_load_and_no_request_fails(
    stack: Any, stub: Any
) -> None:
    prompts = [PROMPT[:20], PROMPT[:50], PROMPT]
    alone = [(await ask(stub, SHORT, prompt)).answer for prompt in prompts]
    is_over = asyncio.Event()
    num_answers = 0

    async def keep_asking(index: int) -> None:
        nonlocal num_answers
        while not is_over.is_set():
            assert (await ask(stub, SHORT, prompts[index])).answer == alone[index]
            num_answers += 1
            await asyncio.sleep(0.2)

    load = [asyncio.create_task(keep_asking(index)) for index in range(len(prompts))]
    try:
        for number in range(2):
            names = [f"prefill-{number}", f"decode-{number}"]
            for name in names:
                stack.send_signal(name, signal.SIGTERM)
            for name in names:
                assert await asyncio.to_thread(stack.process(name).wait, 60) == 0
            stack.wake_and_start()
            await asyncio.to_thread(stack.wait_until_whole)
            num_before = num_answers
            await until(lambda num=num_before: num_answers > num + len(load), timeout_s=60)
            assert not any(task.done() for task in load), "a request has failed"
    finally:
        is_over.set()
        await asyncio.gather(*load)
    stack.assert_idle()
