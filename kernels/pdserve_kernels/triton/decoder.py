"""The decoder as a sequence of this set's kernels."""

from collections.abc import Sequence

import torch

from pdserve_kernels.decoder import Decoder, LayerFunctions, run_layer_by_layer
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.triton.attention import paged_attention
from pdserve_kernels.triton.cache import reshape_and_cache
from pdserve_kernels.triton.layers import fused_add_rms_norm, rms_norm, rotary_embedding
from pdserve_kernels.triton.linear import linear, linear_silu_mul

FUNCTIONS = LayerFunctions(
    linear=linear,
    linear_silu_mul=linear_silu_mul,
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
) -> torch.Tensor:
    """See the reference's contract."""
    return run_layer_by_layer(FUNCTIONS, packed, hidden_states, positions, kv_cache, metadata)
