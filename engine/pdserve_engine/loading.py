"""Turns an EngineConfig into an EngineCore: device, weights, KV pool, connector, scheduler, warm-
up.
"""

import ctypes
import gc
import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from pdserve_common.engine_types import EngineInfo, WorkerRole
from pdserve_common.kv_types import new_epoch
from pdserve_common.metrics import KVTransferMetrics
from pdserve_common.version import VERSION
from pdserve_engine.config import EngineConfig
from pdserve_engine.core.block_pool import BlockPool
from pdserve_engine.core.engine_core import EngineCore
from pdserve_engine.core.kv_cache_manager import KVCacheManager
from pdserve_engine.core.scheduler import Scheduler
from pdserve_engine.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.kv_transfer.base import KVConnector, KVIdentity
from pdserve_engine.kv_transfer.compatibility import compatibility_hash
from pdserve_engine.kv_transfer.consumer import ConsumerConnector
from pdserve_engine.kv_transfer.factory import make_transport
from pdserve_engine.kv_transfer.producer import ProducerConnector
from pdserve_engine.model_runner import ModelRunner
from pdserve_engine.models.config import ModelConfig
from pdserve_engine.models.registry import load_model

logger = logging.getLogger(__name__)

# A loading message in the log at most this often.
PROGRESS_LOG_S = 1.0

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """An engine that is ready to step, and what has to be closed after it."""

    core: EngineCore
    info: EngineInfo
    connector: KVConnector | None
    kv_cache: KVCache
    step_timeout_s: float

    def close(self) -> None:
        """Release the transport, then the pool under it. The engine thread has ended."""
        if self.connector is not None:
            self.connector.shutdown()
        self.kv_cache.close()


def load_engine(
    config: EngineConfig,
    *,
    role: Role,
    engine_id: str,
    metrics: KVTransferMetrics,
    wakeup: Callable[[], None] = lambda: None,
    take_aborts: Callable[[], Iterable[str]] = tuple,
) -> LoadedEngine:
    """Load everything; takes seconds to minutes and blocks.

    `wakeup` is called, on any thread, when the connector has news for the engine thread. Raises
    ModelError or ValueError for a model or a setting that cannot be served.
    """
    started = time.monotonic()
    device = _device(config)
    model_config = ModelConfig.from_dir(
        config.model, dtype=config.dtype, max_model_len=config.max_model_len
    )
    spec = KVCacheSpec.from_model(model_config, block_size=config.block_size)
    num_blocks = config.num_blocks or spec.num_blocks_for_budget(config.kv_cache_memory_mib << 20)
    _check_fits(config, model_config.max_model_len, num_blocks)
    model = load_model(config.model, model_config, device=device, progress=_log_progress())
    kv_cache = KVCache(spec, num_blocks=num_blocks, device=device)
    step_seq = _StepCounter()
    identity = KVIdentity(
        engine_id=engine_id,
        epoch=new_epoch(),
        compatibility_hash=compatibility_hash(config.model, model_config, spec.layout()),
        layout=spec.layout(),
        vocab_size=model_config.vocab_size,
    )
    connector = _make_connector(config, role, identity, metrics, wakeup, step_seq)
    if connector is not None:
        connector.register_kv_cache(kv_cache)
    pool = BlockPool(num_blocks, enable_caching=config.enable_prefix_caching)
    core = EngineCore(
        scheduler=Scheduler(config.scheduler, KVCacheManager(pool, config.block_size), connector),
        executor=ModelRunner(model, kv_cache, max_num_seqs=config.max_num_seqs),
        connector=connector,
        max_model_len=model_config.max_model_len,
        take_aborts=take_aborts,
    )
    step_seq.core = core
    core.warm_up(config.max_num_batched_tokens)
    _settle_memory()
    info = _describe(config, role, identity, model_config, num_blocks)
    logger.info(
        "loaded %s in %.1f s: %d blocks of %d tokens (%.0f MiB of KV), max_model_len %d, %s",
        info.model,
        time.monotonic() - started,
        num_blocks,
        config.block_size,
        kv_cache.num_bytes / 2**20,
        info.max_model_len,
        info.dtype,
    )
    return LoadedEngine(
        core=core,
        info=info,
        connector=connector,
        kv_cache=kv_cache,
        step_timeout_s=config.step_timeout_s,
    )


def _make_connector(
    config: EngineConfig,
    role: str,
    identity: KVIdentity,
    metrics: KVTransferMetrics,
    wakeup: Callable[[], None],
    step_seq: Callable[[], int],
) -> KVConnector | None:
    if config.kv_connector == "none":
        return None
    transport = make_transport(
        config.kv_connector, identity, require_transport=config.require_transport
    )
    if role == "prefill":
        return ProducerConnector(
            transport,
            identity=identity,
            metrics=metrics,
            wakeup=wakeup,
            step_seq=step_seq,
            session_timeout_s=config.kv_session_timeout_s,
        )
    return ConsumerConnector(
        transport,
        identity=identity,
        metrics=metrics,
        wakeup=wakeup,
        step_seq=step_seq,
        transfer_timeout_s=config.kv_transfer_timeout_s,
    )


class _StepCounter:
    """The engine's step number for heartbeats; the connector is built before the core."""

    core: EngineCore | None = None

    def __call__(self) -> int:
        return self.core.step_seq if self.core is not None else 0


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no CUDA device: use --device cpu")
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    return torch.device(config.device)


def _check_fits(config: EngineConfig, max_model_len: int, num_blocks: int) -> None:
    """One request of max_model_len has to fit, or it could never finish."""
    if num_blocks * config.block_size < max_model_len:
        raise ValueError(
            f"the KV pool holds {num_blocks} blocks of {config.block_size} tokens, less than "
            f"max_model_len ({max_model_len}): raise --kv-cache-memory-mib or lower --max-model-len"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}, without chunked prefill "
            f"it must be at least max_model_len ({max_model_len})"
        )


def _log_progress() -> Callable[[int, int], None]:
    last = time.monotonic()

    def log(num_read: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_LOG_S:
            last = time.monotonic()
            logger.info("loading weights: %d of %d tensors", num_read, total)

    return log


def _settle_memory() -> None:
    """What is loaded now lives as long as the process: the collector need not look at it again, and
    the allocator can give back what loading has freed (90 MB of a 0.5 B model's).
    """
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if trim is not None:
            trim(0)


def _describe(
    config: EngineConfig,
    role: str,
    identity: KVIdentity,
    model_config: ModelConfig,
    num_blocks: int,
) -> EngineInfo:
    return EngineInfo(
        engine_id=identity.engine_id,
        epoch=identity.epoch,
        role=WorkerRole.PREFILL if role == "prefill" else WorkerRole.DECODE,
        model=config.served_model_name or Path(config.model).resolve().name,
        max_model_len=model_config.max_model_len,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        dtype=model_config.dtype_name,
        kv_compatibility_hash=identity.compatibility_hash,
        kv_transport=config.kv_connector,
        determinism="consistent",
        version=VERSION,
    )
