# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The terms of log-probabilities on CUDA, in two reads of the logits and no copy of them."""

import torch
import triton
import triton.language as tl

from pdserve_kernels.reference.sampling.logprobs import check_chosen
from pdserve_kernels.sampling_batch import LogprobTerms
from pdserve_kernels.triton.exact_math import exp_to_fixed_point
from pdserve_kernels.triton.sampling.masks import from_key, readable, to_key

BLOCK = 1024
# A device has room for about as many; of few rows each is looked at by several.
MAX_PROGRAMS = 2048
# Makes keys positive, so that memory of zeros is below all.
KEY_BIAS = tl.constexpr(2**31)
# Above the keys of all numbers.
NAN_KEY = tl.constexpr(0x7FC00000)


def logprob_terms(logits: torch.Tensor, chosen: torch.Tensor) -> LogprobTerms:
    """See the reference."""
    check_chosen(logits, chosen)
    logits, _ = readable(logits, None)
    num_rows, vocab_size = logits.shape
    highest = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    # Each row has its highest key, its total, the number of better tokens, and one for alignment.
    records = torch.zeros(num_rows, 4, dtype=torch.int64, device=logits.device)
    if num_rows:
        num_blocks = triton.cdiv(vocab_size, BLOCK)
        grid = (num_rows, min(num_blocks, max(1, MAX_PROGRAMS // num_rows)))
        row = (logits, logits.stride(0), vocab_size, records)
        highest_logit_kernel[grid](*row, BLOCK=BLOCK, enable_fp_fusion=False)
        terms_kernel[grid](*row, chosen, highest, BLOCK=BLOCK, enable_fp_fusion=False)
    return LogprobTerms(highest, records[:, 1].clamp(min=1), records[:, 2] + 1)


@triton.jit
def _load(raw_ptr, stride_row, vocab_size, row, token):
    raw_ptr += row.to(tl.int64) * stride_row
    return tl.load(raw_ptr + token, mask=token < vocab_size, other=float("-inf"))


@triton.jit
def highest_logit_kernel(raw_ptr, stride_row, vocab_size, records_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    highest = tl.full((BLOCK,), -(2**31), tl.int32)
    for start in range(tl.program_id(1) * BLOCK, vocab_size, tl.num_programs(1) * BLOCK):
        x = _load(raw_ptr, stride_row, vocab_size, row, start + tl.arange(0, BLOCK))
        highest = tl.maximum(highest, tl.where(x == x, to_key(x), NAN_KEY))
    highest = tl.max(highest, axis=0).to(tl.int64) + KEY_BIAS
    tl.atomic_max(records_ptr + row * 4, highest, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["chosen_ptr"])
def terms_kernel(
    raw_ptr,
    stride_row,
    vocab_size,
    records_ptr,
    chosen_ptr,
    found_ptr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    highest = from_key((tl.load(records_ptr + row * 4) - KEY_BIAS).to(tl.int32))
    chosen = _load(raw_ptr, stride_row, vocab_size, row, tl.load(chosen_ptr + row))
    weights = tl.zeros((BLOCK,), tl.int64)
    num_better = tl.zeros((BLOCK,), tl.int32)
    for start in range(tl.program_id(1) * BLOCK, vocab_size, tl.num_programs(1) * BLOCK):
        x = _load(raw_ptr, stride_row, vocab_size, row, start + tl.arange(0, BLOCK))
        weights += exp_to_fixed_point(x - highest)
        num_better += (x > chosen).to(tl.int32)
    tl.atomic_add(records_ptr + row * 4 + 1, tl.sum(weights, axis=0), sem="relaxed")
    total_better = tl.sum(num_better, axis=0).to(tl.int64)
    tl.atomic_add(records_ptr + row * 4 + 2, total_better, sem="relaxed")
    if tl.program_id(1) == 0:
        tl.store(found_ptr + row, highest)
