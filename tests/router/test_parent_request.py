"""n and best_of over real streams: one request for the client, several for the workers."""

import asyncio
import json

import pytest

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.engine import ErrorCode, FinishReason, WorkerRole
from pdserve_router.requests.records.request_metrics import FIRST_ITL_STAGES, TTFT_STAGES
from support.fake_worker import PREFILL_STATS, decode, hang, prefill
from support.router_stack import ANSWER_TEXT, Stack
from support.waiting import until

PARAMS = {"n": 3, "seed": 7}


def request(**fields) -> pb2.GenerateRequest:
    params = core.SamplingParams(**{**PARAMS, **fields.pop("params", {})})
    return pb2.GenerateRequest(text="hello", sampling_params=params, **fields)


async def generate(stack, timeout=None, **fields) -> list[pb2.RequestOutput]:
    return await stack.generate(request(**fields), timeout=timeout)


def index_of(running) -> int:
    return int(running.request.request_id.split("_")[0])


async def decode_cut(running) -> None:
    """Completion i is the worker's answer, cut to 4 + i tokens."""
    tokens = running.worker.answer[: 4 + index_of(running)]
    running.answer = lambda: (tokens, FinishReason.LENGTH)
    await decode(running)


def failing(stack: Stack, index: int, *, num_tokens: int, then):
    """Fail a completion when the router has so many tokens of the others."""

    async def behave(running) -> None:
        if index_of(running) != index:
            return await then(running)
        await tokens_came(stack, num_tokens)
        running.fail(ErrorCode.KV_EXPIRED)

    return behave


async def tokens_came(stack: Stack, num_tokens: int) -> None:
    """Wait until the router has so many, of all completions."""
    name = "pdserve_generation_tokens_total"
    await until(lambda: stack.metric(name, model="tiny") >= num_tokens)


def completions(outputs) -> dict[int, list]:
    found: dict[int, list] = {}
    for output in outputs:
        for completion in output.outputs:
            found.setdefault(completion.index, []).append(completion)
    return found


def tokens_of(parts) -> list[int]:
    return [token_id for part in parts for token_id in part.token_ids]


async def test_only_the_first_child_is_prefilled_and_the_others_are_its_forks(stack) -> None:
    await generate(stack)
    (leg,) = stack.prefill.requests
    first, *forks = stack.decode.requests
    assert leg.request_id == first.request_id
    assert leg.kv_transfer_params.do_remote_decode
    assert first.kv_transfer_params.do_remote_prefill
    base = first.request_id.removeprefix("0_")
    assert [fork.request_id for fork in forks] == [f"1_{base}", f"2_{base}"]
    assert first.fork_of is None
    assert [fork.fork_of for fork in forks] == [first.request_id] * 2
    assert all(fork.kv_transfer_params is None for fork in forks)
    children = [first, *forks]
    assert [child.task.sampling_params.seed for child in children] == [7, 8, 9]
    assert {child.task.sampling_params.n for child in children} == {1}
    assert {child.prompt_token_ids for child in children} == {leg.prompt_token_ids}


async def test_seeds_wrap_at_64_bits(stack) -> None:
    outputs = await generate(stack, params={"seed": 2**64 - 2})
    seeds = [child.task.sampling_params.seed for child in stack.decode.requests]
    assert seeds == [2**64 - 2, 2**64 - 1, 0]
    assert {output.seed for output in outputs} == {2**64 - 2}


async def test_one_stream_carries_every_completion_once(stack) -> None:
    stack.decode.behave = decode_cut
    stack.decode.step_s = 0.01
    outputs = await generate(stack, request_id="mine")
    assert {output.request_id for output in outputs} == {"mine"}
    assert [bool(output.prompt_token_ids) for output in outputs] == (
        [True] + [False] * (len(outputs) - 1)
    )
    found = completions(outputs)
    assert sorted(found) == [0, 1, 2]
    for index, parts in found.items():
        assert tokens_of(parts) == list(stack.decode.answer[: 4 + index])
        assert ANSWER_TEXT.startswith("".join(part.text for part in parts))
        reasons = [part.finish_reason for part in parts if part.finish_reason]
        assert reasons == [core.FINISH_REASON_LENGTH]
        assert parts[-1].finish_reason
    assert len(outputs) > 3


async def test_a_request_counts_once_and_its_tokens_all_count(stack) -> None:
    async def decode_last_later(running) -> None:
        if index_of(running) == 2:
            await asyncio.sleep(0.1)
        await decode_cut(running)

    stack.decode.behave = decode_last_later
    last = (await generate(stack))[-1]
    assert last.usage.num_prompt_tokens == len(stack.prefill.requests[0].prompt_token_ids)
    assert last.usage.num_cached_tokens == PREFILL_STATS.num_cached_tokens
    assert last.usage.num_output_tokens == 4 + 5 + 6
    metrics = last.metrics
    for total, stages in (("ttft", TTFT_STAGES), ("first_itl", FIRST_ITL_STAGES)):
        parts = [getattr(metrics, f"{stage}_ns") for stage in stages]
        assert sum(parts) == getattr(metrics, f"{total}_ns") > 0
    assert metrics.path == "disaggregated"
    # The whole request takes as long as its last completion.
    assert metrics.e2e_ns > 0.1e9
    assert stack.metric("pdserve_requests_total", model="tiny", outcome="length") == 1
    assert stack.metric("pdserve_generation_tokens_total", model="tiny") == 15
    assert stack.metric("pdserve_prompt_tokens_total", model="tiny") == (
        last.usage.num_prompt_tokens
    )
    routed = {"path": "disaggregated", "reason": ""}
    assert stack.metric("pdserve_requests_routed_total", **routed) == 1
    assert stack.metric("pdserve_handoffs_total", outcome="completed") == 1
    assert stack.metric("pdserve_request_duration_seconds_count", model="tiny") == 1


async def test_final_only_is_one_message_with_all_completions(stack) -> None:
    stack.decode.behave = decode_cut
    kind = core.REQUEST_OUTPUT_KIND_FINAL_ONLY
    (output,) = await generate(stack, params={"output_kind": kind})
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert [len(completion.token_ids) for completion in output.outputs] == [4, 5, 6]


async def test_cumulative_outputs_repeat_each_completion(stack) -> None:
    stack.decode.behave = decode_cut
    kind = core.REQUEST_OUTPUT_KIND_CUMULATIVE
    found = completions(await generate(stack, params={"output_kind": kind}))
    for index, parts in found.items():
        lengths = [len(part.token_ids) for part in parts]
        assert lengths == sorted(set(lengths))
        assert list(parts[-1].token_ids) == list(stack.decode.answer[: 4 + index])


async def test_a_child_that_fails_ends_the_request_with_its_error(stack) -> None:
    stack.prefill.behave = hang
    stack.decode.behave = failing(stack, 1, num_tokens=0, then=hang)
    (output,) = await generate(stack)
    assert {item.error.code for item in output.outputs} == {core.ERROR_CODE_KV_EXPIRED}
    assert {item.error.message for item in output.outputs} == {"broken on purpose"}
    await until(lambda: len(stack.decode.requests) == 3)
    first, _, third = [child.request_id for child in stack.decode.requests]
    await until(lambda: sorted(stack.decode.aborted) == [first, third])
    await until(lambda: stack.prefill.aborted == [first])
    assert stack.metric("pdserve_requests_total", model="tiny", outcome="error") == 1


async def test_completions_that_ended_keep_their_ends_when_another_fails(stack) -> None:
    stack.decode.behave = failing(stack, 2, num_tokens=4 + 5, then=decode_cut)
    outputs = await generate(stack)
    ends = {index: parts[-1] for index, parts in completions(outputs).items()}
    assert [ends[i].finish_reason for i in range(3)] == [
        core.FINISH_REASON_LENGTH,
        core.FINISH_REASON_LENGTH,
        core.FINISH_REASON_ERROR,
    ]


async def test_a_deadline_ends_every_child_with_one_error(start_stack) -> None:
    async with start_stack(default_deadline_s=0.6) as stack:
        stack.decode.behave = hang
        outputs = await generate(stack)
        errors = {item.error.code for item in outputs[-1].outputs}
        assert errors == {core.ERROR_CODE_DEADLINE_EXCEEDED}
        await until(lambda: len(stack.decode.aborted) == 3)


async def test_sixty_four_children_that_fail_at_once_end_once(start_stack) -> None:
    async with start_stack(max_redrives=0) as stack:
        stack.prefill.behave = stack.decode.behave = hang
        task = asyncio.create_task(generate(stack, params={"n": 64}))
        await until(lambda: stack.decode.num_running == 64)
        await stack.decode.stop()
        (output,) = await task
        assert len(output.outputs) == 64


async def test_one_token_each_is_served_by_decode_alone(stack) -> None:
    outputs = await generate(stack, params={"max_tokens": 1})
    assert outputs[-1].metrics.path == "local"
    assert stack.prefill.requests == []
    assert [child.fork_of is None for child in stack.decode.requests] == [True, False, False]
    routed = {"path": "local", "reason": "max_tokens_1"}
    assert stack.metric("pdserve_requests_routed_total", **routed) == 1


async def test_only_the_first_child_computes_the_prompts_logprobs(stack) -> None:
    outputs = await generate(stack, params={"prompt_logprobs": 2})
    assert len(outputs[0].prompt_logprobs.positions) == outputs[-1].usage.num_prompt_tokens
    asked = [child.task.sampling_params.prompt_logprobs for child in stack.decode.requests]
    assert asked == [2, None, None]


def first_child_last(stack: Stack):
    """A fork may be faster than the first child, whose first token takes another way."""

    async def behave(running) -> None:
        if index_of(running) == 0:
            await tokens_came(stack, 1)
        await (prefill if running.worker.info.role is WorkerRole.PREFILL else decode)(running)

    return behave


@pytest.mark.parametrize("prompt_logprobs", [None, 2])
async def test_the_first_output_has_the_prompts_logprobs_also_if_a_fork_is_faster(
    stack, prompt_logprobs
) -> None:
    stack.prefill.behave = stack.decode.behave = first_child_last(stack)
    params = {} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs}
    outputs = await generate(stack, params=params)
    has_first_child = 0 in [item.index for item in outputs[0].outputs]
    assert has_first_child == (prompt_logprobs is not None)
    assert len(outputs[0].prompt_token_ids) == outputs[-1].usage.num_prompt_tokens
    num_positions = len(outputs[0].prompt_logprobs.positions)
    assert num_positions == (len(outputs[0].prompt_token_ids) if prompt_logprobs else 0)
    assert not any(output.HasField("prompt_logprobs") for output in outputs[1:])
    for parts in completions(outputs).values():
        assert tokens_of(parts)[:-1] == list(stack.decode.answer)


async def test_one_request_has_no_children(stack) -> None:
    await generate(stack, params={"n": 1}, request_id="mine")
    (only,) = stack.decode.requests
    assert only.request_id.startswith("mine-")
    assert (only.fork_of, only.task.sampling_params.seed) == (None, 7)


BEST_OF = {"n": 2, "best_of": 4}


async def test_best_of_returns_the_likeliest_best_first_at_the_end(stack) -> None:
    stack.decode.behave = decode_cut
    # The fake's tokens all have negative logprobs: shorter is likelier.
    (output,) = await generate(stack, params=BEST_OF)
    assert [child.task.sampling_params.logprobs for child in stack.decode.requests] == [0] * 4
    assert [item.index for item in output.outputs] == [0, 1]
    assert [len(item.token_ids) for item in output.outputs] == [4, 5]
    assert not any(item.HasField("logprobs") for item in output.outputs)
    assert not any(item.HasField("cumulative_logprob") for item in output.outputs)
    assert output.usage.num_output_tokens == 4 + 5 + 6 + 7


async def test_best_of_picks_by_the_sum_not_by_the_order(stack) -> None:
    async def reverse(running) -> None:
        tokens = running.worker.answer[: 9 - index_of(running)]
        running.answer = lambda: (tokens, FinishReason.LENGTH)
        await decode(running)

    stack.decode.behave = reverse
    (output,) = await generate(stack, params={**BEST_OF, "logprobs": 2})
    assert [len(item.token_ids) for item in output.outputs] == [6, 7]
    for item in output.outputs:
        positions = item.logprobs.positions
        chosen = [position.logprobs[0] for position in positions]
        assert [len(position.logprobs) for position in positions] == [3] * len(item.token_ids)
        assert item.cumulative_logprob == pytest.approx(sum(chosen), rel=1e-5)
    assert output.outputs[0].cumulative_logprob > output.outputs[1].cumulative_logprob


async def test_best_of_fails_whole_when_a_child_fails(stack) -> None:
    stack.decode.behave = failing(stack, 3, num_tokens=4 + 5 + 6, then=decode_cut)
    (output,) = await generate(stack, params=BEST_OF)
    assert [item.error.code for item in output.outputs] == [core.ERROR_CODE_KV_EXPIRED]
    assert [item.index for item in output.outputs] == [0]


async def test_best_of_one_is_one_request(stack) -> None:
    outputs = await generate(stack, params={"n": 1, "best_of": 1})
    assert tokens_of(completions(outputs)[0])[:-1] == list(stack.decode.answer)
    assert [child.task.sampling_params.best_of for child in stack.decode.requests] == [None]


@pytest.fixture
async def http_stack(start_stack):
    async with start_stack(http=True) as stack:
        yield stack


BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 100, "n": 2}


async def test_an_echo_has_the_prompts_logprobs_also_if_a_fork_is_faster(http_stack) -> None:
    http_stack.prefill.behave = http_stack.decode.behave = first_child_last(http_stack)
    body = {**BODY, "stream": True, "echo": True, "logprobs": 1}
    lines = (await http_stack.api.post("/v1/completions", json=body)).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    echoes = [event["choices"][0] for event in events[:2]]
    assert [echo["index"] for echo in echoes] == [0, 1]
    for echo in echoes:
        assert echo["text"] == "".join(echo["logprobs"]["tokens"]) == "hello"
        assert echo["logprobs"]["token_logprobs"][0] is None


async def test_http_answers_have_a_choice_for_each_completion(http_stack) -> None:
    answer = (await http_stack.api.post("/v1/completions", json=BODY)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert {choice["text"] for choice in answer["choices"]} == {ANSWER_TEXT}
    best = (await http_stack.api.post("/v1/completions", json={**BODY, "best_of": 3})).json()
    assert [choice["index"] for choice in best["choices"]] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"best_of": 3}, "best_of above n"),
        ({"use_beam_search": True, "temperature": 0.0}, "use_beam_search"),
    ],
)
async def test_http_refuses_to_stream_what_is_only_known_at_the_end(
    http_stack, fields, reason
) -> None:
    response = await http_stack.api.post("/v1/completions", json={**BODY, "stream": True, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "stream"
    assert reason in error["message"]
    assert http_stack.decode.requests == []


async def test_http_streams_events_of_every_completion(http_stack) -> None:
    http_stack.decode.step_s = 0.01
    response = await http_stack.api.post("/v1/completions", json={**BODY, "stream": True})
    assert response.text.count("data: [DONE]") == 1
    for index in range(2):
        assert response.text.count(f'"index":{index}') > 2
    assert response.text.count('"finish_reason":"stop"') == 2
