"""A KV cache in 8 bits, and what its numbers are to be multiplied by."""

from typing import NamedTuple

import torch

from pdserve_kernels.fp8 import FP8


class KVScales(NamedTuple):
    """Of one layer: a cache in FP8 holds keys / key and values / value, rounded."""

    key: float = 1.0
    value: float = 1.0


# The scales of a cache in the model's dtype, and of one in FP8 whose model has been given none.
NO_SCALES = KVScales()


def check_kv_dtype(
    kv_cache: torch.Tensor, dtype: torch.dtype, scales: KVScales = NO_SCALES
) -> None:
    """Raise ValueError unless a cache [num_blocks, num_kv_heads, num_slots, 2, block_size,
    head_dim] is in `dtype`, without scales, or in fp8.
    """
    if kv_cache.dtype == FP8:
        return
    if kv_cache.dtype != dtype:
        raise ValueError(f"kv_cache is {kv_cache.dtype}, must be {dtype} or {FP8}")
    if scales != NO_SCALES:
        raise ValueError(f"scales are {tuple(scales)}, a kv_cache in {dtype} has none")
