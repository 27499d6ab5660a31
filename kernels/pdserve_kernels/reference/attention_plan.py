"""Which cache rows each attention tile of a step gathers; derived once per step."""

from dataclasses import dataclass

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
    """One KV tile of the first `num_reqs` (the longest) requests of a group."""

    num_reqs: int
    # [num_reqs * num_kv_heads * blocks] rows of the layer's cache view, request by request.
    cache_rows: torch.Tensor
    # [num_reqs * num_kv_heads, 1, width] bool, true past a request's end; None if all are full.
    hidden: torch.Tensor | None
    # Token rows of the gathered V that hold garbage and must be zeroed; None if there are none.
    stale_rows: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Decodes that are attended to together, longest first."""

    requests: torch.Tensor
    tiles: tuple[DecodeTile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTile:
    """One KV tile of a prefill chunk: columns [0, num_valid) are its tokens, the rest padding."""

    start: int
    width: int
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
    # What the plan was made for; a step may meet caches of several shapes (a draft model's, say).
    geometry: tuple[object, ...]
    num_query_tokens: int
    decode_groups: tuple[DecodeGroup, ...]
    prefill_chunks: tuple[PrefillChunk, ...]
    # [max rows of any tile, block_size * head_dim]; reused by every tile and layer of the step.
    key_scratch: torch.Tensor
    value_scratch: torch.Tensor
    # [QUERY_BLOCK * group size, QUERY_BLOCK] fp32: -inf where the key is after the row's token.
    causal_bias: torch.Tensor


def get_plan(metadata: AttentionMetadata, kv_cache: torch.Tensor, num_heads: int) -> AttentionPlan:
    """Return the step's plan; the first layer of a step builds it."""
    geometry = (num_heads, kv_cache.shape[1], *kv_cache.shape[4:], kv_cache.dtype, kv_cache.device)
    plan = metadata.memo.plan
    if not isinstance(plan, AttentionPlan) or plan.geometry != geometry:
        plan = _build_plan(metadata, kv_cache, num_heads // kv_cache.shape[1], geometry)
        metadata.memo.plan = plan
    return plan


def _build_plan(
    metadata: AttentionMetadata,
    kv_cache: torch.Tensor,
    group_size: int,
    geometry: tuple[object, ...],
) -> AttentionPlan:
    num_decodes = metadata.num_decodes
    groups = tuple(
        DecodeGroup(
            requests=torch.tensor(members, dtype=torch.int64, device=kv_cache.device),
            tiles=_decode_tiles(metadata, kv_cache, members),
        )
        for members in _group_decodes(metadata.seq_lens_host[:num_decodes], kv_cache)
    )
    chunks = []
    row = num_decodes
    for request in range(num_decodes, metadata.num_reqs):
        query_len, seq_len = metadata.query_lens_host[request], metadata.seq_lens_host[request]
        chunks.append(
            PrefillChunk(
                first_row=row,
                query_start=seq_len - query_len,
                query_end=seq_len,
                tiles=_prefill_tiles(metadata, kv_cache, request),
            )
        )
        row += query_len
    block_size, head_dim = kv_cache.shape[4:]
    index_sizes = [tile.cache_rows.shape[0] for group in groups for tile in group.tiles]
    index_sizes += [tile.cache_rows.shape[0] for chunk in chunks for tile in chunk.tiles]
    rows = max(index_sizes, default=0)
    return AttentionPlan(
        geometry=geometry,
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


def _group_decodes(seq_lens: tuple[int, ...], kv_cache: torch.Tensor) -> list[list[int]]:
    """Longest first, so that neighbours have similar lengths; each group within GROUP_BYTES."""
    num_kv_heads, block_size, head_dim = kv_cache.shape[1], *kv_cache.shape[4:]
    block_bytes = num_kv_heads * block_size * head_dim * kv_cache.element_size()
    groups: list[list[int]] = []
    room = 0
    for request in sorted(range(len(seq_lens)), key=lambda i: -seq_lens[i]):
        if room == 0:
            blocks = _num_blocks(min(seq_lens[request], KV_TILE), block_size)
            room = max(1, GROUP_BYTES // (blocks * block_bytes))
            groups.append([])
        groups[-1].append(request)
        room -= 1
    return groups


def _decode_tiles(
    metadata: AttentionMetadata, kv_cache: torch.Tensor, members: list[int]
) -> tuple[DecodeTile, ...]:
    block_size, device = kv_cache.shape[4], kv_cache.device
    lens = [metadata.seq_lens_host[request] for request in members]
    table = metadata.block_table[torch.tensor(members, device=device)]
    tiles = []
    for start in range(0, lens[0], KV_TILE):
        valid = [min(length - start, KV_TILE) for length in lens if length > start]
        first, blocks = start // block_size, _num_blocks(valid[0], block_size)
        column = torch.arange(blocks, device=device)
        num_valid = torch.tensor(valid, device=device)[:, None]
        # Past its end a request's own first block stands in: block-table padding is not trusted.
        own = torch.where(column * block_size < num_valid, column, 0)
        stale = hidden = None
        if min(valid) < blocks * block_size:
            position = torch.arange(blocks * block_size, device=device)
            hidden_2d = position >= num_valid
            stale = _stale_rows(own, num_valid, kv_cache)
            hidden = hidden_2d.repeat_interleave(kv_cache.shape[1], 0)[:, None]
        tiles.append(
            DecodeTile(
                num_reqs=len(valid),
                cache_rows=_cache_rows(table[: len(valid)].gather(1, own + first), kv_cache),
                hidden=hidden,
                stale_rows=stale,
            )
        )
    return tuple(tiles)


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
    metadata: AttentionMetadata, kv_cache: torch.Tensor, request: int
) -> tuple[PrefillTile, ...]:
    block_size = kv_cache.shape[4]
    seq_len = metadata.seq_lens_host[request]
    tiles = []
    for start in range(0, seq_len, KV_TILE):
        num_valid = min(seq_len - start, KV_TILE)
        blocks = _num_blocks(num_valid, block_size)
        column = torch.arange(blocks, device=kv_cache.device)
        own = torch.where(column * block_size < num_valid, column, 0) + start // block_size
        block_ids = metadata.block_table[request][own][None]
        tiles.append(
            PrefillTile(
                start=start,
                width=blocks * block_size,
                num_valid=num_valid,
                cache_rows=_cache_rows(block_ids, kv_cache),
            )
        )
    return tuple(tiles)
