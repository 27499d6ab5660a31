# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Paged attention in Triton: one body for decodes, split over the context, and for chunks.

A program has all query heads of one KV head for a few query tokens, so that K and V are read once
for the group and `tl.dot` is full. Grids depend on the number of requests and tokens only, never on
lengths, so that a CUDA graph replays them: which request a program is for, it finds on the device.
"""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pdserve_kernels.kv_scales import NO_SCALES, KVScales, check_kv_dtype
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.triton.attention_tiles import (
    Tile,
    attend,
    chunk_tile,
    decode_tile,
    first_seen,
    load_query,
    request_of,
)

# What the driver says of no GPU: the interpreter's.
DEFAULT_NUM_SMS = 8
# A decode's context is split so that there are this many programs for each SM, or its tiles end.
PROGRAMS_PER_SM = 1
MAX_SPLITS = 128


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
    """Causal GQA attention over the paged cache; see the reference's contract.

    The split of a decode's context over programs is Flash-Decoding (Dao et al. 2023), the loop over
    keys FlashAttention-2 (Dao 2023, arXiv:2307.08691), both over a block table.
    """
    return Launch(
        query, kv_cache, layer, metadata, scale, window=window, softcap=softcap, scales=scales
    ).run()


def check_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    window: int | None,
    softcap: float,
    scales: KVScales,
) -> None:
    """Raise ValueError unless `paged_attention` takes these: query [num_tokens, num_heads,
    head_dim], kv_cache [num_blocks, num_kv_heads, num_slots, 2, block_size, head_dim] of query's
    dtype or fp8.
    """
    if query.shape[1] % kv_cache.shape[1] or query.shape[2] != kv_cache.shape[5]:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit kv_cache {tuple(kv_cache.shape)}"
        )
    if not kv_cache.is_contiguous() or query.stride(2) != 1:
        raise ValueError("kv_cache must be contiguous, and query in head_dim")
    check_kv_dtype(kv_cache, query.dtype, scales)
    if (window is not None and window < 1) or softcap < 0:
        raise ValueError(f"window must be >= 1 and softcap >= 0, got {window} and {softcap}")


class Launch:
    """One layer's attention: what all its launches have in common. Takes what `paged_attention`
    does.
    """

    def __init__(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        metadata: AttentionMetadata,
        scale: float,
        *,
        window: int | None,
        softcap: float,
        scales: KVScales,
    ) -> None:
        """Raises ValueError."""
        check_attention(query, kv_cache, window, softcap, scales)
        self.query, self.kv_cache, self.layer, self.metadata = query, kv_cache, layer, metadata
        self.scale_log2 = scale * scales.key * math.log2(math.e)
        self.value_scale = scales.value
        self.output = torch.empty_like(query, memory_format=torch.contiguous_format)
        self.num_kv_heads = kv_cache.shape[1]
        self.group_size = query.shape[1] // self.num_kv_heads
        head_dim = query.shape[2]
        self.constants: dict[str, Any] = {
            "WINDOW": window or 0,
            "SOFTCAP": softcap,
            "GROUP_SIZE": self.group_size,
            "BLOCK_SIZE": kv_cache.shape[4],
            "HEAD_DIM": head_dim,
            "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        }

    def run(self) -> torch.Tensor:
        """Launch what there is to launch; return the output, which that will write."""
        query_lens = self.metadata.query_lens_host
        num_tokens = sum(query_lens)
        if num_tokens < len(self.query):
            self.output[num_tokens:].zero_()
        if 1 in query_lens:
            self.decodes()
        if max(query_lens) > 1:
            self.chunks()
        return self.output

    def decodes(self) -> None:
        """Attend for the requests with one query token."""
        metadata, query = self.metadata, self.query
        num_reqs, (_, num_heads, head_dim) = metadata.num_reqs, query.shape
        num_splits = _num_splits(num_reqs * self.num_kv_heads, _num_sms(query.device))
        if num_splits == 1:
            parts = part_sums = self.output  # not written
        else:
            shape = (num_reqs, num_heads, num_splits)
            parts = query.new_empty(*shape, head_dim, dtype=torch.float32)
            part_sums = query.new_empty(2, *shape, dtype=torch.float32)
        tile = decode_tile(query.dtype, head_dim, self.group_size)
        self._run((num_reqs, self.num_kv_heads, num_splits), tile, parts, part_sums, num_splits)
        if num_splits > 1:
            merge_kernel[(num_reqs, num_heads)](
                parts,
                part_sums,
                metadata.seq_lens,
                metadata.query_start_loc,
                self.output,
                self.output.stride(0),
                NUM_SPLITS=num_splits,
                HEAD_DIM=head_dim,
                BLOCK_D=self.constants["BLOCK_D"],
                BLOCK_N=tile.block_n,
                WINDOW=self.constants["WINDOW"],
                num_warps=2,
                enable_fp_fusion=True,
            )

    def chunks(self) -> None:
        """Attend for the requests with several query tokens."""
        block_size, head_dim = self.kv_cache.shape[4:]
        has_tma = _has_tma(self.query.device)
        tile = chunk_tile(self.query.dtype, block_size, head_dim, self.group_size, has_tma=has_tma)
        tokens_per_block = tile.block_m // self.group_size
        # A request's blocks of queries begin at query_start_loc // tokens_per_block + its index.
        num_blocks = len(self.query) // tokens_per_block + self.metadata.num_reqs
        self._run((num_blocks, self.num_kv_heads), tile, self.output, self.output, 0)

    def _run(
        self,
        grid: tuple[int, ...],
        tile: Tile,
        parts: torch.Tensor,
        part_sums: torch.Tensor,
        num_splits: int,
    ) -> None:
        metadata, kv_cache = self.metadata, self.kv_cache
        attention_kernel[grid](
            self.query,
            kv_cache,
            _rows_of(kv_cache, tile.block_n) if tile.use_tma else None,
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
            IS_DECODE=num_splits > 0,
            IS_SPLIT=num_splits > 1,
            USE_TMA=tile.use_tma,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            enable_fp_fusion=True,
            **self.constants,
        )


def _num_splits(num_programs: int, num_sms: int) -> int:
    """Return into how many parts each context is cut, a power of two."""
    wanted = triton.cdiv(PROGRAMS_PER_SM * num_sms, max(1, num_programs))
    return int(min(MAX_SPLITS, triton.next_power_of_2(wanted)))


def _rows_of(kv_cache: torch.Tensor, block_n: int) -> TensorDescriptor:
    """Return the pool as rows of a head's numbers, of which block_n are loaded at a time."""
    head_dim = kv_cache.shape[5]
    num_rows = kv_cache.numel() // head_dim
    return TensorDescriptor(kv_cache, [num_rows, head_dim], [head_dim, 1], [block_n, head_dim])


@functools.cache
def _has_tma(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return DEFAULT_NUM_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _split_of(seq_len, first_tile, num_splits, BLOCK_N: tl.constexpr):
    """Return how many tiles of keys each part of a context has."""
    return tl.cdiv(tl.cdiv(seq_len, BLOCK_N) - first_tile, num_splits)


@triton.jit(
    do_not_specialize=["num_reqs", "layer", "stride_table"],
    do_not_specialize_on_alignment=["block_table_ptr"],
)
def attention_kernel(
    query_ptr,
    kv_cache_ptr,
    kv_rows,
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
    IS_SPLIT: tl.constexpr,
    USE_TMA: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Chunks, grid (block of queries, KV head), or decodes, grid (request, KV head, part). If these
    are split, what is written are parts, for `merge_kernel`.
    """
    TOKENS_PER_BLOCK: tl.constexpr = 1 if IS_DECODE else BLOCK_M // GROUP_SIZE
    kv_head = tl.program_id(1)
    if IS_DECODE:
        request = tl.program_id(0)
        first_token = 0
    else:
        # Blocks at the end of a chunk have the most keys: they go first.
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
    start = kv_start // BLOCK_N * BLOCK_N
    end = kv_end
    if IS_DECODE:
        per_split = _split_of(seq_len, start // BLOCK_N, tl.num_programs(2), BLOCK_N) * BLOCK_N
        start += tl.program_id(2) * per_split
        end = tl.minimum(seq_len, start + per_split)
        if start >= end:
            return

    kv_ptr = kv_cache_ptr + kv_head.to(tl.int64) * stride_head + layer * (2 * BLOCK_SIZE * HEAD_DIM)
    kv_row = (kv_head * stride_head + layer * (2 * BLOCK_SIZE * HEAD_DIM)) // HEAD_DIM
    rows_per_block = stride_block // HEAD_DIM
    table_ptr = block_table_ptr + request.to(tl.int64) * stride_table
    output = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    seen_by_all = start
    if WINDOW == 0:
        # Up to the last tile that every row sees whole.
        seen_by_all = tl.minimum(first_position + 1, end) // BLOCK_N * BLOCK_N
        output, row_max, row_sum = attend(
            output, row_max, row_sum, query, query_position, kv_ptr, kv_rows, kv_row,
            rows_per_block, table_ptr, start, seen_by_all, kv_start, kv_end, stride_block,
            scale_log2, False, USE_TMA, WINDOW, SOFTCAP, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_M,
            BLOCK_N,
        )  # fmt: skip
    output, row_max, row_sum = attend(
        output, row_max, row_sum, query, query_position, kv_ptr, kv_rows, kv_row, rows_per_block,
        table_ptr, seen_by_all, end, kv_start, kv_end, stride_block, scale_log2, True, USE_TMA,
        WINDOW, SOFTCAP, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    output *= value_scale
    if IS_SPLIT:
        num_heads = tl.num_programs(1) * GROUP_SIZE
        part = (request * num_heads + head).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
        tl.store(parts_ptr + part[:, None] * HEAD_DIM + dim[None, :], output, mask=mask)
        num_parts = num_reqs.to(tl.int64) * num_heads * tl.num_programs(2)
        tl.store(part_sums_ptr + part, row_max, mask=in_block)
        tl.store(part_sums_ptr + num_parts + part, row_sum, mask=in_block)
    else:
        result = (output / row_sum[:, None]).to(output_ptr.dtype.element_ty)
        output_row = (first_row + token).to(tl.int64) * stride_output_token + head * HEAD_DIM
        tl.store(output_ptr + output_row[:, None] + dim[None, :], result, mask=mask)


@triton.jit
def merge_kernel(
    parts_ptr,
    part_sums_ptr,
    seq_lens_ptr,
    query_start_loc_ptr,
    output_ptr,
    stride_output_token,
    NUM_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Merge a decode's parts in ascending order; those past its length were never written."""
    request, head = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(query_start_loc_ptr + request)
    if tl.load(query_start_loc_ptr + request + 1) - first_row != 1:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    first_tile = first_seen(seq_len - 1, WINDOW) // BLOCK_N
    per_split = _split_of(seq_len, first_tile, NUM_SPLITS, BLOCK_N)
    num_parts = tl.cdiv(tl.cdiv(seq_len, BLOCK_N) - first_tile, per_split)
    split = tl.arange(0, NUM_SPLITS)
    index = (request.to(tl.int64) * tl.num_programs(1) + head) * NUM_SPLITS
    all_parts = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * NUM_SPLITS
    is_part = split < num_parts
    part_max = tl.load(part_sums_ptr + index + split, mask=is_part, other=float("-inf"))
    part_sum = tl.load(part_sums_ptr + all_parts + index + split, mask=is_part, other=0.0)
    highest = tl.max(part_max, 0)
    total = tl.sum(part_sum * tl.exp2(part_max - highest), 0)
    dim = tl.arange(0, BLOCK_D)
    inside = dim < HEAD_DIM
    output = tl.zeros([BLOCK_D], dtype=tl.float32)
    for part in tl.range(0, num_parts, num_stages=4):
        decay = tl.exp2(tl.load(part_sums_ptr + index + part) - highest)
        output += decay * tl.load(parts_ptr + (index + part) * HEAD_DIM + dim, mask=inside, other=0)
    result = (output / total).to(output_ptr.dtype.element_ty)
    output_row = first_row.to(tl.int64) * stride_output_token + head * HEAD_DIM
    tl.store(output_ptr + output_row + dim, result, mask=inside)
