"""The Llama-family decoder: Llama, Mistral, Qwen2 and Qwen3, which differ only in data."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from pdserve_engine.kv_groups import group_layers, slots_of
from pdserve_engine.models.config import LlamaConfig
from pdserve_engine.models.loader import Checkpoint
from pdserve_engine.models.rope import build_cos_sin_cache
from pdserve_kernels import select
from pdserve_kernels.metadata import AttentionMetadata

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


class _Projection(NamedTuple):
    """One matrix product; its weights may be several checkpoint entries, stacked by rows."""

    parts: tuple[tuple[str, int], ...]
    in_features: int
    has_bias: bool

    def shapes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, rows in self.parts:
            yield f"{prefix}{name}.weight", (rows, self.in_features)
            if self.has_bias:
                yield f"{prefix}{name}.bias", (rows,)


class _LayerSpec(NamedTuple):
    """The weights of one decoder layer as the checkpoint names them, below the layer's prefix."""

    qkv: _Projection
    attention_output: _Projection
    gate_up: _Projection
    down: _Projection
    norms: dict[str, int]

    @classmethod
    def of(cls, config: LlamaConfig) -> "_LayerSpec":
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        hidden, intermediate = config.hidden_size, config.intermediate_size
        attention, mlp = "self_attn.", "mlp."
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if config.has_qk_norm:
            norms |= dict.fromkeys((attention + "q_norm", attention + "k_norm"), config.head_dim)
        qkv_parts = (
            (attention + "q_proj", q_size),
            (attention + "k_proj", kv_size),
            (attention + "v_proj", kv_size),
        )
        gate_up_parts = ((mlp + "gate_proj", intermediate), (mlp + "up_proj", intermediate))
        return cls(
            qkv=_Projection(qkv_parts, hidden, config.has_qkv_bias),
            attention_output=_Projection(
                ((attention + "o_proj", hidden),), q_size, config.has_attention_output_bias
            ),
            gate_up=_Projection(gate_up_parts, hidden, config.has_mlp_bias),
            down=_Projection(((mlp + "down_proj", hidden),), intermediate, config.has_mlp_bias),
            norms=norms,
        )

    def shapes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for projection in (self.qkv, self.attention_output, self.gate_up, self.down):
            yield from projection.shapes(prefix)
        for name, size in self.norms.items():
            yield f"{prefix}{name}.weight", (size,)


def weight_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return every weight the checkpoint must have, with its shape."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table, FINAL_NORM: (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = table
    spec = _LayerSpec.of(config)
    for layer in range(config.num_layers):
        shapes.update(spec.shapes(_layer_prefix(layer)))
    return shapes


def _layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


class _Layer(NamedTuple):
    """The weights of one decoder layer; projections are packed for the kernel set."""

    input_norm: torch.Tensor
    qkv: Any
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_output: Any
    post_attention_norm: torch.Tensor
    gate_up: Any
    down: Any


class LlamaModel:
    """The family behind the interface of `models.base.Model`."""

    def __init__(self, config: LlamaConfig, checkpoint: Checkpoint, device: torch.device) -> None:
        checkpoint.check(weight_shapes(config), optional=(LM_HEAD,))
        self.config = config
        self.device = device
        self._checkpoint = checkpoint
        self._kernels = select(device)
        self.is_row_independent = self._kernels.is_row_independent(config.dtype)
        # The largest come first: while one is packed, memory holds it twice.
        self._embedding = checkpoint.map(EMBEDDING, dtype=config.dtype, device=device)
        if not config.tie_word_embeddings:
            head = self._read(LM_HEAD)
        else:  # on the CPU packing a mapped table would pull all of it into memory
            head = self._read(EMBEDDING) if device.type == "cpu" else self._embedding
        self._lm_head = self._kernels.pack_linear(head, None)
        del head
        spec = _LayerSpec.of(config)
        self._layers = [self._read_layer(spec, layer) for layer in range(config.num_layers)]
        self._final_norm = self._read(FINAL_NORM)
        self._cos_sin_cache = build_cos_sin_cache(
            config.rope,
            head_dim=config.head_dim,
            max_positions=config.max_model_len,
            dtype=torch.float32,
        ).to(device)
        self._slots = slots_of(group_layers(config.attention_windows))
        self._scale = config.head_dim**-0.5
        self._qkv_heads = (config.num_attention_heads, config.num_kv_heads, config.num_kv_heads)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: tuple[AttentionMetadata, ...],
    ) -> torch.Tensor:
        """See `models.base.Model`."""
        kernels, eps = self._kernels, self.config.rms_norm_eps
        residual = F.embedding(token_ids, self._embedding)
        x = kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            x = self._attend(index, layer, x, positions, kv_cache, metadata)
            x, residual = kernels.fused_add_rms_norm(x, residual, layer.post_attention_norm, eps)
            gate_up = kernels.linear(x, layer.gate_up)
            x = kernels.linear(kernels.silu_and_mul(gate_up), layer.down)
            x, residual = kernels.fused_add_rms_norm(x, residual, self._norm_after(index), eps)
        hidden_states: torch.Tensor = x
        return hidden_states

    @torch.inference_mode()
    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """See `models.base.Model`."""
        logits: torch.Tensor = self._kernels.linear(hidden_rows, self._lm_head).float()
        return logits

    def _attend(
        self,
        index: int,
        layer: _Layer,
        x: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: tuple[AttentionMetadata, ...],
    ) -> Any:
        kernels, eps = self._kernels, self.config.rms_norm_eps
        heads = kernels.linear(x, layer.qkv).view(x.shape[0], -1, self.config.head_dim)
        query, key, value = torch.split_with_sizes(heads, self._qkv_heads, dim=1)
        if layer.q_norm is not None:
            query = kernels.rms_norm(query, layer.q_norm, eps)
            key = kernels.rms_norm(key, layer.k_norm, eps)
        kernels.rotary_embedding(positions, query, key, self._cos_sin_cache)
        group, slot = self._slots[index]
        kernels.reshape_and_cache(key, value, kv_cache, slot, metadata[group].slot_mapping)
        attended = kernels.paged_attention(
            query,
            kv_cache,
            slot,
            metadata[group],
            self._scale,
            window=self.config.attention_windows[index],
        )
        return kernels.linear(attended.view(x.shape[0], -1), layer.attention_output)

    def _norm_after(self, index: int) -> torch.Tensor:
        is_last = index + 1 == len(self._layers)
        return self._final_norm if is_last else self._layers[index + 1].input_norm

    def _read(self, *names: str) -> torch.Tensor:
        return self._checkpoint.read(*names, dtype=self.config.dtype, device=self.device)

    def _read_layer(self, spec: _LayerSpec, layer: int) -> _Layer:
        prefix = _layer_prefix(layer)
        norms = {name: self._read(f"{prefix}{name}.weight") for name in spec.norms}
        return _Layer(
            input_norm=norms["input_layernorm"],
            qkv=self._pack(prefix, spec.qkv),
            q_norm=norms.get("self_attn.q_norm"),
            k_norm=norms.get("self_attn.k_norm"),
            attention_output=self._pack(prefix, spec.attention_output),
            post_attention_norm=norms["post_attention_layernorm"],
            gate_up=self._pack(prefix, spec.gate_up),
            down=self._pack(prefix, spec.down),
        )

    def _pack(self, prefix: str, projection: _Projection) -> Any:
        names = [prefix + name for name, _ in projection.parts]
        weight = self._read(*(f"{name}.weight" for name in names))
        bias = self._read(*(f"{name}.bias" for name in names)) if projection.has_bias else None
        return self._kernels.pack_linear(weight, bias)
