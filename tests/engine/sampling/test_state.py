"""Sampling many requests at once: nobody's parameters, faults or neighbours touch another."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_common.types.engine import EngineError, ErrorCode, ErrorFault, LogprobsLists
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.grammar.manager import TokenMasks
from pdserve_engine.request.sched_output import NewRequestData
from pdserve_engine.sampling.logits_rows import LogitsRows, Rows
from pdserve_engine.sampling.processors import LogitsProcessorFactory
from pdserve_engine.sampling.state import SamplingState, errors_of_masks

VOCAB_SIZE = 403
MAX_NUM_SEQS = 8
EOS = 1
PROMPT = (5, 9, 9, 100, 7)


class Favour:
    """A processor that pushes one token more, the longer the output is."""

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.token_id = params.top_k % vocab_size

    def __call__(self, output_token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        logits[self.token_id] += 0.5 * len(output_token_ids)
        return logits


def fails_when_made(params: SamplingParams, vocab_size: int) -> Favour:
    raise RuntimeError("no room")


def always(result: object) -> LogitsProcessorFactory:
    return lambda params, vocab_size: lambda output, logits: result


def fails_in_half(params: SamplingParams, vocab_size: int) -> LogitsProcessorFactory:
    def process(output_token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        logits.fill_(100.0)
        raise KeyError("lost")

    return process


FACTORIES: Mapping[str, LogitsProcessorFactory] = {
    "favour": Favour,
    "double": lambda params, vocab_size: lambda output, logits: logits * 2,
    "fails when made": fails_when_made,
    "fails in half": fails_in_half,
    "no tensor": always(7),
    "wrong shape": always(torch.zeros(5)),
    "wrong type": always(torch.zeros(VOCAB_SIZE, dtype=torch.float64)),
    "nan": always(torch.full((VOCAB_SIZE,), torch.nan)),
    "ban all": always(torch.full((VOCAB_SIZE,), -torch.inf)),
}


class Batch:
    """A SamplingState and what it is told of each request."""

    def __init__(self) -> None:
        self.state = SamplingState(
            max_num_seqs=MAX_NUM_SEQS,
            vocab_size=VOCAB_SIZE,
            device=torch.device("cpu"),
            logits_processors=FACTORIES,
        )
        self.outputs: dict[int, list[int]] = {}

    def add(
        self, row: int, params: SamplingParams, *, output: Sequence[int] = (), seed: int = 0
    ) -> None:
        self.outputs[row] = list(output)
        self.state.add(
            row,
            NewRequestData(
                request_id=str(row),
                all_token_ids=(*PROMPT, *output),
                num_prompt_tokens=len(PROMPT),
                sampling_params=params,
                seed=seed,
                eos_token_id=EOS,
                block_ids=(),
                num_computed_tokens=0,
            ),
        )

    def sample(
        self, rows: Sequence[int], logits: torch.Tensor
    ) -> tuple[list[int], dict[int, LogprobsLists], dict[int, EngineError]]:
        """The dicts are by row."""
        positions = np.array([len(self.outputs[row]) for row in rows])
        result = self.state.sample(
            logits.clone(), LogitsRows(np.array(rows), positions), self.output_token_ids
        )
        self.state.append_tokens(np.array(rows), result.token_ids)
        tokens = result.token_ids.tolist()
        for row, token in zip(rows, tokens, strict=True):
            self.outputs[row].append(token)
        return (
            tokens,
            {rows[i]: lists for i, lists in result.logprobs.items()},
            {rows[i]: error for i, error in result.errors.items()},
        )

    def sample_behind(
        self, drafts: Sequence[Sequence[int]], logits: torch.Tensor
    ) -> list[list[tuple[list[int], dict[int, LogprobsLists], dict[int, EngineError]]]]:
        """Sample row by row behind all it has and behind each of its drafts; return for each row
        what `sample` would for every token that counts.
        """
        each = [(row, tuple(d[:i])) for row, d in enumerate(drafts) for i in range(1 + len(d))]
        batch_rows = np.array([row for row, _ in each])
        positions = np.array([len(self.outputs[row]) + len(assumed) for row, assumed in each])
        assumed = {i: assumed for i, (_, assumed) in enumerate(each) if assumed}
        rows = LogitsRows(batch_rows, positions, assumed)
        sampled = self.state.sample(logits.clone(), rows, self.output_token_ids).accepted()
        self.state.append_tokens(sampled.rows.batch_rows, sampled.token_ids)
        results: list[list[Any]] = [[] for _ in drafts]
        for i, row in enumerate(sampled.rows.batch_rows.tolist()):
            token = int(sampled.token_ids[i])
            self.outputs[row].append(token)
            both = (sampled.logprobs, sampled.errors)
            results[row].append(([token], *({row: d[i]} if i in d else {} for d in both)))
        return results

    def output_token_ids(self, row: int) -> Rows:
        return np.array(self.outputs[row], dtype=np.int64)


def make_logits(n: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


TOKEN_IDS = st.integers(0, VOCAB_SIZE - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 30, 300]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.1, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {}, {3: 4.0, 77: -3.3}]),
    allowed_token_ids=st.sampled_from([(), (), tuple(range(5, 300, 3))]),
    bad_words_token_ids=st.lists(
        st.lists(TOKEN_IDS, min_size=1, max_size=2).map(tuple), max_size=2
    ).map(tuple),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_token_ids=st.sampled_from([(), (8, 11)]),
    logprobs=st.sampled_from([None, None, 0, 3, 20]),
    logits_processors=st.sampled_from([(), (), (), ("favour", "double"), ("fails in half",)]),
)


@settings(deadline=None, max_examples=30)
@given(
    requests=st.lists(
        st.tuples(PARAMS, st.lists(TOKEN_IDS, max_size=4), st.integers(-9, 9)),
        min_size=1,
        max_size=MAX_NUM_SEQS,
    ),
    seed=st.integers(0, 99),
)
def test_each_request_gets_what_it_would_get_alone(
    requests: list[tuple[SamplingParams, list[int], int]], seed: int
) -> None:
    together = Batch()
    rows = list(reversed(range(len(requests))))
    for row, (params, output, request_seed) in zip(rows, requests, strict=True):
        together.add(row, params, output=output, seed=request_seed)
    steps = [make_logits(len(requests), seed=seed + step) for step in range(3)]
    results = [together.sample(rows, logits) for logits in steps]
    for index, (params, output, request_seed) in enumerate(requests):
        alone = Batch()
        alone.add(0, params, output=output, seed=request_seed)
        for logits, (tokens, logprobs, errors) in zip(steps, results, strict=True):
            expected = alone.sample([0], logits[index : index + 1])
            assert tokens[index : index + 1] == expected[0]
            assert logprobs.get(rows[index]) == expected[1].get(0)
            assert errors.get(rows[index]) == expected[2].get(0)


@settings(deadline=None, max_examples=150)
@given(
    requests=st.lists(
        st.tuples(PARAMS, st.lists(TOKEN_IDS, max_size=2), st.integers(0, 5), st.integers(0, 5)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 99),
)
def test_rows_that_assume_the_right_tokens_bring_what_steps_one_by_one_would(
    requests: list[tuple[SamplingParams, list[int], int, int]], seed: int
) -> None:
    one_by_one, at_once, again = Batch(), Batch(), Batch()
    drafts, logits, expected = [], [], []
    for row, (params, output, num_drafts, num_right) in enumerate(requests):
        for batch in (one_by_one, at_once):
            batch.add(row, params, output=output, seed=seed)
        # The same ones each time: what was likely once is what penalties tell apart.
        logits.append(make_logits(1, seed=seed + row).repeat(1 + num_drafts, 1))
        steps = [one_by_one.sample([row], each) for each in logits[-1].split(1)]
        right = [tokens[0] for tokens, _, _ in steps[:num_right]]
        drafts.append(
            [*right, *((tokens[0] + 1) % VOCAB_SIZE for tokens, _, _ in steps[num_right:])]
        )
        del drafts[-1][num_drafts:]
        # What cannot be sampled is tried again without an assumption, and nothing comes behind it.
        broken = [i for i, (_, _, errors) in enumerate(steps) if errors]
        num_counting = max(1, broken[0]) if broken else len(steps)
        expected.append(steps[: min(1 + num_right, num_counting)])
    assert at_once.sample_behind(drafts, torch.cat(logits)) == expected
    for row, (params, _, _, _) in enumerate(requests):
        again.add(row, params, output=at_once.outputs[row], seed=seed)
    rows, next_logits = range(len(requests)), torch.cat([each[:1] for each in logits])
    assert at_once.sample(rows, next_logits) == again.sample(rows, next_logits)


@settings(deadline=None, max_examples=20)
@given(params=PARAMS, num_steps=st.integers(1, 4))
def test_a_request_that_comes_again_goes_on_as_if_it_had_stayed(
    params: SamplingParams, num_steps: int
) -> None:
    stayed, again = Batch(), Batch()
    stayed.add(0, params)
    # The same ones each time: what was likely once is what penalties tell apart.
    logits = make_logits(1)
    for _ in range(num_steps):
        stayed.sample([0], logits)
    again.add(5, params, output=stayed.outputs[0])
    assert again.sample([5], logits)[0] == stayed.sample([0], logits)[0]


def test_a_row_forgets_its_last_request() -> None:
    batch, logits = Batch(), make_logits(1)
    batch.add(
        0,
        SamplingParams(
            presence_penalty=2.0,
            logprobs=3,
            prompt_logprobs=1,
            logits_processors=("nan",),
            allowed_token_ids=(7,),
        ),
    )
    batch.sample([0], logits)
    batch.state.remove(0)
    assert batch.state.num_prompt_logprobs[0] == -1
    batch.add(0, SamplingParams(temperature=0.0))
    assert batch.sample([0], logits) == ([int(logits.argmax())], {}, {})


def test_logprobs_are_of_the_logits_before_any_parameter() -> None:
    batch, logits = Batch(), make_logits(1)
    params = SamplingParams(
        temperature=0.0, logprobs=1, logit_bias={40: 100.0}, repetition_penalty=1.5
    )
    batch.add(0, params)
    tokens, logprobs, _ = batch.sample([0], logits)
    assert tokens == [40]
    (lists,) = logprobs.values()
    best = int(logits.argmax())
    assert lists.logprob_token_ids == ((40, best),)
    expected = logits[0].double().log_softmax(0)[[40, best]].tolist()
    assert lists.logprobs[0] == pytest.approx(expected, abs=1e-6)
    assert lists.sampled_token_ranks == (1 + int((logits[0] > logits[0, 40]).sum()),)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails when made", r"logits processor fails when made: RuntimeError\('no room'\)"),
        ("fails in half", r"logits processor fails in half: KeyError\('lost'\)"),
        ("no tensor", "no tensor: .*returned int, not a tensor"),
        ("wrong shape", r"wrong shape: .*float32 \[5\], must be torch.float32 \[403\]"),
        ("wrong type", "wrong type: .*returned torch.float64"),
        ("not installed", "not installed: KeyError"),
        ("nan", "the highest logit is nan after the request's parameters"),
        ("ban all", "no token is left to choose"),
    ],
)
def test_a_failing_processor_fails_its_request_only(name: str, message: str) -> None:
    batch, logits = Batch(), make_logits(3)
    batch.add(0, SamplingParams(temperature=0.0, logprobs=2))
    batch.add(1, SamplingParams(logits_processors=("double", name), logprobs=2, top_k=3))
    batch.add(2, SamplingParams(temperature=0.0, presence_penalty=1.0))
    tokens, logprobs, errors = batch.sample([2, 1, 0], logits)
    assert tokens == [int(logits[0].argmax()), 0, int(logits[2].argmax())]
    assert list(errors) == [1]
    assert list(logprobs) == [0]
    assert re.search(message, errors[1].message)
    assert errors[1].fault is ErrorFault.REQUEST


def test_parameters_that_ban_everything_fail_the_request() -> None:
    batch = Batch()
    batch.add(0, SamplingParams(allowed_token_ids=(EOS, 4), min_tokens=2, stop_token_ids=(4,)))
    tokens, _, errors = batch.sample([0], make_logits(1))
    assert tokens == [0]
    assert "no token is left" in errors[0].message
    assert errors[0].code is ErrorCode.INVALID_ARGUMENT


def test_nan_logits_stay_in_their_row() -> None:
    params = SamplingParams(presence_penalty=1.0, logprobs=3, logit_bias={5: 1.0}, top_p=0.9)
    alone, together, logits = Batch(), Batch(), make_logits(2)
    for batch in (alone, together):
        batch.add(0, params)
    together.add(1, params)
    logits[1] = torch.nan
    expected = alone.sample([0], logits[:1])
    tokens, logprobs, errors = together.sample([0, 1], logits)
    assert (tokens[:1], {0: logprobs[0]}) == expected[:2]
    assert 0 not in errors
    assert 0 <= tokens[1] < VOCAB_SIZE


def mask_of(*allowed: Sequence[int]) -> TokenMasks:
    bits = np.zeros((len(allowed), -(-VOCAB_SIZE // 32) * 32), dtype=np.uint8)
    for row, token_ids in zip(bits, allowed, strict=True):
        row[list(token_ids)] = 1
    return TokenMasks(np.packbits(bits, axis=1, bitorder="little").view(np.int32), (), {})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_say_what_is_sampled_and_not_what_logprobs_are_of(temperature: float) -> None:
    batch, logits = Batch(), make_logits(2)
    params = SamplingParams(temperature=temperature, logprobs=1, presence_penalty=1.0)
    for row in range(2):
        batch.add(row, params)
    rows, masks = LogitsRows(np.arange(2), np.zeros(2, dtype=np.int64)), mask_of([40], range(403))
    sampled = batch.state.sample(logits.clone(), rows, batch.output_token_ids, masks)
    assert sampled.token_ids[0] == 40
    assert sampled.token_ids[1] == batch.sample([1], logits[1:])[0][0]
    assert not sampled.errors
    expected = logits[0].double().log_softmax(0)
    best = int(expected.argmax())
    assert sampled.logprobs[0].logprob_token_ids == ((40, best),)
    assert sampled.logprobs[0].logprobs[0] == pytest.approx(expected[[40, best]].tolist(), abs=1e-6)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(bad_words_token_ids=((40,),))])
def test_a_row_of_which_its_mask_allows_nothing_gets_no_token(params: SamplingParams) -> None:
    batch, logits = Batch(), make_logits(3)
    for row in range(3):
        batch.add(row, params)
    logits[0, [40, 50]] = -torch.inf
    rows = LogitsRows(np.arange(3), np.zeros(3, dtype=np.int64))
    masks = mask_of([40, 50], [], [40, 50])
    sampled = batch.state.sample(logits, rows, batch.output_token_ids, masks)
    assert list(sampled.errors) == [0, 1]
    assert "no token is left to choose" in sampled.errors[0].message
    assert sampled.token_ids[2] in (40, 50)
    assert list(errors_of_masks(masks, np.array([3, 3, 50]))) == [0, 1]


def test_plain_rows_do_nothing_for_features() -> None:
    batch = Batch()
    for row in range(MAX_NUM_SEQS):
        batch.add(row, SamplingParams(temperature=0.5, top_k=3))
    assert not batch.state._rules
    assert not batch.state.looks_back(np.arange(MAX_NUM_SEQS))
    assert not batch.state._penalties._seen
