"""Rule K7, text and the collector."""

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.errors import PdserveError
from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    Generate,
    LogprobsLists,
)
from pdserve_common.types.sampling_params import RequestOutputKind, SamplingParams
from pdserve_router.requests.output.output_processor import RequestState
from pdserve_router.requests.output.outputs import Ending, Usage
from pdserve_router.requests.records.request_metrics import RequestMetrics, Timeline
from support.fake_worker import logprobs_of


class Harness:
    def __init__(self, tokenizer, *, attempt=0, prompt=(5, 6), **params) -> None:
        self.registry = CollectorRegistry()
        asked = SamplingParams(seed=7, **params)
        self.state = RequestState(
            EngineCoreRequest(
                request_id="internal",
                external_req_id="client's",
                prompt_token_ids=prompt,
                task=Generate(asked),
                attempt=attempt,
            ),
            asked,
            tokenizer=tokenizer,
            timeline=Timeline(arrival_ns=1, tokenize_start_ns=1, tokenize_end_ns=1),
            metrics=RouterMetrics(self.registry),
        )

    def accept(self, *token_ids, at, attempt=0, finish=None, **more) -> str | None:
        return self.state.accept(
            EngineCoreOutput(
                request_id="internal",
                new_token_ids=token_ids,
                first_token_index=at,
                attempt=attempt,
                finish_reason=finish,
                **more,
            ),
            time.monotonic_ns(),
        )

    def accept_with_logprobs(self, *token_ids, at, num_repeated=0, **more) -> str | None:
        logprobs = logprobs_of(token_ids[num_repeated:], 1)
        return self.accept(*token_ids, at=at, new_logprobs=logprobs, **more)

    async def completion(self):
        return (await self.state.collector.get()).outputs[0]

    def finish(self, reason=FinishReason.LENGTH) -> None:
        usage = Usage(num_prompt_tokens=2, num_cached_tokens=0, num_output_tokens=3)
        self.state.finish(Ending(finish_reason=reason, usage=usage, metrics=RequestMetrics()))

    def duplicates(self, match: str) -> float:
        name = "pdserve_duplicate_tokens_total"
        return self.registry.get_sample_value(name, {"match": match}) or 0


@pytest.fixture
def make(tokenizer):
    return lambda **options: Harness(tokenizer, **options)


async def test_a_repeated_first_token_is_checked_and_dropped(make) -> None:
    harness = make()
    harness.accept(10, at=0)
    harness.accept(10, 11, at=0)
    assert harness.state.token_ids == [10, 11]
    assert (harness.duplicates("true"), harness.duplicates("false")) == (1, 0)


async def test_the_first_token_may_come_from_decode_first(make) -> None:
    harness = make()
    harness.accept(10, 11, at=0)
    harness.accept(10, at=0)
    assert harness.state.token_ids == [10, 11]
    assert harness.duplicates("true") == 1


async def test_a_different_duplicate_is_counted_and_an_error(make) -> None:
    harness = make()
    harness.accept(10, at=0)
    with pytest.raises(PdserveError, match="repeated tokens 0 to 0"):
        harness.accept(99, 11, at=0)
    assert harness.state.token_ids == [10]
    assert harness.duplicates("false") == 1


async def test_a_gap_is_an_error(make) -> None:
    harness = make()
    harness.accept(10, at=0)
    with pytest.raises(PdserveError, match="tokens 1 to 2 of the answer are missing"):
        harness.accept(13, at=3)
    assert harness.state.token_ids == [10]


async def test_an_end_that_fails_can_be_told_as_an_error(make, monkeypatch) -> None:
    def broken(self) -> str:
        raise ValueError("broken on purpose")

    harness = make()
    harness.accept(10, at=0)
    monkeypatch.setattr("pdserve_router.text.detokenizer.Detokenizer.finish", broken)
    with pytest.raises(ValueError, match="on purpose"):
        harness.finish()
    assert harness.state.ending is None
    harness.finish(FinishReason.ERROR)
    assert (await harness.completion()).finish_reason is FinishReason.ERROR


async def test_outputs_of_another_attempt_are_dropped(make) -> None:
    harness = make(attempt=2)
    assert harness.accept(10, at=0, attempt=1) is None
    assert harness.state.token_ids == []
    harness.accept(10, at=0, attempt=2)
    assert harness.state.token_ids == [10]


async def test_eos_counts_as_a_token_and_is_no_text(make, tokenizer) -> None:
    harness = make(skip_special_tokens=False)
    harness.accept(*tokenizer.backend.encode("hi").ids, 1, at=0, finish=FinishReason.STOP)
    harness.finish(FinishReason.STOP)
    output = await harness.state.collector.get()
    assert output.outputs[0].text == "hi"
    assert output.outputs[0].token_ids[-1] == 1


async def test_tokens_behind_a_stop_string_are_dropped(make, tokenizer) -> None:
    harness = make(stop=("lo",))
    token_ids = [tokenizer.backend.encode(c).ids[0] for c in "hello you"]
    assert harness.accept(*token_ids, at=0) == "lo"
    harness.finish(FinishReason.STOP)
    output = await harness.state.collector.get()
    assert output.outputs[0].text == "hel"
    assert output.outputs[0].token_ids == tuple(token_ids[:5])


async def test_without_detokenize_there_are_only_tokens(make) -> None:
    harness = make(detokenize=False)
    harness.accept(10, 11, at=0)
    output = await harness.state.collector.get()
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", (10, 11))


async def test_deltas_merge_while_nobody_reads(make, tokenizer) -> None:
    harness = make()
    token_ids = tokenizer.backend.encode("hello world").ids
    for at, token_id in enumerate(token_ids):
        harness.accept(token_id, at=at)
    harness.finish()
    output = await harness.state.collector.get()
    assert output.outputs[0].text == "hello world"
    assert output.outputs[0].token_ids == tuple(token_ids)
    assert output.finished
    assert output.usage is not None
    assert output.metrics is not None


async def test_every_delta_is_given_once(make, tokenizer) -> None:
    harness = make()
    texts = []
    for at, token_id in enumerate(tokenizer.backend.encode("hello world").ids):
        harness.accept(token_id, at=at)
        output = await harness.state.collector.get()
        assert output.prompt_token_ids == ((5, 6) if at == 0 else ())
        assert (output.request_id, output.seed) == ("client's", 7)
        texts.append(output.outputs[0].text)
    assert "".join(texts) == "hello world"
    assert len(texts) > 1


async def test_cumulative_outputs_repeat_everything(make, tokenizer) -> None:
    harness = make(output_kind=RequestOutputKind.CUMULATIVE)
    texts = []
    for at, token_id in enumerate(tokenizer.backend.encode("hello world").ids):
        harness.accept(token_id, at=at)
        output = await harness.state.collector.get()
        assert len(output.outputs[0].token_ids) == at + 1
        texts.append(output.outputs[0].text)
    assert texts[-1] == "hello world"
    assert all("hello world".startswith(text) for text in texts)


async def test_final_only_is_silent_until_the_end(make) -> None:
    harness = make(output_kind=RequestOutputKind.FINAL_ONLY)
    harness.accept(10, at=0)
    harness.accept(11, at=1)
    getting = asyncio.create_task(harness.state.collector.get())
    await asyncio.sleep(0)
    assert not getting.done()
    harness.finish()
    output = await getting
    assert output.outputs[0].token_ids == (10, 11)


async def test_logprobs_come_with_their_tokens_and_add_up(make) -> None:
    harness = make(logprobs=1)
    harness.accept_with_logprobs(10, at=0)
    first = await harness.completion()
    harness.accept_with_logprobs(11, 12, at=1)
    second = await harness.completion()
    assert (first.logprobs, second.logprobs) == (logprobs_of([10], 1), logprobs_of([11, 12], 1))
    assert first.cumulative_logprob == -10 / 64
    assert second.cumulative_logprob == -(10 + 11 + 12) / 64


NOTHING = LogprobsLists(logprob_token_ids=((),), logprobs=((),), sampled_token_ranks=(0,))


@pytest.mark.parametrize(
    "logprobs",
    [logprobs_of([10, 11, 12], 1), logprobs_of([11, 12], 1), NOTHING + logprobs_of([11, 12], 1)],
)
async def test_a_repeated_token_takes_its_logprobs_along(make, logprobs) -> None:
    """Whether the worker knows the repeated token's logprobs or, as D, does not."""
    harness = make(logprobs=1)
    harness.accept_with_logprobs(10, at=0)
    harness.accept(10, 11, 12, at=0, new_logprobs=logprobs)
    completion = await harness.completion()
    assert completion.token_ids == (10, 11, 12)
    assert completion.logprobs == logprobs_of([10, 11, 12], 1)
    assert completion.cumulative_logprob == -(10 + 11 + 12) / 64


async def test_an_output_without_tokens_has_no_logprobs(make) -> None:
    harness = make(logprobs=0)
    harness.accept_with_logprobs(10, at=0)
    await harness.completion()
    harness.finish()
    completion = await harness.completion()
    assert (completion.token_ids, completion.logprobs) == ((), None)
    assert completion.cumulative_logprob == -10 / 64


async def test_logprobs_nobody_asked_for_are_not_passed_on(make) -> None:
    harness = make()
    harness.accept_with_logprobs(10, at=0, new_prompt_logprobs=logprobs_of([6], 1))
    output = await harness.state.collector.get()
    assert (output.prompt_logprobs, output.outputs[0].logprobs) == (None, None)
    assert output.outputs[0].cumulative_logprob is None


async def test_missing_logprobs_are_an_error(make) -> None:
    harness = make(logprobs=1)
    with pytest.raises(PdserveError, match="sent 1 tokens without their logprobs"):
        harness.accept(10, at=0)
    with pytest.raises(PdserveError, match="sent 1 tokens without their logprobs"):
        harness.accept_with_logprobs(10, 11, at=0, num_repeated=1)


@pytest.mark.parametrize(("token_ids", "values"), [((), ()), ((10, 11), (-1.0,))])
async def test_malformed_positions_are_an_error(make, token_ids, values) -> None:
    logprobs = LogprobsLists(
        logprob_token_ids=(token_ids,), logprobs=(values,), sampled_token_ranks=(1,)
    )
    for params, more in (
        ({"logprobs": 1}, {"new_logprobs": logprobs}),
        ({"prompt_logprobs": 1}, {"new_prompt_logprobs": logprobs}),
    ):
        with pytest.raises(PdserveError, match=f"{len(token_ids)} tokens and {len(values)} logpr"):
            make(**params).accept(10, at=0, **more)


async def test_slices_of_prompt_logprobs_are_whole_on_the_first_output(make) -> None:
    harness = make(prompt_logprobs=1, prompt=(5, 6, 7, 8))
    harness.accept(at=0, new_prompt_logprobs=logprobs_of([6, 7], 1))
    assert not harness.state.collector.has_output
    harness.accept(10, at=0, new_prompt_logprobs=logprobs_of([8], 1))
    output = await harness.state.collector.get()
    assert output.prompt_logprobs == NOTHING + logprobs_of([6, 7, 8], 1)
    assert output.outputs[0].token_ids == (10,)
    # A worker that computes the prompt again, after it was preempted, adds nothing.
    harness.accept(11, at=1, new_prompt_logprobs=logprobs_of([6, 7, 8], 1))
    assert (await harness.state.collector.get()).prompt_logprobs is None


async def test_missing_prompt_logprobs_are_an_error(make) -> None:
    harness = make(prompt_logprobs=1, prompt=(5, 6, 7, 8))
    harness.accept(at=0, new_prompt_logprobs=logprobs_of([6, 7], 1))
    with pytest.raises(PdserveError, match="of 2 prompt tokens, the prompt has 3 besides"):
        harness.accept(10, at=0)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("outputs", [[1, 2, 6], [1, 8], [9]])
async def test_a_stop_string_may_span_the_first_token_and_those_of_decode(
    make, tokenizer, include, outputs
) -> None:
    """However the answer is cut into messages."""
    harness = make(stop=("hel",), include_stop_str_in_output=include)
    token_ids = [tokenizer.backend.encode(c).ids[0] for c in "hello you"]
    at = 0
    stop = None
    for size in outputs:
        stop = harness.accept(*token_ids[at : at + size], at=at)
        at += size
        if stop is not None:
            break
    assert stop == "hel"
    harness.finish(FinishReason.STOP)
    completion = await harness.completion()
    assert completion.text == ("hel" if include else "")
    assert completion.token_ids == tuple(token_ids[:3])


async def test_a_stop_string_within_min_tokens_does_not_end_a_merged_output(
    make, tokenizer
) -> None:
    harness = make(stop=("l",), min_tokens=3)
    token_ids = [tokenizer.backend.encode(c).ids[0] for c in "hello you"]
    assert harness.accept(*token_ids, at=0) == "l"
    harness.finish(FinishReason.STOP)
    completion = await harness.completion()
    assert (completion.text, len(completion.token_ids)) == ("hel", 4)


async def test_a_token_taken_alone_is_one_accepted(make, tokenizer) -> None:
    """Whoever reads, and however the text is cut into tokens."""
    token_ids = tokenizer.backend.encode("ok \U0001f600 na\u00efve \u4f60\u597d").ids
    for kind in RequestOutputKind:
        alone, whole = make(output_kind=kind), make(output_kind=kind)
        for at, token_id in enumerate(token_ids):
            assert not alone.state.take_token(token_id, at, 9)  # nobody has said that it may
            alone.state.takes_tokens = True
            assert alone.state.take_token(token_id, at, 9)
            assert not alone.state.take_token(token_id, at, 9)
            alone.state.takes_tokens = False
            whole.accept(token_id, at=at)
            if at % 3 == 0 and kind is not RequestOutputKind.FINAL_ONLY:
                assert await alone.completion() == await whole.completion()
        for harness in (alone, whole):
            harness.finish()
        assert await alone.completion() == await whole.completion()
        assert alone.state.timeline.last_token_ns == 9


@pytest.mark.parametrize("params", [{"stop": ("x",)}, {"logprobs": 1}, {"detokenize": False}])
async def test_a_token_that_more_depends_on_is_not_taken_alone(make, params) -> None:
    harness = make(**params)
    harness.state.takes_tokens = True
    assert not harness.state.take_token(10, 0, 9)


async def test_text_is_read_at_once_only_while_the_reader_waits(make, tokenizer) -> None:
    harness = make()
    collector = harness.state.collector
    harness.accept(*tokenizer.backend.encode("a").ids, at=0)
    assert collector.take_text() is None  # the first output is the reader's
    await collector.get()
    (token_id,) = tokenizer.backend.encode("b").ids
    told = []
    collector.on_text = lambda: told.append("text")
    harness.state.takes_tokens = True
    for at in (1, 2):
        harness.state.take_token(token_id, at, 9)
    assert told == ["text"]
    assert not collector.is_awaited  # the reader has not come back for more
    reader = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    assert collector.is_awaited
    assert collector.take_text() == ("bb", [token_id, token_id])
    harness.state.take_token(token_id, 3, 9)
    harness.finish()
    assert collector.take_text() is None  # its end goes with it
    assert (await reader).outputs[0].text == "b"
