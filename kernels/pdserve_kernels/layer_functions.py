"""Layers by a kernel set's plain functions, one after another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pdserve_kernels.decoder import Attention, Decoder, run_layers
from pdserve_kernels.groups import Group
from pdserve_kernels.lora import LoraRows, LoraSegment
from pdserve_kernels.metadata import AttentionMetadata

Adapted = Sequence[LoraRows]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFunctions:
    """`decoder.LayerFunctions` of functions with the contracts of `pdserve_kernels.reference`."""

    linear: Callable[[torch.Tensor, Any], torch.Tensor]
    linear_sums: Callable[[torch.Tensor, Any], torch.Tensor]
    linear_silu_mul: Callable[[torch.Tensor, Any], torch.Tensor]
    linear_lora: Callable[[torch.Tensor, Any, Adapted], torch.Tensor]
    # For ranks that have a part of the inputs each: what they add up, and what comes of it.
    shrink_lora: Callable[[torch.Tensor, Any, Adapted], torch.Tensor]
    expand_lora: Callable[[torch.Tensor, torch.Tensor, Any, Adapted], None]
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    fused_moe: Callable[[torch.Tensor, Any], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    fused_add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rotary_embedding: Callable[..., None]
    reshape_and_cache: Callable[..., None]
    paged_attention: Callable[..., torch.Tensor]

    def linear_adapted(self, x: torch.Tensor, packed: Any, adapted: Adapted) -> torch.Tensor:
        return self.linear_lora(x, packed, adapted)

    def linear_of_ranks(
        self, x: torch.Tensor, packed: Any, group: Group, adapted: Adapted | None
    ) -> torch.Tensor:
        """See `decoder.LayerFunctions`. Sums of all ranks and the bias are rounded once."""
        sums = group.sum_rows(self.linear_sums(x, packed))
        if adapted:
            shrunk = group.sum_rows(self.shrink_lora(x, packed, adapted))
            self.expand_lora(sums, shrunk, packed, adapted)
        return (sums if packed.bias is None else sums + packed.bias).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.fused_add_rms_norm(x, residual, weight, eps)

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
        heads = qkv.view(len(qkv), -1, decoder.head_dim)
        num_heads = (decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads)
        query, key, value = torch.split_with_sizes(heads, num_heads, dim=1)
        if attention.q_norm is not None and attention.k_norm is not None:
            query = self.rms_norm(query, attention.q_norm, decoder.rms_norm_eps)
            key = self.rms_norm(key, attention.k_norm, decoder.rms_norm_eps)
        self.rotary_embedding(positions, query, key, decoder.cos_sin_cache)
        slots, scales = metadata.slot_mapping, attention.kv_scales
        self.reshape_and_cache(key, value, kv_cache, attention.slot, slots, scales)
        return self.paged_attention(
            query,
            kv_cache,
            attention.slot,
            metadata,
            decoder.scale,
            window=attention.window,
            scales=scales,
        )


@dataclass(frozen=True, slots=True)
class _Segments:
    """`decoder.StepAdapters` of adapters that are a sequence of `LoraLayer`s."""

    segments: Sequence[LoraSegment]

    def of_linear(self, layer: int, name: str) -> list[LoraRows]:
        """Return the rows whose adapters have a part in the linear."""
        found = (
            LoraRows(begin, end, adapter[layer].get(name)) for begin, end, adapter in self.segments
        )
        return [rows for rows in found if rows.weight is not None]


def run_layer_by_layer(
    functions: PlainFunctions,
    decoder: Decoder,
    hidden_states: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Sequence[AttentionMetadata],
    lora: Sequence[LoraSegment] = (),
) -> torch.Tensor:
    """Compute `run_decoder` of a kernel set with its plain functions. hidden_states and the result
    are [num_tokens, hidden_size] in the model's dtype, positions int64 [num_tokens].
    """
    adapters = _Segments(lora) if lora else None
    return run_layers(functions, decoder, hidden_states, positions, kv_cache, metadata, adapters)
