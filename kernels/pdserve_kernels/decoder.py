"""A stack of decoder layers: what it is made of, and how a kernel set computes it part by part."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pdserve_kernels.groups import Group
from pdserve_kernels.kv_scales import NO_SCALES, KVScales
from pdserve_kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """A layer's attention: its linears, packed by the kernel set that runs it, and where its KV is.

    With ranks that have the other heads, qkv is cut by outputs and output by inputs.
    """

    qkv: Any
    # The norms of each head, [head_dim] in the model's dtype; both None if heads are not normed.
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Any
    # The KV group, by which the step's metadata is chosen, the layer's slot within a block, and how
    # many positions a token sees (None: all).
    group: int
    slot: int
    window: int | None
    # The scales of a cache in FP8.
    kv_scales: KVScales = NO_SCALES

    @property
    def linears(self) -> Mapping[str, Any]:
        """Those that adapters may change, by the names of `lora.LINEARS`."""
        return {"qkv": self.qkv, "attention_output": self.output}


class Mlp(Protocol):
    """What a layer does with each token by itself. `DenseMlp` and `MoeMlp` are the kinds."""

    @property
    def linears(self) -> Mapping[str, Any]:
        """Those that adapters may change, by the names of `lora.LINEARS`."""

    def run(self, products: "LayerProducts", x: torch.Tensor) -> torch.Tensor:
        """Return what it makes of x [num_tokens, hidden_size], bf16 or fp32, of the same shape and
        dtype.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMlp:
    """down(silu(gate x) * up x). With ranks, gate_up is cut by outputs and down by inputs."""

    # In two parts.
    gate_up: Any
    down: Any

    @property
    def linears(self) -> Mapping[str, Any]:
        return {"gate_up": self.gate_up, "down": self.down}

    def run(self, products: "LayerProducts", x: torch.Tensor) -> torch.Tensor:
        activated = products.linear_silu_mul("gate_up", self.gate_up, x)
        return products.linear_of_ranks("down", self.down, activated)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeMlp:
    """Some of many experts for each token. They have no adapters, and each rank has them all."""

    # As `pack_moe` made them.
    experts: Any

    @property
    def linears(self) -> Mapping[str, Any]:
        return {}

    def run(self, products: "LayerProducts", x: torch.Tensor) -> torch.Tensor:
        return products.functions.fused_moe(x, self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """x += attention(input_norm(x)); x += mlp(post_attention_norm(x)). Norms are [hidden_size]."""

    input_norm: torch.Tensor
    attention: Attention
    post_attention_norm: torch.Tensor
    mlp: Mlp

    @property
    def linears(self) -> Mapping[str, Any]:
        """Those that adapters may change, by the names of `lora.LINEARS`."""
        return {**self.attention.linears, **self.mlp.linears}


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
    # group num_heads, num_kv_heads and weights are this rank's own; of what is cut by inputs each
    # rank has the whole bias.
    group: Group | None = None

    @property
    def scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return float(self.head_dim**-0.5)


class LayerFunctions(Protocol):
    """What a kernel set computes layers with. `adapted` is what adapters add to a linear, as the
    set's `StepAdapters` says it.
    """

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor: ...
    def linear_adapted(self, x: torch.Tensor, packed: Any, adapted: Any) -> torch.Tensor:
        """Return the linear of x [num_tokens, in_features] with what adapters add, [num_tokens,
        out_features] in x's dtype.
        """

    def linear_silu_mul(self, x: torch.Tensor, packed: Any) -> torch.Tensor: ...
    def linear_of_ranks(
        self, x: torch.Tensor, packed: Any, group: Group, adapted: Any | None
    ) -> torch.Tensor:
        """Return the linear's outputs [num_tokens, out_features], in x's dtype, on each rank; x is
        the rank's part of the inputs, [num_tokens, in_features / group.size].
        """

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor: ...
    def fused_moe(self, x: torch.Tensor, packed: Any) -> torch.Tensor: ...
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, and x + residual, which may be in residual's memory; all
        are [num_tokens, hidden_size] of one dtype.
        """

    def attend(
        self,
        qkv: torch.Tensor,
        decoder: Decoder,
        attention: Attention,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Write each token's KV; return what its queries find, [num_tokens, num_heads, head_dim] in
        qkv's dtype.

        qkv is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] and may be overwritten.
        positions are int64 [num_tokens]; kv_cache is as in `KernelSet.paged_attention`.
        """


class StepAdapters(Protocol):
    """Which rows of a step have which adapter, in a kernel set's own form."""

    def of_linear(self, layer: int, name: str) -> Any:
        """Return what adapters add to one of a layer's linears."""


@dataclass(frozen=True, slots=True)
class LayerProducts:
    """The linears of a layer, in which some rows may have adapters."""

    functions: LayerFunctions
    group: Group | None
    adapters: StepAdapters | None
    layer: int

    def linear(self, name: str, packed: Any, x: torch.Tensor) -> torch.Tensor:
        if self.adapters is None:
            return self.functions.linear(x, packed)
        return self.functions.linear_adapted(x, packed, self._adapted(name))

    def linear_silu_mul(self, name: str, packed: Any, x: torch.Tensor) -> torch.Tensor:
        if self.adapters is None:
            return self.functions.linear_silu_mul(x, packed)
        return self.functions.silu_and_mul(self.linear(name, packed, x))

    def linear_of_ranks(self, name: str, packed: Any, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return self.linear(name, packed, x)
        return self.functions.linear_of_ranks(x, packed, self.group, self._adapted(name))

    def _adapted(self, name: str) -> Any | None:
        return None if self.adapters is None else self.adapters.of_linear(self.layer, name)


def run_layers(
    functions: LayerFunctions,
    decoder: Decoder,
    hidden_states: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Sequence[AttentionMetadata],
    adapters: StepAdapters | None = None,
) -> torch.Tensor:
    """Compute `run_decoder` of a kernel set with its functions, part by part. hidden_states may be
    overwritten. They are [num_tokens, hidden_size] in the model's dtype, as is the result;
    positions are int64 [num_tokens].
    """
    eps = decoder.rms_norm_eps
    residual = hidden_states
    x = functions.rms_norm(residual, decoder.layers[0].input_norm, eps)
    for index, (layer, next_norm) in enumerate(
        zip(decoder.layers, _norms_after(decoder), strict=True)
    ):
        attention = layer.attention
        products = LayerProducts(functions, decoder.group, adapters, index)
        qkv = products.linear("qkv", attention.qkv, x)
        step = metadata[attention.group]
        attended = functions.attend(qkv, decoder, attention, positions, kv_cache, step)
        x = products.linear_of_ranks("attention_output", attention.output, attended.flatten(1))
        x, residual = functions.add_rms_norm(x, residual, layer.post_attention_norm, eps)
        x = layer.mlp.run(products, x)
        if next_norm is None:
            return x + residual
        x, residual = functions.add_rms_norm(x, residual, next_norm, eps)
    return x


def _norms_after(decoder: Decoder) -> Iterator[torch.Tensor | None]:
    """For each layer the norm between it and what comes next."""
    yield from (layer.input_norm for layer in decoder.layers[1:])
    yield decoder.final_norm
