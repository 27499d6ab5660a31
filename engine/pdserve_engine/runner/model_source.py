"""The model that a config names, and the device it runs on."""

from dataclasses import replace

import torch

from pdserve_common.kv_types import KVShard, new_epoch
from pdserve_engine.config import EngineConfig
from pdserve_engine.grammar.native import TokenizerInfo
from pdserve_engine.grammar.vocabulary import make_tokenizer_info
from pdserve_engine.kv.kv_cache import KVCacheSpec
from pdserve_engine.kv_transfer.base import KVIdentity
from pdserve_engine.kv_transfer.compatibility import compatibility_hash, model_digest
from pdserve_engine.models.base import Model
from pdserve_engine.models.config import LlamaConfig, ModelConfig, ModelError
from pdserve_engine.models.llama import LlamaModel
from pdserve_engine.models.registry import load_model, read_model_config
from pdserve_engine.models.shard import Shard, check_shards
from pdserve_engine.runner.plugins import load_logits_processors
from pdserve_engine.runner.sharded_model import ShardedModel
from pdserve_kernels.groups import Group


class ModelSource:
    """The model that a config names: what it is, and its weights, now and after a sleep."""

    def __init__(self, config: EngineConfig, group: Group | None = None) -> None:
        """A group makes it one rank's: `spec` and `load` are of its part. Raises ModelError."""
        self._group = group
        self.device = _device(config)
        self.logits_processors = load_logits_processors()
        self.config = read_model_config(
            config.model,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            model_impl=config.model_impl,
            quantization=config.quantization,
        )
        _check_size(self.config, config.tensor_parallel_size)
        self.num_ranks = config.tensor_parallel_size
        self.spec = KVCacheSpec.from_model(
            self.config, block_size=config.block_size, device=self.device
        )
        if group is not None:
            self.spec = replace(self.spec, shard=_shard_of(self.spec, group))
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

    @property
    def rank(self) -> int:
        """Which of the ranks this process is."""
        return 0 if self._group is None else self._group.rank

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

    def load(self) -> Model:
        group = self._group
        model = load_model(self._model_dir, self.config, device=self.device, group=group)
        if group is not None and group.rank == 0:
            assert isinstance(model, LlamaModel)
            return ShardedModel(model, group)
        return model

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


def _shard_of(spec: KVCacheSpec, group: Group) -> KVShard:
    heads = Shard(group.rank, group.size).kv_heads(spec.num_kv_heads)
    return replace(spec.part, first_kv_head=heads.start, num_kv_heads=heads.stop - heads.start)


def _check_size(config: ModelConfig, tensor_parallel_size: int) -> None:
    if isinstance(config, LlamaConfig):
        check_shards(config, tensor_parallel_size)
    elif tensor_parallel_size > 1:
        raise ModelError(
            f"tensor_parallel_size is {tensor_parallel_size}, {config.architecture} runs on the "
            "transformers backend, which has 1"
        )


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no CUDA device: use --device cpu")
    return torch.device(config.device)
