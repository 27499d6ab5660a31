"""Logprobs against log_softmax in float64, and that a row's are its own."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_engine.sampling.logprobs import compute_logprobs, narrow


def make_logits(n: int, vocab_size: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Rounded, as bf16 models' logits are: ties are common.
    return (torch.randn(n, vocab_size, generator=generator) * 4).bfloat16().float()


@pytest.mark.parametrize(("vocab_size", "num_top"), [(199, 5), (5003, 20), (7, 20), (300, 0)])
def test_values_and_ranks_are_those_of_log_softmax(vocab_size: int, num_top: int) -> None:
    logits = make_logits(6, vocab_size)
    chosen = torch.tensor([0, 1, 2, 3, 4, 5])
    lists = compute_logprobs(logits, chosen, num_top)
    expected = logits.double().log_softmax(1)
    for row in range(6):
        # A stable sort: the lowest id first among equals.
        order = sorted(range(vocab_size), key=lambda i: -logits[row, i])
        assert lists.logprob_token_ids[row] == (int(chosen[row]), *order[:num_top])
        for token_id, value in zip(lists.logprob_token_ids[row], lists.logprobs[row], strict=True):
            assert value == pytest.approx(float(expected[row, token_id]), abs=1e-6)
        num_better = sum(1 for x in logits[row].tolist() if x > logits[row, chosen[row]])
        assert lists.sampled_token_ranks[row] == 1 + num_better


def test_ties_go_to_the_lowest_id_and_share_a_rank() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, [900, 30]] = 2.0
    logits[0, 7] = -0.5
    lists = compute_logprobs(logits, torch.tensor([900]), 4)
    assert lists.logprob_token_ids == ((900, 30, 900, 0, 1),)
    assert lists.sampled_token_ranks == (1,)
    assert compute_logprobs(logits, torch.tensor([7]), 0).sampled_token_ranks == (1000,)


def test_banned_tokens_have_no_probability() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 3.0]])
    lists = compute_logprobs(logits, torch.tensor([1]), 3)
    assert lists.logprob_token_ids == ((1, 2, 0, 1),)
    assert lists.logprobs[0][0] == lists.logprobs[0][3] == -math.inf
    assert math.exp(lists.logprobs[0][1]) + math.exp(lists.logprobs[0][2]) == pytest.approx(1.0)


@settings(deadline=None, max_examples=25)
@given(
    vocab_size=st.integers(1, 700),
    num_rows=st.integers(1, 9),
    num_top=st.integers(0, 20),
    num_threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_a_row_has_the_same_bits_alone_and_among_others(
    vocab_size: int, num_rows: int, num_top: int, num_threads: int, seed: int
) -> None:
    logits = make_logits(num_rows, vocab_size, seed=seed)
    chosen = torch.arange(num_rows) % vocab_size
    torch.set_num_threads(num_threads)
    together = compute_logprobs(logits, chosen, 20)
    torch.set_num_threads(1)
    for row in range(num_rows):
        alone = compute_logprobs(logits[row : row + 1].clone(), chosen[row : row + 1], num_top)
        assert narrow(together[row : row + 1], num_top) == alone


@pytest.mark.parametrize("max_logits", [1, 2000, 5499])
def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch, max_logits: int) -> None:
    logits, chosen = make_logits(11, 500), torch.arange(11)
    whole = compute_logprobs(logits, chosen, 3)
    monkeypatch.setattr("pdserve_engine.sampling.logprobs.MAX_LOGITS_AT_ONCE_ON_CPU", max_logits)
    assert compute_logprobs(logits, chosen, 3) == whole


def test_nan_stays_in_its_row() -> None:
    logits = make_logits(3, 300)
    expected = compute_logprobs(logits, torch.tensor([1, 2, 3]), 4)
    logits[1, 77] = torch.nan
    lists = compute_logprobs(logits, torch.tensor([1, 2, 3]), 4)
    assert all(map(math.isnan, lists.logprobs[1]))
    assert all(0 <= token_id < 300 for token_id in lists.logprob_token_ids[1])
    assert lists[:1] + lists[2:] == expected[:1] + expected[2:]
