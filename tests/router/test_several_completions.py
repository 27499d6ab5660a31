"""What n, best_of and beam search share: for the router's limits each is one request."""

import grpc
import pytest

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from support.fake_worker import all_behave, hang
from support.waiting import until

KINDS = {
    "n": {"n": 3},
    "best_of": {"n": 2, "best_of": 4},
    "beams": {"n": 2, "use_beam_search": True, "temperature": 0.0},
}
NUM_CHILDREN = {"n": 3, "best_of": 4, "beams": 1}

every_kind = pytest.mark.parametrize("kind", KINDS)


def call(stack, kind: str, **fields):
    params = core.SamplingParams(**{**KINDS[kind], **fields})
    return stack.stub.Generate(pb2.GenerateRequest(text="hello", sampling_params=params))


async def status_of(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code(), caught.value.details()


@every_kind
async def test_a_full_queue_refuses_and_counts_it_once(start_stack, kind) -> None:
    async with start_stack(max_num_queued_requests=2) as stack:
        all_behave(stack.workers, hang)
        waiting = [call(stack, kind) for _ in range(2)]
        await until(lambda: stack.server.router.num_queued == 2)
        code, details = await status_of(call(stack, kind))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details == "2 requests wait for their first token, at most 2 may"
        assert stack.metric("pdserve_requests_in_flight") == 2
        await until(lambda: stack.decode.num_running == 2 * NUM_CHILDREN[kind])
        waiting.pop().cancel()
        # All that belongs to the one stream is freed, and nothing of the other.
        await until(lambda: stack.server.router.num_queued == 1)
        await until(lambda: stack.decode.num_running == NUM_CHILDREN[kind])
        waiting.pop().cancel()
        await stack.assert_idle()
        assert stack.metric("pdserve_requests_total", model="tiny", outcome="refused") == 1
        assert stack.metric("pdserve_requests_total", model="tiny", outcome="abort") == 2


# Logprobs of 20 000 tokens, 21 for each.
MANY = {"logprobs": 20, "max_tokens": 20_000}
ROOM = {"max_model_len": 30_000}
CUMULATIVE = core.REQUEST_OUTPUT_KIND_CUMULATIVE
FINAL_ONLY = core.REQUEST_OUTPUT_KIND_FINAL_ONLY
DELTA = core.REQUEST_OUTPUT_KIND_DELTA


# The prompt's are in the same message.
FEW_BUT_FOR_THE_PROMPTS = {"logprobs": 0, "prompt_logprobs": 20, "max_tokens": 262_144 - 2 * 5}


async def test_logprobs_that_may_not_fit_into_one_message_are_refused(start_stack) -> None:
    async with start_stack(info={"max_model_len": 300_000}) as stack:
        for fields in (
            {"n": 1, "output_kind": FINAL_ONLY},
            {"n": 1, "output_kind": CUMULATIVE},
            {"n": 2, "output_kind": FINAL_ONLY, "max_tokens": 10_000},
            {"n": 2, "best_of": 3, "max_tokens": 10_000},
            {"n": 2, "use_beam_search": True, "temperature": 0.0, "max_tokens": 10_000},
            {"n": 1, "output_kind": FINAL_ONLY, **FEW_BUT_FOR_THE_PROMPTS},
        ):
            params = core.SamplingParams(**{**MANY, **fields})
            request = pb2.GenerateRequest(text="hello", sampling_params=params)
            code, details = await status_of(stack.stub.Generate(request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert details.startswith(f"logprobs is {params.logprobs} with max_tokens ")
            assert details.endswith("log-probabilities, at most 262144")
        assert stack.decode.requests == []


@pytest.mark.parametrize(
    ("kind", "expected"), [(FINAL_ONLY, 2**18 // 21), (CUMULATIVE, 2**18 // 21), (DELTA, 299_998)]
)
async def test_an_answer_of_any_length_has_as_many_logprobs_as_fit(
    start_stack, kind, expected
) -> None:
    """Who sets no max_tokens is not refused for a long model's."""
    async with start_stack(http=True, info={"max_model_len": 300_000}) as stack:
        params = core.SamplingParams(logprobs=20, output_kind=kind)
        prompt = pb2.TokenPrompt(token_ids=[5, 6])
        request = pb2.GenerateRequest(tokens=prompt, sampling_params=params)
        outputs = [response.output async for response in stack.stub.Generate(request)]
        assert outputs[-1].outputs[0].finish_reason == core.FINISH_REASON_STOP
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        body = {**chat, "logprobs": True, "top_logprobs": 20}
        assert (await stack.api.post("/v1/chat/completions", json=body)).status_code == 200
        limits = [each.task.sampling_params.max_tokens for each in stack.decode.requests]
        assert limits == [expected, 2**20 // 21]


async def test_logprobs_in_parts_or_over_http_may_be_many(start_stack) -> None:
    async with start_stack(http=True, info=ROOM) as stack:
        outputs = [response.output async for response in call(stack, "n", **MANY)]
        assert outputs[-1].finished
        body = {"model": "tiny", "prompt": "hello", **MANY}
        response = await stack.api.post("/v1/completions", json=body)
        assert response.status_code == 200
