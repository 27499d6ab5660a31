"""A router's spans: what they are called and say, what workers are told, and what is in none."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.openmetrics.exposition import generate_latest

from pdserve.v1 import inference_service_pb2 as pb2
from support.fake_worker import all_behave, hang, pool
from support.otlp import CollectedSpan, Collector
from support.router_stack import ANSWER_TEXT
from support.waiting import until

PROMPT = "the quick fox"
COMPLETION = {"model": "tiny", "prompt": PROMPT, "max_tokens": 100}
CLIENTS_SPAN = "00f067aa0ba902b7"
KEY = "a-key-of-the-tests"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
    with Collector() as collector:
        yield collector
    said = str(collector.spans)
    assert PROMPT not in said
    assert ANSWER_TEXT not in said
    assert KEY not in said


@pytest.fixture
async def stack(start_stack: Any, collector: Collector) -> AsyncIterator[Any]:
    async with start_stack(
        http=True, otlp_traces_endpoint=collector.endpoint, log_requests=False
    ) as stack:
        yield stack


def new_trace(flags: str = "01") -> tuple[str, dict[str, str]]:
    trace_id = secrets.token_hex(16)
    return trace_id, {"traceparent": f"00-{trace_id}-{CLIENTS_SPAN}-{flags}"}


def pooler(task: str) -> dict[str, Any]:
    """Settings of a stack that pools."""
    size = 1 if task == "score" else 3
    info = {"tasks": (task,), "embedding_size": size, "eos_token_ids": (), "kv_transport": "none"}
    return {"decode": 0, "info": info}


async def post(
    stack: Any, body: dict[str, Any], headers: dict[str, str], path: str = "/v1/completions"
) -> httpx.Response:
    return await stack.api.post(path, json=body, headers=headers)


async def trace(collector: Collector, trace_id: str) -> dict[str, CollectedSpan]:
    """Wait for a request's own span, which is exported last, and return all by their names, its own
    as "".
    """

    def spans() -> dict[str, CollectedSpan]:
        of_trace = (span for span in collector.spans if span.trace_id == trace_id)
        return {"" if s.parent_id == CLIENTS_SPAN else s.name: s for s in of_trace}

    await until(lambda: "" in spans())
    return spans()


async def test_a_request_names_its_workers_span_and_itself(
    stack: Any, collector: Collector
) -> None:
    trace_id, headers = new_trace()
    headers |= {"tracestate": "vendor=1", "authorization": f"Bearer {KEY}"}
    answer = await post(stack, COMPLETION, headers)
    assert answer.status_code == 200
    spans = await trace(collector, trace_id)
    root, attempt = spans[""], spans["attempt"]
    assert root.service == "front"
    assert root.name == "POST /v1/completions"
    assert (root.kind, attempt.kind) == ("server", "client")
    assert attempt.parent_id == root.span_id
    assert attempt.attributes["pdserve.decode.address"] == stack.decode.address
    told = stack.decode.requests[-1].trace_headers
    assert told == {
        "traceparent": f"00-{trace_id}-{attempt.span_id}-01",
        "tracestate": "vendor=1",
    }
    says = root.attributes
    assert says["gen_ai.operation.name"] == "text_completion"
    assert says["gen_ai.request.model"] == "tiny"
    assert says["gen_ai.request.max_tokens"] == 100
    assert says["gen_ai.usage.output_tokens"] > 0
    assert says["url.path"] == "/v1/completions"
    assert "gen_ai.latency.e2e" in says


@pytest.mark.parametrize(
    ("path", "body", "num_sequences", "num_traced", "num_traced_prompts"),
    [
        ("/v1/completions", {"prompt": [[5, 6]] * 40}, 40, 8, 8),
        # All completions of a prompt have spans, or none.
        ("/v1/completions", {"prompt": [[5, 6]] * 40, "n": 3}, 120, 9, 3),
        ("/v1/embeddings", {"input": [[5, 6]] * 200}, 200, 8, 8),
    ],
)
async def test_the_spans_of_many_prompts_are_bounded(
    start_stack: Any,
    collector: Collector,
    path: str,
    body: dict[str, Any],
    num_sequences: int,
    num_traced: int,
    num_traced_prompts: int,
) -> None:
    workers = pooler("embed") if path == "/v1/embeddings" else {}
    async with start_stack(http=True, otlp_traces_endpoint=collector.endpoint, **workers) as stack:
        trace_id, headers = new_trace()
        answer = await post(stack, body, headers, path)
        assert answer.status_code == 200, answer.text
        told = [each.trace_headers for each in stack.workers[-1].requests]
        spans = await trace(collector, trace_id)
    names = [span.name for span in collector.spans]
    assert names.count("attempt") == num_traced
    assert names.count("tokenize") == num_traced_prompts
    # Workers make no span of what has no context.
    assert len(told) == num_sequences
    assert told.count({}) == num_sequences - num_traced
    assert len(spans[""].attributes["gen_ai.response.finish_reasons"]) == 1


@pytest.mark.parametrize(
    ("path", "task", "operation"),
    [
        ("/v1/embeddings", "embed", "embeddings"),
        ("/classify", "classify", "classify"),
        ("/v1/score", "score", "score"),
    ],
)
async def test_a_request_that_pools_has_one_worker_and_says_what_it_does(
    start_stack: Any, collector: Collector, path: str, task: str, operation: str
) -> None:
    body = {"text_1": PROMPT, "text_2": PROMPT} if task == "score" else {"input": PROMPT}
    async with start_stack(
        http=True, otlp_traces_endpoint=collector.endpoint, **pooler(task)
    ) as stack:
        trace_id, headers = new_trace()
        answer = await post(stack, body, headers, path)
        assert answer.status_code == 200, answer.text
        (sent,) = stack.prefill.requests
        spans = await trace(collector, trace_id)
    root, attempt = spans[""], spans["attempt"]
    assert spans.keys() == {"", "attempt", "router_queue", "tokenize", "dispatch"}
    assert {s.parent_id for s in spans.values() if s is not root} == {root.span_id}
    assert root.name == f"POST {path}"
    says = root.attributes
    assert says["gen_ai.operation.name"] == operation
    assert says["gen_ai.request.model"] == "tiny"
    assert says["gen_ai.usage.input_tokens"] == len(sent.prompt_token_ids)
    assert says["gen_ai.usage.output_tokens"] == 0
    assert says["gen_ai.response.finish_reasons"] == ["stop"]
    assert says["pdserve.path"] == attempt.attributes["pdserve.path"] == "pooling"
    assert not {"gen_ai.request.temperature", "gen_ai.request.max_tokens"} & says.keys()
    assert attempt.attributes["pdserve.prefill.engine_id"] == "prefill-0"
    assert sent.trace_headers["traceparent"] == f"00-{trace_id}-{attempt.span_id}-01"


async def test_a_conversation_is_a_chat_over_either_api(stack: Any, collector: Collector) -> None:
    message = {"role": "user", "content": PROMPT}
    over_http, headers = new_trace()
    answer = await post(stack, {"messages": [message]}, headers, "/v1/chat/completions")
    assert answer.status_code == 200, answer.text
    over_grpc, headers = new_trace()
    request = pb2.GenerateRequest(chat=pb2.ChatPrompt(messages=[pb2.ChatMessage(**message)]))
    async for _ in stack.stub.Generate(request, metadata=tuple(headers.items())):
        pass
    for trace_id in (over_http, over_grpc):
        root = (await trace(collector, trace_id))[""]
        assert root.attributes["gen_ai.operation.name"] == "chat"


async def test_a_vector_that_is_computed_elsewhere_has_an_attempt_for_each_worker(
    start_stack: Any, collector: Collector
) -> None:
    async with start_stack(
        prefill=2, http=True, otlp_traces_endpoint=collector.endpoint, **pooler("embed")
    ) as stack:
        all_behave(stack.workers, hang)
        trace_id, headers = new_trace()
        asking = asyncio.ensure_future(post(stack, {"input": PROMPT}, headers, "/v1/embeddings"))
        await until(lambda: any(worker.num_running for worker in stack.workers))
        (lost,) = (worker for worker in stack.workers if worker.num_running)
        all_behave(stack.workers, pool)
        await lost.close()
        assert (await asking).status_code == 200
        root = (await trace(collector, trace_id))[""]
    attempts = sorted(
        (each for each in collector.spans if each.name == "attempt"),
        key=lambda each: each.start_ns,
    )
    assert [each.attributes["pdserve.attempt"] for each in attempts] == [0, 1]
    assert [each.is_error for each in attempts] == [True, False]
    assert attempts[0].attributes["pdserve.redrive_reason"]
    assert root.attributes["pdserve.num_redrives"] == 1
    assert not root.is_error


async def test_workers_are_told_of_a_trace_that_is_not_sampled(
    stack: Any, collector: Collector
) -> None:
    trace_id, headers = new_trace("00")
    await post(stack, COMPLETION, headers)
    told = stack.decode.requests[-1].trace_headers["traceparent"]
    assert told.startswith(f"00-{trace_id}-")
    assert told.endswith("-00")
    sampled, headers = new_trace()
    await post(stack, COMPLETION, headers)
    await trace(collector, sampled)
    assert {span.trace_id for span in collector.spans} == {sampled}


@pytest.mark.parametrize("num_chars", [512, 513, 2000])
async def test_workers_are_told_no_more_of_a_clients_state_than_they_take(
    stack: Any, collector: Collector, num_chars: int
) -> None:
    trace_id, headers = new_trace()
    members = [f"vendor{i}={'v' * 100}" for i in range(num_chars // 109)]
    state = ",".join([*members, "last="]).ljust(num_chars, "v")
    answer = await post(stack, COMPLETION, headers | {"tracestate": state})
    assert answer.status_code == 200, answer.text
    told = stack.decode.requests[-1].trace_headers
    assert told["traceparent"].startswith(f"00-{trace_id}-")
    assert told.get("tracestate") == (state if num_chars <= 512 else None)
    await trace(collector, trace_id)


@pytest.mark.parametrize(
    "context",
    [
        {"tracestate": "CLIENTS TEXT"},
        {"tracestate": ",".join(f"k{i}=1" for i in range(40))},
        {"tracestate": "a=1,CLIENTS TEXT" * 60},
        {"traceparent": "CLIENTS TEXT" * 50},
        {"traceparent": "CLIENTS TEXT"},
    ],
)
async def test_a_context_that_is_none_leaves_nothing_in_the_log(
    stack: Any, caplog: pytest.LogCaptureFixture, context: dict[str, str]
) -> None:
    _, headers = new_trace()
    await post(stack, COMPLETION, headers | context)
    call = stack.stub.Generate(
        pb2.GenerateRequest(text=PROMPT), metadata=tuple((headers | context).items())
    )
    assert [response async for response in call]
    assert "CLIENTS TEXT" not in caplog.text
    assert not [each for each in caplog.records if each.name.startswith("opentelemetry")]


@pytest.mark.parametrize("sampler", ["always_off", "traceidratio"])
async def test_the_routers_sampler_decides_for_workers(
    start_stack: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    """Whatever the client's context says, unless the sampler is the parent's."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    async with start_stack(http=True, otlp_traces_endpoint=collector.endpoint) as stack:
        _, headers = new_trace()
        await post(stack, COMPLETION, headers)
        assert stack.decode.requests[-1].trace_headers["traceparent"].endswith("-00")
    assert not collector.spans


@pytest.mark.parametrize(
    ("body", "status", "error_type"),
    [
        ({"model": "tiny", "prompt": PROMPT, "max_tokens": -1}, 400, "invalid_argument"),
        ({"model": "none", "prompt": PROMPT}, 404, "invalid_argument"),
    ],
)
async def test_a_clients_error_is_named_and_is_not_the_servers(
    stack: Any, collector: Collector, body: dict[str, Any], status: int, error_type: str
) -> None:
    trace_id, headers = new_trace()
    answer = await post(stack, body, headers)
    assert answer.status_code == status
    (root,) = (await trace(collector, trace_id)).values()
    # Of what no worker has got anybody could make any number of names.
    assert root.name == "POST"
    assert not root.is_error
    assert root.attributes["error.type"] == error_type
    assert root.attributes["http.response.status_code"] == status


async def test_an_error_of_the_server_is_an_error(start_stack: Any, collector: Collector) -> None:
    async with start_stack(
        prefill=0, decode=("127.0.0.1:1",), wait=False, otlp_traces_endpoint=collector.endpoint
    ) as stack:
        trace_id, headers = new_trace()
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            async for _ in stack.stub.Generate(
                pb2.GenerateRequest(text=PROMPT), metadata=tuple(headers.items())
            ):
                pass
        (root,) = (await trace(collector, trace_id)).values()
    assert root.is_error
    assert root.attributes["error.type"] == "no_worker"
    assert root.attributes["rpc.response.status_code"] == "UNAVAILABLE"
    assert root.attributes["rpc.method"] == "pdserve.v1.InferenceService/Generate"


async def test_a_client_that_leaves_ends_its_spans(stack: Any, collector: Collector) -> None:
    all_behave(stack.workers, hang)
    trace_id, headers = new_trace()
    call = stack.stub.Generate(
        pb2.GenerateRequest(text=PROMPT), metadata=tuple(headers.items()), timeout=60
    )
    reading = asyncio.ensure_future(call.read())
    await until(lambda: stack.decode.num_running)
    call.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    spans = await trace(collector, trace_id)
    for span in (spans[""], spans["attempt"]):
        assert span.attributes["error.type"] == "cancelled"
        assert not span.is_error
    assert spans[""].attributes["gen_ai.response.finish_reasons"] == ["abort"]


async def test_histograms_have_exemplars_of_sampled_requests(
    start_stack: Any, collector: Collector
) -> None:
    async with start_stack(http=True, otlp_traces_endpoint=collector.endpoint) as stack:
        trace_id, headers = new_trace()
        unsampled, others = new_trace("00")
        for each in (headers, others):
            await post(stack, COMPLETION, each)
        text = generate_latest(stack.server.registry).decode()
    lines = [line for line in text.splitlines() if trace_id in line]
    assert {line.partition("_bucket")[0] for line in lines} >= {
        "pdserve_time_to_first_token_seconds",
        "pdserve_request_duration_seconds",
    }
    assert unsampled not in text
