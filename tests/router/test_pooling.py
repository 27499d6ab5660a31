"""Requests for vectors: one prefill worker has each, and another one if that fails."""

import asyncio
import contextlib
import logging

import grpc
import pytest

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.engine import ErrorCode, Pool
from pdserve_common.types.lora import LoRAAdapter
from pdserve_router.workers.circuit_breaker import FAILURES_TO_OPEN
from pdserve_router.workers.routing.prefix_index import prefix_hashes
from pdserve_router.workers.routing.routing_policy import ROUTING_POLICIES
from support.fake_worker import (
    EMBEDDER,
    all_behave,
    fails_with,
    hang,
    pool,
    vector_of,
)
from support.fake_worker import EMBEDDER_SIZE as SIZE
from support.refusals import refused
from support.waiting import until

EMBED = core_pb2.PoolingParams(task="embed")


def request(text: str = "the quick fox", **fields) -> pb2.PoolRequest:
    fields.setdefault("pooling_params", EMBED)
    if not fields.keys() & {"pair", "tokens"}:
        fields["text"] = text
    return pb2.PoolRequest(**fields)


STACK = {"prefill": 2, "decode": 0, "info": EMBEDDER}


def sent(stack) -> list:
    return [each for worker in stack.workers for each in worker.requests]


async def refusal(stack, message, **options) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stack.stub.Pool(message, timeout=30, **options)
    return raised.value


# ---- what it is and how it gets there


async def test_prefill_workers_alone_make_a_router_ready(stack) -> None:
    assert stack.server.router.is_ready
    (model,) = (await stack.stub.ListModels(pb2.ListModelsRequest())).models
    assert (model.id, list(model.tasks), model.embedding_size) == ("tiny", ["embed"], SIZE)
    # Nothing is handed off, so nothing has to be proven.
    assert not any(worker.probes for worker in stack.workers)


async def test_a_text_has_its_vector(stack, tokenizer) -> None:
    call = stack.stub.Pool(request(request_id="mine"), timeout=30)
    answer = await call
    (core,) = sent(stack)
    assert core.prompt_token_ids == tuple(tokenizer.backend.encode("the quick fox").ids)
    assert core.kv_transfer_params is None
    assert list(answer.pooling_output) == vector_of(core, SIZE)
    assert (answer.request_id, answer.model) == ("mine", "tiny")
    assert answer.num_prompt_tokens == len(core.prompt_token_ids)
    assert answer.num_cached_tokens == 2
    trailers = dict(await call.trailing_metadata())
    assert trailers["pdserve-path"] == "pooling"
    assert trailers["pdserve-prefill-engine-id"].startswith("prefill-")
    assert trailers["pdserve-request-id"] == "mine"
    stages = ("router-queue", "tokenize", "dispatch", "prefill-queue", "prefill", "return")
    total = sum(float(trailers[f"pdserve-{stage}-ms"]) for stage in stages)
    assert total == pytest.approx(float(trailers["pdserve-ttft-ms"]), abs=0.01)


async def test_tokens_pairs_and_parameters_arrive(stack, tokenizer) -> None:
    params = core_pb2.PoolingParams(task="embed", dimensions=3, use_activation=False)
    tokens = pb2.TokenPrompt(token_ids=[5, 6, 7])
    answer = await stack.stub.Pool(request(tokens=tokens, pooling_params=params, priority=-3))
    (core,) = sent(stack)
    assert core.prompt_token_ids == (5, 6, 7)
    assert (core.task.pooling_params.dimensions, core.task.pooling_params.use_activation) == (
        3,
        False,
    )
    assert core.priority == -3
    assert list(answer.pooling_output) == vector_of(core, SIZE)
    assert len(answer.pooling_output) == 3
    pair = pb2.TextPair(text="hello", text_pair="world")
    await stack.stub.Pool(request(pair=pair))
    wanted = tuple(tokenizer.backend.encode("hello", "world").ids)
    assert wanted in [each.prompt_token_ids for each in sent(stack)]


@pytest.mark.parametrize(("keeps_end", "kept"), [(False, [5, 6]), (True, [8, 9])])
async def test_a_long_prompt_is_cut(stack, keeps_end, kept) -> None:
    tokens = pb2.TokenPrompt(token_ids=[5, 6, 7, 8, 9])
    await stack.stub.Pool(
        request(tokens=tokens, truncate_prompt_tokens=2, truncate_start=keeps_end)
    )
    assert list(sent(stack)[0].prompt_token_ids) == kept


async def test_a_prompt_may_fill_the_model(stack) -> None:
    limit = stack.prefill.info.max_model_len
    for number, code in ((limit, None), (limit + 1, grpc.StatusCode.INVALID_ARGUMENT)):
        message = request(tokens=pb2.TokenPrompt(token_ids=[5] * number))
        if code is None:
            await stack.stub.Pool(message)
        else:
            error = await refusal(stack, message)
            assert error.code() is code
            assert str(limit) in error.details()
    too_long = pb2.TokenPrompt(token_ids=[5] * (limit + 1))
    await stack.stub.Pool(request(tokens=too_long, truncate_prompt_tokens=-1))
    assert len(sent(stack)[-1].prompt_token_ids) == limit


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (request(pooling_params=core_pb2.PoolingParams(task="classify")), "serves embed"),
        (request(pooling_params=core_pb2.PoolingParams(task="generate")), "task"),
        (request(pooling_params=core_pb2.PoolingParams()), "task"),
        (pb2.PoolRequest(pooling_params=EMBED), "prompt is empty"),
        (request(tokens=pb2.TokenPrompt()), "prompt is empty"),
        (request(tokens=pb2.TokenPrompt(token_ids=[10**6])), "prompt_token_ids"),
        (request(""), "prompt is empty"),
        (
            request(pooling_params=core_pb2.PoolingParams(task="embed", dimensions=SIZE + 1)),
            "dimensions is 9",
        ),
        (
            request(pooling_params=core_pb2.PoolingParams(task="embed", dimensions=0)),
            "dimensions is 0",
        ),
        (request(truncate_prompt_tokens=0), "truncate_prompt_tokens is 0"),
        (request(truncate_prompt_tokens=-2), "truncate_prompt_tokens is -2"),
        (request(truncate_prompt_tokens=5000), "must be -1 or 1 to 4096"),
        (request(priority=2**31 - 1), "priority"),
        (request(cache_salt=""), "cache_salt"),
        (request(request_id="x" * 257), "request_id"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(stack, message, words) -> None:
    error = await refusal(stack, message)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in error.details()
    assert not sent(stack)


@pytest.mark.parametrize("name", ["model", "lora_name"])
async def test_another_model_is_not_found(stack, name) -> None:
    error = await refusal(stack, request(**{name: "other"}))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "'other'" in error.details()


async def test_a_model_does_what_it_does_and_nothing_else(stack, start_stack) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "the model serves embed"):
        await stack.generate(pb2.GenerateRequest(text="hello"))
    async with start_stack() as generating:
        error = await refusal(generating, request())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "task is 'embed', the model serves generate" in error.details()


async def test_prefill_workers_of_a_model_that_generates_do_not_serve_alone(start_stack) -> None:
    async with start_stack(prefill=1, decode=0, wait=False) as stack:
        await until(lambda: all(client.is_ready for client in stack.server.pool.prefill))
        assert not stack.server.router.is_ready
        error = await refusal(stack, request())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "no prefill worker with a model that pools is ready" in error.details()


# ---- where it goes


@pytest.mark.parametrize("policy", sorted(ROUTING_POLICIES))
async def test_every_policy_finds_workers(start_stack, policy) -> None:
    async with start_stack(prefill=3, decode=0, info=EMBEDDER, routing_policy=policy) as stack:
        for number in range(40):
            await stack.stub.Pool(request(f"text {number}"))
        assert all(worker.requests for worker in stack.workers)
        before = {worker.port: len(worker.requests) for worker in stack.workers}
        metadata = (("x-session-id", "mine"),)
        for number in range(6):
            await stack.stub.Pool(request(f"text {number}"), metadata=metadata)
        used = [worker for worker in stack.workers if len(worker.requests) > before[worker.port]]
        assert len(used) == 1 or policy != "session"


async def test_a_cached_prefix_is_used(stack) -> None:
    tokens = pb2.TokenPrompt(token_ids=[5, 6, 7, 8] * 64)
    await stack.stub.Pool(request(tokens=tokens))
    hashes = prefix_hashes(sent(stack)[0], stack.prefill.info.block_size)
    stack.server.pool.prefix_index.stored(stack.server.pool.prefill[1], hashes)
    before = len(stack.prefills[1].requests)
    for _ in range(5):
        await stack.stub.Pool(request(tokens=tokens))
    assert len(stack.prefills[1].requests) == before + 5


async def test_no_more_than_the_queue_may_hold_waits_on_prefill(start_stack) -> None:
    async with start_stack(
        prefill=1, decode=0, info=EMBEDDER, max_prefill_queue_tokens=100
    ) as stack:
        stack.prefill.links[-1].num_waiting_tokens = 101
        await stack.stub.Pool(request())
        error = await refusal(stack, request())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_adapters_are_named_like_models(start_stack) -> None:
    adapters = (LoRAAdapter(name="mine", digest="d" * 64, rank=4),)
    info = {**EMBEDDER, "adapters": adapters, "adapters_version": 1}
    async with start_stack(prefill=1, decode=0, info=info) as stack:
        answer = await stack.stub.Pool(request(model="mine"))
        assert answer.model == "mine"
        assert sent(stack)[0].lora_request.digest == "d" * 64
        models = (await stack.stub.ListModels(pb2.ListModelsRequest())).models
        assert [model.id for model in models] == ["tiny", "mine"]


async def test_tenants_share_no_prefixes(start_stack, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:0123456789abcdef\nbob:fedcba9876543210\n")
    async with start_stack(prefill=1, decode=0, info=EMBEDDER, api_keys_file=str(keys)) as stack:
        error = await refusal(stack, request())
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        for key in ("0123456789abcdef", "fedcba9876543210"):
            await stack.stub.Pool(request(), metadata=(("authorization", f"Bearer {key}"),))
        salts = [each.cache_salt for each in sent(stack)]
        assert len(set(salts)) == 2
        assert None not in salts


# ---- how it ends


failing = fails_with(ErrorCode.INTERNAL, "broken")


losing = fails_with(ErrorCode.ENGINE_DEAD, "gone", is_retryable=True)


async def test_a_worker_that_dies_is_replaced(stack) -> None:
    all_behave(stack.workers, hang)
    call = stack.stub.Pool(request(), timeout=30)
    pending = asyncio.ensure_future(call)
    await until(lambda: sent(stack))
    (lost,) = [worker for worker in stack.workers if worker.requests]
    (other,) = [worker for worker in stack.workers if worker is not lost]
    other.behave = pool
    await lost.stop()
    answer = await pending
    (again,) = other.requests
    assert again.attempt == 1
    assert again.prompt_token_ids == lost.requests[0].prompt_token_ids
    assert list(answer.pooling_output) == vector_of(again, SIZE)
    trailers = dict(await call.trailing_metadata())
    assert (trailers["pdserve-num-redrives"], trailers["pdserve-recovered"]) == ("1", "1")
    assert stack.metric("pdserve_recovered_requests_total", outcome="stop") == 1
    redrives = {"reason": "engine_dead", "path": "pooling"}
    assert stack.metric("pdserve_redrives_total", **redrives) == 1


async def test_a_worker_that_keeps_failing_gets_no_more(stack) -> None:
    bad, _ = stack.workers
    bad.behave = failing
    (client,) = [each for each in stack.server.pool.prefill if each.address == bad.address]
    bad.behave_probe = hang
    for number in range(60):
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stack.stub.Pool(request(f"text {number}"), timeout=30)
        if client.breaker.is_open:
            break
    assert client.breaker.is_open
    assert len(bad.requests) == FAILURES_TO_OPEN
    before = len(bad.requests)
    for number in range(10):
        await stack.stub.Pool(request(f"more {number}"))
    assert len(bad.requests) == before
    # A trial of the router's own shows when it is well again.
    bad.behave = bad.behave_probe = pool
    await until(lambda: not client.breaker.is_open)
    assert isinstance(bad.probes[-1].task, Pool)


async def test_nothing_is_sent_again_for_ever(stack) -> None:
    all_behave(stack.workers, losing)
    error = await refusal(stack, request())
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "gone")
    assert max(each.attempt for each in sent(stack)) == 3
    assert stack.metric("pdserve_pooling_requests_total", task="embed", outcome="error") == 1


@pytest.mark.parametrize("vector", [(), (1.0, float("nan")), (float("inf"),)])
async def test_a_vector_that_is_none_is_the_workers_fault(stack, vector, caplog) -> None:
    async def wrong(running) -> None:
        running.emit_vector(vector)

    all_behave(stack.workers, wrong)
    with caplog.at_level(logging.ERROR):
        error = await refusal(stack, request())
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "vector" in error.details()
    assert len(sent(stack)) == 1


async def test_what_the_request_is_to_blame_for_is_not_sent_again(stack) -> None:
    refuse = fails_with(ErrorCode.INVALID_ARGUMENT, "no")
    all_behave(stack.workers, refuse)
    error = await refusal(stack, request())
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "no")
    assert len(sent(stack)) == 1
    assert not any(each.breaker.is_open for each in stack.server.pool.prefill)


async def test_a_client_that_leaves_ends_it_on_its_worker(stack) -> None:
    all_behave(stack.workers, hang)
    call = stack.stub.Pool(request(), timeout=30)
    pending = asyncio.ensure_future(call)
    await until(lambda: sent(stack))
    call.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    await until(lambda: any(worker.aborted for worker in stack.workers))
    await stack.assert_idle()
    assert stack.metric("pdserve_pooling_requests_total", task="embed", outcome="abort") == 1


async def test_the_deadline_is_the_calls(stack) -> None:
    all_behave(stack.workers, hang)
    with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
        await stack.stub.Pool(request(), timeout=0.3)
    await stack.assert_idle()
    assert any(worker.aborted for worker in stack.workers)


async def test_a_drain_lets_it_end_and_cuts_what_takes_too_long(start_stack) -> None:
    async with start_stack(prefill=1, decode=0, info=EMBEDDER) as stack:
        stack.prefill.behave = hang
        pending = asyncio.ensure_future(stack.stub.Pool(request(), timeout=30))
        await until(lambda: sent(stack))
        await stack.server.stop(0.1)
        with refused(grpc.StatusCode.UNAVAILABLE):
            await pending


async def test_it_is_counted_and_logged(stack, caplog) -> None:
    with caplog.at_level(logging.INFO, "pdserve_router.requests.records.request_log"):
        await stack.stub.Pool(request(request_id="mine"))
        await until(lambda: caplog.records)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("/pdserve.v1.InferenceService/Pool OK, request mine, ")
    assert ", pooling: prefill-" in text
    num_tokens = len(sent(stack)[0].prompt_token_ids)
    assert record.args["num_prompt_tokens"] == num_tokens
    for name, labels in (
        ("pdserve_requests_total", {"model": "tiny", "outcome": "stop"}),
        ("pdserve_requests_routed_total", {"path": "pooling", "reason": ""}),
        ("pdserve_pooling_requests_total", {"task": "embed", "outcome": "stop"}),
        ("pdserve_time_to_first_token_seconds_count", {"model": "tiny", "path": "pooling"}),
        ("pdserve_request_duration_seconds_count", {"model": "tiny"}),
        ("pdserve_request_stage_seconds_count", {"stage": "prefill_queue"}),
    ):
        assert stack.metric(name, **labels) == 1, name
    for name, labels in (
        ("pdserve_prompt_tokens_total", {"model": "tiny"}),
        ("pdserve_pooling_prompt_tokens_total", {"task": "embed"}),
    ):
        assert stack.metric(name, **labels) == num_tokens
    assert stack.metric("pdserve_generation_tokens_total", model="tiny") == 0


# ---- which weights serve
