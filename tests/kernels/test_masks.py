"""Masks: nothing is chosen that is not allowed, and what is allowed is chosen as if it were all."""

import re
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_batches import make_logits, make_sampling_batch, pack_mask

from pdserve_kernels import cpu, reference
from pdserve_kernels.reference.quantization import quantize
from pdserve_kernels.reference.sampling.gumbel import gumbel_noise

# `each_isa` holds for all examples of a test.
PER_TEST_FIXTURES = [HealthCheck.function_scoped_fixture]
NUM_ROWS = 4
VOCAB_SIZES = st.sampled_from([1, 31, 32, 33, 63, 64, 65, 96, 127, 200, 1392, 3001])
# Of the tokens that are allowed; None is a run of them, as long as a few blocks.
SHARES = st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0, None])
REQUESTS: dict[str, Any] = {
    "temperature": st.sampled_from([0.0, 0.6, 1.0, 1.4]),
    "top_k": st.sampled_from([0, 0, 1, 20, 500]),
    "top_p": st.sampled_from([1.0, 1.0, 0.9, 0.2]),
    "min_p": st.sampled_from([0.0, 0.0, 0.05]),
    "seeds": st.integers(-5, 5),
}


def draw_allowed(data: st.DataObject, vocab_size: int) -> torch.Tensor:
    """Return bool [NUM_ROWS, vocab_size]; a row may allow nothing."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    rows = []
    for share in data.draw(st.lists(SHARES, min_size=NUM_ROWS, max_size=NUM_ROWS)):
        ids = torch.arange(vocab_size)
        if share is None:
            first = data.draw(st.integers(0, vocab_size - 1))
            rows.append((ids >= first) & (ids < first + 100))
        else:
            rows.append(torch.rand(vocab_size, generator=generator) < share)
            rows[-1][data.draw(st.integers(0, vocab_size - 1))] |= share > 0
    return torch.stack(rows)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@settings(deadline=None, max_examples=60, suppress_health_check=PER_TEST_FIXTURES)
@given(data=st.data(), vocab_size=VOCAB_SIZES)
def test_a_token_that_is_not_allowed_is_as_if_its_logit_were_minus_infinity(
    each_isa: None, dtype: torch.dtype, data: st.DataObject, vocab_size: int
) -> None:
    is_allowed = draw_allowed(data, vocab_size)
    mask = pack_mask(is_allowed, past_end=data.draw(st.booleans()))
    columns = {
        name: data.draw(st.lists(values, min_size=NUM_ROWS, max_size=NUM_ROWS))
        for name, values in REQUESTS.items()
    }
    batch = make_sampling_batch(NUM_ROWS, **columns)
    logits = make_logits(NUM_ROWS, vocab_size).to(dtype)
    filled = logits.masked_fill(~is_allowed, -torch.inf)
    can_choose = is_allowed.any(1)
    for kernels in (reference, cpu):
        drawn, best = kernels.sample(logits, batch, mask=mask), kernels.argmax(logits, mask=mask)
        assert torch.equal(drawn[can_choose], reference.sample(filled, batch)[can_choose])
        assert torch.equal(best.token_ids[can_choose], filled.argmax(-1)[can_choose])
        for token_ids in (drawn, best.token_ids):
            assert bool(is_allowed[can_choose].gather(1, token_ids[can_choose, None]).all())
            assert bool(((token_ids >= 0) & (token_ids < vocab_size)).all())


@settings(deadline=None, max_examples=50, suppress_health_check=PER_TEST_FIXTURES)
@given(data=st.data(), vocab_size=VOCAB_SIZES)
def test_draws_are_the_best_of_the_allowed_in_fp64(
    each_isa: None, data: st.DataObject, vocab_size: int
) -> None:
    is_allowed = draw_allowed(data, vocab_size)
    is_allowed[:, data.draw(st.integers(0, vocab_size - 1))] = True
    seeds, positions = torch.arange(NUM_ROWS) - 2, torch.arange(NUM_ROWS)
    logits = make_logits(NUM_ROWS, vocab_size)
    noise = gumbel_noise(seeds, positions, vocab_size=vocab_size).double()
    perturbed = (logits.double() / 0.7 + noise).masked_fill(~is_allowed, -torch.inf)
    batch = make_sampling_batch(NUM_ROWS, seeds=seeds.numpy(), temperature=0.7)
    for kernels in (reference, cpu):
        drawn = kernels.sample(logits, batch, mask=pack_mask(is_allowed))
        reached = perturbed.gather(1, drawn[:, None])
        assert bool((reached >= perturbed.amax(1, keepdim=True) - 1e-4).all())


@settings(deadline=None, max_examples=60, suppress_health_check=PER_TEST_FIXTURES)
@given(data=st.data(), vocab_size=VOCAB_SIZES, num_rows=st.sampled_from([1, 2, 7, 200]))
def test_the_fused_head_chooses_among_the_allowed(
    each_isa: None, data: st.DataObject, vocab_size: int, num_rows: int
) -> None:
    is_allowed = draw_allowed(data, vocab_size).repeat(50, 1)[:num_rows]
    mask = pack_mask(is_allowed, past_end=data.draw(st.booleans()))
    generator = torch.Generator().manual_seed(vocab_size)
    weight = torch.randn(vocab_size, 64, generator=generator).bfloat16()
    # Twins, so that logits have equals.
    weight[vocab_size // 2 :] = weight[: vocab_size - vocab_size // 2].clone()
    x = torch.randn(num_rows, 64, generator=generator).bfloat16()
    packed = cpu.pack_linear(weight)
    best = cpu.linear_argmax(x, packed, mask=mask)
    expected = reference.argmax(cpu.linear(x, packed), mask=mask)
    can_choose = is_allowed.any(1)
    assert torch.equal(best.token_ids[can_choose], expected.token_ids[can_choose])
    assert bool(((best.token_ids >= 0) & (best.token_ids < vocab_size)).all())
    exact = (x.double() @ weight.double().T).masked_fill(~is_allowed, -torch.inf)[can_choose]
    reached = exact.gather(1, best.token_ids[can_choose, None])
    highest = exact.amax(1, keepdim=True)
    assert bool((reached >= highest - 2**-7 * highest.abs() - 1e-3).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_the_fused_head_of_integers_chooses_among_the_allowed(each_isa: None, bits: int) -> None:
    weight = quantize(torch.randn(1000, 64).bfloat16(), bits=bits, group_size=None)
    packed = cpu.pack_linear(weight)
    x, is_allowed = torch.randn(3, 64).bfloat16(), torch.rand(3, 1000) < 0.01
    is_allowed[:, 777] = True
    best = cpu.linear_argmax(x, packed, mask=pack_mask(is_allowed))
    expected = reference.argmax(cpu.linear(x, packed), mask=pack_mask(is_allowed))
    assert torch.equal(best.token_ids, expected.token_ids)


@pytest.mark.parametrize("vocab_size", [33, 64, 1392])
def test_a_mask_that_allows_all_is_no_mask(each_isa: None, vocab_size: int) -> None:
    mask = torch.full((400, -(-vocab_size // 32)), -1, dtype=torch.int32)
    logits = make_logits(400, vocab_size)
    batch = make_sampling_batch(400, top_k=[0, 0, 30, 0] * 100, top_p=[1.0, 0.9] * 200)
    for kernels in (reference, cpu):
        drawn = kernels.sample(logits, batch)
        assert torch.equal(kernels.sample(logits, batch, mask=mask), drawn)
        assert torch.equal(kernels.sample(logits, batch, mask=pack_mask(logits < 99)), drawn)


def test_what_is_not_allowed_is_not_looked_at(each_isa: None) -> None:
    logits, is_allowed = make_logits(3, 300), torch.zeros(3, 300, dtype=torch.bool)
    is_allowed[:, 130:140] = True
    logits[~is_allowed] = torch.nan
    logits[1, 135] = torch.nan
    weight = torch.randn(300, 64).bfloat16()
    weight[~is_allowed[0]] = torch.nan
    x, mask = torch.randn(3, 64).bfloat16(), pack_mask(is_allowed)
    for kernels in (reference, cpu):
        assert kernels.argmax(logits, mask=mask).num_nans.tolist() == [0, 1, 0]
        drawn = kernels.sample(logits, make_sampling_batch(3, top_k=3), mask=mask)
        assert all(130 <= token_id < 140 for token_id in drawn[[0, 2]].tolist())
        best = kernels.linear_argmax(x, kernels.pack_linear(weight), mask=mask)
        assert best.num_nans.tolist() == [0] * 3
        assert all(130 <= token_id < 140 for token_id in best.token_ids.tolist())


def test_logits_whose_rows_lie_apart_have_masks_too(each_isa: None) -> None:
    logits, is_allowed = make_logits(6, 200), torch.rand(6, 200) < 0.1
    is_allowed[:, 7] = True
    mask = pack_mask(is_allowed)
    expected = reference.sample(logits[::2].clone(), make_sampling_batch(3), mask=mask[::2].clone())
    drawn = cpu.sample(logits[::2], make_sampling_batch(3), mask=mask[::2])
    assert torch.equal(drawn, expected)


@pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(3, 2, dtype=torch.int64),
        torch.zeros(3, 3, dtype=torch.int32),
        torch.zeros(2, 2, dtype=torch.int32),
        torch.zeros(3, 50, dtype=torch.bool),
    ],
    ids=str,
)
def test_a_mask_that_does_not_fit_is_refused(kernels: ModuleType, mask: torch.Tensor) -> None:
    message = f"the mask is {mask.dtype} {list(mask.shape)} on cpu; logits [3, 50] take"
    weight = kernels.pack_linear(torch.randn(50, 64).bfloat16())
    with pytest.raises(ValueError, match=re.escape(message)):
        kernels.sample(torch.zeros(3, 50), make_sampling_batch(3), mask=mask)
    with pytest.raises(ValueError, match=re.escape(message)):
        kernels.argmax(torch.zeros(3, 50), mask=mask)
    with pytest.raises(ValueError, match=re.escape(message)):
        kernels.linear_argmax(torch.zeros(3, 64).bfloat16(), weight, mask=mask)
