# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Logits as the sampling kernels read them: masked, and in an order that integers have too."""

import torch
import triton
import triton.language as tl

from pdserve_kernels.sampling_batch import check_mask


def readable(
    logits: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logits [n, vocab_size], of any float dtype, and their mask, int32 [n, ceil(vocab_size
    / 32)], as kernels read them: each row in one piece.

    Raises ValueError.
    """
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits are {list(logits.shape)}; they must be [n, vocab_size]")
    if mask is not None:
        check_mask(mask, logits.shape, logits.device)
        mask = mask.contiguous()
    return logits if logits.stride(1) == 1 else logits.contiguous(), mask


@triton.jit
def load_logits(logits_ptr, mask_ptr, stride_row, vocab_size, row, token, HAS_MASK: tl.constexpr):
    """fp32 logits of a row's tokens; -inf where a token is not allowed or not in the vocabulary."""
    row = row.to(tl.int64)
    is_allowed = token < vocab_size
    if HAS_MASK:
        num_words = (vocab_size + 31) // 32
        word = tl.load(mask_ptr + row * num_words + token // 32, mask=is_allowed, other=0)
        is_allowed = is_allowed & ((word >> (token % 32)) & 1 != 0)
    logits_ptr += row * stride_row
    return tl.load(logits_ptr + token, mask=is_allowed, other=float("-inf")).to(tl.float32)


@triton.jit
def load_scaled(
    logits_ptr, mask_ptr, stride_row, vocab_size, row, token, divisor, HAS_MASK: tl.constexpr
):
    """The same, scaled."""
    x = load_logits(logits_ptr, mask_ptr, stride_row, vocab_size, row, token, HAS_MASK)
    return scaled(x, divisor)


@triton.jit
def scaled(logits, divisor):
    """Logits divided; -inf for NaN: it may give any id, but everything else needs an order."""
    x = tl.div_rn(logits, divisor)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def to_key(x):
    """int32 in the order of fp32 numbers; both zeros are 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def from_key(key):
    """The number of an int32 key."""
    bits = tl.where(key < 0, (-key) ^ -0x80000000, key)
    return bits.to(tl.float32, bitcast=True)
