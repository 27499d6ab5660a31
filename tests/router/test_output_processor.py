"""Rule K7, text and the collector."""

import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.engine_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    RequestOutputKind,
    SamplingParams,
)
from pdserve_common.errors import PdserveError
from pdserve_common.metrics import RouterMetrics
from pdserve_router.output_processor import Ending, RequestState, Usage
from pdserve_router.request_metrics import RequestMetrics, Timeline


class Harness:
    def __init__(self, tokenizer, *, attempt=0, **params) -> None:
        self.registry = CollectorRegistry()
        self.state = RequestState(
            EngineCoreRequest(
                request_id="internal",
                external_req_id="client's",
                prompt_token_ids=(5, 6),
                sampling_params=SamplingParams(seed=7, **params),
                attempt=attempt,
            ),
            tokenizer=tokenizer,
            timeline=Timeline(arrival_ns=1, tokenize_start_ns=1, tokenize_end_ns=1),
            metrics=RouterMetrics(self.registry),
        )

    def accept(self, *token_ids, at, attempt=0, finish=None) -> str | None:
        return self.state.accept(
            EngineCoreOutput(
                request_id="internal",
                new_token_ids=token_ids,
                first_token_index=at,
                attempt=attempt,
                finish_reason=finish,
            )
        )

    def finish(self, reason=FinishReason.LENGTH) -> None:
        usage = Usage(num_prompt_tokens=2, num_cached_tokens=0, num_output_tokens=3)
        self.state.finish(Ending(finish_reason=reason, usage=usage, metrics=RequestMetrics()))

    def duplicates(self, match: str) -> float:
        name = "pdserve_duplicate_tokens_total"
        return self.registry.get_sample_value(name, {"match": match}) or 0


@pytest.fixture
def make(tokenizer):
    return lambda **options: Harness(tokenizer, **options)


async def test_contiguous_tokens_are_taken(make) -> None:
    harness = make()
    harness.accept(10, at=0)
    harness.accept(11, 12, at=1)
    assert harness.state.token_ids == [10, 11, 12]


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
    assert output.completion.text == "hi"
    assert output.completion.token_ids[-1] == 1


async def test_tokens_behind_a_stop_string_are_dropped(make, tokenizer) -> None:
    harness = make(stop=("lo",))
    token_ids = [tokenizer.backend.encode(c).ids[0] for c in "hello you"]
    assert harness.accept(*token_ids, at=0) == "lo"
    harness.finish(FinishReason.STOP)
    output = await harness.state.collector.get()
    assert output.completion.text == "hel"
    assert output.completion.token_ids == tuple(token_ids[:5])


async def test_without_detokenize_there_are_only_tokens(make) -> None:
    harness = make(detokenize=False)
    harness.accept(10, 11, at=0)
    output = await harness.state.collector.get()
    assert (output.completion.text, output.completion.token_ids) == ("", (10, 11))


async def test_deltas_merge_while_nobody_reads(make, tokenizer) -> None:
    harness = make()
    token_ids = tokenizer.backend.encode("hello world").ids
    for at, token_id in enumerate(token_ids):
        harness.accept(token_id, at=at)
    harness.finish()
    output = await harness.state.collector.get()
    assert output.completion.text == "hello world"
    assert output.completion.token_ids == tuple(token_ids)
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
        texts.append(output.completion.text)
    assert "".join(texts) == "hello world"
    assert len(texts) > 1


async def test_cumulative_outputs_repeat_everything(make, tokenizer) -> None:
    harness = make(output_kind=RequestOutputKind.CUMULATIVE)
    texts = []
    for at, token_id in enumerate(tokenizer.backend.encode("hello world").ids):
        harness.accept(token_id, at=at)
        output = await harness.state.collector.get()
        assert len(output.completion.token_ids) == at + 1
        texts.append(output.completion.text)
    assert texts[-1] == "hello world"
    assert all("hello world".startswith(text) for text in texts)


async def test_final_only_is_silent_until_the_end(make) -> None:
    harness = make(output_kind=RequestOutputKind.FINAL_ONLY)
    harness.accept(10, at=0)
    harness.accept(11, at=1)
    assert not harness.state.collector._wake.is_set()
    harness.finish()
    output = await harness.state.collector.get()
    assert output.completion.token_ids == (10, 11)
