"""The decoder as a sequence of this set's kernels, some of them fused."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pdserve_kernels.decoder import Decoder, DecoderLayer, norms_after
from pdserve_kernels.groups import Group
from pdserve_kernels.lora import LoraSegment
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.triton.attention import paged_attention
from pdserve_kernels.triton.heads import prepare_heads
from pdserve_kernels.triton.layers import add_rms_norm_, rms_norm, silu_and_mul
from pdserve_kernels.triton.linear import linear
from pdserve_kernels.triton.lora import StepLora


@dataclass(frozen=True, slots=True)
class _Products:
    """The linears of a layer, in which some rows may have adapters."""

    layer: DecoderLayer
    group: Group | None
    lora: StepLora | None
    index: int

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = linear(x, getattr(self.layer, name))
        if self.lora is not None:
            self.lora.add(out, x, self.index, name)
        return out

    def linear_of_ranks(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return self.linear(name, x)
        # In x's dtype: in fp32 there would be twice the bytes, of products that are rounded anyway.
        packed = getattr(self.layer, name)
        sums = self.group.sum_rows(linear(x, replace(packed, bias=None)))
        return sums if packed.bias is None else sums.add_(packed.bias)


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
    """See the reference's contract."""
    step_lora = StepLora.of(lora, hidden_states.device)
    eps, num_tokens = packed.rms_norm_eps, len(hidden_states)
    residual = hidden_states.clone()  # changed by every layer
    x = rms_norm(residual, packed.layers[0].input_norm, eps)
    for index, (layer, next_norm) in enumerate(
        zip(packed.layers, norms_after(packed), strict=True)
    ):
        step = metadata[layer.group]
        products = _Products(layer, packed.group, step_lora, index)
        qkv = products.linear("qkv", x)
        query = prepare_heads(qkv, packed, layer, positions, kv_cache, step.slot_mapping)
        attended = paged_attention(
            query,
            kv_cache,
            layer.slot,
            step,
            packed.scale,
            window=layer.window,
            scales=layer.kv_scales,
        )
        x = products.linear_of_ranks("attention_output", attended.view(num_tokens, -1))
        x = add_rms_norm_(x, residual, layer.post_attention_norm, eps)
        x = silu_and_mul(products.linear("gate_up", x))
        x = products.linear_of_ranks("down", x)
        if next_norm is None:
            return residual + x
        x = add_rms_norm_(x, residual, next_norm, eps)
    return x
