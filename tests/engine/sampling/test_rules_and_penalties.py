"""What changes logits before the temperature, against vLLM's definitions over a model's logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampling_reference import adjusted

from pdserve_common.limits.validation import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.sampling.logits_rows import LogitsRows
from pdserve_engine.sampling.penalties import Penalties
from pdserve_engine.sampling.processors import NO_PROCESSORS
from pdserve_engine.sampling.rules import TokenRules
from pdserve_kernels import select
from pdserve_kernels.sampling_batch import MIN_TEMPERATURE

CPU = torch.device("cpu")
VOCAB_SIZE = 199
PROMPT = [5, 9, 9, 100, 7, 3, 198, 44]
OUTPUT = [7, 7, 61, 0, 61, 61, 150]
EOS = 1


@pytest.fixture(scope="module")
def logits(make_model: Callable[..., Path], hf_model: Callable[..., Any]) -> torch.Tensor:
    with torch.inference_mode():
        return hf_model(make_model())(torch.tensor([PROMPT + OUTPUT])).logits[0, -1].clone()


def make_rules(params: SamplingParams) -> TokenRules:
    return TokenRules(params, (EOS,), vocab_size=VOCAB_SIZE, device=CPU, factories=NO_PROCESSORS)


def make_penalties(params: SamplingParams, *, row: int = 0, num_known: int = 7) -> Penalties:
    penalties = Penalties(max_num_seqs=8, kernels=select(CPU))
    penalties.add(row, params, PROMPT + OUTPUT[:num_known], len(PROMPT))
    return penalties


def rows_of(*batch_rows: int) -> LogitsRows:
    return LogitsRows(np.array(batch_rows), np.zeros(len(batch_rows), dtype=np.int64))


RULES = {
    "allowed": SamplingParams(allowed_token_ids=(3, 7, 198, 7)),
    "bias": SamplingParams(logit_bias={0: 5.5, 198: -100.0, 7: 0.1}),
    "min_tokens": SamplingParams(min_tokens=8),
    "min_tokens reached": SamplingParams(min_tokens=7, logit_bias={2: 1.0}),
    "bad words": SamplingParams(
        bad_words_token_ids=((4,), (150, 8), (61, 150, 9), (61, 10), (*OUTPUT, 11))
    ),
    "bad words longer than the output": SamplingParams(
        bad_words_token_ids=((44, *OUTPUT, 12), tuple(range(30)), (5,))
    ),
    "all": SamplingParams(
        allowed_token_ids=tuple(range(0, 199, 2)),
        bad_words_token_ids=((150, 8),),
        min_tokens=20,
        logit_bias={1: 50.0, 8: 50.0, 10: 2.0},
    ),
}


@pytest.mark.parametrize("params", RULES.values(), ids=RULES.keys())
def test_rules_are_those_of_the_reference(logits: torch.Tensor, params: SamplingParams) -> None:
    expected = adjusted(logits, params, PROMPT, OUTPUT, (EOS,))
    changed = logits.clone()
    assert make_rules(params).apply(changed, np.array(OUTPUT)) == bool(expected.isneginf().any())
    assert torch.equal(changed.isneginf(), expected.isneginf())
    torch.testing.assert_close(changed.double(), expected)


def test_rules_that_have_nothing_to_do_change_nothing(logits: torch.Tensor) -> None:
    changed = logits.clone()
    assert not make_rules(SamplingParams(min_tokens=7)).apply(changed, np.array(OUTPUT))
    params = SamplingParams(bad_words_token_ids=((61, 3),))
    assert not make_rules(params).apply(changed, np.array(OUTPUT))
    assert torch.equal(changed, logits)


PENALTIES = [
    {"presence_penalty": 1.3},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 1.2},
    {"repetition_penalty": 0.8, "presence_penalty": -2.0, "frequency_penalty": 1.9},
]


@pytest.mark.parametrize("wanted", PENALTIES, ids=str)
def test_penalties_are_those_of_the_reference(
    logits: torch.Tensor, wanted: dict[str, float]
) -> None:
    params = SamplingParams(**wanted)
    penalised = logits.unsqueeze(0).clone()
    make_penalties(params).apply(penalised, rows_of(0))
    expected = adjusted(logits, params, PROMPT, OUTPUT)
    torch.testing.assert_close(penalised[0].double(), expected, rtol=1e-5, atol=1e-5)
    seen = {*PROMPT, *OUTPUT}
    unseen = [i for i in range(VOCAB_SIZE) if i not in seen]
    assert torch.equal(penalised[0, unseen], logits[unseen])


@pytest.mark.parametrize("wanted", PENALTIES, ids=str)
def test_counting_tokens_as_they_come_is_counting_them_at_once(
    logits: torch.Tensor, wanted: dict[str, float]
) -> None:
    params = SamplingParams(**wanted)
    by_and_by = make_penalties(params, row=3, num_known=2)
    by_and_by.add(1, SamplingParams(temperature=0.3, top_k=5), PROMPT, len(PROMPT))
    by_and_by.add(4, params, PROMPT, len(PROMPT))
    for token in OUTPUT[2:]:
        by_and_by.count(np.array([1, 3, 4]), np.array([8, token, 9]))
    both = logits.repeat(2, 1)
    by_and_by.apply(both, rows_of(1, 3))
    at_once = logits.unsqueeze(0).clone()
    make_penalties(params).apply(at_once, rows_of(0))
    assert torch.equal(both[0], logits)
    assert torch.equal(both[1], at_once[0])


@pytest.mark.parametrize("wanted", PENALTIES, ids=str)
def test_assumed_tokens_count_for_their_own_row_of_logits(
    logits: torch.Tensor, wanted: dict[str, float]
) -> None:
    params = SamplingParams(**wanted)
    penalties = make_penalties(params, num_known=1)
    rows = LogitsRows(np.array([0, 0]), np.array([1, 7]), {1: tuple(OUTPUT[1:])})
    for _ in range(2):
        both = logits.repeat(2, 1)
        penalties.apply(both, rows)
        for penalised, num_known in zip(both, (1, 7), strict=True):
            expected = logits.unsqueeze(0).clone()
            make_penalties(params, num_known=num_known).apply(expected, rows_of(0))
            assert torch.equal(penalised, expected[0])


@settings(deadline=None)
@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=4, max_size=4),
    st.floats(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, width=32),
    st.sampled_from([-2.0, 0.0, 2.0]),
)
@example([2.0**100, -(2.0**100)] * 2, MIN_REPETITION_PENALTY, 2.0)
@example([2.0**100, -(2.0**100)] * 2, MAX_REPETITION_PENALTY, -2.0)
def test_permitted_penalties_leave_logits_finite(
    values: list[float], repetition: float, others: float
) -> None:
    params = SamplingParams(
        repetition_penalty=repetition, presence_penalty=others, frequency_penalty=others
    )
    penalties = Penalties(max_num_seqs=1, kernels=select(CPU))
    penalties.add(0, params, [0, 1, 0, 1, 2], 2)
    logits = torch.tensor([values], dtype=torch.float32)
    penalties.apply(logits, rows_of(0))
    assert (logits / MIN_TEMPERATURE).isfinite().all()


def test_a_row_forgets_its_last_request(logits: torch.Tensor) -> None:
    penalties = make_penalties(SamplingParams(presence_penalty=1.0))
    penalties.remove(0)
    plain = logits.unsqueeze(0).clone()
    penalties.apply(plain, rows_of(0))
    assert torch.equal(plain[0], logits)
    params = SamplingParams(repetition_penalty=2.0)
    penalties.add(0, params, [17, 18], 1)
    penalties.apply(plain, rows_of(0))
    torch.testing.assert_close(plain[0].double(), adjusted(logits, params, [17], [18]))
