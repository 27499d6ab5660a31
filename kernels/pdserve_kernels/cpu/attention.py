"""Paged attention over packed tiles, decodes and prefill chunks by the same arithmetic."""

import ctypes
from itertools import accumulate

import torch

from pdserve_kernels import reference
from pdserve_kernels.cpu.cache import PagedKV, has_packed_tiles
from pdserve_kernels.cpu.compiled import library
from pdserve_kernels.cpu.layers import are_within, check_indices
from pdserve_kernels.kv_scales import NO_SCALES, KVScales
from pdserve_kernels.metadata import AttentionMetadata


class Batch(ctypes.Structure):
    """`Batch` of csrc/paged_kv.h. The metadata's tensors must outlive it."""

    _fields_ = (
        ("num_reqs", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("slot_mapping", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, metadata: AttentionMetadata, num_tokens: int, kv_cache: torch.Tensor) -> "Batch":
        """Describe a step of `num_tokens` rows, padding included; kv_cache is bf16 [num_blocks,
        num_kv_heads, num_slots, 2, block_size, head_dim].

        Raises ValueError if there are fewer rows than query tokens, if a request has more query
        tokens than positions, or if a tensor is not what the kernels read: of another dtype, other
        lengths than the host's, or with blocks that the cache has not. (Those before a window are
        not read, but must be blocks as well.)
        """
        _validate_batch(metadata, num_tokens)
        _validate_block_table(metadata, kv_cache)
        return cls(
            metadata.num_reqs,
            num_tokens,
            metadata.query_start_loc.data_ptr(),
            metadata.seq_lens.data_ptr(),
            metadata.block_table.data_ptr(),
            metadata.block_table.stride(0),
            metadata.slot_mapping.data_ptr(),
        )


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
    """See the reference. Tiles are in the format of `kv_tile_format`.

    With packed tiles probabilities are rounded to bf16 before both the product with V and their
    sum, and a row's bits depend neither on the batch and its chunking nor on the number of threads.
    """
    if not has_packed_tiles(kv_cache):
        return reference.paged_attention(
            query,
            kv_cache,
            layer,
            metadata,
            scale,
            window=window,
            softcap=softcap,
            scales=scales,
        )
    _validate(query, kv_cache, layer, metadata, window, softcap)
    if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
        query = query.contiguous()
    num_tokens, num_heads, _ = query.shape
    kv, batch = PagedKV.of(kv_cache), Batch.of(metadata, num_tokens, kv_cache)
    out, scratch = query.new_empty(query.shape), _scratch(metadata, num_heads, kv, batch)
    library().pds_paged_attention(
        query.data_ptr(),
        query.stride(0),
        num_heads,
        ctypes.byref(kv),
        layer,
        ctypes.byref(batch),
        scale,
        window or 0,
        softcap,
        out.data_ptr(),
        scratch.data_ptr(),
    )
    return out


def _scratch(
    metadata: AttentionMetadata, num_heads: int, kv: PagedKV, batch: Batch
) -> torch.Tensor:
    """One for all layers of the step: new memory costs more than a short decode's attention."""
    geometry = (PagedKV, num_heads, kv.num_kv_heads, kv.head_dim, torch.get_num_threads())
    scratch = metadata.memo.plans.get(geometry)
    if scratch is None:
        size = ctypes.c_int64()
        library().pds_attention_scratch_size(
            num_heads, ctypes.byref(kv), ctypes.byref(batch), ctypes.byref(size)
        )
        scratch = torch.empty(size.value, dtype=torch.float32)
        metadata.memo.plans[geometry] = scratch
    assert isinstance(scratch, torch.Tensor)
    return scratch


def _validate_batch(metadata: AttentionMetadata, num_tokens: int) -> None:
    query_lens, seq_lens = metadata.query_lens_host, metadata.seq_lens_host
    if sum(query_lens) > num_tokens:
        raise ValueError(f"query has {num_tokens} tokens, the batch {sum(query_lens)}")
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        if query_len > seq_len:
            raise ValueError(f"query_lens must be at most seq_lens, got {query_len} and {seq_len}")
    for name in ("query_start_loc", "seq_lens", "block_table"):
        tensor = getattr(metadata, name)
        if tensor.dtype != torch.int32 or tensor.device.type != "cpu" or tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} must be dense int32 on cpu, is {tensor.dtype} on {tensor.device} with"
                f" strides {tensor.stride()}"
            )
    on_host = {"query_start_loc": [0, *accumulate(query_lens)], "seq_lens": list(seq_lens)}
    for name, expected in on_host.items():
        if (values := getattr(metadata, name).tolist()) != expected:
            raise ValueError(f"{name} is {values}, by the lengths on the host {expected}")


def _validate_block_table(metadata: AttentionMetadata, kv_cache: torch.Tensor) -> None:
    """Only entries in use: what follows a request's last block may be anything."""
    table, seq_lens = metadata.block_table, metadata.seq_lens
    num_blocks, block_size = kv_cache.shape[0], kv_cache.shape[4]
    if table.dim() != 2 or len(table) != len(seq_lens):
        raise ValueError(f"block_table is {list(table.shape)}, must have {len(seq_lens)} rows")
    if not are_within(table, 0, num_blocks):  # mostly it is, and a closer look takes longer
        in_use = torch.arange(table.shape[1]) * block_size < seq_lens[:, None]
        check_indices("blocks", table.where(in_use, 0), end=num_blocks)


def _validate(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    metadata: AttentionMetadata,
    window: int | None,
    softcap: float,
) -> None:
    _, num_kv_heads, num_layers, _, block_size, head_dim = kv_cache.shape
    if query.shape[1] % num_kv_heads or query.shape[2] != head_dim:
        raise ValueError(
            f"query {tuple(query.shape)} does not fit kv_cache {tuple(kv_cache.shape)}"
        )
    if query.dtype != kv_cache.dtype:
        raise ValueError(f"query is of dtype {query.dtype}, kv_cache of {kv_cache.dtype}")
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer must be in [0, {num_layers}), got {layer}")
    positions = metadata.block_table.shape[1] * block_size
    if metadata.seq_lens_host and metadata.max_seq_len > positions:
        raise ValueError(f"block_table has {positions} positions, seq_lens {metadata.max_seq_len}")
    if (window is not None and window < 1) or softcap < 0:
        raise ValueError(f"window must be >= 1 and softcap >= 0, got {window} and {softcap}")
