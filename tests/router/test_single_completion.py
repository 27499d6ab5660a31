"""A request's life over real streams: both legs, their ends, and every way to lose one."""

import asyncio
import itertools
import time

import grpc
import pytest

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.engine import ErrorCode, ErrorFault, FinishReason
from pdserve_router.requests.records.request_metrics import FIRST_ITL_STAGES, TTFT_STAGES
from pdserve_router.workers.worker import WorkerState
from support.fake_worker import EOS, KV_STATS, PREFILL_STATS, all_behave, fails_with, hang, prefill
from support.refusals import refused
from support.router_stack import ANSWER_TEXT, Stack, text_of
from support.waiting import until


def request(**fields) -> pb2.GenerateRequest:
    fields.setdefault("text", "hello")
    params = core.SamplingParams(**fields.pop("params", {}))
    return pb2.GenerateRequest(sampling_params=params, **fields)


async def generate(stack, timeout=None, **fields) -> list[pb2.RequestOutput]:
    return await stack.generate(request(**fields), timeout=timeout)


def ending(outputs):
    return outputs[-1].outputs[0]


async def first_token(stack: Stack) -> None:
    """Wait until the router has it, which is P's."""
    await until(lambda: stack.metric("pdserve_generation_tokens_total", model="tiny") == 1)


async def test_both_legs_get_the_same_request_and_each_other(stack) -> None:
    await generate(stack)
    (to_prefill,), (to_decode,) = stack.prefill.requests, stack.decode.requests
    assert to_prefill.request_id == to_decode.request_id
    assert to_prefill.prompt_token_ids == to_decode.prompt_token_ids
    assert to_prefill.task.sampling_params == to_decode.task.sampling_params
    leg = to_prefill.kv_transfer_params
    assert (leg.do_remote_decode, leg.do_remote_prefill) == (True, False)
    assert leg.remote_engine_id == "decode-0"
    assert f"{leg.remote_host}:{leg.remote_port}" == stack.decode.address
    leg = to_decode.kv_transfer_params
    assert (leg.do_remote_decode, leg.do_remote_prefill) == (False, True)
    assert leg.remote_engine_id == "prefill-0"
    assert f"{leg.remote_host}:{leg.remote_port}" == stack.prefill.address


async def test_the_stream_is_the_answer_once_and_in_order(stack, tokenizer) -> None:
    stack.decode.step_s = 0.01
    outputs = await generate(stack)
    token_ids = [t for output in outputs for t in output.outputs[0].token_ids]
    assert token_ids == [*tokenizer.backend.encode(ANSWER_TEXT).ids, EOS]
    assert text_of(outputs) == ANSWER_TEXT
    assert ending(outputs).finish_reason == core.FINISH_REASON_STOP
    assert len(outputs) > 3
    assert outputs[-1].usage.num_output_tokens == len(token_ids)
    assert outputs[-1].usage.num_cached_tokens == PREFILL_STATS.num_cached_tokens
    # D's first output repeats P's token.
    assert stack.metric("pdserve_duplicate_tokens_total", match="true") == 1
    assert stack.metric("pdserve_handoffs_total", outcome="completed") == 1
    assert stack.prefill.aborted == stack.decode.aborted == []


async def test_an_answer_that_ends_at_prefill_aborts_the_decode_leg(start_stack) -> None:
    async with start_stack(answer=()) as stack:
        outputs = await generate(stack)
        assert ending(outputs).finish_reason == core.FINISH_REASON_STOP
        assert list(ending(outputs).token_ids) == [EOS]
        await until(lambda: len(stack.decode.aborted) == 1)
        assert stack.prefill.aborted == []
        assert stack.metric("pdserve_handoffs_total", outcome="ended_at_prefill") == 1


@pytest.mark.parametrize(
    ("config", "params", "reason"),
    [
        ({"prefill": 0}, {}, "no_prefill_worker"),
        ({"disaggregation": False}, {}, "disabled"),
        ({}, {"max_tokens": 1}, "max_tokens_1"),
    ],
)
async def test_decode_serves_alone_for_a_visible_reason(start_stack, config, params, reason):
    async with start_stack(**config) as stack:
        outputs = await generate(stack, params=params)
        assert outputs[-1].metrics.path == "local"
        assert outputs[-1].metrics.prefill_engine_id == ""
        (leg,) = stack.decode.requests
        assert leg.kv_transfer_params is None
        assert all(not worker.requests for worker in stack.prefills)
        labels = {"path": "local", "reason": reason}
        assert stack.metric("pdserve_requests_routed_total", **labels) == 1


async def test_without_a_decode_worker_a_request_fails_at_once(start_stack) -> None:
    async with start_stack(wait=False, redrive_wait_s=60.0) as stack:
        await stack.decode.stop()
        await until(lambda: stack.server.pool.prefill[0].is_ready)
        await until(lambda: stack.server.pool.decode[0].state is WorkerState.DOWN)
        with refused(grpc.StatusCode.UNAVAILABLE, "no decode worker is ready"):
            await generate(stack, timeout=20)
        assert stack.metric("pdserve_requests_total", model="tiny", outcome="refused") == 1


@pytest.fixture
async def once(start_stack):
    """A stack that sends no request again; test_recovery.py is about those that do."""
    async with start_stack(max_redrives=0) as stack:
        yield stack


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_that_fails_ends_the_request_and_the_other_leg(once, role) -> None:
    stack = once
    broken = getattr(stack, role)
    other = stack.decode if role == "prefill" else stack.prefill
    broken.behave = fails_with(ErrorCode.KV_TRANSFER_FAILED, is_retryable=True)
    other.behave = hang
    outputs = await generate(stack)
    assert ending(outputs).finish_reason == core.FINISH_REASON_ERROR
    assert ending(outputs).error.code == core.ERROR_CODE_KV_TRANSFER_FAILED
    assert ending(outputs).error.message == "broken on purpose"
    assert ending(outputs).error.retryable
    await until(lambda: len(other.aborted) == 1)
    assert stack.metric("pdserve_handoffs_total", outcome=f"{role}_failed") == 1
    assert stack.metric("pdserve_requests_total", model="tiny", outcome="error") == 1


async def test_decode_failing_after_the_handoff_keeps_the_first_token(once) -> None:
    stack = once

    async def fail_later(running) -> None:
        await first_token(stack)
        running.fail(ErrorCode.KV_EXPIRED)

    stack.decode.behave = fail_later
    outputs = await generate(stack)
    assert len(outputs[0].outputs[0].token_ids) == 1
    assert ending(outputs).error.code == core.ERROR_CODE_KV_EXPIRED
    # P may still hold the blocks that D did not fetch.
    await until(lambda: len(stack.prefill.aborted) == 1)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_dies_ends_its_requests_with_one_error(start_stack, role) -> None:
    async with start_stack(max_redrives=0) as stack:
        stack.prefill.behave = stack.decode.behave = hang
        task = asyncio.create_task(generate(stack))
        await until(lambda: stack.prefill.num_running + stack.decode.num_running == 2)
        await getattr(stack, role).stop()
        outputs = await task
        assert ending(outputs).error.code == core.ERROR_CODE_ENGINE_DEAD


async def test_an_abort_that_nobody_asked_for_is_an_error(once) -> None:
    stack = once

    async def give_up(running) -> None:
        running.emit(at=0, finish=FinishReason.ABORT)

    stack.decode.behave = give_up
    stack.prefill.behave = hang
    outputs = await generate(stack)
    assert ending(outputs).finish_reason == core.FINISH_REASON_ERROR
    assert "ended the request: abort" in ending(outputs).error.message


async def test_a_gap_ends_the_request_with_an_error(stack) -> None:
    async def skip(running) -> None:
        await first_token(stack)
        running.emit(9, at=3)
        await hang(running)

    stack.decode.behave = skip
    outputs = await generate(stack)
    assert ending(outputs).error.code == core.ERROR_CODE_INTERNAL
    assert "are missing" in ending(outputs).error.message
    await until(lambda: len(stack.decode.aborted) == 1)


async def test_a_gap_of_prefill_is_prefills_failure(stack) -> None:
    async def skip(running) -> None:
        running.emit(9, at=3)
        await hang(running)

    stack.prefill.behave = skip
    stack.decode.behave = hang
    assert "are missing" in ending(await generate(stack)).error.message
    assert stack.metric("pdserve_handoffs_total", outcome="prefill_failed") == 1


async def test_a_contradicting_duplicate_ends_the_request_with_an_error(stack) -> None:
    async def contradict(running) -> None:
        await first_token(stack)
        running.emit(250, 251, at=0)
        await hang(running)

    stack.decode.behave = contradict
    outputs = await generate(stack)
    assert "differently from what was delivered" in ending(outputs).error.message
    assert stack.metric("pdserve_duplicate_tokens_total", match="false") == 1


async def test_a_stop_string_ends_both_legs(stack) -> None:
    stack.decode.step_s = 0.01
    outputs = await generate(stack, params={"stop": ["world"]})
    assert text_of(outputs) == "hello "
    assert ending(outputs).finish_reason == core.FINISH_REASON_STOP
    assert ending(outputs).stop_string == "world"
    await until(lambda: len(stack.decode.aborted) == 1)


async def test_cancelling_aborts_both_legs(stack) -> None:
    async def half(running) -> None:
        await prefill(running)
        await hang(running)

    stack.prefill.behave = half
    stack.decode.behave = hang
    call = stack.stub.Generate(request())
    await call.read()
    call.cancel()
    await until(lambda: stack.prefill.aborted and stack.decode.aborted)
    await stack.assert_idle()
    assert stack.metric("pdserve_requests_total", model="tiny", outcome="abort") == 1
    assert stack.metric("pdserve_handoffs_total", outcome="aborted") == 1


async def test_a_deadline_of_the_call_ends_it_on_every_worker(stack) -> None:
    stack.prefill.behave = stack.decode.behave = hang
    began = time.monotonic()
    # The call's status and the router's typed end race for the client.
    try:
        outputs = await generate(stack, timeout=2.0)
    except grpc.aio.AioRpcError as error:
        code = error.code()
    else:
        code = ending(outputs).error.code
    assert code in (grpc.StatusCode.DEADLINE_EXCEEDED, core.ERROR_CODE_DEADLINE_EXCEEDED)
    await until(lambda: stack.prefill.aborted and stack.decode.aborted)
    assert began + 1.9 < stack.decode.requests[0].deadline < time.monotonic() + 2.0


async def test_the_default_deadline_ends_with_a_typed_error(start_stack) -> None:
    async with start_stack(default_deadline_s=0.6) as stack:
        stack.decode.behave = hang
        outputs = await generate(stack)
        assert len(outputs[0].outputs[0].token_ids) == 1
        assert ending(outputs).finish_reason == core.FINISH_REASON_ERROR
        assert ending(outputs).error.code == core.ERROR_CODE_DEADLINE_EXCEEDED
        await until(lambda: stack.prefill.aborted and stack.decode.aborted)


async def test_a_lost_worker_gets_no_more_requests(start_stack) -> None:
    async with start_stack(prefill=2, decode=2) as stack:
        await stack.decodes[0].stop()
        await until(lambda: stack.server.pool.decode[0].state is WorkerState.DOWN)
        for _ in range(4):
            assert text_of(await generate(stack)) == ANSWER_TEXT
        assert len(stack.decodes[1].requests) == 4
        assert stack.metric("pdserve_workers", role="decode", state="down") == 1
        assert stack.metric("pdserve_workers", role="decode", state="ready") == 1


async def test_the_metrics_of_a_request_sum_and_reach_the_client(stack) -> None:
    stack.prefill.step_s = stack.decode.step_s = 0.005
    outputs = await generate(stack)
    metrics = outputs[-1].metrics
    for total, stages in (("ttft", TTFT_STAGES), ("first_itl", FIRST_ITL_STAGES)):
        parts = [getattr(metrics, f"{stage}_ns") for stage in stages]
        assert sum(parts) == getattr(metrics, f"{total}_ns") > 0
    assert metrics.prefill_queue_ns == PREFILL_STATS.queue_s * 1e9
    assert metrics.prefill_ns == PREFILL_STATS.prefill_s * 1e9
    assert metrics.kv_transfer_exposed_ns == KV_STATS.exposed_s * 1e9
    assert metrics.kv_transfer_bytes == KV_STATS.num_bytes
    assert metrics.kv_transport == "shm"
    assert metrics.e2e_ns >= metrics.ttft_ns + metrics.first_itl_ns
    assert metrics.path == "disaggregated"
    assert (metrics.prefill_engine_id, metrics.decode_engine_id) == ("prefill-0", "decode-0")
    for stage in (*TTFT_STAGES, *FIRST_ITL_STAGES, "kv_transfer"):
        assert stack.metric("pdserve_request_stage_seconds_count", stage=stage) == 1
    ttft = {"model": "tiny", "path": "disaggregated"}
    stage_sum = sum(
        stack.metric("pdserve_request_stage_seconds_sum", stage=stage) for stage in TTFT_STAGES
    )
    assert stage_sum == pytest.approx(
        stack.metric("pdserve_time_to_first_token_seconds_sum", **ttft)
    )
    assert stack.metric("pdserve_generation_tokens_total", model="tiny") == (
        outputs[-1].usage.num_output_tokens
    )


TTFT = {"model": "tiny", "path": "disaggregated"}


async def test_the_time_to_the_first_token_is_exported_with_it(stack) -> None:
    may_go_on = asyncio.Event()
    stack.decode.before_token = lambda running, num_tokens: may_go_on.wait()
    running = asyncio.create_task(generate(stack))
    await first_token(stack)
    assert stack.metric("pdserve_time_to_first_token_seconds_count", **TTFT) == 1
    for stage in TTFT_STAGES:
        assert stack.metric("pdserve_request_stage_seconds_count", stage=stage) == 1
    assert stack.metric("pdserve_request_duration_seconds_count", model="tiny") == 0
    may_go_on.set()
    await running
    await stack.assert_idle()
    assert stack.metric("pdserve_time_to_first_token_seconds_count", **TTFT) == 1
    assert stack.metric("pdserve_request_duration_seconds_count", model="tiny") == 1


async def test_what_the_prompt_took_is_exported_though_decode_is_first(stack) -> None:
    async def after_decode(running, num_tokens) -> None:
        await until(lambda: stack.metric("pdserve_generation_tokens_total", model="tiny") == 2)

    async def after_prefill(running, num_tokens) -> None:
        repeated = {"match": "true"}
        await until(
            lambda: num_tokens < 2 or stack.metric("pdserve_duplicate_tokens_total", **repeated)
        )

    stack.prefill.before_token = after_decode
    stack.decode.before_token = after_prefill
    metrics = (await generate(stack))[-1].metrics
    assert metrics.prefill_ns == PREFILL_STATS.prefill_s * 1e9
    assert stack.metric("pdserve_time_to_first_token_seconds_count", **TTFT) == 1
    exported = stack.metric("pdserve_request_stage_seconds_sum", stage="prefill")
    assert exported == pytest.approx(PREFILL_STATS.prefill_s)


async def test_what_the_prompt_took_is_known_though_prefill_is_never_heard(stack) -> None:
    async def after_decode(running, num_tokens) -> None:
        await until(lambda: stack.decode.requests and stack.decode.num_running == 0)

    stack.prefill.before_token = after_decode
    last = (await generate(stack))[-1]
    assert last.metrics.prefill_ns == PREFILL_STATS.prefill_s * 1e9
    assert last.usage.num_cached_tokens == PREFILL_STATS.num_cached_tokens


async def test_a_request_without_a_token_has_no_time_to_one(once) -> None:
    all_behave(once.workers, fails_with(ErrorCode.OVERLOADED, is_retryable=True))
    await generate(once)
    await once.assert_idle()
    assert once.metric("pdserve_time_to_first_token_seconds_count", **TTFT) == 0
    assert once.metric("pdserve_request_duration_seconds_count", model="tiny") == 1


async def test_a_ticket_that_p_voided_waits_for_ps_own_word(stack) -> None:
    """D may hear from P, and tell, that the request ended there before P's answer arrives."""

    async def end_late(running) -> None:
        await until(lambda: stack.decode.requests and stack.decode.num_running == 0)
        await asyncio.sleep(0.1)
        running.emit(EOS, at=0, finish=FinishReason.STOP, prefill_stats=PREFILL_STATS)

    void = fails_with(ErrorCode.CANCELLED, "P prefill-0 ended it: finished")
    stack.prefill.behave, stack.decode.behave = end_late, void
    assert ending(await generate(stack)).finish_reason == core.FINISH_REASON_STOP


async def test_logprobs_wait_for_prefills_word_when_decode_is_first(stack) -> None:
    """Only P has those of the first token; D repeats the token without them."""

    async def late(running) -> None:
        await until(lambda: stack.decode.num_running == 0 and stack.decode.requests)
        await asyncio.sleep(0.05)
        await prefill(running)

    stack.prefill.behave = late
    outputs = await generate(stack, params={"logprobs": 1, "prompt_logprobs": 1})
    assert text_of(outputs) == ANSWER_TEXT
    positions = [item for output in outputs for item in output.outputs[0].logprobs.positions]
    assert len(positions) == outputs[-1].usage.num_output_tokens
    assert len(outputs[0].prompt_logprobs.positions) == outputs[-1].usage.num_prompt_tokens


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_who_is_blamed_for_an_error(start_stack, role) -> None:
    """What is the request's own fault counts for nobody."""
    states = (
        ErrorCode.ENGINE_DEAD,
        ErrorCode.OVERLOADED,
        ErrorCode.NO_WORKER,
        ErrorCode.FAILED_PRECONDITION,
    )
    # Of DRAINING see test_recovery.py, and CANCELLED is not what failed workers say.
    codes = set(ErrorCode) - {ErrorCode.DRAINING, ErrorCode.CANCELLED}
    async with start_stack(max_redrives=0) as stack:
        pool = stack.server.pool
        reported = []
        pool.report_failure = reported.append
        broken, other = getattr(stack, role), stack.decode if role == "prefill" else stack.prefill
        other.behave = hang
        for code, fault in itertools.product(sorted(codes), list(ErrorFault)[1:]):
            broken.behave = fails_with(code, is_retryable=True, fault=fault)
            assert ending(await generate(stack)).error.fault == fault
            blamed, reported[:] = tuple(reported), []
            if fault is ErrorFault.PEER:
                assert blamed == ((pool.prefill[0], pool.decode[0]),)
            elif fault is ErrorFault.WORKER and code not in states:
                assert blamed == (getattr(pool, role)[0],)
            else:
                assert blamed == ()


async def test_what_the_request_is_at_fault_for_is_never_sent_again(start_stack) -> None:
    async with start_stack(decode=2) as stack:
        fault = ErrorFault.REQUEST
        blame = fails_with(ErrorCode.KV_EXPIRED, is_retryable=True, fault=fault)
        all_behave(stack.decodes, blame)
        outputs = await generate(stack)
        assert ending(outputs).error.message == "broken on purpose"
        assert outputs[-1].metrics.num_redrives == 0
