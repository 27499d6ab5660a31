"""The Llama-family decoder: Llama, Mistral, Qwen2 and Qwen3, which differ only in data."""

import logging
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from pdserve_engine.kv.kv_groups import group_layers, slots_of
from pdserve_engine.lora.adapter import LoraAdapter
from pdserve_engine.lora.adapter_config import Targets
from pdserve_engine.models.base import ForwardInputs
from pdserve_engine.models.config import LlamaConfig, ModelError
from pdserve_engine.models.loader import Checkpoint, WeightPart
from pdserve_engine.models.quantized_weights import (
    check_unused_biases,
    read_projection,
    stored_shapes,
)
from pdserve_engine.models.rope import build_cos_sin_cache
from pdserve_engine.models.shard import WHOLE, Shard, check_shards
from pdserve_engine.models.stage import ALL_LAYERS, Stage, check_stages
from pdserve_kernels import KernelSet, name_of, select
from pdserve_kernels.decoder import Decoder, DecoderLayer
from pdserve_kernels.groups import Group
from pdserve_kernels.kv_scales import NO_SCALES, KVScales
from pdserve_kernels.lora import LoraLayer, LoraPart
from pdserve_kernels.reference.quantization import QuantizedWeight
from pdserve_kernels.sampling_batch import Argmax, Sampled, SamplingBatch

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
# Of a layer, for KV in FP8; as vLLM and compressed-tensors name them.
KV_SCALES = ("self_attn.k_scale", "self_attn.v_scale")


class _Projection(NamedTuple):
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


class _LayerSpec(NamedTuple):
    """The weights of one decoder layer as the checkpoint names them, below the layer's prefix."""

    qkv: _Projection
    attention_output: _Projection
    gate_up: _Projection
    down: _Projection
    norms: dict[str, int]

    @classmethod
    def of(cls, config: LlamaConfig, shard: Shard = WHOLE) -> "_LayerSpec":
        head_dim, hidden = config.head_dim, config.hidden_size
        q_size, kv_size = config.num_attention_heads * head_dim, config.num_kv_heads * head_dim
        attention, mlp = "self_attn.", "mlp."
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
        intermediate = config.intermediate_size
        mlp_rows = shard.part(intermediate)
        gate_up_parts = (
            (mlp + "gate_proj", intermediate, mlp_rows),
            (mlp + "up_proj", intermediate, mlp_rows),
        )
        all_rows = slice(0, hidden)
        return cls(
            qkv=_Projection(qkv_parts, hidden, config.has_qkv_bias),
            attention_output=_Projection(
                ((attention + "o_proj", hidden, all_rows),),
                q_size,
                config.has_attention_output_bias,
                q_rows,
                shard.num_sums(q_size),
            ),
            gate_up=_Projection(gate_up_parts, hidden, config.has_mlp_bias),
            down=_Projection(
                ((mlp + "down_proj", hidden, all_rows),),
                intermediate,
                config.has_mlp_bias,
                mlp_rows,
                shard.num_sums(intermediate),
            ),
            norms=norms,
        )

    @property
    def projections(self) -> tuple[_Projection, ...]:
        return self.qkv, self.attention_output, self.gate_up, self.down

    def shapes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for projection in self.projections:
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


def lora_targets(config: LlamaConfig) -> Targets:
    """Return the linears that adapters may change: all those of the layers."""
    spec = _LayerSpec.of(config)
    return {
        f"{_layer_prefix(layer)}{name}": (num_rows, projection.in_features)
        for layer in range(config.num_layers)
        for projection in spec.projections
        for name, num_rows, _ in projection.parts
    }


def _layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def _kv_scale_names(layer: int) -> list[str]:
    return [_layer_prefix(layer) + name for name in KV_SCALES]


class LlamaModel:
    """The family behind the interface of `models.base.Model`."""

    def __init__(
        self,
        config: LlamaConfig,
        checkpoint: Checkpoint,
        device: torch.device,
        group: Group | None = None,
        stage: Stage = ALL_LAYERS,
    ) -> None:
        """A group makes it one rank's part: `forward` is all ranks' work and brings each of them
        the same states, logits are those of the rank's `vocabulary`. A stage has some layers: it
        gets its states from the one before and hands them on; only the last has logits. Raises
        ModelError.
        """
        dense = weight_shapes(config)
        expected = stored_shapes(dense, checkpoint.names, config.quantization)
        scales = (name for layer in range(config.num_layers) for name in _kv_scale_names(layer))
        checkpoint.check(expected, optional=(LM_HEAD, *scales))
        check_unused_biases(checkpoint, dense.keys())
        self.config = config
        self.device = device
        self.group = group
        self._shard = WHOLE if group is None else Shard(group.rank, group.size)
        self.stage = stage
        check_shards(config, self._shard.size)
        check_stages(config, stage.count)
        self.vocabulary = self._shard.vocabulary(config.vocab_size)
        self._checkpoint = checkpoint
        self._kernels = select(device)
        _warn_if_integers_save_nothing(config, self._kernels)
        if config.has_fp8_kv and _kv_scale_names(0)[0] not in checkpoint.names:
            logger.warning("the checkpoint has no k_scale and v_scale: KV in FP8 is not scaled")
        self.can_be_captured = True
        self.is_row_independent = self._kernels.is_row_independent(config.dtype) and (
            group is None or self._kernels.is_shard_independent(config.dtype)
        )
        # The largest come first: while one is packed, memory holds it twice.
        self._is_embedding_split = group is not None and not is_mapped(device)
        if stage.is_first:
            self._embedding = self._read_embedding()
        if stage.is_last:
            self._lm_head = self._kernels.pack_linear(self._read_lm_head(), None)
        decoder = self._read_decoder()
        self._layers = decoder.layers
        self._decoder = self._kernels.pack_decoder(decoder)

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """See `models.base.Model`."""
        if self.stage.is_first:
            states = self._embed(inputs.token_ids)
        else:
            states = self.stage.receive(len(inputs.token_ids), self.config)
        states = self._kernels.run_decoder(
            states,
            self._decoder,
            inputs.positions,
            inputs.kv_cache,
            inputs.metadata,
            inputs.lora,
        )
        if not self.stage.is_last:
            self.stage.send(states)
        return states

    @torch.inference_mode()
    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """See `models.base.Model`."""
        logits: torch.Tensor = self._kernels.linear(hidden_rows, self._lm_head)
        return logits

    @torch.inference_mode()
    def choose_greedily(
        self, hidden_rows: torch.Tensor, *, mask: torch.Tensor | None = None
    ) -> Argmax:
        """See `models.base.Model`."""
        best: Argmax = self._kernels.linear_argmax(hidden_rows, self._lm_head, mask=mask)
        return best

    @torch.inference_mode()
    def sample_part(
        self, hidden_rows: torch.Tensor, batch: SamplingBatch, *, mask: torch.Tensor | None = None
    ) -> Argmax:
        """Return of the rank's `vocabulary` the token that would win in each of the n rows, none of
        which has a filter, numbered within it. The mask is of its tokens alone.
        """
        logits = self.compute_logits(hidden_rows)
        first_id = self.vocabulary.start
        chosen: Sampled = self._kernels.sample_part(logits, batch, first_id=first_id, mask=mask)
        return Argmax(chosen.token_ids, self._kernels.count_nans(logits), chosen.values)

    @property
    def lora_targets(self) -> Targets:
        """See `models.base.SupportsLora`."""
        return lora_targets(self.config)

    def max_adapter_bytes(self, max_rank: int) -> int:
        """See `models.base.SupportsLora`: the linears of a product lie side by side, with the ranks
        of all.
        """
        num_numbers = sum(
            len(projection.parts) * max_rank * (projection.num_inputs + projection.num_outputs)
            for projection in _LayerSpec.of(self.config, self._shard).projections
        )
        return len(self._layers) * num_numbers * self.config.dtype.itemsize

    def pack_adapter(self, adapter: LoraAdapter) -> Any:
        """See `models.base.SupportsLora`."""
        spec, layers = _LayerSpec.of(self.config, self._shard), self._layers
        return self._kernels.pack_adapter(
            [
                LoraLayer(
                    qkv=self._pack_lora(adapter, index, spec.qkv, layer.qkv),
                    attention_output=self._pack_lora(
                        adapter, index, spec.attention_output, layer.attention_output
                    ),
                    gate_up=self._pack_lora(adapter, index, spec.gate_up, layer.gate_up),
                    down=self._pack_lora(adapter, index, spec.down, layer.down),
                )
                for index, layer in zip(
                    self.stage.layers(self.config.num_layers), layers, strict=True
                )
            ]
        )

    def _pack_lora(
        self, adapter: LoraAdapter, layer: int, projection: _Projection, packed: Any
    ) -> Any:
        parts, first_output = [], 0
        for name, _, rows in projection.parts:
            module = adapter.modules.get(_layer_prefix(layer) + name)
            if module is not None:
                a, b = module.a[:, projection.columns], module.b[rows]
                parts.append(LoraPart(first_output, a, b, module.scale))
            first_output += rows.stop - rows.start
        return self._kernels.pack_lora(parts, packed)

    def _read(self, *weights: str | WeightPart) -> torch.Tensor:
        return self._checkpoint.read(*weights, dtype=self.config.dtype, device=self.device)

    def _read_embedding(self) -> torch.Tensor:
        if is_mapped(self.device):
            return self._checkpoint.map(EMBEDDING, dtype=self.config.dtype, device=self.device)
        return self._read(WeightPart(EMBEDDING, self.vocabulary))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the tokens' embeddings, of which each rank may have those of its vocabulary."""
        if self.group is None or not self._is_embedding_split:
            return F.embedding(token_ids, self._embedding)
        places = token_ids - self.vocabulary.start
        is_elsewhere = (places < 0) | (places >= len(self._embedding))
        states = F.embedding(places.masked_fill_(is_elsewhere, 0), self._embedding)
        return self.group.sum_rows(states.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    def _read_decoder(self) -> Decoder:
        config, spec = self.config, _LayerSpec.of(self.config, self._shard)
        kv_heads = self._shard.kv_heads(config.num_kv_heads)
        places = slots_of(group_layers(config.attention_windows))
        layers = self.stage.layers(config.num_layers)
        first_slot = places[layers[0]][1] if self.stage.count > 1 else 0
        return Decoder(
            layers=tuple(
                self._read_layer(spec, layer, places[layer][0], places[layer][1] - first_slot)
                for layer in layers
            ),
            final_norm=self._read(FINAL_NORM) if self.stage.is_last else None,
            num_heads=config.num_attention_heads // self._shard.size,
            num_kv_heads=kv_heads.stop - kv_heads.start,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            group=self.group,
            cos_sin_cache=build_cos_sin_cache(
                config.rope,
                head_dim=config.head_dim,
                max_positions=config.max_model_len,
                dtype=torch.float32,
            ).to(self.device),
        )

    def _read_layer(self, spec: _LayerSpec, layer: int, group: int, slot: int) -> DecoderLayer:
        prefix = _layer_prefix(layer)
        norms = {name: self._read(f"{prefix}{name}.weight") for name in spec.norms}
        return DecoderLayer(
            input_norm=norms["input_layernorm"],
            qkv=self._pack(prefix, spec.qkv),
            q_norm=norms.get("self_attn.q_norm"),
            k_norm=norms.get("self_attn.k_norm"),
            attention_output=self._pack(prefix, spec.attention_output),
            post_attention_norm=norms["post_attention_layernorm"],
            gate_up=self._pack(prefix, spec.gate_up, num_parts=2),
            down=self._pack(prefix, spec.down),
            group=group,
            slot=slot,
            window=self.config.attention_windows[layer],
            kv_scales=self._read_kv_scales(layer),
        )

    def _read_kv_scales(self, layer: int) -> KVScales:
        names = _kv_scale_names(layer)
        found = [name for name in names if name in self._checkpoint.names]
        if not self.config.has_fp8_kv or not found:
            return NO_SCALES
        if len(found) == 1:
            raise ModelError(f"checkpoint has {found[0]} alone, expected {' and '.join(names)}")
        key, value = map(self._read_scale, names)
        return KVScales(key, value)

    def _read_scale(self, name: str) -> float:
        scale = self._checkpoint.read_as_stored(name).float()
        if scale.numel() != 1 or not 0 < scale.item() < math.inf:
            raise ModelError(f"{name} is {scale.tolist()}, expected one positive number")
        return scale.item()

    def _read_lm_head(self) -> torch.Tensor | QuantizedWeight:
        config, device = self.config, self.device
        if config.tie_word_embeddings and self.stage.is_first and not is_mapped(device):
            return self._embedding  # packing a map would pull all of it into memory
        name = EMBEDDING if config.tie_word_embeddings else LM_HEAD
        part = WeightPart(name.removesuffix(".weight"), self.vocabulary)
        return read_projection(
            self._checkpoint,
            [(part, (config.vocab_size, config.hidden_size))],
            config.quantization and config.quantization.of_lm_head,
            dtype=config.dtype,
            device=device,
        )

    def _pack(self, prefix: str, projection: _Projection, *, num_parts: int = 1) -> Any:
        weight = read_projection(
            self._checkpoint,
            projection.weights(prefix),
            self.config.quantization,
            dtype=self.config.dtype,
            device=self.device,
        )
        bias = self._read(*projection.biases(prefix)) if projection.has_bias else None
        return self._kernels.pack_linear(
            weight, bias, num_parts=num_parts, num_sums=projection.num_sums
        )


def is_mapped(device: torch.device) -> bool:
    """Does the embedding stay in its file? It takes no memory there: every rank has all of it."""
    return device.type == "cpu"


def _warn_if_integers_save_nothing(config: LlamaConfig, kernels: KernelSet) -> None:
    if config.quantization is None:
        return
    name = name_of(kernels)
    if name == "reference" or (name.startswith("cpu") and config.dtype != torch.bfloat16):
        logger.warning(
            "quantization saves nothing here: in %s the %s kernels multiply with dense weights; "
            "the compiled ones in bfloat16 keep integers",
            config.dtype_name,
            name,
        )
