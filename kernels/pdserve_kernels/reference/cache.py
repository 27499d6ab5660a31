"""Writing new keys and values into the paged cache."""

import torch

from pdserve_kernels.fp8 import FP8, FP8_MAX
from pdserve_kernels.kv_scales import NO_SCALES, KVScales, check_kv_dtype


def kv_tile_format(dtype: torch.dtype, block_size: int, head_dim: int) -> str:
    """Return "row_major": how a [block_size, head_dim] tile of keys or values lies in the cache.

    Workers may exchange blocks only if it is equal.
    """
    del dtype, block_size, head_dim
    return "row_major"


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    scales: KVScales = NO_SCALES,
) -> None:
    """Write each token's key and value of one layer into its slot.

    key, value [num_tokens, num_kv_heads, head_dim]; kv_cache [num_blocks, num_kv_heads, num_layers,
    2 (K, V), block_size, head_dim] of the same dtype, or of FP8: then it gets each number times the
    reciprocal of its scale, in fp32, cut to what FP8 holds and rounded to the nearest. slot_mapping
    int64 [num_tokens] holds block_id * block_size + offset, -1 for a token that is padding. Slots
    must be distinct. On CPU it returns when done; elsewhere the search for padding waits for the
    device. Raises ValueError for another dtype.
    """
    check_kv_dtype(kv_cache, key.dtype, scales)
    if bool((slot_mapping < 0).any()):
        written = slot_mapping >= 0
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    block_size = kv_cache.shape[4]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    if kv_cache.dtype == FP8:
        key, value = _to_fp8(key, scales.key), _to_fp8(value, scales.value)
    kv_cache[block, :, layer, 0, offset] = key
    kv_cache[block, :, layer, 1, offset] = value


def _to_fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x.float() * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
