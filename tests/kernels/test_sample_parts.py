"""A token that is sampled of a vocabulary's parts is the one that is sampled of the whole."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve_kernels import KernelSet, cpu, reference
from pdserve_kernels.sampling_batch import MASK_BITS, Argmax, SamplingBatch, combine_argmax

NUM_ROWS = 5


def make_batch(generator: torch.Generator) -> SamplingBatch:
    """Rows without filters, some of them greedy."""

    def integers(high: int) -> np.ndarray:
        return torch.randint(high, (NUM_ROWS,), generator=generator).numpy()

    return SamplingBatch(
        temperature=np.array([0.0, 1.0, 0.3, 2.0, 1e-6], dtype=np.float32),
        top_k=np.zeros(NUM_ROWS, dtype=np.int64),
        top_p=np.ones(NUM_ROWS),
        min_p=np.zeros(NUM_ROWS, dtype=np.float32),
        seeds=integers(2**62),
        positions=integers(10_000),
    )


@pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])
@given(
    num_words=st.integers(2, 40),
    num_missing=st.integers(0, MASK_BITS - 1),
    num_parts=st.sampled_from((2, 4, 8)),
    seed=st.integers(0, 2**31),
    has_mask=st.booleans(),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_parts_bring_the_token_of_the_whole(
    kernels: KernelSet,
    num_words: int,
    num_missing: int,
    num_parts: int,
    seed: int,
    has_mask: bool,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    vocab_size = num_words * MASK_BITS - num_missing
    logits = torch.randn(NUM_ROWS, vocab_size, generator=generator).mul_(3).to(dtype)
    batch = make_batch(generator)
    mask = None
    if has_mask:
        words = torch.randint(-(2**31), 2**31, (NUM_ROWS, num_words), generator=generator)
        mask = words.to(torch.int32)
        mask[:, 0] |= 1  # something is allowed
    share = -(-num_words // num_parts)
    firsts = list(range(0, num_words, share))
    parts = []
    for first in firsts:
        end = first + share
        part = slice(first * MASK_BITS, end * MASK_BITS)
        part_mask = None if mask is None else mask[:, first:end].contiguous()
        chosen = kernels.sample_part(
            logits[:, part], batch, first_id=first * MASK_BITS, mask=part_mask
        )
        parts.append(Argmax(chosen.token_ids, torch.zeros(NUM_ROWS), chosen.values))
    best = combine_argmax(parts, [first * MASK_BITS for first in firsts])
    assert torch.equal(best.token_ids, kernels.sample(logits, batch, mask=mask))
