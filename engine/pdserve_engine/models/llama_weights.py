"""The weights of the Llama family: what checkpoints call them, their shapes, and a rank's part."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from pdserve_engine.lora.adapter_config import Targets
from pdserve_engine.models.config import LlamaConfig
from pdserve_engine.models.experts import ExpertWeights
from pdserve_engine.models.loader import WeightPart
from pdserve_engine.models.shard import WHOLE, Shard

MODEL_PREFIX = "model."
EMBEDDING = MODEL_PREFIX + "embed_tokens.weight"
FINAL_NORM = MODEL_PREFIX + "norm.weight"
LM_HEAD = "lm_head.weight"
# Makes labels of pooled states.
SCORE = "score.weight"
# Of a layer, for KV in FP8; as vLLM and compressed-tensors name them.
KV_SCALES = ("self_attn.k_scale", "self_attn.v_scale")


class Projection(NamedTuple):
    """One matrix product; its weights may be several checkpoint entries, stacked by rows."""

    # Of each weight the rows that there are, and this rank's part of them.
    parts: tuple[tuple[str, int, slice], ...]
    in_features: int
    has_bias: bool
    # This rank's part of the inputs, and in how many sums it adds them up.
    columns: slice = slice(None)
    num_sums: int = 1

    @property
    def num_inputs(self) -> int:
        """This rank's."""
        return len(range(self.in_features)[self.columns])

    @property
    def num_outputs(self) -> int:
        """This rank's."""
        return sum(rows.stop - rows.start for _, _, rows in self.parts)

    def shapes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, num_rows, _ in self.parts:
            yield f"{prefix}{name}.weight", (num_rows, self.in_features)
            if self.has_bias:
                yield f"{prefix}{name}.bias", (num_rows,)

    def weights(self, prefix: str) -> list[tuple[WeightPart, tuple[int, int]]]:
        """Return this rank's parts, with the shapes of the whole weights."""
        return [
            (WeightPart(prefix + name, rows, self.columns), (num_rows, self.in_features))
            for name, num_rows, rows in self.parts
        ]

    def biases(self, prefix: str) -> list[WeightPart]:
        return [WeightPart(f"{prefix}{name}.bias", rows) for name, _, rows in self.parts]


class LayerSpec(NamedTuple):
    """The weights of one decoder layer as the checkpoint names them, below the layer's prefix."""

    qkv: Projection
    attention_output: Projection
    norms: dict[str, int]
    # An MLP, or experts.
    gate_up: Projection | None
    down: Projection | None
    experts: ExpertWeights | None

    @classmethod
    def of(
        cls, config: LlamaConfig, layer: int, shard: Shard = WHOLE, names: Collection[str] = ()
    ) -> "LayerSpec":
        """Of a checkpoint that has these names: tools differ in what they call experts."""
        head_dim, hidden = config.head_dim, config.hidden_size
        has_experts = config.experts is not None and layer in config.experts.layers
        q_size, kv_size = config.num_attention_heads * head_dim, config.num_kv_heads * head_dim
        attention = "self_attn."
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if config.has_qk_norm:
            norms |= dict.fromkeys((attention + "q_norm", attention + "k_norm"), head_dim)
        q_rows = shard.part(q_size)
        kv_heads = shard.kv_heads(config.num_kv_heads)
        kv_rows = slice(kv_heads.start * head_dim, kv_heads.stop * head_dim)
        qkv_parts = (
            (attention + "q_proj", q_size, q_rows),
            (attention + "k_proj", kv_size, kv_rows),
            (attention + "v_proj", kv_size, kv_rows),
        )
        all_rows = slice(0, hidden)
        return cls(
            qkv=Projection(qkv_parts, hidden, config.has_qkv_bias),
            attention_output=Projection(
                ((attention + "o_proj", hidden, all_rows),),
                q_size,
                config.has_attention_output_bias,
                q_rows,
                shard.num_sums(q_size),
            ),
            norms=norms,
            gate_up=None if has_experts else _gate_up(config, shard),
            down=None if has_experts else _down(config, shard),
            experts=ExpertWeights.of(config.experts, hidden, layer_prefix(layer), names)
            if has_experts and config.experts is not None
            else None,
        )

    @property
    def projections(self) -> tuple[Projection, ...]:
        mlp = (projection for projection in (self.gate_up, self.down) if projection is not None)
        return self.qkv, self.attention_output, *mlp

    def shapes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for projection in self.projections:
            yield from projection.shapes(prefix)
        for name, size in self.norms.items():
            yield f"{prefix}{name}.weight", (size,)
        if self.experts is not None:
            yield from self.experts.shapes(prefix)


def _gate_up(config: LlamaConfig, shard: Shard) -> Projection:
    size = config.intermediate_size
    rows = shard.part(size)
    parts = (("mlp.gate_proj", size, rows), ("mlp.up_proj", size, rows))
    return Projection(parts, config.hidden_size, config.has_mlp_bias)


def _down(config: LlamaConfig, shard: Shard) -> Projection:
    hidden, size = config.hidden_size, config.intermediate_size
    return Projection(
        (("mlp.down_proj", hidden, slice(0, hidden)),),
        size,
        config.has_mlp_bias,
        shard.part(size),
        shard.num_sums(size),
    )


def weight_shapes(config: LlamaConfig, names: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
    """Return every weight that a checkpoint with these names must have, with its shape."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table, FINAL_NORM: (config.hidden_size,)}
    pooler = config.pooler
    uses_lm_head = pooler is None or pooler.classifier_token_ids
    if uses_lm_head and not config.tie_word_embeddings:
        shapes[LM_HEAD] = table
    if pooler is not None and pooler.num_labels and not pooler.classifier_token_ids:
        shapes[SCORE] = (pooler.num_labels, config.hidden_size)
    for layer in range(config.num_layers):
        spec = LayerSpec.of(config, layer, names=names)
        shapes.update(spec.shapes(layer_prefix(layer)))
    return shapes


def lora_targets(config: LlamaConfig) -> Targets:
    """Return the linears that adapters may change: those of the layers but routers and experts."""
    return {
        f"{layer_prefix(layer)}{name}": (num_rows, projection.in_features)
        for layer in range(config.num_layers)
        for projection in LayerSpec.of(config, layer).projections
        for name, num_rows, _ in projection.parts
    }


def layer_prefix(layer: int) -> str:
    return f"{MODEL_PREFIX}layers.{layer}."


def kv_scale_names(layer: int) -> list[str]:
    return [layer_prefix(layer) + name for name in KV_SCALES]
