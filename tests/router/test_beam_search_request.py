"""Beam search over real streams: what it asks of a worker, what it answers, and how it fails."""

import asyncio
import math
import random
from dataclasses import replace
from functools import cache

import grpc
import pytest

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.engine import ErrorCode, FinishReason, LogprobsLists
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.requests.beam_search import BeamSearch
from support.fake_worker import EOS, PREFILL_STATS, all_behave, fails_with, hang
from support.refusals import refused
from support.waiting import until

PROMPT = [40, 41, 42]
MAX_TOKENS = 6
PARAMS = {"use_beam_search": True, "temperature": 0.0, "n": 2, "max_tokens": MAX_TOKENS}
# What the fake model may say; EOS is likely enough to end some beams.
WORDS = [EOS, *range(50, 75)]


@cache
def next_tokens(token_ids: tuple[int, ...], num: int) -> LogprobsLists:
    """A language model: what it says is a function of all tokens before."""
    rng = random.Random(repr(token_ids))
    logits = [rng.gauss(0, 2) for _ in WORDS]
    norm = math.log(sum(map(math.exp, logits)))
    ranked = sorted(zip(logits, WORDS, strict=True), reverse=True)[:num]
    ids, logprobs = [word for _, word in ranked], [logit - norm for logit, _ in ranked]
    return LogprobsLists(
        logprob_token_ids=((ids[0], *ids),),
        logprobs=((logprobs[0], *logprobs),),
        sampled_token_ranks=(1,),
    )


async def predict(running) -> None:
    request = running.request
    top = next_tokens(request.prompt_token_ids, request.task.sampling_params.logprobs)
    running.emit(
        top.logprob_token_ids[0][0],
        at=0,
        finish=FinishReason.LENGTH,
        new_logprobs=top,
        prefill_stats=PREFILL_STATS,
    )


def at_step(step: int, behave):
    """Do something else from a step on."""

    async def either(running) -> None:
        number = int(running.request.request_id.split(".")[0])
        await (behave if number >= step else predict)(running)

    return either


def expected(**fields) -> BeamSearch:
    params = SamplingParams(**{**PARAMS, **fields})
    stops = frozenset() if params.ignore_eos else frozenset({EOS})
    search = BeamSearch(params, max_tokens=params.max_tokens, stop_token_ids=stops)
    while not search.is_done:
        tops = [
            next_tokens((*PROMPT, *beam.token_ids), search.num_top_tokens)
            for beam in search.running
        ]
        search.advance(tops)
    return search


def request(**fields) -> pb2.GenerateRequest:
    params = core.SamplingParams(**{**PARAMS, **fields})
    tokens = pb2.TokenPrompt(token_ids=PROMPT)
    return pb2.GenerateRequest(tokens=tokens, sampling_params=params)


async def generate(stack, **fields) -> pb2.RequestOutput:
    (response,) = [response async for response in stack.stub.Generate(request(**fields))]
    assert response.output.finished
    return response.output


@pytest.fixture
async def stack(start_stack):
    async with start_stack() as stack:
        stack.decode.behave = predict
        yield stack


@pytest.mark.parametrize("fields", [{}, {"n": 5}, {"best_of": 5}, {"n": 3, "ignore_eos": True}])
async def test_the_best_beams_come_in_one_message(stack, tokenizer, fields) -> None:
    output = await generate(stack, **fields)
    search = expected(**fields)
    best = search.finished[: {**PARAMS, **fields}["n"]]
    assert [item.index for item in output.outputs] == list(range(len(best)))
    assert [tuple(item.token_ids) for item in output.outputs] == [b.token_ids for b in best]
    for item, beam in zip(output.outputs, best, strict=True):
        is_stopped = beam.token_ids[-1] == EOS and not fields.get("ignore_eos")
        reason = core.FINISH_REASON_STOP if is_stopped else core.FINISH_REASON_LENGTH
        assert item.finish_reason == reason
        assert item.text == tokenizer.decode([i for i in beam.token_ids if i != EOS])
        assert item.cumulative_logprob == pytest.approx(beam.cumulative_logprob)
        assert not item.HasField("logprobs")
    assert list(output.prompt_token_ids) == PROMPT
    assert output.usage.num_prompt_tokens == len(PROMPT)
    assert output.usage.num_cached_tokens == PREFILL_STATS.num_cached_tokens
    assert output.usage.num_output_tokens == sum(len(beam.token_ids) for beam in best)


async def test_each_step_asks_decode_for_one_token_behind_each_beam(stack) -> None:
    output = await generate(stack, n=3, ignore_eos=True)
    assert stack.prefill.requests == []
    asked = stack.decode.requests
    lengths = [len(each.prompt_token_ids) - len(PROMPT) for each in asked]
    assert lengths == [0] + [step for step in range(1, MAX_TOKENS) for _ in range(3)]
    for each in asked:
        params = each.task.sampling_params
        assert (params.max_tokens, params.temperature, params.logprobs) == (1, 0.0, 6)
        assert (each.kv_transfer_params, each.fork_of) == (None, None)
    assert len({each.request_id for each in asked}) == len(asked)
    assert output.metrics.path == "local"
    assert output.metrics.e2e_ns >= output.metrics.ttft_ns > 0
    routed = {"path": "local", "reason": "beam_search"}
    assert stack.metric("pdserve_requests_routed_total", **routed) == 1
    assert stack.metric("pdserve_requests_total", model="tiny", outcome="length") == 1
    assert stack.metric("pdserve_generation_tokens_total", model="tiny") == len(asked)


async def test_all_steps_stay_on_one_worker(start_stack) -> None:
    async with start_stack(decode=2) as stack:
        all_behave(stack.decodes, predict)
        await generate(stack)
        assert sorted(bool(worker.requests) for worker in stack.decodes) == [False, True]


async def test_logprobs_are_those_of_the_beams_tokens(stack) -> None:
    output = await generate(stack, logprobs=2)
    for item in output.outputs:
        positions = item.logprobs.positions
        assert [position.token_ids[0] for position in positions] == list(item.token_ids)
        assert [len(position.token_ids) for position in positions] == [3] * len(positions)


async def test_answers_end_at_the_models_length(start_stack) -> None:
    async with start_stack(info={"max_model_len": 6}) as stack:
        stack.decode.behave = predict
        output = await generate(stack, ignore_eos=True)
        assert [len(item.token_ids) for item in output.outputs] == [3, 3]
        assert max(len(each.prompt_token_ids) for each in stack.decode.requests) == 5


async def test_a_stop_token_is_named_and_is_no_text(stack, tokenizer) -> None:
    output = await generate(stack, ignore_eos=True, stop_token_ids=WORDS[1:12])
    stopped = [item for item in output.outputs if item.finish_reason == core.FINISH_REASON_STOP]
    assert stopped
    for item in stopped:
        assert item.stop_token_id == item.token_ids[-1] in WORDS[1:12]
        assert item.text == tokenizer.decode([i for i in item.token_ids[:-1] if i != EOS])


REFUSED = [
    ({"n": 11}, "n is 11, at most 10 with use_beam_search"),
    ({"best_of": 12}, "best_of is 12, at most 10 with use_beam_search"),
    ({"n": 8, "stop_token_ids": range(50, 62)}, "stop_token_ids and EOS are 13 tokens"),
    ({"length_penalty": 11.0}, "length_penalty is 11, must be -10 to 10"),
    ({"stop": ["a"]}, "stop is set: not served with use_beam_search"),
    ({"presence_penalty": 1.0}, "presence_penalty is set"),
    ({"logit_bias": {5: 1.0}}, "logit_bias is set"),
    ({"bad_words": ["a"]}, "bad_words is set"),
    ({"prompt_logprobs": 1}, "prompt_logprobs is set"),
    ({"temperature": 0.5}, "temperature is 0.5, must be 0 with use_beam_search"),
]


async def test_what_beams_cannot_follow_is_refused(stack) -> None:
    for fields, message in REFUSED:
        with refused(grpc.StatusCode.INVALID_ARGUMENT, message):
            await generate(stack, **fields)
    assert stack.decode.requests == []
    rejected = stack.metric("pdserve_requests_total", model="tiny", outcome="rejected")
    assert rejected == len(REFUSED)


def error_of(output) -> tuple[int, str]:
    (item,) = output.outputs
    assert item.finish_reason == core.FINISH_REASON_ERROR
    return item.error.code, item.error.message


async def test_one_beams_failure_ends_the_request_and_its_other_beams(stack) -> None:
    async def fail_one(running) -> None:
        if ".1_" not in running.request.request_id:
            return await hang(running)
        running.fail(ErrorCode.OVERLOADED)

    stack.decode.behave = at_step(2, fail_one)
    assert error_of(await generate(stack)) == (core.ERROR_CODE_OVERLOADED, "broken on purpose")
    await until(lambda: len(stack.decode.aborted) == 1)
    assert stack.decode.aborted[0].startswith("2.0_")
    assert stack.metric("pdserve_requests_total", model="tiny", outcome="error") == 1


async def test_a_worker_that_fails_searches_again_and_again_gets_none(start_stack) -> None:
    fail = fails_with(ErrorCode.INTERNAL)
    async with start_stack(decode=2, routing_policy="round_robin") as stack:
        for is_good in (False, False, True, False, False):
            all_behave(stack.decodes, predict if is_good else fail)
            for _ in stack.decodes:
                await generate(stack)
            # One that goes well lets those before it be forgotten.
            assert stack.metric("pdserve_workers_failing", role="decode") == 0
        for _ in range(4):
            await generate(stack)
        assert stack.metric("pdserve_workers_failing", role="decode") == 1, "the last one is spared"


async def test_a_step_without_logprobs_is_an_error(start_stack) -> None:
    async def end(running) -> None:
        running.emit(at=0, finish=FinishReason.ABORT)

    async with start_stack(max_redrives=0) as stack:
        stack.decode.behave = at_step(1, end)
        code, message = error_of(await generate(stack))
        assert code == core.ERROR_CODE_ENGINE_DEAD
        assert "without logprobs: abort" in message


async def test_cancelling_aborts_every_beam(stack) -> None:
    stack.decode.behave = at_step(2, hang)
    call = stack.stub.Generate(request())
    reading = asyncio.ensure_future(call.read())
    await until(lambda: len(stack.decode.requests) == 1 + 2 + 2)
    call.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: len(stack.decode.aborted) == 2)
    await stack.assert_idle()
    assert stack.metric("pdserve_requests_total", model="tiny", outcome="abort") == 1


async def test_the_deadline_ends_it_with_a_typed_error(start_stack) -> None:
    async with start_stack(default_deadline_s=0.6) as stack:
        stack.decode.behave = at_step(1, hang)
        code, message = error_of(await generate(stack))
        assert code == core.ERROR_CODE_DEADLINE_EXCEEDED
        assert "the deadline passed" in message
        await until(lambda: len(stack.decode.aborted) == 2)


async def test_without_another_worker_a_lost_one_ends_it_with_one_error(start_stack) -> None:
    async with start_stack(redrive_wait_s=0.1) as stack:
        stack.decode.behave = at_step(1, hang)
        task = asyncio.create_task(generate(stack))
        await until(lambda: stack.decode.num_running == 2)
        await stack.decode.stop()
        code, _ = error_of(await task)
        assert code == core.ERROR_CODE_ENGINE_DEAD


fail = fails_with(ErrorCode.OVERLOADED, is_retryable=True)


class TwoWorkers:
    """Two decode workers; the one that gets `step` first does something else from then on."""

    def __init__(self, stack, step: int, behave) -> None:
        self.stack = stack
        self.first = None
        self._behave = behave
        all_behave(stack.decodes, at_step(step, self._reach))

    @property
    def second(self):
        (other,) = (worker for worker in self.stack.decodes if worker is not self.first)
        return other

    @property
    def is_first_ready(self) -> bool:
        clients = self.stack.server.pool.decode
        return any(client.is_ready for client in clients if client.address == self.first.address)

    async def _reach(self, running) -> None:
        self.first = self.first or running.worker
        await (self._behave if running.worker is self.first else predict)(running)


@pytest.fixture
async def two(start_stack):
    async with start_stack(prefill=0, decode=2) as stack:
        yield stack


def assert_recovered(stack, output, *, reason: str) -> None:
    best = expected().finished[: PARAMS["n"]]
    assert [tuple(item.token_ids) for item in output.outputs] == [b.token_ids for b in best]
    assert output.metrics.num_redrives == 1
    assert output.metrics.determinism == "exact"
    assert stack.metric("pdserve_redrives_total", reason=reason, path="local") == 1
    assert stack.metric("pdserve_redrives_waiting") == 0


async def test_a_search_goes_on_elsewhere_when_its_worker_drains(two) -> None:
    async def drain(running) -> None:
        running.worker.is_draining = True
        await until(lambda: not workers.is_first_ready)
        await predict(running)

    workers = TwoWorkers(two, 2, drain)
    output = await generate(two)
    assert_recovered(two, output, reason="no_worker")
    # Each step is asked for once: what drained has finished its own.
    steps = [
        [int(each.request_id.split(".")[0]) for each in worker.requests]
        for worker in (workers.first, workers.second)
    ]
    assert steps == [[0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5]]
    assert workers.first.aborted == []
    assert output.metrics.decode_engine_id == workers.second.info.engine_id


async def test_a_drain_takes_nothing_of_a_searchs_redrives(start_stack) -> None:
    hand_back = fails_with(ErrorCode.DRAINING, "shutdown", is_retryable=True)
    async with start_stack(prefill=0, decode=2, max_redrives=0) as stack:
        TwoWorkers(stack, 2, hand_back)
        assert_recovered(stack, await generate(stack), reason="draining")


async def test_a_step_is_done_again_elsewhere_when_its_worker_dies(two) -> None:
    workers = TwoWorkers(two, 2, hang)
    task = asyncio.create_task(generate(two))
    await until(lambda: workers.first is not None and workers.first.num_running == 2)
    await workers.first.stop()
    assert_recovered(two, await task, reason="engine_dead")
    again = [each.request_id.split("_")[0] for each in workers.second.requests if each.attempt]
    assert again == ["2.0", "2.1"]
    assert len(workers.second.requests) == 2 * (MAX_TOKENS - 2)


async def test_a_search_that_goes_on_between_its_losses_is_not_at_fault_for_them(
    start_stack,
) -> None:
    """Each of its workers answered a step of it before it died."""
    dying: dict[int, asyncio.Task[None]] = {}

    async def die(running) -> None:
        step, attempt = int(running.request.request_id.split(".")[0]), running.request.attempt
        if step not in (1, 3) or attempt:
            await predict(running)
            return
        if step not in dying:
            dying[step] = asyncio.create_task(running.worker.stop())
        await hang(running)

    async with start_stack(prefill=0, decode=3) as stack:
        all_behave(stack.decodes, die)
        output = await generate(stack)
        await asyncio.gather(*dying.values())
        best = expected().finished[: PARAMS["n"]]
        assert [tuple(item.token_ids) for item in output.outputs] == [b.token_ids for b in best]
        assert output.metrics.num_redrives == 2


async def test_a_step_is_done_again_by_the_only_worker(stack, monkeypatch) -> None:
    monkeypatch.setattr("pdserve_router.requests.redrive.REUSE_DELAY_S", 0.0)

    async def fail_one(running) -> None:
        name = running.request.request_id
        is_lost = running.request.attempt == 0 and name.startswith("2.")
        await ((fail if ".1_" in name else hang) if is_lost else predict)(running)

    stack.decode.behave = fail_one
    assert_recovered(stack, await generate(stack), reason="overloaded")
    # The other beam's answer would come too late.
    assert [name.split("_")[0] for name in stack.decode.aborted] == ["2.0"]


@pytest.mark.parametrize("step", [0, 2])
async def test_no_other_weights_go_on_with_a_search(start_stack, step, monkeypatch) -> None:
    monkeypatch.setattr("pdserve_router.requests.redrive.REUSE_DELAY_S", 0.0)
    async with start_stack(prefill=0, decode=2, redrive_wait_s=1.0) as stack:
        second = stack.decodes[1]
        second.info = replace(second.info, weights_digest="b" * 64, epoch="1" * 32)
        second.cut()
        await until(lambda: stack.server.pool.decode[1].info == second.info)
        await until(lambda: stack.server.pool.decode[1].is_ready)
        TwoWorkers(stack, step, fail)
        output = await generate(stack)
        assert not second.requests
        assert output.metrics.num_redrives > 0
        assert error_of(output) == (core.ERROR_CODE_OVERLOADED, "broken on purpose")


async def test_a_search_outlives_a_pause_of_its_worker(stack) -> None:
    async def pause(running) -> None:
        stack.decode.is_paused = True
        await until(lambda: not stack.server.pool.decode[0].is_ready)
        await predict(running)

    stack.decode.behave = at_step(1, pause)
    output = await generate(stack)
    assert not any(item.HasField("error") for item in output.outputs)


async def test_a_search_waits_only_until_its_first_step(start_stack) -> None:
    async with start_stack(max_num_queued_requests=1) as stack:
        stack.decode.behave = at_step(1, hang)
        first = asyncio.create_task(generate(stack))
        await until(lambda: stack.decode.num_running == 2)
        assert stack.server.router.num_queued == 0
        ttft = {"model": "tiny", "path": "local"}
        assert stack.metric("pdserve_time_to_first_token_seconds_count", **ttft) == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
