# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Masks on CUDA: one pass over the logits."""

import torch
import triton
import triton.language as tl

from pdserve_kernels.sampling_batch import check_mask

BLOCK = 1024


def mask_logits(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return logits [n, vocab_size] with -inf where no bit is set; see the reference's contract."""
    if mask is None:
        return logits
    check_mask(mask, logits.shape, logits.device)
    num_rows, vocab_size = logits.shape
    logits, mask = logits.contiguous(), mask.contiguous()
    masked = torch.empty_like(logits)
    if num_rows:
        grid = (num_rows, triton.cdiv(vocab_size, BLOCK))
        _mask_kernel[grid](logits, mask, masked, vocab_size, mask.shape[1], BLOCK=BLOCK)
    return masked


@triton.jit
def _mask_kernel(logits_ptr, mask_ptr, masked_ptr, vocab_size, num_words, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    word = tl.load(mask_ptr + row * num_words + token // 32, mask=inside, other=0)
    is_allowed = (word >> (token % 32)) & 1 != 0
    logits = tl.load(logits_ptr + row * vocab_size + token, mask=inside & is_allowed, other=0.0)
    masked = tl.where(is_allowed, logits, float("-inf"))
    tl.store(masked_ptr + row * vocab_size + token, masked, mask=inside)
