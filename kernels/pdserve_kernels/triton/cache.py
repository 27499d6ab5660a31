# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Writing new keys and values into the paged cache."""

import torch
import triton
import triton.language as tl

from pdserve_kernels.fp8 import FP8, FP8_MAX
from pdserve_kernels.kv_scales import NO_SCALES, KVScales, check_kv_dtype

# What `to_fp8` cuts at.
_FP8_MAX = tl.constexpr(FP8_MAX)


def kv_tile_format(dtype: torch.dtype, block_size: int, head_dim: int) -> str:
    """Return "row_major"; see the reference's contract."""
    del dtype, block_size, head_dim
    return "row_major"


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    scales: KVScales = NO_SCALES,
) -> None:
    """Write each token's key and value of one layer into its slot; see the reference's contract."""
    check_kv_dtype(kv_cache, key.dtype, scales)
    num_tokens, num_kv_heads, head_dim = key.shape
    if not kv_cache.is_contiguous() or key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("kv_cache must be contiguous, and key and value in their last dimension")
    reshape_and_cache_kernel[(num_tokens, num_kv_heads)](
        key,
        value,
        kv_cache,
        slot_mapping,
        layer,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        1.0 / scales.key,
        1.0 / scales.value,
        IS_FP8=kv_cache.dtype == FP8,
        BLOCK_SIZE=kv_cache.shape[4],
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
    )


@triton.jit
def to_fp8(x, inverse_scale):
    """Numbers as a cache in FP8 holds them; NaN stays NaN."""
    scaled = x.to(tl.float32) * inverse_scale
    return tl.clamp(scaled, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL).to(
        tl.float8e4nv
    )


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slot_mapping_ptr"])
def reshape_and_cache_kernel(
    key_ptr,
    value_ptr,
    kv_cache_ptr,
    slot_mapping_ptr,
    layer,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_block,
    stride_head,
    inverse_key_scale,
    inverse_value_scale,
    IS_FP8: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    dim = tl.arange(0, BLOCK_D)
    inside = dim < HEAD_DIM
    key = tl.load(key_ptr + token * stride_key_token + head * stride_key_head + dim, mask=inside)
    value = tl.load(
        value_ptr + token * stride_value_token + head * stride_value_head + dim, mask=inside
    )
    if IS_FP8:
        key, value = to_fp8(key, inverse_key_scale), to_fp8(value, inverse_value_scale)
    row = (slot // BLOCK_SIZE) * stride_block + head * stride_head
    row += layer * (2 * BLOCK_SIZE * HEAD_DIM) + (slot % BLOCK_SIZE) * HEAD_DIM
    tl.store(kv_cache_ptr + row + dim, key, mask=inside)
    tl.store(kv_cache_ptr + row + BLOCK_SIZE * HEAD_DIM + dim, value, mask=inside)
