"""The Llama-family decoder: Llama, Mistral, Qwen2 and Qwen3, which differ only in data, and
Mixtral, Qwen2-MoE and Qwen3-MoE, which have experts in place of MLPs.
"""

import logging
import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from pdserve_engine.kv.kv_groups import group_layers, slots_of
from pdserve_engine.lora.adapter import LoraAdapter
from pdserve_engine.lora.adapter_config import Targets
from pdserve_engine.models.base import ForwardInputs
from pdserve_engine.models.config import LlamaConfig, ModelError, PoolerConfig
from pdserve_engine.models.quantization import Fp8Quantization
from pdserve_engine.models.rope import build_cos_sin_cache
from pdserve_engine.models.shard import WHOLE, Shard, check_shards
from pdserve_engine.models.stage import ALL_LAYERS, Stage, check_stages
from pdserve_engine.models.weights.layer_reader import LayerReader
from pdserve_engine.models.weights.llama import (
    EMBEDDING,
    FINAL_NORM,
    INPUT_NORM,
    K_NORM,
    LM_HEAD,
    POST_ATTENTION_NORM,
    Q_NORM,
    SCORE,
    LayerWeights,
    kv_scale_names,
    layer_prefix,
    lora_targets,
    never_quantized,
    weight_shapes,
)
from pdserve_engine.models.weights.loader import Checkpoint, WeightPart
from pdserve_engine.models.weights.projection import Projection
from pdserve_engine.models.weights.quantized import (
    check_unused_biases,
    read_projection,
    stored_weights,
)
from pdserve_kernels import KernelSet, name_of, select
from pdserve_kernels.decoder import Attention, Decoder, DecoderLayer
from pdserve_kernels.groups import Group
from pdserve_kernels.kv_scales import NO_SCALES, KVScales
from pdserve_kernels.lora import LoraLayer, LoraPart
from pdserve_kernels.reference.quantization import QuantizedWeight
from pdserve_kernels.sampling_batch import Argmax, Sampled, SamplingBatch

logger = logging.getLogger(__name__)

HEAD_PREFIX = LM_HEAD.removesuffix("weight")


def _unread_head(config: LlamaConfig, names: Collection[str]) -> list[str]:
    """Return what a checkpoint has of a head that is the embedding: tools store it all the same,
    and quantize it. A model that pools has no use for one.
    """
    if config.pooler is None and not config.tie_word_embeddings:
        return []
    return [name for name in names if name.startswith(HEAD_PREFIX)]


def _tie_as_stored(config: LlamaConfig, checkpoint: Checkpoint) -> LlamaConfig:
    """Make of a tied head what transformers makes of it. Where the checkpoint has it alone, it is
    the embedding as well; where it differs from the embedding, they are not tied: return the config
    with `tie_word_embeddings` false. A quantized head does not count: tools make it of the
    embedding.
    """
    names = checkpoint.names
    head = {name for name in names if name.startswith(HEAD_PREFIX)}
    if not config.tie_word_embeddings or head != {LM_HEAD}:
        return config
    if not checkpoint.is_dense_float(LM_HEAD):
        return config
    if EMBEDDING not in names:
        checkpoint.rename(LM_HEAD, EMBEDDING)
        return config
    if checkpoint.is_same(EMBEDDING, LM_HEAD, dtype=config.dtype):
        return config
    logger.warning(
        "tie_word_embeddings is true, but %s differs from %s: they are not tied", LM_HEAD, EMBEDDING
    )
    return replace(config, tie_word_embeddings=False)


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
        config = _tie_as_stored(config, checkpoint)
        names = checkpoint.names
        dense, tables = weight_shapes(config, names), never_quantized(config, names)
        stored = stored_weights(dense, names, config.quantization, tables=tables)
        # An embedding needs no head.
        score = () if config.pooler is None else (SCORE,)
        scales = (name for layer in range(config.num_layers) for name in kv_scale_names(layer))
        unread = _unread_head(config, checkpoint.names)
        checkpoint.check(
            stored.shapes, in_fp8=stored.in_fp8, optional=(*unread, *score, *scales, *stored.unused)
        )
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
        self._reader = LayerReader(
            checkpoint=checkpoint,
            kernels=self._kernels,
            quantization=config.quantization,
            dtype=config.dtype,
            device=device,
        )
        _warn_if_quantization_saves_nothing(config, self._kernels)
        if config.has_fp8_kv and kv_scale_names(0)[0] not in checkpoint.names:
            logger.warning("the checkpoint has no k_scale and v_scale: KV in FP8 is not scaled")
        self.can_be_captured = True
        self.is_row_independent = self._kernels.is_row_independent(config.dtype) and (
            group is None or self._kernels.is_shard_independent(config.dtype)
        )
        # The largest come first: while one is packed, memory holds it twice.
        self._is_embedding_split = group is not None and not is_mapped(device)
        if stage.is_first:
            self._embedding = self._read_embedding()
        self._head: Any = None
        if stage.is_last and (config.pooler is None or config.pooler.num_labels):
            self._head = self._kernels.pack_linear(self._read_head(), None)
        decoder = self._read_decoder()
        self._layers = decoder.layers
        self._decoder = self._kernels.pack_decoder(decoder)

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """See `models.base.Model`."""
        if self.stage.is_first:
            states = self._embed(inputs.token_ids)
            if inputs.mm_embeds is not None:
                assert inputs.mm_rows is not None
                states.index_copy_(0, inputs.mm_rows, inputs.mm_embeds)
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
        logits: torch.Tensor = self._kernels.linear(hidden_rows, self._head)
        return logits

    @torch.inference_mode()
    def choose_greedily(
        self, hidden_rows: torch.Tensor, *, mask: torch.Tensor | None = None
    ) -> Argmax:
        """See `models.base.Model`."""
        best: Argmax = self._kernels.linear_argmax(hidden_rows, self._head, mask=mask)
        return best

    @torch.inference_mode()
    def sample_part(
        self, hidden_rows: torch.Tensor, batch: SamplingBatch, *, mask: torch.Tensor | None = None
    ) -> Argmax:
        """See `models.base.ModelPart`."""
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
            for layer in self.stage.layers(self.config.num_layers)
            for projection in self._weights_of(layer).projections.values()
        )
        return num_numbers * self.config.dtype.itemsize

    def pack_adapter(self, adapter: LoraAdapter) -> Any:
        """See `models.base.SupportsLora`."""
        layers = zip(self.stage.layers(self.config.num_layers), self._layers, strict=True)
        return self._kernels.pack_adapter(
            [self._pack_adapter_layer(adapter, index, layer) for index, layer in layers]
        )

    def _pack_adapter_layer(
        self, adapter: LoraAdapter, index: int, layer: DecoderLayer
    ) -> LoraLayer:
        return {
            name: self._pack_lora(adapter, index, projection, layer.linears[name])
            for name, projection in self._weights_of(index).projections.items()
        }

    def _weights_of(self, layer: int) -> LayerWeights:
        return LayerWeights.of(self.config, layer, self._shard, self._checkpoint.names)

    def _pack_lora(
        self, adapter: LoraAdapter, layer: int, projection: Projection, packed: Any
    ) -> Any:
        parts, first_output = [], 0
        for name, _, rows in projection.parts:
            module = adapter.modules.get(layer_prefix(layer) + name)
            if module is not None:
                a, b = module.a[:, projection.columns], module.b[rows]
                parts.append(LoraPart(first_output, a, b, module.scale))
            first_output += rows.stop - rows.start
        return self._kernels.pack_lora(parts, packed)

    def _read(self, *weights: str | WeightPart) -> torch.Tensor:
        return self._reader.tensor(*weights)

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
        config = self.config
        kv_heads = self._shard.kv_heads(config.num_kv_heads)
        places = slots_of(group_layers(config.attention_windows))
        layers = self.stage.layers(config.num_layers)
        first_slot = places[layers[0]][1] if self.stage.count > 1 else 0
        return Decoder(
            layers=tuple(
                self._read_layer(layer, places[layer][0], places[layer][1] - first_slot)
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

    def _read_layer(self, layer: int, group: int, slot: int) -> DecoderLayer:
        prefix, weights, reader = layer_prefix(layer), self._weights_of(layer), self._reader
        return DecoderLayer(
            input_norm=self._read(f"{prefix}{INPUT_NORM}.weight"),
            attention=Attention(
                qkv=reader.linear(prefix, weights.attention.qkv),
                q_norm=self._read_head_norm(prefix + Q_NORM),
                k_norm=self._read_head_norm(prefix + K_NORM),
                output=reader.linear(prefix, weights.attention.output),
                group=group,
                slot=slot,
                window=self.config.attention_windows[layer],
                kv_scales=self._read_kv_scales(layer),
            ),
            post_attention_norm=self._read(f"{prefix}{POST_ATTENTION_NORM}.weight"),
            mlp=weights.mlp.read(reader, prefix),
        )

    def _read_head_norm(self, name: str) -> torch.Tensor | None:
        return self._read(f"{name}.weight") if self.config.has_qk_norm else None

    def _read_kv_scales(self, layer: int) -> KVScales:
        names = kv_scale_names(layer)
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

    def _read_head(self) -> torch.Tensor | QuantizedWeight:
        config, device = self.config, self.device
        if config.pooler is not None:
            return self._read_score(config.pooler)
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

    def _read_score(self, pooler: PoolerConfig) -> torch.Tensor:
        """Return the head [num_labels, hidden_size] of a classifier."""
        if not pooler.classifier_token_ids:
            return self._read(SCORE)
        name = EMBEDDING if self.config.tie_word_embeddings else LM_HEAD
        if name not in self._checkpoint.names:
            raise ModelError(f"classifier_from_token needs {name} as it is, which is quantized")
        no, yes = (
            self._checkpoint.read(
                WeightPart(name, slice(token_id, token_id + 1)),
                dtype=torch.float32,
                device=self.device,
            )
            for token_id in pooler.classifier_token_ids
        )
        return (yes - no).to(self.config.dtype)


def is_mapped(device: torch.device) -> bool:
    """Does the embedding stay in its file? It takes no memory there: every rank has all of it."""
    return device.type == "cpu"


def _warn_if_quantization_saves_nothing(config: LlamaConfig, kernels: KernelSet) -> None:
    if config.quantization is None:
        return
    name, is_fp8 = name_of(kernels), isinstance(config.quantization, Fp8Quantization)
    if name == "reference" or (
        name.startswith("cpu") and (is_fp8 or config.dtype != torch.bfloat16)
    ):
        logger.warning(
            "quantization saves nothing here: in %s the %s kernels multiply with dense weights; %s",
            config.dtype_name,
            name,
            "those of CUDA keep FP8" if is_fp8 else "the compiled ones in bfloat16 keep integers",
        )
