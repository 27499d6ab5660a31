# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Penalties on CUDA: one copy of what tokens are penalised by, and one launch."""

import numpy as np
import torch
import triton
import triton.language as tl

from pdserve_kernels.reference.sampling.penalties import check_penalized
from pdserve_kernels.sampling_batch import PenalizedTokens
from pdserve_kernels.triton.staging import Field, Layout

BLOCK = 512


def penalize(logits: torch.Tensor, tokens: PenalizedTokens) -> None:
    """See the reference."""
    check_penalized(logits)
    num_tokens = len(tokens.token_ids)
    if num_tokens == 0:
        return
    types = (np.int64, np.int64, np.float32, np.float32)
    fields = {
        name: Field(dtype, (num_tokens,))
        for name, dtype in zip(PenalizedTokens._fields, types, strict=True)
    }
    staged = Layout(fields).to_device(tokens._asdict(), logits.device)
    penalize_kernel[(triton.cdiv(num_tokens, BLOCK),)](
        logits,
        *logits.stride(),
        *(staged[name] for name in PenalizedTokens._fields),
        num_tokens,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def penalize_kernel(
    penalized_ptr,
    stride_row,
    stride_token,
    rows_ptr,
    token_ids_ptr,
    repetition_ptr,
    reductions_ptr,
    num_tokens,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = index < num_tokens
    row = tl.load(rows_ptr + index, mask=is_token, other=0)
    token = tl.load(token_ids_ptr + index, mask=is_token, other=0)
    place = penalized_ptr + row * stride_row + token * stride_token
    x = tl.load(place, mask=is_token, other=0.0)
    repetition = tl.load(repetition_ptr + index, mask=is_token, other=1.0)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x -= tl.load(reductions_ptr + index, mask=is_token, other=0.0)
    tl.store(place, x, mask=is_token)
