# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What kernels of paged attention have in common: their tiles, and the loop over keys."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """How a launch cuts its work: rows (query token, head of the group), keys, and the pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    # Whether K and V come by the tensor memory accelerator, a block of keys in one instruction.
    use_tma: bool = False


def decode_tile(dtype: torch.dtype, head_dim: int, group_size: int) -> Tile:
    """Return how decodes are cut. As with chunks, all tiles fit into 99 KiB of shared memory, which
    is what the smaller GPUs of a generation have (compute capability 8.6, 8.9 and 12.0).
    """
    tile = Tile(block_m=16, block_n=64, num_warps=2, num_stages=5)  # tl.dot needs 16 rows
    if dtype == torch.float32:
        tile = tile._replace(num_stages=2)
    if head_dim > 128:
        tile = tile._replace(block_n=32)
    return tile._replace(block_m=max(tile.block_m, triton.next_power_of_2(group_size)))


def chunk_tile(
    dtype: torch.dtype, block_size: int, head_dim: int, group_size: int, *, has_tma: bool
) -> Tile:
    """Return how chunks of prompts are cut, as measured on an H100 for heads of 128 in bf16."""
    if dtype == torch.float32 and head_dim > 128:
        tile = Tile(block_m=32, block_n=32, num_warps=4, num_stages=1)
    elif dtype == torch.float32 or head_dim > 128:
        tile = Tile(block_m=64, block_n=32, num_warps=4, num_stages=2)
    elif block_size % 64 == 0 and head_dim in (64, 128) and has_tma:
        tile = Tile(block_m=128, block_n=64, num_warps=4, num_stages=2, use_tma=True)
    else:
        tile = Tile(block_m=64, block_n=64, num_warps=4, num_stages=3)
    return tile._replace(block_m=max(tile.block_m, triton.next_power_of_2(group_size)))


@triton.jit
def first_seen(query_position, WINDOW: tl.constexpr):
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
def attend(
    output,
    row_max,
    row_sum,
    query,
    query_position,
    kv_ptr,
    kv_rows,
    first_row,
    rows_per_block,
    table_ptr,
    start,
    end,
    kv_start,
    kv_end,
    stride_block,
    scale_log2,
    MASKED: tl.constexpr,
    USE_TMA: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the tiles of keys from start, a multiple of BLOCK_N, to end to the unnormalised output
    [BLOCK_M, BLOCK_D], the maximum and the sum (base 2) of each row; return these.

    `kv_ptr` is the K of this layer and head in block 0, `first_row` its row in `kv_rows`, which a
    block has `rows_per_block` of. Unless MASKED, every row sees every key.
    With it nothing of V before kv_start or from kv_end on is read: what lies there cannot reach a
    result. A row that sees nothing keeps 0, -inf and 0.
    """
    dim = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_N)
    inside = dim < HEAD_DIM
    for tile in tl.range(start, end, BLOCK_N):
        position = tile + column
        if USE_TMA:
            block = tl.load(table_ptr + tile // BLOCK_SIZE)
            row = (block * rows_per_block + first_row + tile % BLOCK_SIZE).to(tl.int32)
        elif BLOCK_SIZE % BLOCK_N == 0:
            block = tl.load(table_ptr + tile // BLOCK_SIZE).to(tl.int64)
            row = block * stride_block + (tile % BLOCK_SIZE + column) * HEAD_DIM
        else:
            if MASKED:
                # Entries past the request's last block may be anything.
                last = tl.maximum(kv_end - 1, 0)
                index = tl.minimum(position, last) // BLOCK_SIZE
            else:
                index = position // BLOCK_SIZE
            block = tl.load(table_ptr + index).to(tl.int64)
            row = block * stride_block + (position % BLOCK_SIZE) * HEAD_DIM
        if USE_TMA:
            key = kv_rows.load([row, 0])
        else:
            key_ptr = kv_ptr + row[:, None] + dim[None, :]
            key = tl.load(key_ptr, mask=inside[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale_log2
        if SOFTCAP > 0.0:
            scores = _cap(scores, SOFTCAP)
        if MASKED:
            valid = (position >= kv_start) & (position < kv_end)
            seen = valid[None, :] & (position[None, :] <= query_position[:, None])
            if WINDOW > 0:
                seen &= position[None, :] > query_position[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row may see no key yet: subtract 0 then, since -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        probs = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(probs, 1)
        output = output * decay[:, None]
        if USE_TMA:
            value = kv_rows.load([row + BLOCK_SIZE, 0]).to(query.dtype)
            if MASKED:
                value = tl.where(valid[:, None], value, 0.0)
        elif MASKED:
            value_ptr = key_ptr + BLOCK_SIZE * HEAD_DIM
            value = tl.load(value_ptr, mask=valid[:, None] & inside[None, :], other=0.0)
        else:
            value = tl.load(key_ptr + BLOCK_SIZE * HEAD_DIM, mask=inside[None, :], other=0.0)
        value = value.to(query.dtype)
        output = tl.dot(probs.to(query.dtype), value, output, input_precision="ieee")
        row_max = new_max
    return output, row_max, row_sum


@triton.jit
def request_of(block, query_start_loc_ptr, num_reqs, TOKENS_PER_BLOCK: tl.constexpr):
    """Return the last request whose blocks of queries begin at `block` or before."""
    low, high = 0, num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle) // TOKENS_PER_BLOCK + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def load_query(
    query_ptr, first_row, first_token, query_len, kv_head, stride_token, stride_head,
    GROUP_SIZE: tl.constexpr, TOKENS_PER_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return a block of queries [BLOCK_M, BLOCK_D], and of each row the token within its request,
    the head, and whether it exists.
    """
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    token = first_token + row // GROUP_SIZE
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    in_block = (row < TOKENS_PER_BLOCK * GROUP_SIZE) & (token < query_len)
    mask = in_block[:, None] & (dim < HEAD_DIM)[None, :]
    query_row = (first_row + token).to(tl.int64) * stride_token + head * stride_head
    query = tl.load(query_ptr + query_row[:, None] + dim[None, :], mask=mask, other=0.0)
    return query, token, head, in_block
