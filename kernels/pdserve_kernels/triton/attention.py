# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Paged attention in Triton: a kernel for decodes, split over the context, and one for prefill.

Both attend to KV tiles of 512 tokens aligned to absolute position 0 and merge these in ascending
order, so that a result depends neither on the other requests nor on the number of SMs.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from pdserve_kernels.metadata import AttentionMetadata

# Tokens per KV tile, as in the reference; decodes spread their tiles over programs.
KV_TILE = tl.constexpr(512)
BLOCK_N = 64
# Rows (query token, head of the group) per program. tl.dot needs at least 16.
DECODE_BLOCK_M = 16
PREFILL_BLOCK_M = 64


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    metadata: AttentionMetadata,
    scale: float,
    *,
    window: int | None = None,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal GQA attention over the paged cache; see the reference's contract.

    The split of a decode's context over programs is Flash-Decoding (Dao et al. 2023), the prefill
    loop FlashAttention-2 (Dao 2023, arXiv:2307.08691), both over a block table.
    """
    if query.shape[1] % kv_cache.shape[1] or query.shape[2] != kv_cache.shape[5]:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit kv_cache {tuple(kv_cache.shape)}"
        )
    if not kv_cache.is_contiguous() or query.stride(2) != 1 or kv_cache.dtype != query.dtype:
        raise ValueError("kv_cache must be contiguous, of query's dtype, and query in head_dim")
    if (window is not None and window < 1) or softcap < 0:
        raise ValueError(f"window must be >= 1 and softcap >= 0, got {window} and {softcap}")
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    output[sum(metadata.query_lens_host) :].zero_()
    constants = _constants(query, kv_cache) | {"WINDOW": window or 0, "SOFTCAP": softcap}
    if metadata.num_decodes:
        _launch_decode(query, kv_cache, layer, metadata, scale, constants, output)
    if metadata.num_decodes < metadata.num_reqs:
        _launch_prefill(query, kv_cache, layer, metadata, scale, constants, output)
    return output


def _constants(query: torch.Tensor, kv_cache: torch.Tensor) -> dict[str, Any]:
    return {
        "GROUP_SIZE": query.shape[1] // kv_cache.shape[1],
        "BLOCK_SIZE": kv_cache.shape[4],
        "HEAD_DIM": query.shape[2],
        "BLOCK_D": max(16, triton.next_power_of_2(query.shape[2])),
        "BLOCK_N": BLOCK_N,
    }


def _launch_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    metadata: AttentionMetadata,
    scale: float,
    constants: dict[str, Any],
    output: torch.Tensor,
) -> None:
    num_decodes, (_, num_heads, head_dim) = metadata.num_decodes, query.shape
    num_kv_heads = kv_cache.shape[1]
    num_tiles = max(
        _num_tiles(length, constants["WINDOW"]) for length in metadata.seq_lens_host[:num_decodes]
    )
    shape = (num_decodes, num_heads, num_tiles)
    tile_output = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
    tile_max = torch.empty(shape, dtype=torch.float32, device=query.device)
    tile_sum = torch.empty_like(tile_max)
    _decode_kernel[(num_decodes, num_kv_heads, num_tiles)](
        query,
        kv_cache,
        metadata.block_table,
        metadata.seq_lens,
        tile_output,
        tile_max,
        tile_sum,
        layer,
        scale * math.log2(math.e),
        query.stride(0),
        query.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        metadata.block_table.stride(0),
        BLOCK_M=max(DECODE_BLOCK_M, triton.next_power_of_2(constants["GROUP_SIZE"])),
        **constants,
    )
    _merge_kernel[(num_decodes, num_heads)](
        tile_output,
        tile_max,
        tile_sum,
        metadata.seq_lens,
        output,
        num_tiles,
        HEAD_DIM=head_dim,
        BLOCK_D=constants["BLOCK_D"],
        WINDOW=constants["WINDOW"],
    )


def _num_tiles(seq_len: int, window: int) -> int:
    """Tiles that hold something that the last of seq_len tokens sees; a window of 0 is none."""
    first = max(0, seq_len - window) if window else 0
    return int(triton.cdiv(seq_len, KV_TILE.value) - first // KV_TILE.value)


def _launch_prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    metadata: AttentionMetadata,
    scale: float,
    constants: dict[str, Any],
    output: torch.Tensor,
) -> None:
    num_decodes = metadata.num_decodes
    block_m = max(PREFILL_BLOCK_M, triton.next_power_of_2(constants["GROUP_SIZE"]))
    tokens_per_block = block_m // constants["GROUP_SIZE"]
    blocks = triton.cdiv(max(metadata.query_lens_host[num_decodes:]), tokens_per_block)
    _prefill_kernel[(blocks, kv_cache.shape[1], metadata.num_reqs - num_decodes)](
        query,
        kv_cache,
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        output,
        num_decodes,
        layer,
        scale * math.log2(math.e),
        query.stride(0),
        query.stride(1),
        output.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        metadata.block_table.stride(0),
        BLOCK_M=block_m,
        **constants,
    )


@triton.jit
def _first_seen(query_position, WINDOW: tl.constexpr):
    """The first position that a query sees; a WINDOW of 0 is none."""
    if WINDOW == 0:
        return query_position * 0
    return tl.maximum(query_position - (WINDOW - 1), 0)


@triton.jit
def _cap(scores_log2, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(s / SOFTCAP) of scores s that are in units of log(2), as is the result."""
    # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right for an infinite exp, too.
    exp_2x = tl.exp2(scores_log2 * (2.0 / SOFTCAP))
    return (SOFTCAP * 1.4426950408889634) * (1.0 - 2.0 / (exp_2x + 1.0))


@triton.jit
def _attend_tile(
    query,
    query_position,
    kv_ptr,
    table_ptr,
    tile_start,
    kv_start,
    tile_end,
    stride_block,
    scale_log2,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to positions [tile_start, tile_end): unnormalised output, maximum, sum (base 2).

    `kv_ptr` is the K of this layer and head in block 0. Nothing before kv_start, the first position
    that a query of this program sees, or from tile_end on, the request's length at most, is read:
    what lies there cannot reach a result. A row that sees nothing gets 0, -inf and 0.
    """
    dim = tl.arange(0, BLOCK_D)
    inside = dim < HEAD_DIM
    output = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    # Parts that nobody sees would leave the state as it is; they are skipped.
    first_part = tl.maximum(kv_start, tile_start) // BLOCK_N * BLOCK_N
    for start in range(first_part, tile_end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        valid = (position >= kv_start) & (position < tile_end)
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        row_ptr = kv_ptr + block * stride_block + (position % BLOCK_SIZE) * HEAD_DIM
        mask = valid[:, None] & inside[None, :]
        key = tl.load(row_ptr[:, None] + dim[None, :], mask=mask, other=0.0)
        value = tl.load(
            row_ptr[:, None] + (BLOCK_SIZE * HEAD_DIM) + dim[None, :], mask=mask, other=0.0
        )
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2
        if SOFTCAP > 0.0:
            scores = _cap(scores, SOFTCAP)
        seen = valid[None, :] & (position[None, :] <= query_position[:, None])
        if WINDOW > 0:
            seen &= position[None, :] > query_position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row may see no key yet: subtract 0 then, since -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        probs = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(probs, 1)
        output = output * decay[:, None]
        output += tl.dot(probs.to(value.dtype), value, input_precision="ieee")
        row_max = new_max
    return output, row_max, row_sum


@triton.jit
def _decode_kernel(
    query_ptr,
    kv_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    tile_output_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    layer,
    scale_log2,
    stride_query_token,
    stride_query_head,
    stride_block,
    stride_head,
    stride_table,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request)
    kv_start = _first_seen(seq_len - 1, WINDOW)
    tile_start = (kv_start // KV_TILE + tile) * KV_TILE
    if tile_start >= seq_len:
        return
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    mask = (row < GROUP_SIZE)[:, None] & (dim < HEAD_DIM)[None, :]
    head = kv_head * GROUP_SIZE + row
    query = tl.load(
        query_ptr + request * stride_query_token + head[:, None] * stride_query_head + dim[None, :],
        mask=mask,
        other=0.0,
    )
    output, row_max, row_sum = _attend_tile(
        query,
        tl.zeros([BLOCK_M], dtype=tl.int32) + (seq_len - 1),
        kv_cache_ptr + kv_head * stride_head + layer * (2 * BLOCK_SIZE * HEAD_DIM),
        block_table_ptr + request * stride_table,
        tile_start,
        kv_start,
        tl.minimum(seq_len, tile_start + KV_TILE),
        stride_block,
        scale_log2,
        WINDOW,
        SOFTCAP,
        BLOCK_SIZE,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_M,
        BLOCK_N,
    )
    num_heads = tl.num_programs(1) * GROUP_SIZE
    out_row = (request * num_heads + head) * tl.num_programs(2) + tile
    tl.store(tile_output_ptr + out_row[:, None] * HEAD_DIM + dim[None, :], output, mask=mask)
    tl.store(tile_max_ptr + out_row, row_max, mask=row < GROUP_SIZE)
    tl.store(tile_sum_ptr + out_row, row_sum, mask=row < GROUP_SIZE)


@triton.jit
def _merge_kernel(
    tile_output_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    seq_lens_ptr,
    output_ptr,
    num_tiles,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Merge a decode's tiles in ascending order; those past its length were never written."""
    request = tl.program_id(0).to(tl.int64)
    row = request * tl.num_programs(1) + tl.program_id(1)
    dim = tl.arange(0, BLOCK_D)
    inside = dim < HEAD_DIM
    first = row * num_tiles
    output = tl.load(tile_output_ptr + first * HEAD_DIM + dim, mask=inside, other=0.0)
    row_max = tl.load(tile_max_ptr + first)
    row_sum = tl.load(tile_sum_ptr + first)
    seq_len = tl.load(seq_lens_ptr + request)
    for tile in range(1, tl.cdiv(seq_len, KV_TILE) - _first_seen(seq_len - 1, WINDOW) // KV_TILE):
        index = first + tile
        other = tl.load(tile_output_ptr + index * HEAD_DIM + dim, mask=inside, other=0.0)
        other_max = tl.load(tile_max_ptr + index)
        new_max = tl.maximum(row_max, other_max)
        decay, other_decay = tl.exp2(row_max - new_max), tl.exp2(other_max - new_max)
        output = output * decay + other * other_decay
        row_sum = row_sum * decay + tl.load(tile_sum_ptr + index) * other_decay
        row_max = new_max
    result = (output / row_sum).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + row * HEAD_DIM + dim, result, mask=inside)


@triton.jit
def _attend_tiles(
    query,
    query_position,
    kv_ptr,
    table_ptr,
    kv_start,
    kv_end,
    stride_block,
    scale_log2,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to [kv_start, kv_end) by tiles and merge as `_merge_kernel` does; output and sum."""
    output = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for tile_start in range(kv_start // KV_TILE * KV_TILE, kv_end, KV_TILE):
        other, other_max, other_sum = _attend_tile(
            query,
            query_position,
            kv_ptr,
            table_ptr,
            tile_start,
            kv_start,
            tl.minimum(kv_end, tile_start + KV_TILE),
            stride_block,
            scale_log2,
            WINDOW,
            SOFTCAP,
            BLOCK_SIZE,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_M,
            BLOCK_N,
        )
        new_max = tl.maximum(row_max, other_max)
        # A row's window may begin in a later tile: subtract 0 then, since -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        decay, other_decay = tl.exp2(row_max - shift), tl.exp2(other_max - shift)
        output = output * decay[:, None] + other * other_decay[:, None]
        row_sum = row_sum * decay + other_sum * other_decay
        row_max = new_max
    return output, row_sum


@triton.jit
def _prefill_kernel(
    query_ptr,
    kv_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    output_ptr,
    num_decodes,
    layer,
    scale_log2,
    stride_query_token,
    stride_query_head,
    stride_output_token,
    stride_block,
    stride_head,
    stride_table,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tokens_per_block: tl.constexpr = BLOCK_M // GROUP_SIZE
    kv_head = tl.program_id(1).to(tl.int64)
    request = (tl.program_id(2) + num_decodes).to(tl.int64)
    first_row = tl.load(query_start_loc_ptr + request).to(tl.int64)
    query_len = (tl.load(query_start_loc_ptr + request + 1) - first_row).to(tl.int32)
    first_token = tl.program_id(0) * tokens_per_block
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    row = tl.arange(0, BLOCK_M)
    token = first_token + row // GROUP_SIZE
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    dim = tl.arange(0, BLOCK_D)
    in_block = (row < tokens_per_block * GROUP_SIZE) & (token < query_len)
    mask = in_block[:, None] & (dim < HEAD_DIM)[None, :]
    query_row = query_ptr + (first_row + token) * stride_query_token + head * stride_query_head
    query = tl.load(query_row[:, None] + dim[None, :], mask=mask, other=0.0)
    query_position = seq_len - query_len + token
    first_position = seq_len - query_len + first_token
    kv_start = _first_seen(first_position, WINDOW)
    kv_end = tl.minimum(seq_len, first_position + tokens_per_block)
    output, row_sum = _attend_tiles(
        query,
        query_position,
        kv_cache_ptr + kv_head * stride_head + layer * (2 * BLOCK_SIZE * HEAD_DIM),
        block_table_ptr + request * stride_table,
        kv_start,
        kv_end,
        stride_block,
        scale_log2,
        WINDOW,
        SOFTCAP,
        BLOCK_SIZE,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_M,
        BLOCK_N,
    )
    result = (output / row_sum[:, None]).to(output_ptr.dtype.element_ty)
    output_row = output_ptr + (first_row + token) * stride_output_token + head * HEAD_DIM
    tl.store(output_row[:, None] + dim[None, :], result, mask=mask)
