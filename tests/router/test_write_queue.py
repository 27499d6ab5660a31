"""How text that nobody waits for in particular gets to its stream."""

import asyncio

import pytest

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.engine import FinishReason
from pdserve_router.api.http.write_queue import WriteQueue
from support.router_stack import events_of, tokens_of
from support.waiting import until

NUM_STREAMS = 100
PATH = "/v1/completions"


async def test_each_writes_in_its_turn_and_the_loop_goes_on_between() -> None:
    queue, written, turns = WriteQueue(), [], 0
    for stream in range(NUM_STREAMS):
        queue.add(lambda stream=stream: written.append(stream))
    assert not written
    while len(written) < NUM_STREAMS:
        await asyncio.sleep(0)
        turns += 1
    assert written == list(range(NUM_STREAMS))
    assert turns > 2


async def test_what_is_added_by_a_write_waits_for_the_others() -> None:
    queue, written = WriteQueue(), []

    def write() -> None:
        written.append("first")
        if len(written) < 3:
            queue.add(write)

    queue.add(write)
    queue.add(lambda: written.append("second"))
    await until(lambda: len(written) == 3)
    assert written == ["first", "second", "first"]


async def steps(worker, running, *, num_tokens: int, per_turn: int) -> None:
    """Answer with some tokens in each frame, as fast as they are taken."""
    first = worker.info.vocab_size - 8
    running.emit(first, first, at=0, prefill_stats=worker.prefill_stats)
    for at in range(2, num_tokens, per_turn):
        for index in range(at, min(at + per_turn, num_tokens)):
            running.emit(first + index % 8, at=index)
        await asyncio.sleep(0)
    running.emit(at=num_tokens, finish=FinishReason.LENGTH)


@pytest.mark.parametrize("per_turn", [1, 3])
async def test_text_is_the_same_however_it_is_merged(start_stack, tokenizer, per_turn) -> None:
    """Over SSE and over gRPC, and more streams than a turn of the loop writes to."""
    num_tokens = 60
    async with start_stack(prefill=0, http=True) as stack:
        worker = stack.decode
        worker.behave = lambda running: steps(
            worker, running, num_tokens=num_tokens, per_turn=per_turn
        )
        first = worker.info.vocab_size - 8
        token_ids = [first, first, *(first + index % 8 for index in range(2, num_tokens))]
        request = pb2.GenerateRequest(text="a")
        request.sampling_params.max_tokens = num_tokens + 1
        body = {"model": "tiny", "prompt": "a", "max_tokens": num_tokens + 1, "stream": True}
        grpc_answers = asyncio.gather(*(stack.generate(request) for _ in range(40)))
        sse_answers = asyncio.gather(*(stack.api.post(PATH, json=body) for _ in range(40)))
        for outputs in await grpc_answers:
            assert tokens_of(outputs) == token_ids
        for answer in await sse_answers:
            choices = [event["choices"][0] for event in events_of(answer.text)]
            assert "".join(choice["text"] for choice in choices) == tokenizer.decode(token_ids)
            assert choices[-1]["finish_reason"] == "length"
        name, labels = "pdserve_generation_tokens_total", {"model": "tiny"}
        assert stack.metric(name, **labels) == 80 * num_tokens
