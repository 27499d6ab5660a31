"""The decoder as a sequence of this set's kernels, some of them fused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pdserve_kernels.decoder import Attention, Decoder, run_layers
from pdserve_kernels.groups import Group
from pdserve_kernels.lora import LoraSegment
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.triton import layers, moe
from pdserve_kernels.triton.attention import paged_attention
from pdserve_kernels.triton.heads import prepare_heads
from pdserve_kernels.triton.linears.linear import linear, linear_of_ranks
from pdserve_kernels.triton.linears.lora import LinearLora
from pdserve_kernels.triton.linears.step_lora import StepLora


@dataclass(frozen=True, slots=True)
class DecoderFunctions:
    """`decoder.LayerFunctions` of Triton's sets, with what is not the same in all of them."""

    linear: Callable[[torch.Tensor, Any], torch.Tensor]
    linear_of_ranks: Callable[[torch.Tensor, Any, Group, LinearLora | None], torch.Tensor]
    paged_attention: Callable[..., torch.Tensor]

    silu_and_mul = staticmethod(layers.silu_and_mul)
    rms_norm = staticmethod(layers.rms_norm)
    fused_moe = staticmethod(moe.fused_moe)

    def linear_adapted(self, x: torch.Tensor, packed: Any, adapted: LinearLora) -> torch.Tensor:
        out = self.linear(x, packed)
        adapted.add(out, x)
        return out

    def linear_silu_mul(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        return layers.silu_and_mul(self.linear(x, packed))

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `decoder.LayerFunctions`. The sum is in residual's memory."""
        return layers.add_rms_norm_(x, residual, weight, eps), residual

    def attend(
        self,
        qkv: torch.Tensor,
        decoder: Decoder,
        attention: Attention,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See `decoder.LayerFunctions`."""
        slots = metadata.slot_mapping
        query = prepare_heads(qkv, decoder, attention, positions, kv_cache, slots)
        return self.paged_attention(
            query,
            kv_cache,
            attention.slot,
            metadata,
            decoder.scale,
            window=attention.window,
            scales=attention.kv_scales,
        )


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
        if isinstance(lora, StepLora):
            adapters: StepLora | None = lora
        else:
            adapters = StepLora.of_segments(lora, hidden_states.device)
        states = hidden_states.clone()  # changed by every layer
        return run_layers(functions, packed, states, positions, kv_cache, metadata, adapters)

    return run_decoder


run_decoder = make_run_decoder(DecoderFunctions(linear, linear_of_ranks, paged_attention))
