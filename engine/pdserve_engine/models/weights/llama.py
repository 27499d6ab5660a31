"""The weights of the Llama family: what checkpoints call them, their shapes, and a rank's part."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from pdserve_engine.lora.adapter_config import Targets
from pdserve_engine.models.config import LlamaConfig
from pdserve_engine.models.mlp import DenseMlpWeights, MlpWeights
from pdserve_engine.models.shard import WHOLE, Shard
from pdserve_engine.models.weights.moe import MoeWeights
from pdserve_engine.models.weights.projection import Projection

MODEL_PREFIX = "model."
EMBEDDING = MODEL_PREFIX + "embed_tokens.weight"
FINAL_NORM = MODEL_PREFIX + "norm.weight"
LM_HEAD = "lm_head.weight"
# Makes labels of pooled states.
SCORE = "score.weight"
# Weights of a layer.
INPUT_NORM, POST_ATTENTION_NORM = "input_layernorm", "post_attention_layernorm"
Q_NORM, K_NORM = "self_attn.q_norm", "self_attn.k_norm"
# Weights of a layer with KV in FP8; as vLLM and compressed-tensors name them.
KV_SCALES = ("self_attn.k_scale", "self_attn.v_scale")


class AttentionWeights(NamedTuple):
    """The weights of a layer's attention as the checkpoint names them, below the layer's prefix."""

    qkv: Projection
    output: Projection
    # The names and sizes of the heads' norms.
    norms: dict[str, int]

    @classmethod
    def of(cls, config: LlamaConfig, shard: Shard) -> "AttentionWeights":
        head_dim, hidden = config.head_dim, config.hidden_size
        q_size, kv_size = config.num_attention_heads * head_dim, config.num_kv_heads * head_dim
        q_rows, kv_heads = shard.part(q_size), shard.kv_heads(config.num_kv_heads)
        kv_rows = slice(kv_heads.start * head_dim, kv_heads.stop * head_dim)
        qkv = (
            ("self_attn.q_proj", q_size, q_rows),
            ("self_attn.k_proj", kv_size, kv_rows),
            ("self_attn.v_proj", kv_size, kv_rows),
        )
        output = (("self_attn.o_proj", hidden, slice(0, hidden)),)
        return cls(
            qkv=Projection(qkv, hidden, config.has_qkv_bias),
            output=Projection(
                output, q_size, config.has_attention_output_bias, q_rows, shard.num_sums(q_size)
            ),
            norms=dict.fromkeys((Q_NORM, K_NORM), head_dim) if config.has_qk_norm else {},
        )

    @property
    def projections(self) -> Mapping[str, Projection]:
        """By the names of the attention's `linears`."""
        return {"qkv": self.qkv, "attention_output": self.output}


class LayerWeights(NamedTuple):
    """The weights of one decoder layer as the checkpoint names them, below the layer's prefix."""

    attention: AttentionWeights
    mlp: MlpWeights
    norms: dict[str, int]

    @classmethod
    def of(
        cls, config: LlamaConfig, layer: int, shard: Shard = WHOLE, names: Collection[str] = ()
    ) -> "LayerWeights":
        """Of a checkpoint that has these names: tools differ in what they call experts."""
        return cls(
            attention=AttentionWeights.of(config, shard),
            mlp=_mlp_weights(config, layer, shard, names),
            norms=dict.fromkeys((INPUT_NORM, POST_ATTENTION_NORM), config.hidden_size),
        )

    @property
    def projections(self) -> Mapping[str, Projection]:
        """Those that adapters may change, by the names of the layer's `linears`."""
        return {**self.attention.projections, **self.mlp.projections}

    def shapes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for projection in self.attention.projections.values():
            yield from projection.shapes(prefix)
        for name, size in (self.norms | self.attention.norms).items():
            yield f"{prefix}{name}.weight", (size,)
        yield from self.mlp.shapes(prefix)


def _mlp_weights(
    config: LlamaConfig, layer: int, shard: Shard, names: Collection[str]
) -> MlpWeights:
    experts = config.experts
    if experts is not None and layer in experts.layers:
        return MoeWeights.of(experts, config.hidden_size, layer_prefix(layer), names)
    return DenseMlpWeights.of(config, shard)


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
        weights = LayerWeights.of(config, layer, names=names)
        shapes.update(weights.shapes(layer_prefix(layer)))
    return shapes


def never_quantized(config: LlamaConfig, names: Collection[str] = ()) -> frozenset[str]:
    """Return the weights that are dense in every checkpoint with these names, norms and biases
    apart.
    """
    prefixes = {layer_prefix(layer): layer for layer in range(config.num_layers)}
    return frozenset((EMBEDDING, SCORE)).union(
        prefix + name
        for prefix, layer in prefixes.items()
        for name in LayerWeights.of(config, layer, names=names).mlp.never_quantized
    )


def lora_targets(config: LlamaConfig) -> Targets:
    """Return the linears that adapters may change: those of the layers but routers and experts."""
    return {
        f"{layer_prefix(layer)}{name}": (num_rows, projection.in_features)
        for layer in range(config.num_layers)
        for projection in LayerWeights.of(config, layer).projections.values()
        for name, num_rows, _ in projection.parts
    }


def layer_prefix(layer: int) -> str:
    return f"{MODEL_PREFIX}layers.{layer}."


def kv_scale_names(layer: int) -> list[str]:
    return [layer_prefix(layer) + name for name in KV_SCALES]
