"""Sampling in Triton against the reference: on a GPU, or interpreted if TRITON_INTERPRET=1."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from sampling_batches import make_logits, make_sampling_batch, pack_mask

from pdserve_kernels import reference
from pdserve_kernels.sampling_batch import PenalizedTokens
from support.samples import seeds
from support.triton_kernels import DEVICE, DTYPES, INTERPRETED, ON_GPU_OR_INTERPRETED

VOCAB_SIZES = [1, 31, 1000, 3001] if INTERPRETED else [1, 31, 1000, 3001, 128_256, 151_936]

pytestmark = ON_GPU_OR_INTERPRETED


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 31, 64, 1025, 3001])
def test_masked_tokens_are_those_of_the_reference(kernels, dtype, vocab_size):
    logits = make_logits(4, vocab_size).to(dtype)
    is_allowed = torch.rand(4, vocab_size) < torch.tensor([[0.0], [0.01], [0.5], [1.0]])
    is_allowed[1:, vocab_size // 2] = True
    is_allowed[2, -1] = True
    mask = pack_mask(is_allowed, past_end=vocab_size % 2 == 0)
    batch = make_sampling_batch(4, temperature=[1.0, 0.0, 0.7, 1.0], top_k=[0, 0, 0, 3])
    on_device = logits.to(DEVICE), mask.to(DEVICE)
    drawn = kernels.sample(on_device[0], batch, mask=on_device[1])
    assert torch.equal(drawn.cpu(), reference.sample(logits, batch, mask=mask))
    best = kernels.argmax(on_device[0], mask=on_device[1])
    expected = reference.argmax(logits, mask=mask)
    assert torch.equal(best.token_ids.cpu(), expected.token_ids)
    assert torch.equal(best.values.cpu(), expected.values)
    weight, x = torch.randn(vocab_size, 64).to(dtype), torch.randn(4, 64).to(dtype)
    packed = kernels.pack_linear(weight.to(DEVICE))
    best = kernels.linear_argmax(x.to(DEVICE), packed, mask=on_device[1])
    assert bool(is_allowed[1:].gather(1, best.token_ids.cpu()[1:, None]).all())


def draw_requests(n, vocab_size):
    """n rows, each with other filters; the first ones are greedy and unfiltered."""
    generator = np.random.default_rng(vocab_size)
    wanted = {
        "temperature": generator.choice([0.6, 1.0, 1.7], n),
        "top_k": generator.choice([0, 0, 1, 20, vocab_size - 1, vocab_size, vocab_size + 7], n),
        "top_p": generator.choice([1.0, 1.0, 0.95, 0.5, 1e-9, 1.0 - 1e-12], n),
        "min_p": generator.choice([0.0, 0.0, 0.02, 1.0], n),
        "seeds": generator.integers(-(2**63), 2**63, n),
        "positions": generator.integers(0, 2**20, n),
    }
    wanted["temperature"][0] = wanted["top_k"][1] = wanted["min_p"][1] = 0.0
    wanted["top_p"][1] = 1.0
    return wanted


def check_tokens(kernels, logits, mask=None, **wanted):
    batch = make_sampling_batch(len(logits), **wanted)
    drawn = kernels.sample(logits.to(DEVICE), batch, mask=None if mask is None else mask.to(DEVICE))
    assert drawn.tolist() == reference.sample(logits, batch, mask=mask).tolist()


@pytest.mark.parametrize("first_id", [0, 32, 2048])
@pytest.mark.parametrize("has_mask", [False, True])
def test_draws_of_a_part_of_the_vocabulary_are_those_of_the_reference(kernels, first_id, has_mask):
    generator = np.random.default_rng(first_id)
    logits = make_logits(8, 1500)
    logits[3] = 0.0  # many are equal
    batch = make_sampling_batch(
        8,
        temperature=[0.0, 0.7, 1.0, 0.0, 1.0, 2.0, 1e-6, 1.0],
        seeds=generator.integers(2**62, size=8),
    )
    mask = pack_mask(torch.rand(8, 1500) < 0.1) if has_mask else None
    expected = reference.sample_part(logits, batch, first_id=first_id, mask=mask)
    mask = None if mask is None else mask.to(DEVICE)
    drawn = kernels.sample_part(logits.to(DEVICE), batch, first_id=first_id, mask=mask)
    assert torch.equal(drawn.token_ids.cpu(), expected.token_ids)
    assert torch.equal(drawn.values.cpu(), expected.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_draws_are_those_of_the_reference(kernels, dtype, vocab_size):
    n = 10 if INTERPRETED else 64
    logits = make_logits(n, vocab_size).to(dtype)
    check_tokens(kernels, logits, **draw_requests(n, vocab_size))


def check_kept(logits, batch):
    """Compare which tokens of logits [n, vocab_size] pass the filters of random rows."""
    from pdserve_kernels.reference.sampling.filters import find_candidates
    from pdserve_kernels.reference.sampling.sample import build_filters
    from pdserve_kernels.triton.sampling.device_batch import DeviceSamplingBatch
    from pdserve_kernels.triton.sampling.filters import find_thresholds

    n, vocab_size = logits.shape
    scaled = logits / torch.from_numpy(batch.divisors())[:, None]
    staged = DeviceSamplingBatch.stage(batch, torch.device(DEVICE))
    thresholds = find_thresholds(logits.to(DEVICE), None, staged).cpu()
    candidates = find_candidates(scaled, build_filters(batch, vocab_size, torch.device("cpu")))
    kept = torch.zeros(n, vocab_size, dtype=torch.bool)
    kept.scatter_(1, candidates.vocab_ids, candidates.logits > -torch.inf)
    # What lies further below cannot be drawn.
    kept &= scaled >= scaled.amax(1, keepdim=True) - 28.0
    is_within = scaled >= torch.maximum(thresholds[:, None], scaled.amax(1, keepdim=True) - 28.0)
    assert torch.equal(is_within, kept)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_filters_keep_what_the_reference_keeps(kernels, vocab_size):
    n = 10 if INTERPRETED else 64
    batch = make_sampling_batch(n, **draw_requests(n, vocab_size)).select(np.arange(1, n))
    # Coarse enough for ties.
    scaled = (make_logits(n - 1, vocab_size) * 8).round() / 8
    check_kept(scaled * torch.from_numpy(batch.divisors())[:, None], batch)


@pytest.mark.parametrize("sizes", [(2048, 8192), (12, 64)], ids=str)
@pytest.mark.parametrize("seed", seeds(2 if INTERPRETED else 30))
def test_filters_of_hard_logits_keep_what_the_reference_keeps(kernels, seed, sizes, monkeypatch):
    """Also with few programs, and with room for so few values that pivots are picked."""
    from pdserve_kernels.triton.sampling import filters

    max_programs, search_block = sizes
    monkeypatch.setattr(filters, "MAX_PROGRAMS", max_programs)
    monkeypatch.setattr(filters, "SEARCH_BLOCK", search_block)
    logits = hard_logits(1500)
    n, generator = len(logits), np.random.default_rng(seed)
    top_k = generator.choice([0, 0, 1, 2, 700, 1499, 1500, 1501], n)
    top_p = generator.choice([0.0, 0.5, 0.95, 0.999, 1.0 - 2.0**-24, 1.0], n)
    min_p = generator.choice([0.0, 0.0, 1e-9, 1e-3, 0.3], n)
    check_kept(logits, make_sampling_batch(n, top_k=top_k, top_p=top_p, min_p=min_p))


def hard_logits(vocab_size):
    """Rows whose values crowd, tie or reach the ends of what floats hold."""
    noise = make_logits(3, vocab_size, scale=1.0)
    places = torch.arange(vocab_size)
    rows = [
        noise[0],
        noise[1].bfloat16().float(),  # many ties
        torch.full((vocab_size,), 2.5),
        torch.where(noise[2] > 0, 1.0, torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))),
        torch.where(noise[2] > 1.5, noise[0], -torch.inf),
        noise[0] * 1e-42,  # denormals
        noise[0].clone().index_fill_(0, torch.tensor([vocab_size // 2]), 1e30),
        noise[0] * 1e30,
        1.0 - 2.0 ** -(places % 24).float(),  # ever closer to the highest
        -places.float() * (28.5 / vocab_size),  # past all steps, in the order of their ids
        torch.where(places % 16 < 15, 0.0, noise[1]),  # most tie, in the middle
        torch.where(places < 8, noise[2], -torch.inf),
    ]
    return torch.stack(rows)


def test_filters_of_a_large_vocabulary_keep_what_the_reference_keeps(kernels):
    logits = make_logits(2, 20_000, scale=1.0)
    logits[1] = logits[1].bfloat16().float()
    check_kept(logits, make_sampling_batch(2, top_p=[0.999, 0.97], top_k=[0, 15_000]))


def test_draws_among_the_allowed_are_those_of_the_reference(kernels):
    n, vocab_size = 8, 2500
    is_allowed = torch.rand(n, vocab_size) < torch.tensor([0.002, 0.5]).repeat(n // 2)[:, None]
    is_allowed[:, 77] = True
    mask = pack_mask(is_allowed, past_end=True)
    check_tokens(kernels, make_logits(n, vocab_size), mask, **draw_requests(n, vocab_size))


@pytest.mark.parametrize(
    "wanted", [{"top_k": [1, 2, 700, 0]}, {"top_p": [0.7, 0.999, 0.1, 1.0]}], ids=str
)
def test_draws_among_ties_are_those_of_the_reference(kernels, wanted):
    logits = torch.full((4, 1500), -torch.inf)
    logits[:, 5::7] = make_logits(4, 214, scale=2.0).round()
    logits[1, :1490], logits[1, 1490:] = -torch.inf, 1.5
    logits[2] = torch.where(torch.rand(1500) < 0.5, 0.0, -0.0)
    check_tokens(kernels, logits, **wanted)
    for spread in (0.0, 1e-4, 200.0):
        crowd = make_logits(4, 1500, scale=spread)
        crowd[:, 17] = 5.0
        check_tokens(kernels, crowd, **wanted)


def test_rows_with_nothing_to_choose_get_valid_ids(kernels):
    from pdserve_kernels.triton.sampling.device_batch import DeviceSamplingBatch
    from pdserve_kernels.triton.sampling.sample import sample_staged

    logits = make_logits(8, 1100)
    logits[0, ::3], logits[1, 9], logits[2:4], logits[4:6] = np.nan, -np.nan, np.nan, -np.inf
    logits[6:, 70:90] = np.inf
    for wanted in ({"top_k": 3, "min_p": 0.1}, {"top_p": 0.9}, {"temperature": [0.0, 1.0] * 4}):
        drawn = kernels.sample(logits.to(DEVICE), make_sampling_batch(8, **wanted))
        assert all(0 <= token_id < 1100 for token_id in drawn.tolist())
    best = kernels.argmax(logits.to(DEVICE))
    assert all(0 <= token_id < 1100 for token_id in best.token_ids.tolist())
    assert best.token_ids[6:].tolist() == [70, 70]
    num_nans = reference.count_nans(logits).tolist()
    assert best.num_nans.tolist() == num_nans
    assert kernels.count_nans(logits.to(DEVICE)).tolist() == num_nans
    staged = DeviceSamplingBatch.stage(make_sampling_batch(8, top_p=0.9), torch.device(DEVICE))
    assert sample_staged(logits.to(DEVICE), staged)[1].tolist() == num_nans


def test_argmax_takes_the_lowest_of_equals_wherever_rows_lie(kernels):
    logits = make_logits(6, 3001, scale=1.0).round()
    logits[4] = torch.where(torch.rand(3001) < 0.5, 0.0, -0.0)
    for view in (logits, logits[::2], logits.T.contiguous().T):
        best = kernels.argmax(view.to(DEVICE))
        assert best.token_ids.tolist() == view.argmax(-1).tolist()
    assert kernels.argmax(logits[:0].to(DEVICE)).token_ids.tolist() == []
    assert kernels.sample(logits[:0].to(DEVICE), make_sampling_batch(0)).tolist() == []


def test_a_staged_batch_draws_for_what_was_copied_last(kernels):
    from pdserve_kernels.triton.sampling.device_batch import DeviceSamplingBatch
    from pdserve_kernels.triton.sampling.sample import sample_staged

    logits, device = make_logits(4, 1000), torch.device(DEVICE)
    wanted = {"top_k": [0, 3, 2**40, 0], "top_p": [0.9, 1.0, 1.0, 0.3], "seeds": -7}
    batches = [make_sampling_batch(4, **columns) for columns in ({"temperature": 0}, {}, wanted)]
    staged = DeviceSamplingBatch.stage(batches[0], device)
    for batch in batches:
        new = DeviceSamplingBatch.stage(batch, device)
        for field in fields(new):
            getattr(staged, field.name).copy_(getattr(new, field.name))
        expected = reference.sample(logits, batch).tolist()
        assert sample_staged(logits.to(device), staged)[0].tolist() == expected


@pytest.mark.parametrize("num_tokens", [0, 1, 1500])
def test_penalties_are_those_of_the_reference(kernels, num_tokens):
    """To the bit, and of these tokens only, wherever rows lie."""
    generator = np.random.default_rng(num_tokens)
    places = generator.choice(3 * 900, num_tokens, replace=False)
    tokens = PenalizedTokens(
        rows=places // 900,
        token_ids=places % 900,
        repetition=generator.uniform(0.1, 2.0, num_tokens).astype(np.float32),
        reductions=generator.uniform(-4.0, 4.0, num_tokens).astype(np.float32),
    )
    expected = make_logits(3, 900)
    expected[:, ::7], expected[:, 1::7] = 0.0, -torch.inf
    for view in (expected.clone(), expected.T.contiguous().T):
        penalized = view.to(DEVICE)
        kernels.penalize(penalized, tokens)
        wanted = expected.clone()
        reference.penalize(wanted, tokens)
        assert torch.equal(penalized.cpu(), wanted)
    with pytest.raises(ValueError, match=r"logits are torch\.bfloat16"):
        kernels.penalize(expected.bfloat16().to(DEVICE), tokens)


@pytest.mark.parametrize("max_programs", [2048, 20])
def test_terms_of_logprobs_are_those_of_the_reference(kernels, max_programs, monkeypatch):
    from pdserve_kernels.triton.sampling import logprobs

    monkeypatch.setattr(logprobs, "MAX_PROGRAMS", max_programs)
    logits = hard_logits(2100)
    logits[0, 5], logits[1, 9] = torch.nan, -torch.nan
    chosen = torch.arange(len(logits)) * 7
    for view in (logits, logits.T.contiguous().T, logits[:0]):
        terms = kernels.logprob_terms(view.to(DEVICE), chosen[: len(view)].to(DEVICE))
        expected = reference.logprob_terms(view, chosen[: len(view)])
        assert terms.highest[:2].isnan().all()
        for actual, wanted in zip(terms, expected, strict=True):
            assert torch.equal(actual.cpu()[2:], wanted[2:])
    with pytest.raises(ValueError, match=r"chosen tokens torch\.int64 \[3\]"):
        kernels.logprob_terms(logits.to(DEVICE), chosen[:3].to(DEVICE))


def test_a_mask_that_does_not_fit_is_refused(kernels):
    mask = torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"the mask is torch\.int64"):
        kernels.sample(torch.zeros(3, 50, device=DEVICE), make_sampling_batch(3), mask=mask)
    with pytest.raises(ValueError, match=r"the mask is torch\.int64"):
        kernels.argmax(torch.zeros(3, 50, device=DEVICE), mask=mask)
