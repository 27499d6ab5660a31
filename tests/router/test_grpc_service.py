"""The public gRPC API: what it refuses, what it answers, what its trailers say."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.engine import ErrorCode
from support.fake_worker import fails_with
from support.refusals import refused
from support.router_stack import ANSWER_TEXT
from support.waiting import until

TRACEPARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
CHAT = pb2.ChatPrompt(messages=[pb2.ChatMessage(role="user", content="hello")])


async def collect(stack, request):
    call = stack.stub.Generate(request)
    outputs = [response.output async for response in call]
    return outputs, dict(await call.trailing_metadata())


def params(**fields):
    return core.SamplingParams(**fields)


@pytest.mark.parametrize(
    "prompt",
    [{"text": "hello"}, {"chat": CHAT}, {"tokens": pb2.TokenPrompt(token_ids=[5, 6, 7])}],
    ids=["text", "chat", "tokens"],
)
async def test_every_kind_of_prompt_is_answered(stack, prompt) -> None:
    outputs, _ = await collect(stack, pb2.GenerateRequest(request_id="mine", **prompt))
    assert "".join(output.outputs[0].text for output in outputs) == ANSWER_TEXT
    assert {output.request_id for output in outputs} == {"mine"}
    assert len(outputs[0].prompt_token_ids) == outputs[-1].usage.num_prompt_tokens > 0


def positions_of(logprobs) -> list:
    return [
        (list(position.token_ids), list(position.logprobs), list(position.decoded_tokens))
        for position in logprobs.positions
    ]


async def test_logprobs_come_with_the_text_of_their_tokens(stack, tokenizer) -> None:
    request = pb2.GenerateRequest(
        text="hello", sampling_params=params(logprobs=1, prompt_logprobs=0)
    )
    outputs, _ = await collect(stack, request)
    texts = tokenizer.token_text
    prompt_ids = outputs[0].prompt_token_ids
    assert positions_of(outputs[0].prompt_logprobs) == [
        ([], [], []),
        *(([i], [-i / 64], [texts(i)]) for i in prompt_ids[1:]),
    ]
    assert [p.sampled_token_rank for p in outputs[0].prompt_logprobs.positions[1:]] == list(
        prompt_ids[1:]
    )
    completions = [output.outputs[0] for output in outputs]
    token_ids = [token_id for completion in completions for token_id in completion.token_ids]
    assert len(token_ids) > 3
    assert [row for each in completions for row in positions_of(each.logprobs)] == [
        ([i, 4], [-i / 64, -1.0], [texts(i), texts(4)]) for i in token_ids
    ]
    assert completions[-1].cumulative_logprob == -sum(token_ids) / 64
    assert not any(output.HasField("prompt_logprobs") for output in outputs[1:])


async def test_without_detokenize_the_tokens_of_logprobs_have_no_text(stack) -> None:
    request = pb2.GenerateRequest(
        text="hello", sampling_params=params(logprobs=1, prompt_logprobs=1, detokenize=False)
    )
    outputs, _ = await collect(stack, request)
    parts = [outputs[0].prompt_logprobs, *(output.outputs[0].logprobs for output in outputs)]
    positions = [position for part in parts for position in part.positions]
    assert any(position.token_ids for position in positions)
    assert not any(position.decoded_tokens for position in positions)


async def test_without_logprobs_there_is_no_trace_of_them(stack) -> None:
    outputs, _ = await collect(stack, pb2.GenerateRequest(text="hello"))
    for output in outputs:
        assert not output.HasField("prompt_logprobs")
        assert not output.outputs[0].HasField("logprobs")
        assert not output.outputs[0].HasField("cumulative_logprob")


async def test_trailers_carry_the_timing_the_path_and_the_seed(stack) -> None:
    request = pb2.GenerateRequest(text="hello", sampling_params=params(seed=42))
    outputs, trailers = await collect(stack, request)
    assert trailers["pdserve-path"] == "disaggregated"
    assert trailers["pdserve-seed"] == "42"
    assert outputs[0].seed == outputs[-1].seed == 42
    metrics = outputs[-1].metrics
    assert float(trailers["pdserve-ttft-ms"]) == pytest.approx(metrics.ttft_ns / 1e6, abs=1e-3)
    assert float(trailers["pdserve-e2e-ms"]) > 0
    assert trailers["pdserve-decode-engine-id"] == "decode-0"


async def test_a_drawn_seed_is_returned(stack) -> None:
    outputs, _ = await collect(stack, pb2.GenerateRequest(text="hello"))
    assert outputs[-1].seed == stack.decode.requests[0].task.sampling_params.seed


async def test_priority_and_salt_reach_the_engine(stack) -> None:
    await collect(stack, pb2.GenerateRequest(text="hello", priority=-3, cache_salt="tenant"))
    assert stack.decode.requests[0].priority == -3
    assert stack.decode.requests[0].cache_salt == "tenant"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"traceparent": TRACEPARENT}, {"traceparent": TRACEPARENT}),
        (
            {"traceparent": TRACEPARENT, "tracestate": "a=1"},
            {"traceparent": TRACEPARENT, "tracestate": "a=1"},
        ),
        ({"traceparent": TRACEPARENT, "tracestate": "x" * 600}, {"traceparent": TRACEPARENT}),
        ({"traceparent": "00-nonsense", "tracestate": "a=1"}, {}),
        ({}, {}),
    ],
)
async def test_a_trace_context_reaches_both_legs_and_a_malformed_one_counts_as_none(
    stack, metadata, expected
) -> None:
    call = stack.stub.Generate(pb2.GenerateRequest(text="hello"), metadata=tuple(metadata.items()))
    assert [response async for response in call]
    for worker in (stack.prefill, stack.decode):
        assert worker.requests[-1].trace_headers == expected


INVALID = grpc.StatusCode.INVALID_ARGUMENT
BAD_REQUESTS = {
    "empty text": ({"text": ""}, INVALID, "prompt is empty"),
    "no prompt": ({}, INVALID, "prompt needs exactly one"),
    "empty tokens": ({"tokens": pb2.TokenPrompt()}, INVALID, "prompt is empty"),
    "too long": (
        {"tokens": pb2.TokenPrompt(token_ids=[5] * 5000)},
        INVALID,
        "prompt has 5000 tokens, at most 4095 fit",
    ),
    "token id out of range": (
        {"tokens": pb2.TokenPrompt(token_ids=[5, 99999])},
        INVALID,
        "prompt_token_ids has 99999",
    ),
    "no messages": ({"chat": pb2.ChatPrompt()}, INVALID, "messages is empty"),
    "unknown model": ({"text": "a", "model": "x"}, grpc.StatusCode.NOT_FOUND, "model 'x'"),
    "temperature": (
        {"text": "a", "sampling_params": params(temperature=-1)},
        INVALID,
        "temperature is -1.0, must be at least 0",
    ),
    "unknown adapter": (
        {"text": "a", "lora_name": "l"},
        grpc.StatusCode.NOT_FOUND,
        "lora_name 'l' is no adapter",
    ),
    "request id": ({"text": "a", "request_id": "ä"}, INVALID, "request_id must be printable"),
    "unknown enum": (
        {"text": "a", "sampling_params": params(output_kind=9)},
        INVALID,
        "sampling_params.output_kind is 9",
    ),
}


async def test_bad_requests_are_refused_with_a_status_that_names_the_field(stack) -> None:
    for name, (fields, code, message) in BAD_REQUESTS.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stack, pb2.GenerateRequest(**fields))
        assert caught.value.code() is code, name
        assert message in caught.value.details(), name
    rejected = stack.metric("pdserve_requests_total", model="tiny", outcome="rejected")
    # Some are refused while the message is read, before they are requests.
    assert len(BAD_REQUESTS) - 2 <= rejected <= len(BAD_REQUESTS)
    assert stack.prefill.requests == stack.decode.requests == []


async def test_too_many_waiting_requests_are_refused_with_a_time_to_wait(start_stack) -> None:
    async with start_stack(max_num_queued_requests=1) as stack:
        stack.prefill.behave = stack.decode.behave = lambda running: asyncio.Event().wait()
        waiting = stack.stub.Generate(pb2.GenerateRequest(text="hello"))
        await until(lambda: stack.server.router.num_in_flight == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stack, pb2.GenerateRequest(text="hello"))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(caught.value.trailing_metadata())["retry-after-ms"] == "1000"
        waiting.cancel()


async def test_a_worker_that_refuses_becomes_the_end_of_the_stream(start_stack) -> None:
    refuse = fails_with(ErrorCode.OVERLOADED, "full", is_retryable=True, retry_after_ms=250)
    async with start_stack(max_redrives=0) as stack:
        stack.prefill.behave = stack.decode.behave = refuse
        (output,), _ = await collect(stack, pb2.GenerateRequest(text="hello"))
    assert output.finished
    assert output.outputs[0].error.code == core.ERROR_CODE_OVERLOADED
    assert output.outputs[0].error.retry_after_ms == 250


async def test_tokenize_and_detokenize_are_inverse(stack) -> None:
    answer = await stack.stub.Tokenize(pb2.TokenizeRequest(text="hello 世界"))
    assert answer.max_model_len == 4096
    back = await stack.stub.Detokenize(pb2.DetokenizeRequest(token_ids=answer.token_ids))
    assert back.text == "hello 世界"
    chat = await stack.stub.Tokenize(pb2.TokenizeRequest(chat=CHAT))
    back = await stack.stub.Detokenize(pb2.DetokenizeRequest(token_ids=chat.token_ids))
    assert back.text.startswith("<|im_start|>user\nhello")


async def test_tokenize_and_detokenize_refuse_bad_input(stack) -> None:
    for call, message, code in (
        (stack.stub.Tokenize, pb2.TokenizeRequest(), INVALID),
        (stack.stub.Tokenize, pb2.TokenizeRequest(text="a", model="x"), grpc.StatusCode.NOT_FOUND),
        (stack.stub.Detokenize, pb2.DetokenizeRequest(token_ids=[2**31]), INVALID),
        (stack.stub.Detokenize, pb2.DetokenizeRequest(token_ids=[5] * (2**18 + 1)), INVALID),
    ):
        with refused(code):
            await call(message)


async def test_models_health_and_reflection(stack) -> None:
    (model,) = (await stack.stub.ListModels(pb2.ListModelsRequest())).models
    assert (model.id, model.max_model_len) == ("tiny", 4096)
    health = health_pb2_grpc.HealthStub(stack.channel)
    for service in ("", "pdserve.v1.InferenceService"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await stack.decode.stop()
    await until(lambda: not stack.server.router.is_ready)
    answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_reflection_lists_the_service(stack) -> None:
    import asyncio

    def list_services() -> list[str]:
        with grpc.insecure_channel(f"127.0.0.1:{stack.server.grpc_port}") as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert "pdserve.v1.InferenceService" in await asyncio.to_thread(list_services)
