"""Workers fail at every stage; the client sees the same stream, or exactly one error."""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.engine import (
    ErrorCode,
    KVLost,
    WorkerRole,
)
from pdserve_router.requests import single_completion
from pdserve_router.workers.clients import attach_client
from pdserve_router.workers.worker import WorkerState
from support.fake_worker import (
    EOS,
    FakeWorker,
    Running,
    all_behave,
    decode,
    fails_with,
    hang,
    prefill,
)
from support.router_stack import ANSWER_TEXT, text_of, tokens_of
from support.waiting import until

RETRYABLE = (
    ErrorCode.ENGINE_DEAD,
    ErrorCode.DRAINING,
    ErrorCode.KV_TRANSFER_FAILED,
    ErrorCode.KV_EXPIRED,
    ErrorCode.OVERLOADED,
)
TOKENS = pb2.TokenPrompt(token_ids=range(10, 30))


def request(**fields) -> pb2.GenerateRequest:
    params = core.SamplingParams(**{"seed": 7, **fields.pop("params", {})})
    return pb2.GenerateRequest(tokens=TOKENS, sampling_params=params, **fields)


async def generate(stack, timeout=30, **fields) -> list[pb2.RequestOutput]:
    return await stack.generate(request(**fields), timeout=timeout)


def ending(outputs):
    return outputs[-1].outputs[0]


def own_behaviour(running: Running):
    return prefill if running.worker.info.role is WorkerRole.PREFILL else decode


def fail(running: Running, code=ErrorCode.ENGINE_DEAD, **more) -> None:
    running.fail(code, is_retryable=True, **more)


def lose_kv(running: Running, num_confirmed_tokens: int) -> None:
    lost = KVLost(num_confirmed_tokens=num_confirmed_tokens, reason="stall", message="stalled")
    running.emit(at=0, kv_lost=lost)


async def noticed(stack) -> None:
    """Wait until the router has lost a worker of the only request."""
    await until(lambda: stack.metric("pdserve_redrives_waiting") == 1)


def num_delivered(stack) -> float:
    """Tokens of all requests that the router has."""
    return stack.metric("pdserve_generation_tokens_total", model="tiny")


@pytest.fixture
def forgiving(monkeypatch) -> None:
    """A worker that failed may get the request again at once: no request's time comes later."""
    monkeypatch.setattr("pdserve_router.requests.redrive.REUSE_DELAY_S", 0.0)


@pytest.fixture
def patient(monkeypatch) -> None:
    """The router waits for D's report, however long it takes."""
    monkeypatch.setattr(single_completion, "_VERDICT_S", 60.0)


def failing(num_tokens: int, then, *, attempts=(0,)):
    """Bring `num_tokens` new tokens and fail, at these attempts; else do as ever."""

    async def behave(running: Running) -> None:
        if running.request.attempt not in attempts:
            await own_behaviour(running)(running)
            return
        await asyncio.sleep(running.worker.step_s)
        tokens, _ = running.answer()
        start = running.num_resumed
        if num_tokens:
            running.emit(*tokens[start : start + num_tokens], at=start)
        await asyncio.sleep(0.01)
        result = then(running)
        if result is not None:
            await result

    return behave


async def assert_recovered(stack, outputs, tokenizer, *, num_recovered: int = 1) -> None:
    assert tokens_of(outputs) == [*tokenizer.backend.encode(ANSWER_TEXT).ids, EOS]
    assert text_of(outputs) == ANSWER_TEXT
    assert ending(outputs).finish_reason == core.FINISH_REASON_STOP
    assert outputs[-1].usage.num_prompt_tokens == len(TOKENS.token_ids)
    assert outputs[-1].usage.num_output_tokens == len(tokens_of(outputs))
    assert stack.metric("pdserve_recovered_requests_total", outcome="stop") == num_recovered
    assert stack.metric("pdserve_duplicate_tokens_total", match="false") == 0
    await stack.assert_idle()
    assert stack.metric("pdserve_redrives_waiting") == 0


@pytest.fixture
async def four(start_stack):
    """Two workers of each role."""
    async with start_stack(prefill=2, decode=2) as stack:
        yield stack


def fail_as(code: ErrorCode):
    return lambda running: fail(running, code)


async def test_a_prefill_worker_that_fails_is_replaced(four, tokenizer) -> None:
    all_behave(four.decodes, failing(0, hang))
    for number, code in enumerate(RETRYABLE, 1):
        all_behave(four.prefills, failing(0, fail_as(code)))
        outputs = await generate(four)
        await assert_recovered(four, outputs, tokenizer, num_recovered=number)
        assert outputs[-1].metrics.num_redrives == 1
        reason = code.name.lower()
        assert four.metric("pdserve_redrives_total", reason=reason, path="local") == 1
        assert four.metric("pdserve_handoffs_total", outcome="prefill_failed") == number


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5])
@pytest.mark.parametrize("code", RETRYABLE, ids=lambda code: code.name.lower())
async def test_a_decode_worker_that_fails_is_replaced_at_any_token(
    four, tokenizer, code, num_tokens
) -> None:
    all_behave(four.decodes, failing(num_tokens, fail_as(code)))
    outputs = await generate(four)
    await assert_recovered(four, outputs, tokenizer)
    used = [worker for worker in four.decodes if worker.requests]
    is_own_fault = code not in (ErrorCode.KV_TRANSFER_FAILED, ErrorCode.KV_EXPIRED)
    assert len(used) == 2 or not is_own_fault
    (last,) = [leg for worker in used for leg in worker.requests if leg.attempt]
    assert last.attempt == 1
    known = list(last.resume_output_token_ids)
    assert known == tokens_of(outputs)[: len(known)]
    assert len(known) >= num_tokens


async def test_what_a_worker_does_not_read_goes_to_another(
    start_stack, tokenizer, monkeypatch
) -> None:
    monkeypatch.setattr(attach_client, "MAX_UNSENT_BYTES", 100_000)
    async with start_stack(prefill=0, decode=2) as stack:
        deaf, client = stack.decodes[0], stack.server.pool.decode[0]
        deaf.reads.clear()
        prompt = pb2.TokenPrompt(token_ids=[299] * 4000)
        params = core.SamplingParams(seed=7)
        calls = [
            asyncio.ensure_future(
                stack.generate(pb2.GenerateRequest(tokens=prompt, sampling_params=params))
            )
            for _ in range(100)
        ]
        await until(lambda: client.state is WorkerState.DOWN)
        deaf.reads.set()
        for outputs in await asyncio.gather(*calls):
            assert text_of(outputs) == ANSWER_TEXT
        assert stack.metric("pdserve_recovered_requests_total", outcome="stop") > 10


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_worker_that_dies_is_replaced(four, tokenizer, role, num_tokens) -> None:
    async def die(running: Running) -> None:
        asyncio.get_running_loop().call_soon(
            stopping.append, asyncio.ensure_future(running.worker.stop())
        )
        await hang(running)

    stopping: list[asyncio.Future] = []
    all_behave(getattr(four, f"{role}s"), failing(num_tokens if role == "decode" else 0, die))
    if role == "prefill":
        all_behave(four.decodes, failing(0, hang))
    outputs = await generate(four)
    await asyncio.gather(*stopping)
    await assert_recovered(four, outputs, tokenizer)


async def test_kv_lost_with_little_missing_goes_on_at_the_same_worker_alone(
    four, tokenizer
) -> None:
    async def lose(running: Running) -> None:
        lose_kv(running, 16)
        await hang(running)

    all_behave(four.decodes, failing(0, lose))
    outputs = await generate(four)
    await assert_recovered(four, outputs, tokenizer)
    (used,) = [worker for worker in four.decodes if worker.requests]
    first, second = used.requests
    assert (first.attempt, second.attempt) == (0, 1)
    assert first.kv_transfer_params is not None
    assert second.kv_transfer_params is None
    # It is superseded there: an abort could hit its successor.
    assert used.aborted == []
    assert four.metric("pdserve_redrives_total", reason="kv_lost", path="local") == 1


async def test_kv_lost_with_much_missing_goes_on_at_the_same_worker_with_another_prefill(
    four, tokenizer, monkeypatch
) -> None:
    monkeypatch.setattr("pdserve_router.requests.redrive.SMALL_NUM_TOKENS", 3)

    async def lose(running: Running) -> None:
        lose_kv(running, 16)
        await hang(running)

    all_behave(four.decodes, failing(0, lose))
    all_behave(four.prefills, failing(0, hang))
    outputs = await generate(four)
    await assert_recovered(four, outputs, tokenizer)
    (used,) = [worker for worker in four.decodes if worker.requests]
    assert [leg.attempt for leg in used.requests] == [0, 1]
    legs = [worker.requests for worker in four.prefills]
    assert sorted(leg.attempt for (leg,) in legs) == [0, 1]
    # The lost P has been told, the holder was superseded.
    aborted = [worker.aborted for worker in four.prefills if worker.requests[0].attempt == 0]
    await until(lambda: len(aborted[0]) == 1)
    assert used.aborted == []


async def test_a_prefill_worker_whose_word_is_lost_is_not_missed_if_decode_goes_on(
    four, tokenizer, patient
) -> None:
    """P's last message reached D and not the router: D has all it needs."""
    all_behave(four.prefills, failing(0, fail))

    async def later(running: Running) -> None:
        await noticed(four)
        await decode(running)

    async def after_two_nothing_waits(running: Running, num_tokens: int) -> None:
        if num_tokens > 1:
            await until(lambda: four.metric("pdserve_redrives_waiting") == 0)

    for worker in four.decodes:
        worker.behave, worker.before_token = later, after_two_nothing_waits
    outputs = await generate(four)
    assert text_of(outputs) == ANSWER_TEXT
    assert outputs[-1].metrics.num_redrives == 0
    assert max(leg.attempt for worker in four.workers for leg in worker.requests) == 0


@pytest.mark.parametrize("max_redrives", [0, 3])
async def test_a_prefill_worker_that_is_lost_while_decode_goes_on_is_not_noticed(
    start_stack, caplog, max_redrives
) -> None:
    """D has brought tokens, so it needs nothing of P, whatever the router knows of P."""
    async with start_stack(max_redrives=max_redrives) as stack:

        async def after_two_p_is_gone(running: Running, num_tokens: int) -> None:
            if num_tokens == 2:
                await until(lambda: num_delivered(stack) == 2)
                await stack.prefill.stop()
                await until(lambda: stack.server.pool.prefill[0].num_in_flight == 0)

        stack.prefill.behave = hang
        stack.decode.before_token = after_two_p_is_gone
        outputs = await generate(stack)
        assert text_of(outputs) == ANSWER_TEXT
        assert not [record for record in caplog.records if "attempt 0" in record.getMessage()]
        assert [leg.attempt for leg in stack.decode.requests] == [0]
        assert stack.metric("pdserve_handoffs_total", outcome="completed") == 1


async def test_both_legs_fail_at_once(four, tokenizer, patient) -> None:
    async def fail_second(running: Running) -> None:
        await noticed(four)
        fail(running)

    all_behave(four.prefills, failing(0, fail))
    all_behave(four.decodes, failing(0, fail_second))
    outputs = await generate(four)
    await assert_recovered(four, outputs, tokenizer)
    assert [len(worker.requests) for worker in four.workers] == [1, 1, 1, 1]
    assert four.metric("pdserve_redrives_total", reason="engine_dead", path="disaggregated") == 1


async def test_decode_lets_go_while_the_next_attempt_is_not_decided(four, tokenizer) -> None:
    """The end of a ticket that P's loss made void is no end of the request."""

    async def void(running: Running) -> None:
        await noticed(four)
        running.fail(ErrorCode.CANCELLED, "P is gone")

    all_behave(four.prefills, failing(0, fail))
    all_behave(four.decodes, failing(0, void))
    await assert_recovered(four, await generate(four), tokenizer)


@pytest.mark.parametrize(("num_before", "num_tokens"), [(0, 0), (1, 0), (1, 3)])
async def test_a_cancel_that_nobody_asked_for_is_a_loss(
    four, tokenizer, num_before, num_tokens
) -> None:
    """Before or after P hands the request off; in the latter case its own output does not come."""

    async def cancel(running: Running) -> None:
        await until(lambda: num_delivered(four) >= num_before)
        running.fail(ErrorCode.CANCELLED, "cancelled here")

    for worker in four.prefills:
        worker.step_s = worker.step_s if num_before else 0.1
    all_behave(four.decodes, failing(num_tokens, cancel))
    await assert_recovered(four, await generate(four), tokenizer)


async def test_the_redrives_of_a_request_are_bounded(four, caplog) -> None:
    caplog.set_level(logging.INFO, logger=single_completion.__name__)
    all_behave(four.decodes, failing(1, fail, attempts=range(10)))
    began = time.monotonic()
    outputs = await generate(four)
    # When both have failed it one of them is left time to come back.
    assert time.monotonic() - began > 0.4
    assert ending(outputs).error.code == core.ERROR_CODE_ENGINE_DEAD
    assert ending(outputs).error.message == "broken on purpose"
    assert ending(outputs).error.retryable
    assert sorted(leg.attempt for w in four.decodes for leg in w.requests) == [0, 1, 2, 3]
    # Never twice in a row on the same one.
    assert [len(worker.requests) for worker in four.decodes] == [2, 2]
    assert outputs[-1].metrics.num_redrives == 3
    assert four.metric("pdserve_recovered_requests_total", outcome="error") == 1
    # What an operator reads of it.
    told = [text.partition(", attempt ")[2] for text in caplog.messages]
    for attempt in range(3):
        assert f"{attempt}: lost 127.0.0.1:" in told[2 * attempt]
        assert "engine_dead: broken on purpose; it is sent again" in told[2 * attempt]
        assert told[2 * attempt + 1].startswith(f"{attempt + 1}: it goes on after ")
    assert told[6].endswith("no attempt is left")
    assert told[7:] == ["3: nobody is left to go on with: it fails"]


def drain(workers: Sequence[FakeWorker], running: Running) -> None:
    """Hand the request back; come again as another process when one of the workers has it."""
    fail(running, ErrorCode.DRAINING)
    attempt = running.request.attempt

    async def restart() -> None:
        await until(lambda: any(r.attempt > attempt for w in workers for r in w.requests))
        worker = running.worker
        worker.info = replace(worker.info, epoch=f"{int(worker.info.epoch, 16) + 1:032x}")
        worker.cut()

    running.worker.restarting = asyncio.create_task(restart())


@pytest.mark.parametrize("num_drains", [4, 10])
@pytest.mark.parametrize("max_redrives", [0, 3])
async def test_a_chain_of_drains_takes_nothing_of_the_redrives(
    start_stack, tokenizer, num_drains, max_redrives
) -> None:
    async with start_stack(prefill=2, decode=2, max_redrives=max_redrives) as stack:
        all_behave(
            stack.decodes, failing(1, partial(drain, stack.decodes), attempts=range(num_drains))
        )
        outputs = await generate(stack, timeout=60)
        await assert_recovered(stack, outputs, tokenizer)
        assert outputs[-1].metrics.num_redrives == num_drains


async def test_a_worker_that_goes_after_it_said_that_it_drains_was_expected_to(
    start_stack, tokenizer
) -> None:
    async with start_stack(decode=2, max_redrives=0) as stack:
        all_behave(stack.decodes, failing(2, hang))
        task = asyncio.create_task(generate(stack))
        await until(lambda: num_delivered(stack) == 2)
        (busy,) = [worker for worker in stack.decodes if worker.num_running]
        busy.is_draining = True
        states = {client.address: client for client in stack.server.pool.decode}
        await until(lambda: states[busy.address].state is WorkerState.DRAINING)
        await busy.stop()
        await assert_recovered(stack, await task, tokenizer)


async def test_losses_between_long_stretches_never_end_a_stream(
    start_stack, tokenizer, monkeypatch
) -> None:
    monkeypatch.setattr("pdserve_router.requests.redrive.TOKENS_PER_REDRIVE", 2)
    async with start_stack(prefill=2, decode=2, max_redrives=1) as stack:
        all_behave(stack.decodes, failing(3, fail, attempts=range(5)))
        outputs = await generate(stack, timeout=60)
        await assert_recovered(stack, outputs, tokenizer)
        assert outputs[-1].metrics.num_redrives == 5


async def test_a_poisonous_request_ends_and_leaves_out_nobody(four, tokenizer) -> None:
    all_behave(four.decodes, failing(0, fail, attempts=range(20)))
    for _ in range(3):
        outputs = await generate(four, timeout=60)
        assert ending(outputs).error.code == core.ERROR_CODE_ENGINE_DEAD
        assert outputs[-1].metrics.num_redrives == 3
    assert four.metric("pdserve_workers_failing", role="decode") == 0
    all_behave(four.decodes, decode)
    assert text_of(await generate(four)) == ANSWER_TEXT


async def test_without_an_attempt_left_decode_still_goes_on_without_prefill(
    start_stack, patient
) -> None:
    async with start_stack(max_redrives=0) as stack:

        async def later(running: Running) -> None:
            await noticed(stack)
            await decode(running)

        stack.prefill.behave = failing(0, fail)
        stack.decode.behave = later
        outputs = await generate(stack)
        assert text_of(outputs) == ANSWER_TEXT
        assert outputs[-1].metrics.num_redrives == 0
        assert stack.metric("pdserve_redrives_waiting") == 0


async def test_without_an_attempt_left_decodes_loss_ends_the_request(start_stack, patient) -> None:
    async with start_stack(max_redrives=0) as stack:

        async def lose(running: Running) -> None:
            await noticed(stack)
            lose_kv(running, 0)
            await hang(running)

        stack.prefill.behave = failing(0, fail)
        stack.decode.behave = lose
        outputs = await generate(stack)
        assert ending(outputs).error.code == core.ERROR_CODE_ENGINE_DEAD
        assert stack.metric("pdserve_redrives_waiting") == 0


async def test_an_error_that_is_not_retryable_ends_the_request_at_once(four) -> None:
    all_behave(four.prefills, fails_with(ErrorCode.INVALID_ARGUMENT, "not like this"))
    all_behave(four.decodes, hang)
    outputs = await generate(four)
    assert ending(outputs).error.code == core.ERROR_CODE_INVALID_ARGUMENT
    assert outputs[-1].metrics.num_redrives == 0


async def test_the_only_worker_gets_the_request_again_after_a_while(stack, tokenizer) -> None:
    stack.decode.behave = failing(3, fail_as(ErrorCode.OVERLOADED))
    began = time.monotonic()
    await assert_recovered(stack, await generate(stack), tokenizer)
    assert time.monotonic() - began > 0.4
    assert [leg.attempt for leg in stack.decode.requests] == [0, 1]


async def test_a_request_waits_for_a_worker_to_come_back(start_stack, tokenizer) -> None:
    async with start_stack() as stack:
        stack.decode.behave = failing(3, hang)
        task = asyncio.create_task(generate(stack))
        await until(lambda: num_delivered(stack) == 3)
        await stack.decode.stop()
        await until(lambda: stack.metric("pdserve_redrives_waiting") == 1)
        stack.decode.info = replace(stack.decode.info, epoch="1" * 32)
        await stack.decode.start()
        await assert_recovered(stack, await task, tokenizer)


async def test_without_a_worker_the_wait_is_bounded_and_the_last_error_is_told(start_stack) -> None:
    async with start_stack(redrive_wait_s=0.3) as stack:
        stack.decode.behave = failing(3, hang)
        task = asyncio.create_task(generate(stack))
        await until(lambda: stack.decode.num_running == 1)
        await stack.decode.stop()
        began = time.monotonic()
        outputs = await task
        assert time.monotonic() - began < 8, "the default is 10"
        assert ending(outputs).error.code == core.ERROR_CODE_ENGINE_DEAD
        assert outputs[-1].metrics.num_redrives == 0


async def test_an_event_stream_that_waits_for_a_worker_is_not_taken_for_a_slow_client(
    start_stack,
) -> None:
    async with start_stack(http=True, client_stall_timeout_s=0.2) as stack:
        stack.decode.behave = failing(
            3, lambda running: fail(running, ErrorCode.OVERLOADED, retry_after_ms=800)
        )
        body = {"model": "tiny", "prompt": "hello", "stream": True}
        answer = await stack.api.post("/v1/completions", json=body)
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        assert "".join(choice["text"] for choice in choices) == ANSWER_TEXT
        assert stack.decode.requests[-1].attempt == 1


async def test_a_deadline_ends_the_wait(start_stack) -> None:
    async with start_stack(default_deadline_s=0.8) as stack:
        stack.decode.behave = failing(3, hang)
        task = asyncio.create_task(generate(stack, timeout=None))
        await until(lambda: stack.decode.num_running == 1)
        await stack.decode.stop()
        outputs = await task
        assert ending(outputs).error.code == core.ERROR_CODE_DEADLINE_EXCEEDED
        await stack.assert_idle()
        assert stack.metric("pdserve_redrives_waiting") == 0


async def test_cancelling_ends_the_wait(start_stack) -> None:
    async with start_stack() as stack:
        stack.decode.behave = failing(3, hang)
        call = stack.stub.Generate(request())
        await call.read()
        await stack.decode.stop()
        await until(lambda: stack.metric("pdserve_redrives_waiting") == 1)
        call.cancel()
        await stack.assert_idle()
        assert stack.metric("pdserve_redrives_waiting") == 0


# ---- what a step of the answer means must not depend on where it was computed


@pytest.mark.parametrize(
    "params",
    [
        {"stop": ["wor"]},
        {"stop": ["wor"], "include_stop_str_in_output": True},
        {"stop": ["hel", "quick"], "min_tokens": 9},
        {"max_tokens": 6},
        {"max_tokens": 6, "logprobs": 2},
        {"logprobs": 1, "prompt_logprobs": 1},
        {"prompt_logprobs": 0},
        {"output_kind": core.REQUEST_OUTPUT_KIND_CUMULATIVE, "logprobs": 1},
        {"output_kind": core.REQUEST_OUTPUT_KIND_FINAL_ONLY},
        {"detokenize": False},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    ],
    ids=str,
)
async def test_the_client_sees_what_it_would_have_seen(four, params) -> None:
    expected = seen(await generate(four, params=params), params)
    for num_tokens in (0, 1, 4):
        for worker in four.workers:
            worker.requests.clear()
        all_behave(four.decodes, failing_as_decode(num_tokens))
        outputs = await generate(four, params=params)
        assert seen(outputs, params) == expected, f"lost after {num_tokens}"
        check_border(four, params)
        await four.assert_idle()


def failing_as_decode(num_tokens: int):
    """Fail when so many tokens are out, P's included and repeated."""

    async def behave(running: Running) -> None:
        if running.request.attempt:
            await decode(running)
            return
        await asyncio.sleep(4 * running.worker.step_s)
        tokens, _ = running.answer()
        if num_tokens > 1:
            running.emit(*tokens[:num_tokens], at=0, num_repeated=1)
        fail(running)

    return behave


def seen(outputs, params):
    """Everything but how it was cut into messages, and when."""
    is_cumulative = params.get("output_kind") == core.REQUEST_OUTPUT_KIND_CUMULATIVE
    last = outputs[-1]
    parts = [last.outputs[0]] if is_cumulative else [o.outputs[0] for o in outputs]
    positions = [p for part in parts for p in part.logprobs.positions]
    return (
        "".join(part.text for part in parts),
        [token_id for part in parts for token_id in part.token_ids],
        [(list(p.token_ids), list(p.logprobs)) for p in positions],
        ending(outputs).cumulative_logprob,
        [list(p.token_ids) for p in outputs[0].prompt_logprobs.positions],
        any(output.HasField("prompt_logprobs") for output in outputs[1:]),
        [bool(output.prompt_token_ids) for output in outputs].count(True),
        ending(outputs).finish_reason,
        ending(outputs).stop_string,
        (last.usage.num_prompt_tokens, last.usage.num_output_tokens),
        last.seed,
    )


def check_border(stack, params) -> None:
    """Workers get the border and the parameters that need it, unchanged."""
    again = [leg for worker in stack.workers for leg in worker.requests if leg.attempt]
    assert again
    (first, *_) = [leg for worker in stack.workers for leg in worker.requests if not leg.attempt]
    for leg in again:
        assert leg.prompt_token_ids == first.prompt_token_ids
        has_tokens = bool(leg.resume_output_token_ids)
        expected = replace(
            first.task.sampling_params,
            prompt_logprobs=None if has_tokens else params.get("prompt_logprobs"),
        )
        assert leg.task.sampling_params == expected


async def test_slices_of_prompt_logprobs_begin_anew_with_the_attempt(four, tokenizer) -> None:
    """They had begun to come when P failed; nothing of them was delivered."""

    async def begin(running: Running) -> None:
        if running.request.attempt:
            await prefill(running)
            return
        num_top = running.request.task.sampling_params.prompt_logprobs
        assert num_top is not None
        running.emit_prompt_logprobs()
        await asyncio.sleep(0.01)
        fail(running)

    all_behave(four.prefills, begin)
    all_behave(four.decodes, failing(0, fail))
    outputs = await generate(four, params={"prompt_logprobs": 1})
    await assert_recovered(four, outputs, tokenizer)
    assert len(outputs[0].prompt_logprobs.positions) == len(TOKENS.token_ids)


# ---- n > 1


async def test_each_completion_recovers_alone(four, tokenizer) -> None:
    async def lose_the_second(running: Running) -> None:
        index = int(running.request.request_id.split("_")[0])
        behave = failing(2, fail) if index == 1 else decode
        await behave(running)

    all_behave(four.decodes, lose_the_second)
    outputs = await generate(four, params={"n": 3})
    expected = [*tokenizer.backend.encode(ANSWER_TEXT).ids, EOS]
    for index in range(3):
        parts = [c for output in outputs for c in output.outputs if c.index == index]
        assert [t for part in parts for t in part.token_ids] == expected
        assert "".join(part.text for part in parts) == ANSWER_TEXT
    again = [leg for worker in four.workers for leg in worker.requests if leg.attempt]
    assert {leg.request_id[:2] for leg in again} == {"1_"}
    assert {leg.fork_of for leg in again} == {None}
    assert outputs[-1].metrics.num_redrives == 1
    assert outputs[-1].usage.num_output_tokens == 3 * len(expected)


async def test_forks_of_a_dead_worker_go_on_by_themselves(four, tokenizer) -> None:
    all_behave(four.decodes, failing(2, hang))
    task = asyncio.create_task(generate(four, params={"n": 3}))
    used = lambda: [worker for worker in four.decodes if worker.num_running == 3]  # noqa: E731
    await until(lambda: len(used()) == 1)
    await until(lambda: num_delivered(four) == 6)
    await used()[0].stop()
    outputs = await task
    expected = [*tokenizer.backend.encode(ANSWER_TEXT).ids, EOS]
    for index in range(3):
        parts = [c for output in outputs for c in output.outputs if c.index == index]
        assert [t for part in parts for t in part.token_ids] == expected
    assert outputs[-1].metrics.num_redrives == 3
    assert {output.finished for output in outputs[:-1]} == {False}


# ---- what is told about it


async def test_another_worker_takes_part_in_what_is_exact(four, tokenizer) -> None:
    second = four.decodes[1]
    second.info = replace(second.info, numerics_id="other", epoch="1" * 32)
    await second.stop()
    await second.start()
    await until(lambda: four.server.pool.decode[1].info == second.info)
    await until(lambda: four.server.pool.decode[1].is_ready)
    all_behave(four.decodes, failing(3, fail))
    outputs = await generate(four)
    await assert_recovered(four, outputs, tokenizer)
    assert outputs[-1].metrics.determinism == "consistent"


async def test_logprobs_that_only_the_lost_prefill_worker_had_are_computed_again(four) -> None:
    """D goes on by itself, but does not know how likely P's token was."""

    async def never_said(running: Running) -> None:
        await (prefill if running.request.attempt else failing(0, fail))(running)

    all_behave(four.prefills, never_said)
    outputs = await generate(four, params={"logprobs": 1})
    assert text_of(outputs) == ANSWER_TEXT
    positions = [p for output in outputs for p in output.outputs[0].logprobs.positions]
    assert len(positions) == outputs[-1].usage.num_output_tokens
    assert all(position.token_ids for position in positions)
    assert outputs[-1].metrics.num_redrives == 1


async def overtake(running: Running, then) -> None:
    """Bring P's token and the next one before P does; at the first attempt alone."""
    if running.request.attempt:
        await decode(running)
        return
    tokens, _ = running.answer()
    running.emit(*tokens[:2], at=0, num_repeated=1)
    await asyncio.sleep(0.05)
    await then(running)


async def prefill_when_noticed(stack, running: Running) -> None:
    if not running.request.attempt:
        await noticed(stack)
    await prefill(running)


def assert_whole(outputs) -> None:
    assert text_of(outputs) == ANSWER_TEXT
    positions = [p for output in outputs for p in output.outputs[0].logprobs.positions]
    assert len(positions) == outputs[-1].usage.num_output_tokens
    assert outputs[-1].metrics.num_redrives == 1


async def test_tokens_that_waited_for_prefill_do_not_outlive_decode_for_a_sign_of_life(
    start_stack,
) -> None:
    async with start_stack() as stack:
        stack.prefill.behave = partial(prefill_when_noticed, stack)
        stack.decode.behave = partial(overtake, then=hang)
        task = asyncio.create_task(generate(stack, params={"logprobs": 1}))
        await until(lambda: stack.decode.num_running == 1)
        await asyncio.sleep(0.1)
        await stack.decode.stop()
        await until(lambda: num_delivered(stack) == 2)
        stack.decode.info = replace(stack.decode.info, epoch="1" * 32)
        await stack.decode.start()
        assert_whole(await task)


@pytest.mark.parametrize("code", [ErrorCode.DRAINING, ErrorCode.OVERLOADED], ids=str)
async def test_decode_may_end_while_its_tokens_wait_for_prefill(four, code) -> None:
    async def end(running: Running) -> None:
        running.fail(code, is_retryable=True)

    all_behave(four.prefills, partial(prefill_when_noticed, four))
    all_behave(four.decodes, partial(overtake, then=end))
    assert_whole(await generate(four, params={"logprobs": 1}))


# ---- requests under which workers die


@pytest.mark.parametrize("num_prefill", [0, 4])
async def test_a_request_under_which_two_workers_died_ends_alone(start_stack, num_prefill) -> None:
    poison = pb2.TokenPrompt(token_ids=(*TOKENS.token_ids, 13))
    dead, dying = [], []

    async def behave(running: Running) -> None:
        if len(running.request.prompt_token_ids) < len(poison.token_ids):
            await asyncio.sleep(0.2)
            await own_behaviour(running)(running)
            return
        dead.append(running.worker)
        dying.append(asyncio.create_task(running.worker.stop()))
        await hang(running)

    spread = {"routing_policy": "round_robin"}
    async with start_stack(prefill=num_prefill, decode=4, **spread) as stack:
        all_behave(stack.decodes, behave)
        others = [asyncio.create_task(generate(stack)) for _ in range(12)]
        wanted = pb2.GenerateRequest(tokens=poison, sampling_params=core.SamplingParams(seed=7))
        error = ending(await stack.generate(wanted, timeout=30)).error
        assert (error.code, error.fault) == (core.ERROR_CODE_INTERNAL, core.ERROR_FAULT_REQUEST)
        assert f"{len(dead)} workers were lost under this request" in error.message
        # A third one if others, too, waited for their first token of the second.
        assert len(dead) in (2, 3)
        for task in others:
            assert text_of(await task) == ANSWER_TEXT
        await asyncio.gather(*dying)


async def test_workers_without_room_cost_no_redrives(start_stack, forgiving, tokenizer) -> None:
    async with start_stack(max_redrives=1) as stack:
        stack.decode.behave = failing(0, fail_as(ErrorCode.OVERLOADED), attempts=range(5))
        outputs = await generate(stack)
        await assert_recovered(stack, outputs, tokenizer)
        assert outputs[-1].metrics.num_redrives == 5
