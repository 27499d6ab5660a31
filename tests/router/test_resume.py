"""A client goes on with an answer whose stream broke."""

import threading
from dataclasses import replace

import grpc
import pytest
from prometheus_client import CollectorRegistry

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    Generate,
)
from pdserve_common.types.sampling_params import RequestOutputKind, SamplingParams
from pdserve_router.chat_formats.base import ParserOptions
from pdserve_router.requests.output.output_processor import RequestState
from pdserve_router.requests.output.outputs import Ending, Usage
from pdserve_router.requests.output.resume import ResumedCompletion
from pdserve_router.requests.parent_request import ParentRequest
from pdserve_router.requests.records.request_metrics import RequestMetrics, Timeline
from pdserve_router.requests.single_completion import SingleCompletion
from pdserve_router.text.parts import ToolCallDelta
from pdserve_router.workers.worker import WorkerState
from support.fake_worker import EOS, all_behave, decode, logprobs_of
from support.refusals import refused
from support.router_stack import ANSWER_TEXT, parts_of, text_of, tokens_of
from support.waiting import until

CUMULATIVE = core.REQUEST_OUTPUT_KIND_CUMULATIVE
FINAL_ONLY = core.REQUEST_OUTPUT_KIND_FINAL_ONLY


def make_state(tokenizer, resumed=None, parsing=None, **params) -> RequestState:
    asked = SamplingParams(seed=7, **{"max_tokens": 100, **params})
    return RequestState(
        EngineCoreRequest(
            request_id="internal",
            prompt_token_ids=(5, 6),
            task=Generate(asked),
            eos_token_id=EOS,
        ),
        asked,
        tokenizer=tokenizer,
        timeline=Timeline(arrival_ns=1, tokenize_start_ns=1, tokenize_end_ns=1),
        metrics=RouterMetrics(CollectorRegistry()),
        resumed=resumed,
        parsing=parsing,
    )


def stream(state: RequestState, token_ids, num_top=None) -> list:
    """Give it the rest of an answer, token by token, and return what its reader gets."""
    completions = []
    for at in range(len(state.token_ids), len(token_ids)):
        token_id = token_ids[at]
        output = EngineCoreOutput(
            request_id="internal",
            new_token_ids=(token_id,),
            first_token_index=at,
            finish_reason=FinishReason.STOP if token_id == EOS else None,
            new_logprobs=None if num_top is None else logprobs_of([token_id], num_top),
        )
        stop_string = state.accept(output, now_ns=2)
        completions.append(state.collector.take().outputs[0])
        if stop_string is not None:
            break
    usage = Usage(num_prompt_tokens=2, num_cached_tokens=0, num_output_tokens=3)
    metrics = RequestMetrics()
    state.finish(Ending(finish_reason=FinishReason.STOP, usage=usage, metrics=metrics))
    return [*completions, state.collector.take().outputs[0]]


LOOP = core.RepetitionDetectionParams(max_pattern_size=2, min_count=4)
TEXTS = ["hello world, the quick fox", "你好、世界 😀🎉 naïve", "ab ab aab aabb end"]
PARAMS = [
    {},
    {"stop": ("aabb", "wor", "世界")},
    {"stop": ("aabb", "wor", "世界"), "include_stop_str_in_output": True},
    {"stop": ("a", "h", "你"), "min_tokens": 5},
    {"detokenize": False},
    {"logprobs": 1},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("text", TEXTS)
async def test_deltas_go_on_exactly_where_they_stopped(tokenizer, text, params) -> None:
    token_ids = [*tokenizer.backend.encode(text).ids, EOS]
    num_top = params.get("logprobs")
    whole = stream(make_state(tokenizer, **params), token_ids, num_top)
    num_out = sum(len(part.token_ids) for part in whole)
    for border in range(1, num_out):
        resumed = ResumedCompletion(index=0, token_ids=tuple(token_ids[:border]))
        state = make_state(tokenizer, resumed, **params)
        assert state.resumed_end is None
        assert not state.collector.has_output
        rest = stream(state, token_ids, num_top)
        strip = [(part.text, part.token_ids, part.logprobs) for part in rest]
        assert strip == [(part.text, part.token_ids, part.logprobs) for part in whole[border:]]


CALLING = (
    "<think>\nhello world\n</think>\n\nthe fox\n<tool_call>\n"
    '{"arguments": {"city": "naïve \\"quick\\" 😀"}, "name": "now"}\n</tool_call>\n<tool_call>\n'
    '{"name": "get_weather", "arguments": {"of": [1, {"x": "</tool_call>"}]}}\n</tool_call> end'
)


async def test_pieces_and_ids_of_calls_go_on_exactly_where_they_stopped(tokenizer) -> None:
    parsing = ParserOptions(format="hermes", tools={"now": {}, "get_weather": {}})
    token_ids = [*tokenizer.backend.encode(CALLING).ids, EOS]
    whole_state = make_state(tokenizer, parsing=parsing)
    whole = [output.parts for output in stream(whole_state, token_ids)]
    calls = [each for parts in whole for each in parts if isinstance(each, ToolCallDelta)]
    assert [each.name for each in calls if each.id] == ["now", "get_weather"]
    for border in range(1, len(token_ids)):
        resumed = ResumedCompletion(index=0, token_ids=tuple(token_ids[:border]))
        state = make_state(tokenizer, resumed, parsing)
        rest = [output.parts for output in stream(state, token_ids)]
        assert rest == whole[border:]
        assert state.num_reasoning_tokens == whole_state.num_reasoning_tokens > 0


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
@pytest.mark.parametrize("text", TEXTS)
async def test_whole_outputs_hold_everything(tokenizer, text, kind) -> None:
    token_ids = [*tokenizer.backend.encode(text).ids, EOS]
    for border in range(1, len(token_ids)):
        resumed = ResumedCompletion(index=0, token_ids=tuple(token_ids[:border]))
        state = make_state(tokenizer, resumed, output_kind=kind, logprobs=1)
        last = stream(state, token_ids, 1)[-1]
        assert (last.text, list(last.token_ids)) == (text, token_ids)
        assert len(last.logprobs) == len(token_ids)
        assert last.logprobs[border:] == logprobs_of(token_ids[border:], 1)


def request(resume=(), n=1, **params) -> pb2.GenerateRequest:
    params = core.SamplingParams(**{"seed": 7, "n": n, **params})
    resume = [pb2.ResumedCompletion(**each) for each in resume]
    return pb2.GenerateRequest(text="hello", sampling_params=params, resume=resume)


async def generate(stack, **fields) -> list[pb2.RequestOutput]:
    return await stack.generate(request(**fields))


@pytest.fixture
def answer(tokenizer) -> list[int]:
    return [*tokenizer.backend.encode(ANSWER_TEXT).ids, EOS]


async def test_only_what_follows_is_sent_and_all_counts(stack, tokenizer, answer) -> None:
    await generate(stack, prompt_logprobs=1)
    borders = (1, 2, len(answer) - 1)
    for border in borders:
        resume = [{"index": 0, "token_ids": answer[:border]}]
        outputs = await generate(stack, resume=resume, prompt_logprobs=1)
        assert tokens_of(outputs) == answer[border:]
        # Each of its characters is a token, or several are.
        assert tokenizer.decode(answer[:border]) + text_of(outputs) == ANSWER_TEXT
        assert outputs[-1].usage.num_output_tokens == len(answer)
        assert not any(output.prompt_token_ids for output in outputs)
        assert not any(output.HasField("prompt_logprobs") for output in outputs)
        assert outputs[-1].seed == 7
        leg = stack.decode.requests[-1]
        assert (leg.attempt, list(leg.resume_output_token_ids)) == (0, answer[:border])
        assert leg.task.sampling_params.prompt_logprobs is None
        assert outputs[-1].metrics.ttft_ns > 0
    assert stack.metric("pdserve_generation_tokens_total", model="tiny") == (
        len(answer) + sum(len(answer) - border for border in borders)
    )


async def test_nothing_yet_is_a_request_like_any_other(stack, answer) -> None:
    outputs = await generate(stack, resume=[{"index": 0}], prompt_logprobs=1)
    assert tokens_of(outputs) == answer
    assert outputs[0].HasField("prompt_logprobs")
    assert outputs[0].prompt_token_ids


@pytest.mark.parametrize("kind", [CUMULATIVE, FINAL_ONLY])
async def test_cumulative_and_final_outputs_are_whole(stack, answer, kind) -> None:
    resume = [{"index": 0, "token_ids": answer[:3]}]
    outputs = await generate(stack, resume=resume, output_kind=kind)
    assert len(outputs) == 1 or kind == CUMULATIVE
    assert list(outputs[-1].outputs[0].token_ids) == answer
    assert outputs[-1].outputs[0].text == ANSWER_TEXT
    assert outputs[0].prompt_token_ids


@pytest.mark.parametrize(
    ("border", "params", "ending"),
    [
        (None, {}, (core.FINISH_REASON_STOP, "", None)),
        (4, {"max_tokens": 4}, (core.FINISH_REASON_LENGTH, "", None)),
        (4, {"stop_token_ids": "last"}, (core.FINISH_REASON_STOP, "", "last")),
        (10, {"stop": ["wor"]}, (core.FINISH_REASON_STOP, "wor", None)),
        ([5] * 4, {"repetition_detection": LOOP}, (core.FINISH_REASON_REPETITION, "", None)),
    ],
    ids=["eos", "max_tokens", "stop token", "stop string", "repetition"],
)
async def test_what_was_over_ends_at_once(stack, answer, border, params, ending) -> None:
    token_ids = border if isinstance(border, list) else answer[:border]
    last = token_ids[-1]
    if params.get("stop_token_ids"):
        params = {"stop_token_ids": [last]}
    whole = await generate(stack, **params)
    num_before = len(stack.decode.requests)
    if params.get("stop"):
        token_ids = tokens_of(whole)
    outputs = await generate(stack, resume=[{"index": 0, "token_ids": token_ids}], **params)
    (output,) = outputs
    completion = output.outputs[0]
    stop_token = completion.stop_token_id if completion.HasField("stop_token_id") else None
    expected = (ending[0], ending[1], last if ending[2] else None)
    assert (completion.finish_reason, completion.stop_string, stop_token) == expected
    assert not completion.token_ids
    assert output.usage.num_output_tokens == len(token_ids)
    assert len(stack.decode.requests) == num_before


async def test_a_finished_answer_is_not_told_again(stack, answer) -> None:
    resume = [{"index": 0, "token_ids": answer[:5], "finished": True}]
    (output,) = await generate(stack, resume=resume, stop=["nothing of this"])
    assert (output.outputs[0].text, list(output.outputs[0].token_ids)) == ("", [])
    assert output.usage.num_output_tokens == 5
    assert stack.decode.requests == []


async def test_each_completion_goes_on_from_its_own_border(stack, answer) -> None:
    resume = [
        {"index": 1, "token_ids": answer, "finished": True},
        {"index": 2, "token_ids": answer[:6]},
    ]
    outputs = await generate(stack, resume=resume, n=3)
    assert tokens_of(outputs, 0) == answer
    assert parts_of(outputs, 1) == []
    assert tokens_of(outputs, 2) == answer[6:]
    assert outputs[-1].usage.num_output_tokens == 3 * len(answer)
    legs = {leg.request_id[0]: leg for leg in stack.decode.requests}
    assert sorted(legs) == ["0", "2"]
    assert list(legs["2"].resume_output_token_ids) == answer[:6]
    assert legs["2"].fork_of is None
    assert [leg.task.sampling_params.seed for leg in stack.decode.requests] == [7, 9]


async def test_when_all_were_finished_only_the_end_is_told(stack, answer) -> None:
    resume = [{"index": i, "token_ids": answer, "finished": True} for i in range(2)]
    (output,) = await generate(stack, resume=resume, n=2)
    assert len(output.outputs) == 0
    assert output.usage.num_output_tokens == 2 * len(answer)
    kinds = await generate(stack, resume=resume, n=2, output_kind=CUMULATIVE)
    assert [completion.text for completion in kinds[-1].outputs] == [ANSWER_TEXT] * 2


def versions_of(outputs) -> set[str]:
    return {part.model_version for output in outputs for part in output.outputs}


async def change(stack, number, **fields) -> None:
    """Restart a decode worker as another one."""
    worker, client = stack.decodes[number], stack.server.pool.decode[number]
    worker.info = replace(worker.info, epoch=str(number) * 32, **fields)
    worker.cut()
    await until(lambda: client.info == worker.info and client.is_ready)


async def test_an_answer_goes_on_exactly_where_it_came_from(stack, answer) -> None:
    whole = await generate(stack, n=2)
    (model_version,) = versions_of(whole)
    assert model_version
    resume = [
        {"index": i, "token_ids": answer[:3], "model_version": model_version} for i in range(2)
    ]
    outputs = await generate(stack, resume=resume, n=2)
    assert versions_of(outputs) == {model_version}
    assert outputs[-1].metrics.determinism == whole[-1].metrics.determinism == "exact"
    # Of a part of the answer nobody knows who computed it.
    del resume[1]["model_version"]
    outputs = await generate(stack, resume=resume, n=2)
    assert outputs[-1].metrics.determinism == "consistent"
    assert {part.model_version for part in parts_of(outputs, 0)} == {model_version}
    (weights,) = {part.model_version for part in parts_of(outputs, 1)}
    assert model_version.startswith(f"{weights}-")


async def test_an_answer_that_was_over_is_as_exact_as_it_was(stack, answer) -> None:
    (model_version,) = versions_of(await generate(stack))
    for fields, determinism in (({"model_version": model_version}, "exact"), ({}, "consistent")):
        outputs = await generate(stack, resume=[{"index": 0, "token_ids": answer, **fields}])
        assert outputs[-1].metrics.determinism == determinism


async def test_no_other_weights_go_on_with_an_answer(start_stack, answer) -> None:
    """As in the middle of an update: what they would say is the end of another answer."""
    async with start_stack(decode=2) as stack:
        (model_version,) = versions_of(await generate(stack))
        await change(stack, 1, weights_digest="b" * 64)
        resume = [{"index": 0, "token_ids": answer[:3], "model_version": model_version}]
        for _ in range(4):
            outputs = await generate(stack, resume=resume)
            assert tokens_of(outputs) == answer[3:]
            assert outputs[-1].metrics.determinism == "exact"
        assert not [leg for leg in stack.decodes[1].requests if leg.resume_output_token_ids]
        await change(stack, 0, weights_digest="b" * 64)
        num_before = sum(len(worker.requests) for worker in stack.workers)
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be resumed here") as raised:
            await generate(stack, resume=resume)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        # One completion of two would be another model's.
        (updated,) = versions_of(await generate(stack)) - {model_version}
        resume.append({"index": 1, "token_ids": answer[:2], "model_version": updated})
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be resumed here"):
            await generate(stack, resume=resume, n=2)
        # What nothing came of, and what is over, is nobody's any more.
        resume[0]["finished"] = True
        outputs = await generate(
            stack, resume=[*resume, {"index": 2, "model_version": model_version}], n=3
        )
        assert tokens_of(outputs, 1) == answer[2:]
        assert sum(len(worker.requests) for worker in stack.workers) > num_before


async def test_other_arithmetic_goes_on_but_not_exactly(start_stack, answer) -> None:
    async with start_stack() as stack:
        (model_version,) = versions_of(await generate(stack))
        await change(stack, 0, numerics_id="another machine")
        resume = [{"index": 0, "token_ids": answer[:3], "model_version": model_version}]
        outputs = await generate(stack, resume=resume)
        assert tokens_of(outputs) == answer[3:]
        assert outputs[-1].metrics.determinism == "consistent"


async def test_a_resumed_request_recovers_like_any_other(start_stack, answer) -> None:
    async def fail_once(running) -> None:
        if running.request.attempt:
            return await decode(running)
        running.emit(*answer[3:6], at=3)
        return running.fail(ErrorCode.DRAINING, "handed back", is_retryable=True)

    async with start_stack(decode=2) as stack:
        all_behave(stack.decodes, fail_once)
        outputs = await generate(stack, resume=[{"index": 0, "token_ids": answer[:3]}])
    assert tokens_of(outputs) == answer[3:]
    (again,) = [leg for worker in stack.decodes for leg in worker.requests if leg.attempt]
    assert list(again.resume_output_token_ids) == answer[:6]
    assert outputs[-1].metrics.num_redrives == 1


def before_making(monkeypatch, act) -> None:
    """Let `act` happen in the thread that makes a live request, before it does."""
    for kind in (SingleCompletion, ParentRequest):

        def make(*args, kind=kind, **options):
            act()
            return kind(*args, **options)

        monkeypatch.setattr(f"pdserve_router.router.{kind.__name__}", make)


async def test_many_tokens_are_taken_beside_the_event_loop(stack, answer, monkeypatch) -> None:
    monkeypatch.setattr("pdserve_router.router.INLINE_RESUMED_TOKENS", 2)
    threads = []
    before_making(monkeypatch, lambda: threads.append(threading.current_thread()))
    for num_tokens in (2, 3):
        outputs = await generate(stack, resume=[{"index": 0, "token_ids": answer[:num_tokens]}])
        assert tokens_of(outputs) == answer[num_tokens:]
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


@pytest.mark.parametrize(("n", "max_redrives"), [(1, 3), (1, 0), (2, 0)])
async def test_a_worker_may_be_gone_when_the_request_is_sent(
    start_stack, answer, monkeypatch, n, max_redrives
) -> None:
    monkeypatch.setattr("pdserve_router.router.INLINE_RESUMED_TOKENS", 0)
    async with start_stack(max_redrives=max_redrives) as stack:

        def lose_prefill() -> None:
            stack.server.pool.prefill[0].state = WorkerState.DOWN

        before_making(monkeypatch, lose_prefill)
        resume = [{"index": 0, "token_ids": answer[:3]}]
        outputs = await generate(stack, resume=resume, n=n)
        if max_redrives:
            assert tokens_of(outputs) == answer[3:]
        else:
            assert outputs[-1].outputs[0].error.code == core.ERROR_CODE_NO_WORKER
            assert stack.decode.requests == []


async def test_a_resume_of_too_many_tokens_is_refused(stack, answer, monkeypatch) -> None:
    monkeypatch.setattr("pdserve_router.requests.output.resume.MAX_RESUMED_TOKENS", 3)
    resume = [{"index": i, "token_ids": answer[:2]} for i in range(2)]
    with pytest.raises(grpc.aio.AioRpcError, match="resume has 4 tokens, at most 3"):
        await generate(stack, resume=resume, n=2)


REFUSED = [
    ([{"index": 1}], {}, "resume has index 1, must be 0 to 0"),
    ([{"index": 0}, {"index": 0}], {}, "resume names an index twice"),
    ([{"index": 0, "token_ids": [5, 99999]}], {}, "resume.token_ids has 99999"),
    (
        [{"index": 0, "token_ids": [5, 6, 7]}],
        {"max_tokens": 2},
        "resume has 3 tokens of completion 0, max_tokens is 2",
    ),
    ([{"index": 0}], {"seed": None}, "resume needs sampling_params.seed"),
    (
        [{"index": 0, "model_version": "here"}],
        {},
        "resume.model_version is 'here' (4 characters), must be",
    ),
    ([{"index": 0}], {"n": 2, "best_of": 3}, "resume is set with best_of"),
    (
        [{"index": 0}],
        {"use_beam_search": True, "temperature": 0.0, "n": 2},
        "resume is set with use_beam_search",
    ),
]


async def test_what_cannot_be_resumed_is_refused(stack) -> None:
    for resume, params, message in REFUSED:
        with refused(grpc.StatusCode.INVALID_ARGUMENT, message):
            await generate(stack, resume=resume, **params)
    assert stack.decode.requests == []
