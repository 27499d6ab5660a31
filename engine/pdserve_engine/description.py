"""What an engine says of itself."""

import time
from typing import Any

from pdserve_common.model_files.model_folder import model_name
from pdserve_common.tokens.tokenizer_digest import tokenizer_digest
from pdserve_common.types.engine import EngineInfo, WorkerRole
from pdserve_common.version import VERSION
from pdserve_engine.config import EngineConfig
from pdserve_engine.core.executor import LoadedModel
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.kv_transfer.base import KVIdentity
from pdserve_engine.models.config import ModelConfig
from pdserve_engine.runner.load.model_source import ModelSource


def describe(
    config: EngineConfig,
    role: str,
    identity: KVIdentity,
    model: LoadedModel,
    manager: KVCacheManager,
    max_model_len: int,
    source: ModelSource,
    *,
    has_prefix_pulls: bool,
    served_fields: tuple[str, ...],
) -> EngineInfo:
    """Return what routers are told of a loaded engine."""
    return EngineInfo(
        engine_id=identity.engine_id,
        epoch=identity.epoch,
        role=WorkerRole.PREFILL if role == "prefill" else WorkerRole.DECODE,
        model=config.served_model_name or model_name(config.model),
        max_model_len=max_model_len,
        vocab_size=source.config.vocab_size,
        eos_token_ids=source.config.eos_token_ids,
        block_size=config.block_size,
        num_blocks=manager.block_pool.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        dtype=source.config.dtype_name,
        kv_compatibility_hash=identity.compatibility_hash,
        kv_transport=config.kv_connector,
        determinism="exact" if model.is_row_independent else "consistent",
        numerics_id=model.numerics_id,
        version=VERSION,
        logits_processors=tuple(sorted(source.logits_processors)),
        kernels=model.kernels,
        has_prefix_caching=config.enable_prefix_caching,
        tokenizer_digest=tokenizer_digest(config.model),
        weights_digest=source.weights_digest(),
        started_at_ms=time.time_ns() // 1_000_000,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        data_parallel_size=config.data_parallel_size,
        data_parallel_rank=config.data_parallel_rank,
        zone=config.zone,
        modalities=() if source.config.vision is None else ("image",),
        has_prefix_pulls=has_prefix_pulls,
        served_fields=served_fields,
        **_pooling_fields(source.config),
    )


def _pooling_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of EngineInfo that a model has which pools."""
    if (pooler := model.pooler) is None:
        return {}
    return {
        "tasks": pooler.tasks,
        "embedding_size": model.embedding_size,
        "is_matryoshka": pooler.is_matryoshka,
        "matryoshka_dimensions": pooler.matryoshka_dimensions,
        "pooling_type": pooler.pooling_type,
    }
