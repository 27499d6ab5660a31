"""Which cache rows each attention tile of a step gathers; derived once per step."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from pdserve_kernels.metadata import AttentionMetadata

# Keys per tile. Tiles start at multiples of it, whatever the batch; part of the numerics.
KV_TILE = 512
# Prefill queries are cut at multiples of this many positions, so that a block's scores stay in the
# L2 cache and few key columns are computed only to be masked. Divides KV_TILE.
QUERY_BLOCK = 64
# Gathered widths are multiples of this, so that few GEMM shapes occur and that a query meets the
# same widths in every chunking, on which the bits of fp32 (not of bf16) GEMMs depend.
WIDTH_STEP = QUERY_BLOCK
# Bytes of K (or V) that one group of decodes gathers at once; see benchmarks/bench_kernels.py.
GROUP_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTile:
    """One KV tile of each of a group's first `num_reqs` requests, those with the most tiles."""

    num_reqs: int
    # [num_reqs * num_kv_heads * blocks] rows of the layer's cache view, request by request.
    cache_rows: torch.Tensor
    # [num_reqs * num_kv_heads, 1, width] bool, true past a request's end and before its window;
    # None if nothing is.
    hidden: torch.Tensor | None
    # Token rows of the gathered V that hold garbage and must be zeroed; None if there are none.
    stale_rows: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Decodes that are attended to together, those with the most to read first."""

    requests: torch.Tensor
    tiles: tuple[DecodeTile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTile:
    """One KV tile of a prefill chunk: columns [first_valid, num_valid) hold its tokens."""

    start: int
    width: int
    first_valid: int
    num_valid: int
    cache_rows: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """One request's query positions [query_start, query_end), from row `first_row` of the query."""

    first_row: int
    query_start: int
    query_end: int
    tiles: tuple[PrefillTile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    num_query_tokens: int
    decode_groups: tuple[DecodeGroup, ...]
    prefill_chunks: tuple[PrefillChunk, ...]
    # [max rows of any tile, block_size * head_dim]; reused by every tile and layer of the step.
    key_scratch: torch.Tensor
    value_scratch: torch.Tensor
    # [QUERY_BLOCK * group size, QUERY_BLOCK] fp32: -inf where the key is after the row's token.
    causal_bias: torch.Tensor


class _Span(NamedTuple):
    """Where a request's visible KV lies, from the start of the first tile that holds some of it."""

    tile_start: int
    # Relative to tile_start.
    first: int
    end: int

    @classmethod
    def of(cls, query_start: int, query_end: int, window: int | None) -> "_Span":
        """What queries at positions [query_start, query_end) see, all together."""
        first = 0 if window is None else max(0, query_start + 1 - window)
        tile_start = first // KV_TILE * KV_TILE
        return cls(tile_start, first - tile_start, query_end - tile_start)


def get_plan(
    metadata: AttentionMetadata, kv_cache: torch.Tensor, num_heads: int, window: int | None
) -> AttentionPlan:
    """Return the step's plan for windows like this and caches [num_blocks, num_kv_heads, num_slots,
    2, block_size, head_dim] of this dtype; the first layer builds it.
    """
    shape = (kv_cache.shape[1], *kv_cache.shape[4:])
    geometry = (num_heads, *shape, kv_cache.dtype, kv_cache.device, window)
    plan = metadata.memo.plans.get(geometry)
    if plan is None:
        plan = _build_plan(metadata, kv_cache, num_heads // kv_cache.shape[1], window)
        metadata.memo.plans[geometry] = plan
    assert isinstance(plan, AttentionPlan)
    return plan


def _build_plan(
    metadata: AttentionMetadata, kv_cache: torch.Tensor, group_size: int, window: int | None
) -> AttentionPlan:
    num_decodes = metadata.num_decodes
    spans = [
        _Span.of(length - 1, length, window) for length in metadata.seq_lens_host[:num_decodes]
    ]
    groups = tuple(
        DecodeGroup(
            requests=torch.tensor(members, dtype=torch.int64, device=kv_cache.device),
            tiles=_decode_tiles(metadata, kv_cache, members, [spans[i] for i in members]),
        )
        for members in _group_decodes(spans, kv_cache)
    )
    chunks = []
    row = num_decodes
    for request in range(num_decodes, metadata.num_reqs):
        query_len, seq_len = metadata.query_lens_host[request], metadata.seq_lens_host[request]
        span = _Span.of(seq_len - query_len, seq_len, window)
        chunks.append(
            PrefillChunk(
                first_row=row,
                query_start=seq_len - query_len,
                query_end=seq_len,
                tiles=_prefill_tiles(metadata, kv_cache, request, span),
            )
        )
        row += query_len
    block_size, head_dim = kv_cache.shape[4:]
    index_sizes = [tile.cache_rows.shape[0] for group in groups for tile in group.tiles]
    index_sizes += [tile.cache_rows.shape[0] for chunk in chunks for tile in chunk.tiles]
    rows = max(index_sizes, default=0)
    return AttentionPlan(
        num_query_tokens=row,
        decode_groups=groups,
        prefill_chunks=tuple(chunks),
        key_scratch=kv_cache.new_empty(rows, block_size * head_dim),
        value_scratch=kv_cache.new_empty(rows, block_size * head_dim),
        causal_bias=_causal_bias(group_size, kv_cache.device),
    )


def _causal_bias(group_size: int, device: torch.device) -> torch.Tensor:
    column = torch.arange(QUERY_BLOCK, device=device)
    later = column > column.repeat_interleave(group_size)[:, None]
    return torch.zeros(later.shape, device=device).masked_fill_(later, float("-inf"))


def _num_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` once these are rounded up to WIDTH_STEP."""
    return -(-num_tokens // WIDTH_STEP) * WIDTH_STEP // block_size


def _group_decodes(spans: list[_Span], kv_cache: torch.Tensor) -> list[list[int]]:
    """Longest span first, so that neighbours have similar ones; each group within GROUP_BYTES."""
    num_kv_heads, block_size, head_dim = kv_cache.shape[1], *kv_cache.shape[4:]
    block_bytes = num_kv_heads * block_size * head_dim * kv_cache.element_size()
    groups: list[list[int]] = []
    room = 0
    for request in sorted(range(len(spans)), key=lambda i: -spans[i].end):
        if room == 0:
            blocks = _num_blocks(min(spans[request].end, KV_TILE), block_size)
            room = max(1, GROUP_BYTES // (blocks * block_bytes))
            groups.append([])
        groups[-1].append(request)
        room -= 1
    return groups


def _decode_tiles(
    metadata: AttentionMetadata, kv_cache: torch.Tensor, members: list[int], spans: list[_Span]
) -> tuple[DecodeTile, ...]:
    """The n-th tile of each request whose span has that many; they start at different positions."""
    device = kv_cache.device
    table = metadata.block_table[torch.tensor(members, device=device)]
    tiles = []
    for start in range(0, spans[0].end, KV_TILE):
        active = [span for span in spans if span.end > start]
        columns = torch.tensor(
            [
                (
                    span.tile_start + start,
                    max(span.first - start, 0),
                    min(span.end - start, KV_TILE),
                )
                for span in active
            ],
            device=device,
        )
        tiles.append(_decode_tile(table[: len(active)], columns, kv_cache))
    return tuple(tiles)


def _decode_tile(table: torch.Tensor, columns: torch.Tensor, kv_cache: torch.Tensor) -> DecodeTile:
    """`columns` int64 [num_reqs, 3]: the tile's position, its first visible column and its end."""
    num_kv_heads, block_size = kv_cache.shape[1], kv_cache.shape[4]
    tile_start, first, end = columns[:, :, None].unbind(1)
    blocks = _num_blocks(int(end[0]), block_size)
    block = torch.arange(blocks, device=table.device)
    # Elsewhere a visible block stands in: table entries past the end and before the window are not
    # trusted.
    is_visible = (block * block_size < end) & ((block + 1) * block_size > first)
    own = torch.where(is_visible, block, first // block_size)
    position = torch.arange(blocks * block_size, device=table.device)
    is_hidden = (position >= end) | (position < first)
    any_hidden = bool(is_hidden.any())
    return DecodeTile(
        num_reqs=len(table),
        cache_rows=_cache_rows(table.gather(1, own + tile_start // block_size), kv_cache),
        hidden=is_hidden.repeat_interleave(num_kv_heads, 0)[:, None] if any_hidden else None,
        stale_rows=_stale_rows(own, end, kv_cache) if any_hidden else None,
    )


def _stale_rows(
    own: torch.Tensor, num_valid: torch.Tensor, kv_cache: torch.Tensor
) -> torch.Tensor | None:
    """Token rows of the gathered tile that lie past the end in a request's partial last block.

    `own` [num_reqs, blocks] is the request's block in each column: stand-ins are copies of full
    blocks, which hold finite values, unless the request's only block is the partial one.
    """
    num_kv_heads, block_size = kv_cache.shape[1], kv_cache.shape[4]
    offset = torch.arange(block_size, device=own.device)
    stale = own[:, :, None] * block_size + offset >= num_valid[:, :, None]
    expanded = stale[:, None].expand(-1, num_kv_heads, -1, -1)
    rows = expanded.reshape(-1).nonzero()[:, 0]
    return rows if rows.numel() else None


def _cache_rows(block_ids: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
    """Turn [num_reqs, blocks] block ids into rows ordered (request, head, block)."""
    num_kv_heads = kv_cache.shape[1]
    head = torch.arange(num_kv_heads, device=block_ids.device)[:, None]
    return (block_ids.to(torch.int64)[:, None] * num_kv_heads + head).reshape(-1)


def _prefill_tiles(
    metadata: AttentionMetadata, kv_cache: torch.Tensor, request: int, span: _Span
) -> tuple[PrefillTile, ...]:
    block_size = kv_cache.shape[4]
    tiles = []
    for offset in range(0, span.end, KV_TILE):
        start = span.tile_start + offset
        num_valid = min(span.end - offset, KV_TILE)
        blocks, first = (
            _num_blocks(num_valid, block_size),
            max(span.first - offset, 0) // block_size,
        )
        block = torch.arange(blocks, device=kv_cache.device)
        is_visible = (block * block_size < num_valid) & (block >= first)
        own = torch.where(is_visible, block, first) + start // block_size
        block_ids = metadata.block_table[request][own][None]
        tiles.append(
            PrefillTile(
                start=start,
                width=blocks * block_size,
                first_valid=first * block_size,
                num_valid=num_valid,
                cache_rows=_cache_rows(block_ids, kv_cache),
            )
        )
    return tuple(tiles)
