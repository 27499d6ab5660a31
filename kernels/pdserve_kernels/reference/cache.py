"""Writing new keys and values into the paged cache."""

import torch


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
) -> None:
    """Write each token's key and value of one layer into its slot.

    key, value [num_tokens, num_kv_heads, head_dim]; kv_cache [num_blocks, num_kv_heads, num_layers,
    2 (K, V), block_size, head_dim] of the same dtype; slot_mapping int64 [num_tokens] holds
    block_id * block_size + offset, -1 for a token that is padding. Slots must be distinct. On CPU
    it returns when done; elsewhere the search for padding waits for the device.
    """
    if bool((slot_mapping < 0).any()):
        written = slot_mapping >= 0
        key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    block_size = kv_cache.shape[4]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    kv_cache[block, :, layer, 0, offset] = key
    kv_cache[block, :, layer, 1, offset] = value
