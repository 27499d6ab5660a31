# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Writing new keys and values into the paged cache."""

import torch
import triton
import triton.language as tl


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
) -> None:
    """Write each token's key and value of one layer into its slot; see the reference's contract."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if not kv_cache.is_contiguous() or key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("kv_cache must be contiguous, and key and value in their last dimension")
    _reshape_and_cache_kernel[(num_tokens, num_kv_heads)](
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
        BLOCK_SIZE=kv_cache.shape[4],
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
    )


@triton.jit(do_not_specialize=["layer"])
def _reshape_and_cache_kernel(
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
    row = (slot // BLOCK_SIZE) * stride_block + head * stride_head
    row += layer * (2 * BLOCK_SIZE * HEAD_DIM) + (slot % BLOCK_SIZE) * HEAD_DIM
    tl.store(kv_cache_ptr + row + dim, key, mask=inside)
    tl.store(kv_cache_ptr + row + BLOCK_SIZE * HEAD_DIM + dim, value, mask=inside)
