# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What a layer does to its heads between two products, in one launch: norms of queries and keys,
rotation, and the write of keys and values into the cache.
"""

import torch
import triton
import triton.language as tl

from pdserve_kernels.decoder import Attention, Decoder
from pdserve_kernels.fp8 import FP8
from pdserve_kernels.kv_scales import check_kv_dtype
from pdserve_kernels.triton.cache import to_fp8

# Heads per program.
BLOCK_HEADS = 8


def prepare_heads(
    qkv: torch.Tensor,
    decoder: Decoder,
    attention: Attention,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Return the queries [T, num_heads, head_dim], a view of qkv [T, (num_heads + 2 * num_kv_heads)
    * head_dim], whose queries are changed; write each token's key and value into its slot.

    The arithmetic is that of rms_norm, rotary_embedding and reshape_and_cache, rounding included.
    positions and slot_mapping are int64 [T]; a slot of -1 is not written.
    """
    check_kv_dtype(kv_cache, qkv.dtype, attention.kv_scales)
    num_tokens, head_dim = qkv.shape[0], decoder.head_dim
    num_heads, num_kv_heads = decoder.num_heads, decoder.num_kv_heads
    half = decoder.cos_sin_cache.shape[1] // 2
    has_norm = attention.q_norm is not None
    heads_kernel[(num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, BLOCK_HEADS))](
        qkv,
        attention.q_norm if has_norm else qkv,
        attention.k_norm if has_norm else qkv,
        positions,
        decoder.cos_sin_cache,
        kv_cache,
        slot_mapping,
        attention.slot,
        decoder.rms_norm_eps,
        qkv.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        1.0 / attention.kv_scales.key,
        1.0 / attention.kv_scales.value,
        IS_FP8=kv_cache.dtype == FP8,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        BLOCK_SIZE=kv_cache.shape[4],
        BLOCK_HEADS=BLOCK_HEADS,
        HAS_NORM=has_norm,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return qkv[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim)


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, is_q, column, inside):
    """Each head's weights [BLOCK_HEADS, n] fp32: of queries or of keys."""
    of_query = tl.load(q_norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(k_norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], of_query[None, :], of_key[None, :])


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slot_mapping_ptr"])
def heads_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    positions_ptr,
    cos_sin_ptr,
    kv_cache_ptr,
    slot_mapping_ptr,
    layer,
    eps,
    stride_token,
    stride_block,
    stride_head,
    inverse_key_scale,
    inverse_value_scale,
    IS_FP8: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """A head is three parts: the halves that are rotated, and the rest, if there is one."""
    HAS_REST: tl.constexpr = 2 * HALF < HEAD_DIM
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_q = head < NUM_HEADS
    is_v = head >= NUM_HEADS + NUM_KV_HEADS
    exists = head < NUM_HEADS + 2 * NUM_KV_HEADS
    column = tl.arange(0, BLOCK_HALF)
    inside = column < HALF
    mask = exists[:, None] & inside[None, :]
    head_ptr = qkv_ptr + token * stride_token + head[:, None] * HEAD_DIM
    first_ptr = head_ptr + column[None, :]
    first = tl.load(first_ptr, mask=mask, other=0.0)
    second = tl.load(first_ptr + HALF, mask=mask, other=0.0)
    dtype = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    rest_column = tl.arange(0, BLOCK_REST)
    rest_inside = rest_column < HEAD_DIM - 2 * HALF
    rest_mask = exists[:, None] & rest_inside[None, :]
    if HAS_REST:
        rest = tl.load(head_ptr + 2 * HALF + rest_column[None, :], mask=rest_mask, other=0.0)
    if HAS_NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if HAS_REST:
            c = rest.to(tl.float32)
            squares += tl.sum(c * c, 1)
        factor = (1.0 / tl.sqrt_rn(squares / HEAD_DIM + eps))[:, None]
        weight = _norm_weight(q_norm_ptr, k_norm_ptr, is_q, column, inside)
        a = ((a * factor).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        weight = _norm_weight(q_norm_ptr + HALF, k_norm_ptr + HALF, is_q, column, inside)
        b = ((b * factor).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        if HAS_REST:
            weight = _norm_weight(
                q_norm_ptr + 2 * HALF, k_norm_ptr + 2 * HALF, is_q, rest_column, rest_inside
            )
            c = (c * factor).to(dtype).to(tl.float32) * weight
            rest = tl.where(is_v[:, None], rest, c.to(dtype))
    angle = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
    cos = tl.load(angle + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(angle + HALF + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    first = tl.where(is_v[:, None], first, (a * cos - b * sin).to(dtype))
    second = tl.where(is_v[:, None], second, (b * cos + a * sin).to(dtype))

    query_mask = is_q[:, None] & inside[None, :]
    tl.store(first_ptr, first, mask=query_mask)
    tl.store(first_ptr + HALF, second, mask=query_mask)
    slot = tl.load(slot_mapping_ptr + token)
    is_kv = exists & (head >= NUM_HEADS) & (slot + head * 0 >= 0)
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    row = (slot // BLOCK_SIZE) * stride_block + kv_head.to(tl.int64) * stride_head
    row += (2 * layer + is_v.to(tl.int32)) * (BLOCK_SIZE * HEAD_DIM) + slot % BLOCK_SIZE * HEAD_DIM
    cache_ptr = kv_cache_ptr + row[:, None]
    kv_mask = is_kv[:, None] & inside[None, :]
    if IS_FP8:
        inverse_scale = tl.where(is_v, inverse_value_scale, inverse_key_scale)[:, None]
        first, second = to_fp8(first, inverse_scale), to_fp8(second, inverse_scale)
    tl.store(cache_ptr + column[None, :], first, mask=kv_mask)
    tl.store(cache_ptr + HALF + column[None, :], second, mask=kv_mask)
    if HAS_REST:
        rest_ptr = head_ptr + 2 * HALF + rest_column[None, :]
        tl.store(rest_ptr, rest, mask=is_q[:, None] & rest_inside[None, :])
        if IS_FP8:
            rest = to_fp8(rest, inverse_scale)
        cache_rest_ptr = cache_ptr + 2 * HALF + rest_column[None, :]
        tl.store(cache_rest_ptr, rest, mask=is_kv[:, None] & rest_inside[None, :])
