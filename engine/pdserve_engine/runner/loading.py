"""Turns an EngineConfig into an EngineCore: device, weights, warm-up, KV pool, connector,
scheduler.
"""

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from pdserve_common.cores import cpu_limit
from pdserve_common.engine_types import EngineInfo, WorkerRole
from pdserve_common.kv_types import new_epoch
from pdserve_common.metrics import KVTransferMetrics
from pdserve_common.model_folder import model_name
from pdserve_common.tokenizer_digest import tokenizer_digest
from pdserve_common.version import VERSION
from pdserve_engine.config import EngineConfig, Role
from pdserve_engine.core.engine_core import EngineCore
from pdserve_engine.core.scheduler import Scheduler
from pdserve_engine.kv.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.kv.memory import out_of_memory_reason, release_unused
from pdserve_engine.kv_transfer.base import KVConnector, KVIdentity
from pdserve_engine.kv_transfer.compatibility import compatibility_hash, model_digest
from pdserve_engine.kv_transfer.consumer import ConsumerConnector
from pdserve_engine.kv_transfer.factory import make_transport
from pdserve_engine.kv_transfer.producer import ProducerConnector
from pdserve_engine.kv_transfer.rdma import has_rdma_device
from pdserve_engine.models.base import Model
from pdserve_engine.models.registry import load_model, read_model_config
from pdserve_engine.request.watchdog import MIN_BOUND_S, MIN_CUDA_BOUND_S, StepWatch
from pdserve_engine.runner.control import EngineControl
from pdserve_engine.runner.kv_sizing import (
    fit_max_model_len,
    make_kv_cache_manager,
    measure_largest_step,
    num_blocks_that_fit,
)
from pdserve_engine.runner.model_runner import ModelRunner
from pdserve_engine.runner.numerics import numerics_id
from pdserve_engine.runner.plugins import load_general_plugins, load_logits_processors
from pdserve_engine.runner.profiler import StepProfiler
from pdserve_engine.runner.sleep import SleepingMemory
from pdserve_kernels import name_of, select
from pdserve_kernels.cpu.compiled import pin_threads
from pdserve_kernels.cpu.isa import KernelsUnavailable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """An engine that is ready to step, and what has to be closed after it."""

    core: EngineCore
    info: EngineInfo
    connector: KVConnector | None
    kv_cache: KVCache
    control: EngineControl
    step_watch: StepWatch
    logs_iterations: bool

    def close(self) -> bool:
        """Release the transport, then the pool under it; False, and nothing, if a step hangs that
        uses them. The engine thread has ended.
        """
        if not self.core.close():
            return False
        gc.unfreeze()  # what the pool and the weights held can be collected again
        if self.connector is not None:
            self.connector.shutdown()
        self.kv_cache.close()
        return True


@contextlib.contextmanager
def _out_of_memory_is_refused() -> Iterator[None]:
    """Raise ValueError for the RuntimeError of one of torch's allocators."""
    try:
        yield
    except RuntimeError as error:
        reason = out_of_memory_reason(error)
        if reason is None:
            raise
        raise ValueError(
            f"too little memory for this model and its largest step: {reason}; lower "
            "--max-num-batched-tokens or --max-num-seqs, see what else uses the memory, or take a "
            "smaller model or dtype, or on CPU --quantization"
        ) from error


@_out_of_memory_is_refused()
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
    ModelError or ValueError for a model, a setting or a plugin that cannot be served, or for want
    of memory.
    """
    started = time.monotonic()
    load_general_plugins()
    source = _ModelSource(config)
    identity = source.identify(engine_id)
    model = source.load()
    manager, max_model_len = _size_pool(config, model, source.spec, source.device)
    kv_cache = KVCache(source.spec, num_blocks=manager.block_pool.num_blocks, device=source.device)
    if config.poison_freed_blocks:
        manager.block_pool.on_dead = kv_cache.poison
    step_seq = _StepCounter()
    connector = _make_connector(config, role, identity, kv_cache, metrics, wakeup, step_seq)
    runner = _make_runner(config, source, model, kv_cache, max_model_len)
    core = step_seq.core = EngineCore(
        scheduler=Scheduler(config.scheduler, manager, connector),
        executor=runner,
        connector=connector,
        max_model_len=max_model_len,
        async_scheduling=config.has_async_scheduling,
        take_aborts=take_aborts,
    )
    # What is loaded now lives as long as the process: the collector need not look at it again.
    release_unused(source.device)
    info = _describe(config, role, identity, model, manager, max_model_len, source)
    _log_loaded(info, kv_cache, manager, time.monotonic() - started)
    return LoadedEngine(
        core=core,
        info=info,
        connector=connector,
        kv_cache=kv_cache,
        control=_make_control(config, core, runner, source, engine_id),
        step_watch=_make_watch(config),
        logs_iterations=config.log_iterations,
    )


class _ModelSource:
    """The model that a config names: what it is, and its weights, now and after a sleep."""

    def __init__(self, config: EngineConfig) -> None:
        self.device = _device(config)
        self.logits_processors = load_logits_processors()
        self.config = read_model_config(
            config.model,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            model_impl=config.model_impl,
            quantization=config.quantization,
        )
        self.spec = KVCacheSpec.from_model(
            self.config, block_size=config.block_size, device=self.device
        )
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
        )

    def weights_digest(self) -> str:
        processors = tuple(self.logits_processors)
        return model_digest(self._model_dir, self.config, logits_processors=processors)

    def load(self) -> Model:
        return load_model(self._model_dir, self.config, device=self.device)

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


def _make_watch(config: EngineConfig) -> StepWatch:
    min_bound_s = MIN_CUDA_BOUND_S if config.device == "cuda" else MIN_BOUND_S
    return StepWatch(timeout_s=config.step_timeout_s, min_bound_s=min_bound_s)


def _size_pool(
    config: EngineConfig, model: Model, spec: KVCacheSpec, device: torch.device
) -> tuple[KVCacheManager, int]:
    """Warm the model up; return the book-keeping of the pool there is room for, and max_model_len.

    Raises ValueError for sizes that do not fit.
    """
    step_bytes = measure_largest_step(config, model, spec, device)
    logger.info("the largest step takes %.0f MiB besides weights and KV", step_bytes / 2**20)
    release_unused(device)
    max_model_len = model.config.max_model_len
    num_blocks = num_blocks_that_fit(
        config, spec, device, max_model_len=max_model_len, step=step_bytes
    )
    manager = make_kv_cache_manager(config, spec, num_blocks)
    max_model_len = fit_max_model_len(config, max_model_len, manager)
    _check_chunks(config, max_model_len)
    return manager, max_model_len


def _make_runner(
    config: EngineConfig,
    source: _ModelSource,
    model: Model,
    kv_cache: KVCache,
    max_model_len: int,
) -> ModelRunner:
    return ModelRunner(
        model,
        kv_cache,
        max_num_seqs=config.scheduler.max_batch_size,
        max_model_len=max_model_len,
        logits_processors=source.logits_processors,
    )


def _make_control(
    config: EngineConfig,
    core: EngineCore,
    runner: ModelRunner,
    source: _ModelSource,
    engine_id: str,
) -> EngineControl:
    memory = SleepingMemory(
        runner,
        runner.kv_cache,
        device=source.device,
        load_model=source.reload,
        keeps_pool=_is_pool_pinned(config),
    )
    return EngineControl(core, memory, StepProfiler(config.profile_dir, name=engine_id))


def _is_pool_pinned(config: EngineConfig) -> bool:
    """Does a transport hold on to the pool's memory, so that it cannot be given back?"""
    if config.kv_connector == "none":
        return False
    may_use_rdma = config.require_transport in ("any", "rdma") and has_rdma_device()
    return config.device == "cuda" or may_use_rdma


def _make_connector(
    config: EngineConfig,
    role: str,
    identity: KVIdentity,
    kv_cache: KVCache,
    metrics: KVTransferMetrics,
    wakeup: Callable[[], None],
    step_seq: Callable[[], int],
) -> KVConnector | None:
    if config.kv_connector == "none":
        return None
    transport = make_transport(
        config.kv_connector, identity, require_transport=config.require_transport
    )
    checksum = kv_cache.block_checksums if config.kv_checksums else None
    connector: KVConnector
    if role == "prefill":
        connector = ProducerConnector(
            transport,
            identity=identity,
            metrics=metrics,
            wakeup=wakeup,
            step_seq=step_seq,
            session_timeout_s=config.kv_session_timeout_s,
            checksum=checksum,
        )
    else:
        connector = ConsumerConnector(
            transport,
            identity=identity,
            metrics=metrics,
            wakeup=wakeup,
            step_seq=step_seq,
            session_timeout_s=config.kv_session_timeout_s,
            transfer_timeout_s=config.kv_transfer_timeout_s,
            checksum=checksum,
        )
    connector.register_kv_cache(kv_cache)
    return connector


class _StepCounter:
    """The engine's step number for heartbeats; the connector is built before the core."""

    core: EngineCore | None = None

    def __call__(self) -> int:
        return self.core.step_seq if self.core is not None else 0


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no CUDA device: use --device cpu")
    torch.set_num_threads(config.num_threads or _default_num_threads(config))
    if config.cores and config.device == "cpu":
        # Without compiled kernels nothing can place the threads: they share the process's cores.
        with contextlib.suppress(KernelsUnavailable):
            pin_threads(config.cores)
    return torch.device(config.device)


def _default_num_threads(config: EngineConfig) -> int:
    """One for each core, but no more than the container has time for."""
    num_threads, limit = len(config.cores) or torch.get_num_threads(), cpu_limit()
    return num_threads if limit is None else max(1, min(num_threads, int(limit)))


def _check_chunks(config: EngineConfig, max_model_len: int) -> None:
    scheduler = config.scheduler
    if not scheduler.has_chunked_prefill and scheduler.max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}, "
            "without chunked prefill (scheduling_mode v0 has none) "
            f"it must be at least max_model_len ({max_model_len})"
        )


def _log_loaded(
    info: EngineInfo, kv_cache: KVCache, manager: KVCacheManager, duration_s: float
) -> None:
    logger.info(
        "loaded %s in %.1f s: %d blocks of %d tokens (%.0f MiB of KV), "
        "max_model_len %d (%.1f requests of it at once), %s",
        info.model,
        duration_s,
        info.num_blocks,
        info.block_size,
        kv_cache.num_bytes / 2**20,
        info.max_model_len,
        info.num_blocks / manager.num_blocks_needed(info.max_model_len),
        info.dtype,
    )


def _describe(
    config: EngineConfig,
    role: str,
    identity: KVIdentity,
    model: Model,
    manager: KVCacheManager,
    max_model_len: int,
    source: _ModelSource,
) -> EngineInfo:
    return EngineInfo(
        engine_id=identity.engine_id,
        epoch=identity.epoch,
        role=WorkerRole.PREFILL if role == "prefill" else WorkerRole.DECODE,
        model=config.served_model_name or model_name(config.model),
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
        block_size=config.block_size,
        num_blocks=manager.block_pool.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        dtype=model.config.dtype_name,
        kv_compatibility_hash=identity.compatibility_hash,
        kv_transport=config.kv_connector,
        determinism="exact" if model.is_row_independent else "consistent",
        numerics_id=numerics_id(config, model, source.device),
        version=VERSION,
        logits_processors=tuple(sorted(source.logits_processors)),
        kernels=name_of(select(source.device)),
        has_prefix_caching=config.enable_prefix_caching,
        tokenizer_digest=tokenizer_digest(config.model),
        weights_digest=source.weights_digest(),
        started_at_ms=time.time_ns() // 1_000_000,
    )
