"""Writing keys and values into the paged cache, whose tiles are packed for the dot products."""

import ctypes

import torch

from pdserve_kernels import reference
from pdserve_kernels.cpu.compiled import library
from pdserve_kernels.cpu.layers import as_contiguous_int64, check_indices
from pdserve_kernels.kv_scales import NO_SCALES, KVScales

PACKED_FORMAT = "vnni16"
# Positions that lie side by side in a tile of keys, dims in one of values.
LANES = 16


class PagedKV(ctypes.Structure):
    """`PagedKV` of csrc/paged_kv.h: a cache with packed tiles."""

    _fields_ = (
        ("cache", ctypes.c_void_p),
        ("num_kv_heads", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
    )

    @classmethod
    def of(cls, kv_cache: torch.Tensor) -> "PagedKV":
        """Point to a packed cache, bf16 [num_blocks, num_kv_heads, num_slots, 2, block_size,
        head_dim]; raise ValueError if it is not contiguous.
        """
        if not kv_cache.is_contiguous():
            raise ValueError(f"kv_cache must be contiguous, has strides {kv_cache.stride()}")
        _, num_kv_heads, num_layers, _, block_size, head_dim = kv_cache.shape
        return cls(kv_cache.data_ptr(), num_kv_heads, num_layers, block_size, head_dim)


def kv_tile_format(dtype: torch.dtype, block_size: int, head_dim: int) -> str:
    """Return "vnni16" for bf16 in whole vectors, else "row_major".

    vnni16 lays each [block_size, head_dim] tile out so that a vector of 16 pairs is what one
    instruction multiplies: a tile of keys as [block_size / 16][head_dim / 2][16 positions][2 dims],
    one of values as [block_size / 2][head_dim][2 positions].
    """
    is_packed = dtype == torch.bfloat16 and block_size % LANES == 0 and head_dim % LANES == 0
    return PACKED_FORMAT if is_packed else "row_major"


def is_thread_independent(dtype: torch.dtype, block_size: int, head_dim: int) -> bool:
    """Whether the bits of a decoder are the same for any number of threads: with packed tiles they
    are, as no kernel of ours cuts a sum by threads.
    """
    return kv_tile_format(dtype, block_size, head_dim) == PACKED_FORMAT


def has_packed_tiles(kv_cache: torch.Tensor) -> bool:
    """Whether a cache [..., block_size, head_dim], of any dtype, has tiles in the packed format."""
    return kv_tile_format(kv_cache.dtype, *kv_cache.shape[-2:]) == PACKED_FORMAT


def check_slots(slot_mapping: torch.Tensor, kv_cache: torch.Tensor) -> None:
    """Raise ValueError unless all slots, int64 [num_tokens], are in the cache [num_blocks,
    num_kv_heads, num_slots, 2, block_size, head_dim], or -1.
    """
    num_slots = kv_cache.shape[0] * kv_cache.shape[4]
    check_indices("slots", slot_mapping, first=-1, end=num_slots)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    scales: KVScales = NO_SCALES,
) -> None:
    """See the reference; tiles are written in the format of `kv_tile_format`."""
    if not has_packed_tiles(kv_cache):
        reference.reshape_and_cache(key, value, kv_cache, layer, slot_mapping, scales)
        return
    shape = (len(slot_mapping), kv_cache.shape[1], kv_cache.shape[5])
    for name, tensor in (("key", key), ("value", value)):
        if tuple(tensor.shape) != shape or tensor.stride(2) != 1 or tensor.dtype != kv_cache.dtype:
            raise ValueError(
                f"{name} must be {shape} with dense heads, in {kv_cache.dtype}; it is"
                f" {tuple(tensor.shape)} with strides {tensor.stride()}, in {tensor.dtype}"
            )
    if not 0 <= layer < kv_cache.shape[2]:
        raise ValueError(f"layer must be in [0, {kv_cache.shape[2]}), got {layer}")
    check_slots(slot_mapping, kv_cache)
    slots = as_contiguous_int64(slot_mapping)
    library().pds_reshape_and_cache(
        key.data_ptr(),
        *key.stride()[:2],
        value.data_ptr(),
        *value.stride()[:2],
        len(slots),
        ctypes.byref(PagedKV.of(kv_cache)),
        layer,
        slots.data_ptr(),
    )
