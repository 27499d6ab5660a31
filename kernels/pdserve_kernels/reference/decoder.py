"""The decoder as a sequence of this set's functions."""

from collections.abc import Sequence

import torch

from pdserve_kernels.decoder import Decoder
from pdserve_kernels.layer_functions import PlainFunctions, run_layer_by_layer
from pdserve_kernels.lora import LoraSegment
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.reference.attention import paged_attention
from pdserve_kernels.reference.cache import reshape_and_cache
from pdserve_kernels.reference.layers import (
    fused_add_rms_norm,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from pdserve_kernels.reference.linear import linear, linear_silu_mul, linear_sums
from pdserve_kernels.reference.lora import expand_lora, linear_lora, shrink_lora
from pdserve_kernels.reference.moe import fused_moe

FUNCTIONS = PlainFunctions(
    linear=linear,
    linear_sums=linear_sums,
    linear_silu_mul=linear_silu_mul,
    fused_moe=fused_moe,
    linear_lora=linear_lora,
    shrink_lora=shrink_lora,
    expand_lora=expand_lora,
    silu_and_mul=silu_and_mul,
    rms_norm=rms_norm,
    fused_add_rms_norm=fused_add_rms_norm,
    rotary_embedding=rotary_embedding,
    reshape_and_cache=reshape_and_cache,
    paged_attention=paged_attention,
)


def pack_decoder(decoder: Decoder) -> Decoder:
    """Prepare a decoder for `run_decoder`; it keeps pointing to the same weights."""
    return decoder


def run_decoder(
    hidden_states: torch.Tensor,
    packed: Decoder,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Sequence[AttentionMetadata],
    lora: Sequence[LoraSegment] = (),
) -> torch.Tensor:
    """Write the tokens' KV into the cache and return the normed states behind the last layer.

    hidden_states [num_tokens, hidden_size] are the embedded tokens, positions int64 [num_tokens];
    kv_cache is [num_blocks, num_kv_heads, num_slots, 2, block_size, head_dim] with tiles in the
    set's format; metadata has one entry per KV group; lora has the rows with adapters, in ascending
    order. Layers are pre-norm as Llama's are (Touvron et al. 2023, arXiv:2302.13971).
    Returns a new tensor of hidden_states' shape and dtype; the functions of the set say what else
    they demand. The ranks of a group all call it, with equal hidden_states and positions, and get
    equal states; RuntimeError if one does not come.
    """
    return run_layer_by_layer(FUNCTIONS, packed, hidden_states, positions, kv_cache, metadata, lora)
