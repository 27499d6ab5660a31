"""The decoder as a sequence of this set's kernels, some of them fused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pdserve_kernels.decoder import Decoder, DecoderLayer, norms_after
from pdserve_kernels.groups import Group
from pdserve_kernels.lora import LoraSegment
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.triton.attention import paged_attention
from pdserve_kernels.triton.heads import prepare_heads
from pdserve_kernels.triton.layers import add_rms_norm_, rms_norm, silu_and_mul
from pdserve_kernels.triton.linear import linear, linear_of_ranks
from pdserve_kernels.triton.lora import LinearLora
from pdserve_kernels.triton.moe import fused_moe
from pdserve_kernels.triton.step_lora import StepLora


class DecoderFunctions(NamedTuple):
    """What is not the same in all sets of Triton's."""

    linear: Callable[[torch.Tensor, Any], torch.Tensor]
    # Of what each rank has a part of the inputs, with what adapters add to it.
    linear_of_ranks: Callable[[torch.Tensor, Any, Group, LinearLora | None], torch.Tensor]
    paged_attention: Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Products:
    """The linears of a layer, in which some rows may have adapters."""

    functions: DecoderFunctions
    layer: DecoderLayer
    group: Group | None
    lora: StepLora | None
    index: int

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = self.functions.linear(x, getattr(self.layer, name))
        if self.lora is not None:
            self.lora.of_linear(self.index, name).add(out, x)
        return out

    def linear_of_ranks(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return self.linear(name, x)
        lora = None if self.lora is None else self.lora.of_linear(self.index, name)
        return self.functions.linear_of_ranks(x, getattr(self.layer, name), self.group, lora)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer.moe is not None:
            return fused_moe(x, self.layer.moe)
        return self.linear_of_ranks("down", silu_and_mul(self.linear("gate_up", x)))


def pack_decoder(decoder: Decoder) -> Decoder:
    """Prepare a decoder for `run_decoder`; it keeps pointing to the same weights."""
    return decoder


RunDecoder = Callable[..., torch.Tensor]


def make_run_decoder(functions: DecoderFunctions) -> RunDecoder:
    """Return a set's `run_decoder`."""

    def run_decoder(
        hidden_states: torch.Tensor,
        packed: Decoder,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Sequence[AttentionMetadata],
        lora: Sequence[LoraSegment] | StepLora = (),
    ) -> torch.Tensor:
        """See the reference's contract. Who has which adapter by a StepLora a CUDA graph does not
        record.
        """
        return _run(functions, hidden_states, packed, positions, kv_cache, metadata, lora)

    return run_decoder


run_decoder = make_run_decoder(DecoderFunctions(linear, linear_of_ranks, paged_attention))


def _run(
    functions: DecoderFunctions,
    hidden_states: torch.Tensor,
    packed: Decoder,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Sequence[AttentionMetadata],
    lora: Sequence[LoraSegment] | StepLora,
) -> torch.Tensor:
    if isinstance(lora, StepLora):
        step_lora: StepLora | None = lora
    else:
        step_lora = StepLora.of_segments(lora, hidden_states.device)
    eps, num_tokens = packed.rms_norm_eps, len(hidden_states)
    residual = hidden_states.clone()  # changed by every layer
    x = rms_norm(residual, packed.layers[0].input_norm, eps)
    for index, (layer, next_norm) in enumerate(
        zip(packed.layers, norms_after(packed), strict=True)
    ):
        step = metadata[layer.group]
        products = _Products(functions, layer, packed.group, step_lora, index)
        qkv = products.linear("qkv", x)
        query = prepare_heads(qkv, packed, layer, positions, kv_cache, step.slot_mapping)
        attended = functions.paged_attention(
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
        x = products.mlp(x)
        if next_norm is None:
            return residual + x
        x = add_rms_norm_(x, residual, next_norm, eps)
    return x
