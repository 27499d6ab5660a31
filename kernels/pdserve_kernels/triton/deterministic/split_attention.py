# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Paged attention whose bits depend on a query token alone: a context is cut at fixed positions,
and its parts are merged one after another. One program does that for a chunk's queries; a decode's
parts are computed side by side. The tiles are the same for both.
"""

import torch
import triton
import triton.language as tl

from pdserve_kernels.kv_scales import NO_SCALES, KVScales
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.triton.attention import Launch
from pdserve_kernels.triton.attention_tiles import (
    Tile,
    attend,
    chunk_tile,
    first_seen,
    load_query,
    request_of,
)

# Positions of a part, a multiple of each tile's keys.
SPLIT = 2048


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    metadata: AttentionMetadata,
    scale: float,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    scales: KVScales = NO_SCALES,
) -> torch.Tensor:
    """Causal GQA attention over the paged cache; see the reference's contract."""
    return _SplitLaunch(
        query, kv_cache, layer, metadata, scale, window=window, softcap=softcap, scales=scales
    ).run()


class _SplitLaunch(Launch):
    """Cuts contexts at multiples of SPLIT, whatever there is in the batch."""

    def decodes(self) -> None:
        """Attend for the requests with one query token."""
        metadata, query = self.metadata, self.query
        num_reqs, (_, num_heads, head_dim) = metadata.num_reqs, query.shape
        # As many as the longest context may have: no grid depends on lengths.
        max_len = metadata.block_table.shape[1] * self.kv_cache.shape[4]
        num_splits = triton.cdiv(max_len, SPLIT)
        shape = (num_reqs, num_heads, num_splits)
        parts = query.new_empty(*shape, head_dim, dtype=torch.float32)
        part_sums = query.new_empty(2, *shape, dtype=torch.float32)
        grid = (num_reqs, self.num_kv_heads, num_splits)
        self._launch(grid, parts, part_sums, is_decode=True)
        names = ("WINDOW", "GROUP_SIZE", "HEAD_DIM", "BLOCK_D")
        merge_parts_kernel[grid[:2]](
            parts,
            part_sums,
            metadata.seq_lens,
            metadata.query_start_loc,
            self.output,
            self.output.stride(0),
            num_splits,
            self.value_scale,
            SPLIT=SPLIT,
            BLOCK_HEADS=triton.next_power_of_2(self.group_size),
            **{name: self.constants[name] for name in names},
            num_warps=2,
            enable_fp_fusion=False,
        )

    def chunks(self) -> None:
        """Attend for the requests with several query tokens."""
        tokens_per_block = self._tile.block_m // self.group_size
        # A request's blocks of queries begin at query_start_loc // tokens_per_block + its index.
        num_blocks = len(self.query) // tokens_per_block + self.metadata.num_reqs
        grid = (num_blocks, self.num_kv_heads)
        self._launch(grid, self.output, self.output, is_decode=False)

    @property
    def _tile(self) -> Tile:
        block_size, head_dim = self.kv_cache.shape[4:]
        return chunk_tile(self.query.dtype, block_size, head_dim, self.group_size, has_tma=False)

    def _launch(
        self,
        grid: tuple[int, ...],
        parts: torch.Tensor,
        part_sums: torch.Tensor,
        *,
        is_decode: bool,
    ) -> None:
        metadata, kv_cache, tile = self.metadata, self.kv_cache, self._tile
        split_attention_kernel[grid](
            self.query,
            kv_cache,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            self.output,
            parts,
            part_sums,
            metadata.num_reqs,
            self.layer,
            self.scale_log2,
            self.value_scale,
            self.query.stride(0),
            self.query.stride(1),
            self.output.stride(0),
            kv_cache.stride(0),
            kv_cache.stride(1),
            metadata.block_table.stride(0),
            IS_DECODE=is_decode,
            SPLIT=SPLIT,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=False,
            **self.constants,
        )


@triton.jit
def _merge(output, row_max, row_sum, part, part_max, part_sum):
    """Add a part [rows, BLOCK_D] to the unnormalised output; rows that see nothing of it stay."""
    new_max = tl.maximum(row_max, part_max)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay, weight = tl.exp2(row_max - shift), tl.exp2(part_max - shift)
    is_unseen = part_sum == 0.0
    merged = output * decay[:, None] + part * weight[:, None]
    output = tl.where(is_unseen[:, None], output, merged)
    row_sum = tl.where(is_unseen, row_sum, row_sum * decay + part_sum * weight)
    return output, tl.where(is_unseen, row_max, new_max), row_sum


@triton.jit(
    do_not_specialize=["num_reqs", "layer", "stride_table"],
    do_not_specialize_on_alignment=["block_table_ptr"],
)
def split_attention_kernel(
    query_ptr,
    kv_cache_ptr,
    block_table_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    output_ptr,
    parts_ptr,
    part_sums_ptr,
    num_reqs,
    layer,
    scale_log2,
    value_scale,
    stride_query_token,
    stride_query_head,
    stride_output_token,
    stride_block,
    stride_head,
    stride_table,
    IS_DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Chunks, grid (block of queries, KV head), whose output is written, or decodes, grid (request,
    KV head, part), of which parts are written.
    """
    TOKENS_PER_BLOCK: tl.constexpr = 1 if IS_DECODE else BLOCK_M // GROUP_SIZE
    kv_head = tl.program_id(1)
    if IS_DECODE:
        request = tl.program_id(0)
        first_token = 0
    else:
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        request = request_of(block, query_start_loc_ptr, num_reqs, TOKENS_PER_BLOCK)
    first_row = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - first_row
    if IS_DECODE:
        if query_len != 1:
            return
    else:
        first_token = (block - first_row // TOKENS_PER_BLOCK - request) * TOKENS_PER_BLOCK
        if query_len < 2 or first_token >= query_len:
            return
    seq_len = tl.load(seq_lens_ptr + request)
    query, token, head, in_block = load_query(
        query_ptr, first_row, first_token, query_len, kv_head, stride_query_token,
        stride_query_head, GROUP_SIZE, TOKENS_PER_BLOCK, HEAD_DIM, BLOCK_D, BLOCK_M,
    )  # fmt: skip
    dim = tl.arange(0, BLOCK_D)
    mask = in_block[:, None] & (dim < HEAD_DIM)[None, :]
    query_position = seq_len - query_len + token
    first_position = seq_len - query_len + first_token
    kv_start = first_seen(first_position, WINDOW)
    kv_end = tl.minimum(seq_len, first_position + TOKENS_PER_BLOCK)
    first_split, end_split = kv_start // SPLIT, tl.cdiv(kv_end, SPLIT)
    if IS_DECODE:
        first_split += tl.program_id(2)
        if first_split >= end_split:
            return
        end_split = first_split + 1

    kv_ptr = kv_cache_ptr + kv_head.to(tl.int64) * stride_head + layer * (2 * BLOCK_SIZE * HEAD_DIM)
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_table
    output = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for split in range(first_split, end_split):
        start = tl.maximum(split * SPLIT, kv_start // BLOCK_N * BLOCK_N)
        end = tl.minimum(kv_end, (split + 1) * SPLIT)
        part, part_max, part_sum = attend(
            tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32),
            tl.full([BLOCK_M], float("-inf"), dtype=tl.float32),
            tl.zeros([BLOCK_M], dtype=tl.float32),
            query, query_position, kv_ptr, None, 0, 0, table_ptr, start, end, kv_start, kv_end,
            stride_block, scale_log2, True, False, WINDOW, SOFTCAP, BLOCK_SIZE, HEAD_DIM, BLOCK_D,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if IS_DECODE:
            output, row_max, row_sum = part, part_max, part_sum
        else:
            output, row_max, row_sum = _merge(output, row_max, row_sum, part, part_max, part_sum)
    if IS_DECODE:
        num_heads = tl.num_programs(1) * GROUP_SIZE
        place = (request * num_heads + head).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
        tl.store(parts_ptr + place[:, None] * HEAD_DIM + dim[None, :], output, mask=mask)
        num_places = num_reqs.to(tl.int64) * num_heads * tl.num_programs(2)
        tl.store(part_sums_ptr + place, row_max, mask=in_block)
        tl.store(part_sums_ptr + num_places + place, row_sum, mask=in_block)
    else:
        result = (output / row_sum[:, None] * value_scale).to(output_ptr.dtype.element_ty)
        output_row = (first_row + token).to(tl.int64) * stride_output_token + head * HEAD_DIM
        tl.store(output_ptr + output_row[:, None] + dim[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def merge_parts_kernel(
    parts_ptr,
    part_sums_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    output_ptr,
    stride_output_token,
    num_splits,
    value_scale,
    SPLIT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the parts of a decode's heads of one KV head, as a chunk's program does."""
    request, kv_head = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(query_start_loc_ptr + request)
    if tl.load(query_start_loc_ptr + request + 1) - first_row != 1:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    num_parts = tl.cdiv(seq_len, SPLIT) - first_seen(seq_len - 1, WINDOW) // SPLIT
    row, dim = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_D)
    head, exists = kv_head * GROUP_SIZE + row, row < GROUP_SIZE
    mask = exists[:, None] & (dim < HEAD_DIM)[None, :]
    num_heads = tl.num_programs(1) * GROUP_SIZE
    first_place = (request * num_heads + head).to(tl.int64) * num_splits
    num_places = tl.num_programs(0).to(tl.int64) * num_heads * num_splits
    output = tl.zeros([BLOCK_HEADS, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_HEADS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_HEADS], dtype=tl.float32)
    for index in tl.range(0, num_parts, num_stages=4):
        place = first_place + index
        part_ptr = parts_ptr + place[:, None] * HEAD_DIM + dim[None, :]
        part = tl.load(part_ptr, mask=mask, other=0.0)
        part_max = tl.load(part_sums_ptr + place, mask=exists, other=float("-inf"))
        part_sum = tl.load(part_sums_ptr + num_places + place, mask=exists, other=0.0)
        output, row_max, row_sum = _merge(output, row_max, row_sum, part, part_max, part_sum)
    result = (output / row_sum[:, None] * value_scale).to(output_ptr.dtype.element_ty)
    output_row = first_row.to(tl.int64) * stride_output_token + head * HEAD_DIM
    tl.store(output_ptr + output_row[:, None] + dim[None, :], result, mask=mask)
