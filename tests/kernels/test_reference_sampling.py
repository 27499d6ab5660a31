"""The sampler: the distribution it draws from, its filters, and that neighbours do not matter."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from sampling_batches import make_logits, make_sampling_batch

from pdserve_kernels.exact_math import (
    FIXED_POINT_ONE,
    exp_to_fixed_point,
    log,
    log_of_complement,
)
from pdserve_kernels.reference.sampling.filters import find_candidates
from pdserve_kernels.reference.sampling.gumbel import gumbel_noise, gumbel_noise_at
from pdserve_kernels.reference.sampling.sample import build_filters, count_nans, sample


def kept_by_reference(
    logits: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> set[int]:
    """vLLM's filters written down plainly, in float64, for one row of distinct logits."""
    logits = logits.double()
    probabilities = logits.softmax(0)
    logits = logits.masked_fill(probabilities < min_p * probabilities.max(), -torch.inf)
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    ascending, order = logits.sort()
    is_dropped = ascending.softmax(0).cumsum(0) <= 1 - top_p
    is_dropped[-1] = False
    kept = order[~is_dropped]
    return set(kept[logits[kept] > -torch.inf].tolist())


def kept_by_filters(logits: torch.Tensor, **columns: Any) -> list[set[int]]:
    n, vocab_size = logits.shape
    batch = make_sampling_batch(n, **columns)
    filters = build_filters(batch, vocab_size, logits.device)
    candidates = find_candidates(logits, filters)
    rows = zip(candidates.vocab_ids, candidates.logits > -torch.inf, strict=True)
    return [set(ids[is_kept].tolist()) for ids, is_kept in rows]


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.zeros(3, 1000)
    logits[0, [700, 300]] = 1.0
    logits[2, 999] = 1.0
    assert sample(logits, make_sampling_batch(3, temperature=0.0)).tolist() == [300, 0, 999]


def test_draws_follow_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0, -0.5, 1.5])
    temperature, n = 0.8, 20_000
    drawn = sample(logits.repeat(n, 1), make_sampling_batch(n, temperature=temperature))
    expected = (logits / temperature).softmax(0) * n
    chi_square = ((torch.bincount(drawn, minlength=7) - expected) ** 2 / expected).sum()
    assert chi_square < 27.9  # the 99.99% quantile for 6 degrees of freedom


def test_filtered_draws_follow_the_renormalised_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0, -0.5, 1.5])
    n = 10_000
    counts = Counter(sample(logits.repeat(n, 1), make_sampling_batch(n, top_k=3)).tolist())
    assert set(counts) == {1, 2, 6}
    weights = {i: math.exp(logits[i]) for i in counts}
    for i, count in counts.items():
        expected = n * weights[i] / sum(weights.values())
        assert count == pytest.approx(expected, abs=4.5 * math.sqrt(expected))


def test_unlikely_tokens_are_drawn_as_often_as_they_should() -> None:
    noise = gumbel_noise(torch.full((64,), 5), torch.arange(64), vocab_size=32_768)
    # P(noise > x) = 1 - exp(-exp(-x)); about 2,097 and 95 of 2,097,152 values.
    for bound in (6.9075, 10.0):
        expected = noise.numel() * -math.expm1(-math.exp(-bound))
        assert int((noise > bound).sum()) == pytest.approx(expected, abs=4.5 * expected**0.5)
    assert bool(noise.isfinite().all())


@pytest.mark.parametrize(
    "wanted",
    [
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 2000},
        {"top_p": 0.1},
        {"top_p": 0.9},
        {"top_p": 0.9999},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.8},
        {"top_k": 500, "top_p": 0.95, "min_p": 0.001},
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_filters_keep_what_the_reference_keeps(wanted: dict[str, Any], scale: float) -> None:
    logits = make_logits(4, 3000, scale=scale)
    expected = [kept_by_reference(row, **wanted) for row in logits]
    assert kept_by_filters(logits, **wanted) == expected


def test_each_row_has_its_own_filters() -> None:
    logits = make_logits(4, 3000)
    wanted = {"top_k": [0, 7, 0, 5], "top_p": [0.5, 1.0, 1.0, 0.7], "min_p": [0.0, 0.0, 0.2, 0.0]}
    expected = [
        kept_by_reference(logits[i], **{name: values[i] for name, values in wanted.items()})
        for i in range(4)
    ]
    assert kept_by_filters(logits, **wanted) == expected


def test_tokens_that_tie_at_the_threshold_are_all_kept() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, :10] = 1.0
    assert kept_by_filters(logits, top_k=3) == [set(range(10))]
    assert kept_by_filters(logits, top_p=1e-6) == [set(range(10))]


def test_the_same_seed_and_position_give_the_same_token() -> None:
    logits = make_logits(1, 5000, scale=0.5).repeat(32, 1)
    first = sample(logits.clone(), make_sampling_batch(32, positions=7))
    assert len(set(first.tolist())) == 1
    assert torch.equal(first, sample(logits.clone(), make_sampling_batch(32, positions=7)))
    for changed in ({"seeds": np.arange(32), "positions": 7}, {}):
        assert len(set(sample(logits.clone(), make_sampling_batch(32, **changed)).tolist())) > 20


def test_a_request_gets_the_same_token_in_any_batch() -> None:
    n, vocab_size = 24, 5003
    logits = make_logits(n, vocab_size, scale=0.5)
    columns = {
        "temperature": [0.0, 0.7, 1.0, 1.3] * 6,
        "top_k": [0, 0, 40, 0, 0, 500] * 4,
        "top_p": [1.0, 1.0, 1.0, 0.9, 0.5, 0.95, 1.0, 1.0] * 3,
        "min_p": [0.0] * 20 + [0.1] * 4,
        "seeds": np.arange(n) - 3,
    }
    together = sample(logits.clone(), make_sampling_batch(n, **columns)).tolist()
    for i in range(n):
        alone = {name: values[i] for name, values in columns.items()}
        batch = make_sampling_batch(1, **alone, positions=i)
        assert sample(logits[i : i + 1].clone(), batch).tolist() == [together[i]]


def test_filtering_changes_no_token_that_it_keeps() -> None:
    logits = make_logits(200, 5003, scale=2.0)
    plain = sample(logits.clone(), make_sampling_batch(200))
    filtered = sample(logits.clone(), make_sampling_batch(200, top_k=2000))
    kept = [int(plain[i]) in kept_by_reference(logits[i], top_k=2000) for i in range(200)]
    assert sum(kept) > 150
    assert torch.equal(plain[kept], filtered[kept])


def test_noise_of_some_ids_is_that_of_all() -> None:
    seeds, positions = torch.tensor([[1, -2], [5, 6]])
    everything = gumbel_noise(seeds, positions, vocab_size=1001)
    vocab_ids = torch.tensor([[0, 3, 1000], [999, 4, 5]])
    some = gumbel_noise_at(seeds, positions, vocab_ids=vocab_ids)
    torch.testing.assert_close(some, everything.gather(1, vocab_ids))


@pytest.mark.parametrize(
    "wanted", [{"temperature": 0.0}, {}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str
)
def test_minus_infinity_is_never_chosen(wanted: dict[str, Any]) -> None:
    logits = torch.full((100, 3000), -torch.inf)
    logits[:, [2, 5, 2999]] = torch.tensor([1.0, 2.0, 1.5])
    assert set(sample(logits, make_sampling_batch(100, **wanted)).tolist()) <= {2, 5, 2999}


def test_filters_look_no_further_than_tokens_that_may_be_chosen() -> None:
    logits = torch.full((1, 10_000), -torch.inf)
    logits[0, :10] = torch.arange(10.0)
    filters = build_filters(make_sampling_batch(1, top_k=40), 10_000, logits.device)
    candidates = find_candidates(logits, filters)
    assert candidates.logits.shape[1] == 256
    assert candidates.vocab_ids[candidates.logits.isfinite()].tolist() == list(range(9, -1, -1))


def test_nan_logits_still_give_valid_ids() -> None:
    logits = torch.full((4, 300), torch.nan)
    tokens = sample(logits, make_sampling_batch(4, temperature=[0, 1, 1, 1], top_k=[0, 0, 5, 0]))
    assert bool(((tokens >= 0) & (tokens < 300)).all())


def test_a_tiny_temperature_is_greedy() -> None:
    logits = make_logits(8, 1000) * 1e3
    tokens = sample(logits.clone(), make_sampling_batch(8, temperature=1e-30))
    assert torch.equal(tokens, logits.argmax(-1))


def test_nans_are_counted_by_row() -> None:
    logits = make_logits(3, 300)
    logits[1, [0, 299]] = torch.nan
    logits[2] = torch.nan
    assert count_nans(logits).tolist() == [0, 2, 300]
    assert count_nans(logits[:1]).tolist() == [0]


def test_exact_functions_are_close_to_the_real_ones() -> None:
    x = torch.logspace(-10, 2, 10_001)
    torch.testing.assert_close(log(x), x.double().log().float(), rtol=3e-7, atol=6e-8)
    u = torch.cat((torch.logspace(-10, -0.001, 10_001), torch.tensor([0.5, 1 - 2.0**-24])))
    expected = torch.log1p(-u.double()).float()
    torch.testing.assert_close(log_of_complement(u), expected, rtol=3e-7, atol=0.0)
    x = torch.linspace(-29.0, 0.0, 10_001)
    weights = exp_to_fixed_point(x).double() / FIXED_POINT_ONE
    torch.testing.assert_close(weights, x.double().exp(), rtol=3e-7, atol=2.0**-40)
    assert exp_to_fixed_point(torch.tensor([0.0, -31.0, -torch.inf])).tolist() == [2**40, 0, 0]
