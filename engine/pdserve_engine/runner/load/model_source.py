"""The model that a config names, and the device it runs on."""

from dataclasses import replace
from pathlib import Path

import torch

from pdserve_common.types.kv import KVShard, new_epoch
from pdserve_engine.combinations import check_combination, features_of
from pdserve_engine.config import AttentionBackend, EngineConfig
from pdserve_engine.grammar.native import TokenizerInfo
from pdserve_engine.grammar.vocabulary import Encode, make_encoder, make_tokenizer_info
from pdserve_engine.kv.kv_cache import KVCacheSpec
from pdserve_engine.kv_transfer.base import KVIdentity
from pdserve_engine.kv_transfer.compatibility import compatibility_hash, model_digest
from pdserve_engine.lora.adapter import LoraAdapter, max_weights_bytes, read_adapter
from pdserve_engine.lora.adapter_config import Targets
from pdserve_engine.models.base import Model, SupportsLora
from pdserve_engine.models.config import LlamaConfig, ModelConfig, ModelError
from pdserve_engine.models.features import features_of_model
from pdserve_engine.models.quantization import Fp8Quantization
from pdserve_engine.models.registry import load_model, read_model_config
from pdserve_engine.models.shard import WHOLE, Shard, check_shards
from pdserve_engine.models.stage import ALL_LAYERS, Stage, check_stages
from pdserve_engine.runner.draft.draft_source import DraftModelSource
from pdserve_engine.runner.load.plugins import load_logits_processors
from pdserve_kernels.groups import Group

# The compute capability of the first GPUs that have numbers in FP8.
FP8_CAPABILITY = (8, 9)


class ModelSource:
    """The model that a config names: what it is, and its weights, now and after a sleep."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int = 0,
        group: Group | None = None,
        stage: Stage = ALL_LAYERS,
    ) -> None:
        """A group or a stage makes it one rank's: `spec` and `load` are of its part. Raises
        ModelError, or ValueError for what this machine cannot run.
        """
        self.rank = rank
        self._group = group
        self._stage = stage
        self.logits_processors = load_logits_processors()
        self.config = read_model_config(
            config.model,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            model_impl=config.model_impl,
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            runner=config.runner,
            convert=config.convert,
            pooler_config=config.pooler_config,
        )
        check_combination(features_of_model(self.config) | features_of(config), ModelError)
        self.device = _device(config)
        if self.device.type == "cuda":
            _check_fp8(self.config, torch.cuda.get_device_capability())
        if isinstance(self.config, LlamaConfig):
            check_shards(self.config, config.tensor_parallel_size)
            check_stages(self.config, config.pipeline_parallel_size)
        if config.attention_backend is not None:
            _check_attention_backend(config.attention_backend, self.config)
        self.num_ranks = config.num_ranks
        self.spec = KVCacheSpec.from_model(
            self.config, block_size=config.block_size, device=self.device
        )
        if group is not None or stage.count > 1:
            self.spec = replace(self.spec, shard=shard_of(self.spec, group, stage))
        self.draft = None
        if config.draft_model is not None:
            self.draft = DraftModelSource(config.draft_model, config, self.config, self.device)
        self._max_lora_rank = config.max_lora_rank
        self._num_adapters = config.max_loras if config.has_adapters else 0
        self._model_dir = config.model
        self.compatibility_hash = self._hash()

    def identify(self, engine_id: str) -> KVIdentity:
        """Return who peers will deal with: this start of an engine with this model."""
        return KVIdentity(
            engine_id=engine_id,
            epoch=new_epoch(),
            compatibility_hash=self.compatibility_hash,
            layout=self.spec.layout(),
            vocab_size=self.config.vocab_size,
            num_ranks=self.num_ranks,
        )

    def weights_digest(self) -> str:
        processors = tuple(self.logits_processors)
        return model_digest(self._model_dir, self.config, logits_processors=processors)

    def tokenizer_info(self) -> TokenizerInfo:
        """Return the vocabulary as grammars see it. Raises ValueError if they cannot."""
        return make_tokenizer_info(
            self._model_dir,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.eos_token_ids,
        )

    def encoder(self) -> Encode:
        """Return what cuts texts into the model's tokens. Raises ValueError if it has none."""
        return make_encoder(self._model_dir)

    def load(self) -> Model:
        return load_model(
            self._model_dir,
            self.config,
            device=self.device,
            group=self._group,
            stage=self._stage,
        )

    def adapter_bytes(self, model: Model) -> int:
        """Return what as many adapters of the loaded model take as there may be."""
        if not self._num_adapters:
            return 0
        assert isinstance(model, SupportsLora), "the config is refused otherwise"
        return self._num_adapters * model.max_adapter_bytes(self._max_lora_rank)

    def max_adapter_file_bytes(self, model: Model) -> int:
        """Return the size of the largest file of an adapter's weights; 0: there are no adapters."""
        if not self._num_adapters:
            return 0
        assert isinstance(model, SupportsLora), "the config is refused otherwise"
        return max_weights_bytes(model.lora_targets, self._max_lora_rank)

    def read_adapter(self, folder: Path, targets: Targets) -> LoraAdapter:
        """Return the adapter in a folder, which may hold anything. Raises LoraError."""
        return read_adapter(folder, targets, dtype=self.config.dtype, max_rank=self._max_lora_rank)

    def reload(self) -> Model:
        """As `load`. Raises ValueError if the folder has changed: peers were told its digest."""
        if self._hash() != self.compatibility_hash:
            raise ValueError(f"{self._model_dir} has changed since the start, restart the worker")
        return self.load()

    def _hash(self) -> str:
        return compatibility_hash(
            self._model_dir,
            self.config,
            self.spec.layout(),
            logits_processors=tuple(self.logits_processors),
        )


def shard_of(spec: KVCacheSpec, group: Group | None, stage: Stage) -> KVShard:
    """Return what of each block a rank holds."""
    shard = WHOLE if group is None else Shard(group.rank, group.size)
    heads, slots = shard.kv_heads(spec.num_kv_heads), stage.layers(spec.part.num_slots)
    return KVShard(
        first_kv_head=heads.start,
        num_kv_heads=heads.stop - heads.start,
        first_slot=slots.start,
        num_slots=len(slots),
    )


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no CUDA device: use --device cpu")
    return torch.device(config.device)


def _check_fp8(model: ModelConfig, capability: tuple[int, int]) -> None:
    for field, is_fp8 in (
        ("kv_cache_dtype", model.has_fp8_kv),
        ("quantization", isinstance(model.quantization, Fp8Quantization)),
    ):
        if is_fp8 and capability < FP8_CAPABILITY:
            raise ValueError(
                f"{field} is fp8, this GPU has compute capability {capability[0]}."
                f"{capability[1]}, must have 8.9 (Ada, Hopper) or later"
            )


def _check_attention_backend(name: AttentionBackend, model: ModelConfig) -> None:
    from pdserve_kernels.triton import flash_attn  # Triton is not everywhere

    try:
        flash_attn.check_support(torch.cuda.get_device_capability(), model.dtype, model.head_dim)
    except ValueError as error:
        raise ValueError(f"attention_backend is {name}: {error}") from error
