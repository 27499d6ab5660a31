"""Paged attention in torch ops: KV tiles are gathered, attended to and merged in order.

Tiles are aligned to absolute position 0 and merged in ascending order, so that a query's result
depends on its own request only, never on its neighbours in the batch or on the chunking.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from pdserve_kernels.fp8 import FP8
from pdserve_kernels.kv_scales import NO_SCALES, KVScales, check_kv_dtype
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.reference.attention_plan import (
    KV_TILE,
    QUERY_BLOCK,
    WIDTH_STEP,
    AttentionPlan,
    DecodeGroup,
    DecodeTile,
    PrefillChunk,
    PrefillTile,
    get_plan,
)

# Some fp32 GEMMs of other row counts sum in another order (measured with MKL, 1 to 512 rows).
GEMM_ROW_STEP = 4


class Scoring(NamedTuple):
    """How the product of a query and a key becomes a score, and which keys a query sees."""

    scale: float
    window: int | None
    softcap: float


class LayerCache(NamedTuple):
    """One layer of the cache: row block_id * num_kv_heads + head is one [block_size, head_dim]."""

    key: torch.Tensor
    value: torch.Tensor
    num_kv_heads: int


class TileResult(NamedTuple):
    """Attention over some tiles: normalised output, score maximum and sum of exponentials."""

    output: torch.Tensor
    score_max: torch.Tensor
    exp_sum: torch.Tensor


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
    """Causal GQA attention of a mixed batch of decodes and prefill chunks over the paged KV cache.

    query [num_tokens, num_heads, head_dim]; kv_cache [num_blocks, num_kv_heads, num_slots, 2,
    block_size, head_dim], contiguous and of the query's dtype or FP8, whose keys and values count
    times their scale; `layer` is the slot within a block. Returns the query's shape and dtype.
    Query head h reads KV head h // (num_heads / num_kv_heads).

    With `window` a token at position p sees (p - window, p] only; blocks that lie before the window
    of a request's every query are never read, so their table entries may be stale. Nor need there
    be anything past a request's length: NaN and block-table padding do no harm. A `softcap` > 0
    turns each score s (scale included) into softcap * tanh(s / softcap), as in Gemma 2 (2024,
    arXiv:2408.00118). Softmax and sums are in fp32. Raises ValueError if shapes or dtypes disagree.

    On CPU it returns when done; elsewhere it is enqueued on the current stream, and only the first
    call of a step waits, to copy indices to the device. The scheme is the online softmax of
    FlashAttention (Dao et al. 2022, arXiv:2205.14135) over the block table of PagedAttention (Kwon
    et al. 2023, arXiv:2309.06180).
    """
    _validate(query, kv_cache, window, softcap, scales)
    if kv_cache.dtype == FP8:
        # All of the layer's: for checks, not for speed.
        of_layer = kv_cache[:, :, layer : layer + 1].to(query.dtype).contiguous()
        scale *= scales.key
        attended = paged_attention(
            query, of_layer, 0, metadata, scale, window=window, softcap=softcap
        )
        return attended * scales.value
    plan = get_plan(metadata, kv_cache, query.shape[1], window)
    scoring = Scoring(scale, window, softcap)
    cache = _layer_cache(kv_cache, layer)
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    for group in plan.decode_groups:
        _attend_decodes(query, cache, plan, group, output, scoring)
    for chunk in plan.prefill_chunks:
        _attend_chunk(query, cache, plan, chunk, output, scoring)
    output[plan.num_query_tokens :].zero_()
    return output


def _validate(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    window: int | None,
    softcap: float,
    scales: KVScales,
) -> None:
    num_kv_heads, block_size, head_dim = kv_cache.shape[1], *kv_cache.shape[4:]
    if query.shape[1] % num_kv_heads or query.shape[2] != head_dim:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit kv_cache {tuple(kv_cache.shape)}"
        )
    if block_size > WIDTH_STEP or WIDTH_STEP % block_size:
        raise ValueError(f"block_size must divide {WIDTH_STEP}, got {block_size}")
    if not kv_cache.is_contiguous():
        raise ValueError("kv_cache must be contiguous")
    check_kv_dtype(kv_cache, query.dtype, scales)
    if (window is not None and window < 1) or softcap < 0:
        raise ValueError(f"window must be >= 1 and softcap >= 0, got {window} and {softcap}")


def _layer_cache(kv_cache: torch.Tensor, layer: int) -> LayerCache:
    num_blocks, num_kv_heads, num_layers, _, block_size, head_dim = kv_cache.shape
    tile = block_size * head_dim
    shape, stride = (num_blocks * num_kv_heads, tile), (num_layers * 2 * tile, 1)
    offset = kv_cache.storage_offset() + layer * 2 * tile
    return LayerCache(
        kv_cache.as_strided(shape, stride, offset),
        kv_cache.as_strided(shape, stride, offset + tile),
        num_kv_heads,
    )


def _gather(rows: torch.Tensor, index: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    return torch.index_select(rows, 0, index, out=scratch[: index.shape[0]])


def _pad_rows(rows: torch.Tensor) -> torch.Tensor:
    """Pad [N, R, head_dim] to the next R for which a GEMM's bits do not depend on R."""
    missing = -rows.shape[1] % GEMM_ROW_STEP
    if rows.dtype != torch.float32 or missing == 0:
        return rows
    return torch.nn.functional.pad(rows, (0, 0, 0, missing))


def _scores(query: torch.Tensor, key: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """The scores in fp32 of query [N, R, head_dim] against key [N, W, head_dim]: [N, R, W].

    A 16-bit GEMM accumulates in fp32 but rounds what it returns. A second one subtracts that in its
    accumulator and so returns the rounding error; the sum is good to 16 bits. On a CPU this beats
    both fp32 GEMMs and torch's flash attention, whose 16-bit GEMMs run at fp32 speed on AMD.
    """
    key_t, scale = key.transpose(1, 2), scoring.scale
    scores = torch.baddbmm(query.new_empty(()), query, key_t, beta=0, alpha=scale)
    if scores.dtype != torch.float32:
        error = torch.baddbmm(scores, query, key_t, beta=-1, alpha=scale)
        scores = scores.float().add_(error)
    return _cap(scores, scoring.softcap) if scoring.softcap else scores


def _cap(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    """softcap * tanh(scores / softcap), in place.

    tanh(x) = m / (m + 2) with m = exp(2x) - 1: torch.tanh is MKL's, whose bits may depend on where
    a number lies. From 2x = 20 on, tanh is 1 in fp32.
    """
    m = scores.mul_(2 / softcap).clamp_(max=20.0).expm1_()
    return m.div_(m + 2).mul_(softcap)


def _attend(scores: torch.Tensor, value: torch.Tensor, *, need_sums: bool) -> TileResult:
    """Softmax (in place) of scores [N, R, W], times value [N, W, head_dim]; one tile's result.

    Without `need_sums` (the only tile) the output keeps the value's dtype and sums are empty.
    """
    score_max = scores.amax(-1, keepdim=True) if need_sums else scores.new_empty(0)
    probs = torch.softmax(scores, -1, out=scores)
    output = _weighted_sum(probs, value)
    if not need_sums:
        return TileResult(output, score_max, score_max)
    # The largest probability is exp(0) / sum.
    return TileResult(output.float(), score_max, probs.amax(-1, keepdim=True).reciprocal_())


def _weighted_sum(probs: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """probs [N, R, W] in fp32 times value [N, W, head_dim], in the value's dtype.

    MKL's fp32 GEMMs cut a sum in pieces that depend on its length, so that hidden columns, whose
    products are 0, would still change bits. Here each piece has one length.
    """
    if value.dtype != torch.float32:
        return torch.bmm(probs.to(value.dtype), value)
    output = torch.bmm(probs[:, :, :WIDTH_STEP], value[:, :WIDTH_STEP])
    for start in range(WIDTH_STEP, value.shape[1], WIDTH_STEP):
        piece = slice(start, start + WIDTH_STEP)
        output.baddbmm_(probs[:, :, piece], value[:, piece])
    return output


def _merge(first: TileResult, second: TileResult) -> TileResult:
    """Merge the later tile `second` into `first`; rows that `second` lacks stay as they are."""
    num = second.output.shape[0]
    output, score_max, exp_sum = (part[:num] for part in first)
    new_max = torch.maximum(score_max, second.score_max)
    weight = exp_sum * torch.exp(score_max - new_max)
    second_weight = second.exp_sum * torch.exp(second.score_max - new_max)
    new_sum = weight + second_weight
    # Shares, so that a row that sees nothing of `first` gets exactly what `second` says.
    merged = (output * (weight / new_sum)).add_(second.output * (second_weight / new_sum))
    for old, new in zip(first, (merged, new_max, new_sum), strict=True):
        old[:num] = new
    return first


def _attend_decodes(
    query: torch.Tensor,
    cache: LayerCache,
    plan: AttentionPlan,
    group: DecodeGroup,
    output: torch.Tensor,
    scoring: Scoring,
) -> None:
    num_heads, head_dim = query.shape[1:]
    group_size = num_heads // cache.num_kv_heads
    heads = _pad_rows(query.index_select(0, group.requests).view(-1, group_size, head_dim))
    merged: TileResult | None = None
    for tile in group.tiles:
        rows = heads[: tile.num_reqs * cache.num_kv_heads]
        key, value = _gather_decode_tile(cache, plan, tile, head_dim)
        scores = _scores(rows, key, scoring)
        if tile.hidden is not None:
            scores.masked_fill_(tile.hidden, float("-inf"))
        result = _attend(scores, value, need_sums=len(group.tiles) > 1)
        merged = result if merged is None else _merge(merged, result)
    assert merged is not None
    attended = merged.output[:, :group_size].to(query.dtype).reshape(-1, num_heads, head_dim)
    output.index_copy_(0, group.requests, attended)


def _gather_decode_tile(
    cache: LayerCache, plan: AttentionPlan, tile: DecodeTile, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (tile.num_reqs * cache.num_kv_heads, -1, head_dim)
    key = _gather(cache.key, tile.cache_rows, plan.key_scratch).view(shape)
    value = _gather(cache.value, tile.cache_rows, plan.value_scratch)
    if tile.stale_rows is not None:
        # Their probability is 0, but 0 * NaN is NaN. (Scores of stale keys are overwritten.)
        value.view(-1, head_dim).index_fill_(0, tile.stale_rows, 0)
    return key, value.view(shape)


def _attend_chunk(
    query: torch.Tensor,
    cache: LayerCache,
    plan: AttentionPlan,
    chunk: PrefillChunk,
    output: torch.Tensor,
    scoring: Scoring,
) -> None:
    """Go through the chunk's KV tiles; each is gathered once and met by every query block after it.

    Rows of a query block are (token, head of the group), so that one GEMM per KV head serves all.
    """
    num_heads, head_dim = query.shape[1:]
    query_len, group_size = chunk.query_end - chunk.query_start, num_heads // cache.num_kv_heads
    span = slice(chunk.first_row, chunk.first_row + query_len)
    by_head = (query_len, cache.num_kv_heads, group_size, head_dim)
    rows = query[span].reshape(by_head).transpose(0, 1).contiguous()
    out_rows = output[span].view(by_head).transpose(0, 1)
    merged: dict[int, TileResult] = {}
    for tile in chunk.tiles:
        key = _gather(cache.key, tile.cache_rows, plan.key_scratch)
        value = _gather(cache.value, tile.cache_rows, plan.value_scratch)
        key = key.view(cache.num_kv_heads, tile.width, head_dim)
        value = value.view(cache.num_kv_heads, tile.width, head_dim)
        # Nothing that is not the request's may reach a sum: 0 * NaN is NaN.
        for gathered in (key, value):
            gathered[:, : tile.first_valid].zero_()
            gathered[:, tile.num_valid :].zero_()
        for start, end in _query_blocks(chunk, tile, scoring.window):
            part = slice(start - chunk.query_start, end - chunk.query_start)
            num_rows = (end - start) * group_size
            block = _pad_rows(rows[:, part].reshape(cache.num_kv_heads, num_rows, head_dim))
            width = min(tile.width, _round_up(end, QUERY_BLOCK) - tile.start)
            # oneDNN wants dense batches: copied here once, not (transposed, slowly) in each GEMM.
            scores = _scores(block, key[:, :width].contiguous(), scoring)
            _hide_later_keys(scores, plan.causal_bias, start - tile.start, group_size)
            if scoring.window is not None and end - scoring.window > tile.start:
                first_seen = start + 1 - scoring.window - tile.start
                _hide_earlier_keys(scores[:, :num_rows], first_seen, group_size)
            result = _attend(scores, value[:, :width], need_sums=end > KV_TILE)
            if start in merged:
                result = _merge(merged.pop(start), result)
            if end <= tile.start + KV_TILE:
                out_rows[:, part] = result.output[:, :num_rows].view(out_rows[:, part].shape)
            else:
                merged[start] = result


def _query_blocks(
    chunk: PrefillChunk, tile: PrefillTile, window: int | None
) -> Iterator[tuple[int, int]]:
    """Half-open position ranges of the chunk's query blocks that attend to the tile."""
    start, stop = max(chunk.query_start, tile.start), chunk.query_end
    if window is not None:
        stop = min(stop, tile.start + KV_TILE + window - 1)
    while start < stop:
        end = min(chunk.query_end, _round_up(start + 1, QUERY_BLOCK))
        yield start, end
        start = end


def _hide_later_keys(
    scores: torch.Tensor, causal_bias: torch.Tensor, start: int, group_size: int
) -> None:
    """Mask in the rows of a query block that starts at column `start` the columns after each row's.

    Columns before the block's aligned start are seen by all its rows.
    """
    first_row = start % QUERY_BLOCK
    window = scores[:, :, start - first_row :]
    if window.shape[2]:
        bias = causal_bias[first_row * group_size :][: window.shape[1], : window.shape[2]]
        window[:, : bias.shape[0]].add_(bias)


def _hide_earlier_keys(scores: torch.Tensor, first_seen: int, group_size: int) -> None:
    """Mask columns before `first_seen` for the first token's rows, one more for each token after.

    With a finite number: a row that sees nothing of the tile must not become NaN. Its share of the
    merged result is 0.
    """
    num_rows, width = scores.shape[1:]
    column = torch.arange(width, device=scores.device)
    token = torch.arange(num_rows, device=scores.device) // group_size
    scores.masked_fill_(column < token[:, None] + first_seen, torch.finfo(scores.dtype).min)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
