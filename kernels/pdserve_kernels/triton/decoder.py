"""The decoder as a sequence of this set's kernels, some of them fused."""

from collections.abc import Sequence

import torch

from pdserve_kernels.decoder import Decoder, linear_of_ranks, norms_after
from pdserve_kernels.lora import LoraSegment
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.triton.attention import paged_attention
from pdserve_kernels.triton.heads import prepare_heads
from pdserve_kernels.triton.layers import add_rms_norm_, rms_norm
from pdserve_kernels.triton.linear import linear, linear_silu_mul, linear_sums


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
    """See the reference's contract. Adapters are not served yet."""
    assert not lora
    eps, num_tokens = packed.rms_norm_eps, len(hidden_states)
    residual = hidden_states.clone()  # changed by every layer
    x = rms_norm(residual, packed.layers[0].input_norm, eps)
    for layer, next_norm in zip(packed.layers, norms_after(packed), strict=True):
        step = metadata[layer.group]
        qkv = linear(x, layer.qkv)
        query = prepare_heads(qkv, packed, layer, positions, kv_cache, step.slot_mapping)
        attended = paged_attention(
            query, kv_cache, layer.slot, step, packed.scale, window=layer.window
        )
        x = attended.view(num_tokens, -1)
        x = linear_of_ranks(linear, linear_sums, x, layer.attention_output, packed.group)
        x = add_rms_norm_(x, residual, layer.post_attention_norm, eps)
        x = linear_silu_mul(x, layer.gate_up)
        x = linear_of_ranks(linear, linear_sums, x, layer.down, packed.group)
        if next_norm is None:
            return residual + x
        x = add_rms_norm_(x, residual, next_norm, eps)
    return x
