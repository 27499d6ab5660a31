"""A stack of decoder layers: what it is made of, and how a kernel set computes it by functions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pdserve_kernels.groups import Group
from pdserve_kernels.kv_scales import NO_SCALES, KVScales
from pdserve_kernels.lora import LoraRows, LoraSegment
from pdserve_kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """One layer's weights, linears packed by the kernel set that runs it, and where its KV is."""

    # Norms are [hidden_size] in the model's dtype; those of heads [head_dim], or None if there are
    # none.
    input_norm: torch.Tensor
    qkv: Any
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_output: Any
    post_attention_norm: torch.Tensor
    # The MLP; gate_up is in two parts. None, both, where there are experts.
    gate_up: Any
    down: Any
    # The KV group, by which the step's metadata is chosen, the layer's slot within a block, and how
    # many positions a token sees (None: all).
    group: int
    slot: int
    window: int | None
    # Of a cache in FP8.
    kv_scales: KVScales = NO_SCALES
    # Experts in place of an MLP, as `pack_moe` made them. They have no adapters, and no group.
    moe: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Layers one after another and the norm behind them, with what all of them share."""

    layers: tuple[DecoderLayer, ...]
    # None: there are layers behind these elsewhere, and the residual is what they go on with.
    final_norm: torch.Tensor | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    # [max_position, head_dim] fp32: cosines, then sines.
    cos_sin_cache: torch.Tensor
    # The ranks that have the other heads and the rest of the MLP, or None if there are none. With a
    # group num_heads, num_kv_heads and weights are this rank's own: qkv and gate_up are cut by
    # outputs, attention_output and down by inputs, of which each rank has the whole bias.
    group: Group | None = None

    @property
    def scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return float(self.head_dim**-0.5)


# Of rows and a packed weight.
Product = Callable[[torch.Tensor, Any], torch.Tensor]


class LayerFunctions(NamedTuple):
    """The functions of a kernel set that compute a layer."""

    linear: Product
    linear_sums: Product
    linear_silu_mul: Product
    fused_moe: Product
    linear_lora: Callable[[torch.Tensor, Any, Sequence[LoraRows]], torch.Tensor]
    # Of ranks that have a part of the inputs each: what they add up, and what comes of it.
    shrink_lora: Callable[[torch.Tensor, Any, Sequence[LoraRows]], torch.Tensor]
    expand_lora: Callable[[torch.Tensor, torch.Tensor, Any, Sequence[LoraRows]], None]
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    fused_add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rotary_embedding: Callable[..., None]
    reshape_and_cache: Callable[..., None]
    paged_attention: Callable[..., torch.Tensor]


def run_layer_by_layer(
    kernels: LayerFunctions,
    decoder: Decoder,
    hidden_states: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Sequence[AttentionMetadata],
    lora: Sequence[LoraSegment] = (),
) -> torch.Tensor:
    """Compute `run_decoder` of a kernel set with the set's own functions; of an adapter
    it takes the layers' parts one by one.
    """
    eps = decoder.rms_norm_eps
    residual, norms = hidden_states, norms_after(decoder)
    x = kernels.rms_norm(residual, decoder.layers[0].input_norm, eps)
    for index, (layer, next_norm) in enumerate(zip(decoder.layers, norms, strict=True)):
        adapted = [LoraRows(begin, end, adapter[index]) for begin, end, adapter in lora]
        products = _Products(kernels, layer, decoder.group, adapted)
        x = _attend(products, decoder, x, positions, kv_cache, metadata[layer.group])
        x, residual = kernels.fused_add_rms_norm(x, residual, layer.post_attention_norm, eps)
        x = products.mlp(x)
        if next_norm is None:
            return x + residual
        x, residual = kernels.fused_add_rms_norm(x, residual, next_norm, eps)
    return x


def linear_of_ranks(
    linear: Product, linear_sums: Product, x: torch.Tensor, packed: Any, group: Group | None
) -> torch.Tensor:
    """Return linear(x, packed), of which every rank of a group has a part of the inputs."""
    if group is None:
        return linear(x, packed)
    return _rounded(group.sum_rows(linear_sums(x, packed)), packed, x.dtype)


def _rounded(sums: torch.Tensor, packed: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return sums + bias, rounded once."""
    return (sums if packed.bias is None else sums + packed.bias).to(dtype)


@dataclass(frozen=True, slots=True)
class _Products:
    """The linears of a layer, in which some rows may have adapters."""

    kernels: LayerFunctions
    layer: DecoderLayer
    group: Group | None
    # Each adapter's part in the layer.
    lora: Sequence[LoraRows]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        packed = getattr(self.layer, name)
        if not self.lora:
            return self.kernels.linear(x, packed)
        return self.kernels.linear_lora(x, packed, self._adapted(name))

    def linear_silu_mul(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if not self.lora:
            return self.kernels.linear_silu_mul(x, getattr(self.layer, name))
        return self.kernels.silu_and_mul(self.linear(name, x))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer.moe is not None:
            return self.kernels.fused_moe(x, self.layer.moe)
        return self.linear_of_ranks("down", self.linear_silu_mul("gate_up", x))

    def linear_of_ranks(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return self.linear(name, x)
        kernels, packed, rows = self.kernels, getattr(self.layer, name), self._adapted(name)
        if not rows:
            return linear_of_ranks(kernels.linear, kernels.linear_sums, x, packed, self.group)
        sums = self.group.sum_rows(kernels.linear_sums(x, packed))
        shrunk = self.group.sum_rows(kernels.shrink_lora(x, packed, rows))
        kernels.expand_lora(sums, shrunk, packed, rows)
        return _rounded(sums, packed, x.dtype)

    def _adapted(self, name: str) -> list[LoraRows]:
        """Return the rows whose adapters have a part in a linear."""
        rows = (row._replace(weight=getattr(row.weight, name)) for row in self.lora)
        return [row for row in rows if row.weight is not None]


def norms_after(decoder: Decoder) -> Iterator[torch.Tensor | None]:
    """For each layer the norm between it and what comes next."""
    yield from (layer.input_norm for layer in decoder.layers[1:])
    yield decoder.final_norm


def _attend(
    products: _Products,
    decoder: Decoder,
    x: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    kernels, layer = products.kernels, products.layer
    heads = products.linear("qkv", x).view(x.shape[0], -1, decoder.head_dim)
    num_heads = (decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads)
    query, key, value = torch.split_with_sizes(heads, num_heads, dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        query = kernels.rms_norm(query, layer.q_norm, decoder.rms_norm_eps)
        key = kernels.rms_norm(key, layer.k_norm, decoder.rms_norm_eps)
    kernels.rotary_embedding(positions, query, key, decoder.cos_sin_cache)
    kernels.reshape_and_cache(
        key, value, kv_cache, layer.slot, metadata.slot_mapping, layer.kv_scales
    )
    attended = kernels.paged_attention(
        query,
        kv_cache,
        layer.slot,
        metadata,
        decoder.scale,
        window=layer.window,
        scales=layer.kv_scales,
    )
    return products.linear_of_ranks("attention_output", attended.view(x.shape[0], -1))
