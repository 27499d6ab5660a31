"""Turns an EngineConfig into an EngineCore: executor, connector, scheduler."""

import contextlib
import dataclasses
import functools
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pdserve_common.metrics.services import GrammarMetrics, KVTransferMetrics
from pdserve_common.model_files.hub_path import HubPath, is_hub_path
from pdserve_common.types.engine import EngineInfo
from pdserve_common.version import VERSION
from pdserve_engine.config import EngineConfig, Role
from pdserve_engine.core.engine_core import EngineCore
from pdserve_engine.core.executor import Executor, LoadedModel
from pdserve_engine.core.features.adapter_pool import AdapterPool
from pdserve_engine.core.scheduler import Scheduler
from pdserve_engine.description import describe
from pdserve_engine.executor.multiproc import MultiprocExecutor
from pdserve_engine.executor.uniproc import UniprocExecutor
from pdserve_engine.grammar.compile_queue import GrammarCompiler
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.kv.memory import out_of_memory_reason, release_unused
from pdserve_engine.kv_offload.build import make_offload
from pdserve_engine.kv_offload.offload import KVOffload
from pdserve_engine.kv_transfer.base import ConnectorContext, KVIdentity, RankTransport
from pdserve_engine.kv_transfer.connectors.connector import Connector
from pdserve_engine.kv_transfer.connectors.consumer import ConsumerConnector
from pdserve_engine.kv_transfer.connectors.prefix_consumer import PrefixConsumer
from pdserve_engine.kv_transfer.connectors.prefix_producer import PrefixProducer
from pdserve_engine.kv_transfer.connectors.producer import ProducerConnector
from pdserve_engine.kv_transfer.ports import KVConnector
from pdserve_engine.kv_transfer.sleep import SleepingTransfer
from pdserve_engine.kv_transfer.transport.sharded_transport import ShardedTransport
from pdserve_engine.lora.hub import FetchAdapter, HubFetch
from pdserve_engine.pooling.settings import pooling_settings
from pdserve_engine.request.watchdog import KNOWN_BOUND_S, MIN_CUDA_BOUND_S, StepWatch
from pdserve_engine.runner.load.kv_sizing import fit_max_model_len, make_kv_cache_manager
from pdserve_engine.runner.load.model_source import ModelSource
from pdserve_engine.runner.load.plugins import load_general_plugins
from pdserve_engine.runner.operate.control import EngineControl
from pdserve_engine.runner.rank import Rank
from pdserve_engine.runner.rank_calls import Poison
from pdserve_engine.spec_decode.factory import make_proposer

logger = logging.getLogger(__name__)

# Fields of requests that are served where grammars are.
_GRAMMAR_FIELDS = ("structured_outputs", "reasoning_ended", "reasoning_parser_kwargs")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """An engine that is ready to step, and what has to be closed after it."""

    core: EngineCore
    info: EngineInfo
    connector: KVConnector | None
    # The connector of prefixes has the other role, over the same transport.
    prefix_connector: KVConnector | None
    offload: KVOffload | None
    control: EngineControl
    step_watch: StepWatch
    logs_iterations: bool
    compiler: GrammarCompiler | None

    def close(self) -> bool:
        """Release the transport, then the pool under it; False, and nothing, if a step hangs that
        uses them. The engine thread has ended.
        """
        if self.compiler is not None:
            self.compiler.close()
        if not self.core.close():
            return False
        if self.offload is not None:
            self.offload.close()
        gc.unfreeze()  # what the pool and the weights held can be collected again
        if self.prefix_connector is not None:
            self.prefix_connector.disconnect()
        if self.connector is not None:
            self.connector.shutdown()
        self.core.executor.close()
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
            "smaller model or dtype, or on CPU --quantization int8"
        ) from error


def make_executor(config: EngineConfig, source: ModelSource, name: str) -> Executor:
    """Return what runs the ranks of `config`: this process, or a process each."""
    if config.num_ranks == 1:
        rank = Rank(config, source, name=name)
        return UniprocExecutor(rank, async_scheduling=config.has_async_scheduling)
    return MultiprocExecutor(
        config,
        name=name,
        hidden_size=source.config.hidden_size,
        compatibility_hash=source.compatibility_hash,
    )


MakeExecutor = Callable[[EngineConfig, ModelSource, str], Executor]


@_out_of_memory_is_refused()
def load_engine(
    config: EngineConfig,
    *,
    role: Role,
    engine_id: str,
    metrics: KVTransferMetrics,
    grammar_metrics: GrammarMetrics | None = None,
    wakeup: Callable[[], None] = lambda: None,
    take_aborts: Callable[[], Iterable[str]] = tuple,
    make_executor: MakeExecutor = make_executor,
) -> LoadedEngine:
    """Load everything; takes seconds to minutes and blocks.

    `wakeup` is called, on any thread, when the connector or the grammar compiler has something for
    the engine thread. Raises
    ModelError or ValueError for a model, a setting or a plugin that cannot be served, or for want
    of memory.
    """
    load_general_plugins()
    source = ModelSource(config)
    if source.config.pooler is not None:
        config = pooling_settings(config, source.config.pooler, role)
    executor = make_executor(config, source, engine_id)
    try:
        return _load(
            config,
            source,
            executor,
            role=role,
            identity=source.identify(engine_id),
            metrics=metrics,
            grammar_metrics=grammar_metrics,
            wakeup=wakeup,
            take_aborts=take_aborts,
        )
    except BaseException:  # it goes on; ranks would outlive it
        executor.abort()
        raise


def _load(
    config: EngineConfig,
    source: ModelSource,
    executor: Executor,
    *,
    role: Role,
    identity: KVIdentity,
    metrics: KVTransferMetrics,
    grammar_metrics: GrammarMetrics | None,
    wakeup: Callable[[], None],
    take_aborts: Callable[[], Iterable[str]],
) -> LoadedEngine:
    started = time.monotonic()
    model = executor.load()
    manager, max_model_len = _make_pool(config, source, executor)
    hub = _make_hub(config, model)
    adapters = _load_adapters(config, executor, hub)
    if config.poison_freed_blocks:
        manager.block_pool.on_dead = lambda ids: executor.collective_rpc(Poison(tuple(ids)))
    if config.speculation != "none" and config.has_async_scheduling:
        logger.info("with speculation no step is planned ahead of another: drafts need its tokens")
    step_seq = _StepCounter()
    transport = _make_transport(config, identity, executor)
    prefix_compatibility = _prefix_compatibility(identity, model)
    connector, prefix_connector = None, None
    if transport is not None:
        context = ConnectorContext(
            transport=transport,
            identity=identity,
            metrics=metrics,
            wakeup=wakeup,
            step_seq=step_seq,
            session_timeout_s=config.kv_session_timeout_s,
            read_timeout_s=config.kv_transfer_timeout_s,
            checksum=executor.block_checksums if config.kv_checksums else None,
        )
        connector = (ProducerConnector if role == "prefill" else ConsumerConnector)(context)
        prefix_connector = _make_prefix_connector(
            config, role, context, manager, compatibility=prefix_compatibility
        )
    compiler = _make_compiler(config, source, grammar_metrics)
    offload = make_offload(
        config,
        source.spec,
        manager,
        # How blocks are hashed, and what they hold, may be others' in another version.
        compatibility=f"{prefix_compatibility} {VERSION}",
        open_copier=executor.open_block_copier,
        registry=metrics.registry,
        wakeup=wakeup,
    )
    core = step_seq.core = EngineCore(
        scheduler=Scheduler(
            config.scheduler,
            manager,
            producer=_if_is(connector, ProducerConnector),
            consumer=_if_is(connector, ConsumerConnector),
            prefix_producer=_if_is(prefix_connector, PrefixProducer),
            prefix_consumer=_if_is(prefix_connector, PrefixConsumer),
            offload=offload,
            compile_grammar=compiler.compile if compiler is not None else None,
            adapters=adapters,
            proposer=make_proposer(config.speculation, config.suffix_decoding_max_cached_requests),
            vision=source.config.vision,
            wakeup=wakeup,
        ),
        executor=executor,
        max_model_len=max_model_len,
        take_aborts=take_aborts,
        pooling_task=None if source.config.pooler is None else source.config.pooler.tasks[0],
    )
    # What is loaded now lives as long as the process: the collector need not look at it again.
    release_unused(source.device)
    info = describe(
        config,
        role,
        identity,
        model,
        manager,
        max_model_len,
        source,
        has_prefix_pulls=prefix_connector is not None,
        served_fields=_GRAMMAR_FIELDS if compiler is not None else (),
    )
    _log_loaded(info, source, manager, time.monotonic() - started)
    return LoadedEngine(
        core=core,
        info=info,
        connector=connector,
        prefix_connector=prefix_connector,
        offload=offload,
        control=EngineControl(
            core,
            lora_root=config.lora_root,
            fetch_adapter=hub,
            transfer=_make_sleeping_transfer(
                config,
                transport,
                (connector, prefix_connector),
                open_ranks=lambda: executor.open_transports(identity),
            ),
            wakeup=wakeup,
        ),
        step_watch=_make_watch(config),
        logs_iterations=config.log_iterations,
        compiler=compiler,
    )


def _make_watch(config: EngineConfig) -> StepWatch:
    if config.device == "cuda":
        return StepWatch(timeout_s=config.step_timeout_s, min_bound_s=MIN_CUDA_BOUND_S)
    known_bound_s = KNOWN_BOUND_S if config.num_ranks > 1 else None
    return StepWatch(timeout_s=config.step_timeout_s, known_bound_s=known_bound_s)


def _make_pool(
    config: EngineConfig, source: ModelSource, executor: Executor
) -> tuple[KVCacheManager, int]:
    """Make the pool that there is room for; return its book-keeping and max_model_len.

    Raises ValueError for sizes that do not fit.
    """
    num_blocks = executor.determine_num_blocks()
    manager = make_kv_cache_manager(
        config, source.spec, num_blocks, max_concurrent_batches=executor.max_concurrent_batches
    )
    max_model_len = fit_max_model_len(config, source.config.max_model_len, manager)
    _check_chunks(config, max_model_len)
    executor.make_pool(num_blocks, max_model_len=max_model_len)
    return manager, max_model_len


def _make_hub(config: EngineConfig, model: LoadedModel) -> FetchAdapter | None:
    if not config.lora_hub:
        return None
    return functools.partial(HubFetch, max_weights_bytes=model.max_adapter_file_bytes)


def _load_adapters(
    config: EngineConfig, executor: Executor, hub: FetchAdapter | None
) -> AdapterPool:
    """Load what the config names; an operator has to want it to go. Raises LoraError."""
    pool = AdapterPool(executor.adapters, max_loras=config.max_loras)
    for name, path in config.adapter_paths.items():
        assert pool.store is not None, "the config or the model is refused otherwise"
        # Other folders than those of the hub are this machine's own.
        folder, shared_path = Path(path), ""
        if is_hub_path(path):
            assert hub is not None, "the config is refused otherwise"
            folder, shared_path = hub(HubPath.parse(path)).future.result(), path
        reading = pool.store.read(folder)
        pool.add(name, reading.result(), shared_path)
        pool.store.discard(reading)
        pool.pin(name)
    return pool


def _make_compiler(
    config: EngineConfig, source: ModelSource, metrics: GrammarMetrics | None
) -> GrammarCompiler | None:
    """None if the model pools; and, with a line in the log, if its vocabulary is not known."""
    if source.config.pooler is not None:
        return None
    try:
        info = source.tokenizer_info()
    except ValueError as error:
        logger.warning("structured outputs are not served: %s", error)
        return None
    serves_large = config.num_ranks == 1
    if metrics is None:
        return GrammarCompiler(info, serves_large=serves_large)
    return GrammarCompiler(info, observe=metrics.observe, serves_large=serves_large)


def _make_transport(
    config: EngineConfig, identity: KVIdentity, executor: Executor
) -> ShardedTransport | None:
    if config.kv_connector == "none":
        return None
    return ShardedTransport(
        executor.open_transports(identity),
        layout=identity.layout,
        transport=config.require_transport,
    )


T = TypeVar("T")


def _if_is(connector: object, cls: type[T]) -> T | None:
    return connector if isinstance(connector, cls) else None


def _make_prefix_connector(
    config: EngineConfig,
    role: Role,
    context: ConnectorContext,
    manager: KVCacheManager,
    *,
    compatibility: str,
) -> PrefixProducer | PrefixConsumer | None:
    if not (config.prefix_pulls and config.enable_prefix_caching):
        return None
    identity = dataclasses.replace(context.identity, compatibility_hash=compatibility)
    context = dataclasses.replace(context, identity=identity)
    if role == "decode":
        return PrefixProducer(context, num_blocks=manager.block_pool.num_blocks)
    return PrefixConsumer(context, timeout_s=config.prefix_pull_timeout_s)


def _prefix_compatibility(identity: KVIdentity, model: LoadedModel) -> str:
    """What must be equal of who has cached a prefix and who uses it: blocks come into an exact
    worker's cache only from one whose tokens are the same.
    """
    numerics = model.numerics_id if model.is_row_independent else ""
    return f"{identity.compatibility_hash} {numerics}"


def _make_sleeping_transfer(
    config: EngineConfig,
    transport: ShardedTransport | None,
    connectors: Iterable[Connector[Any] | None],
    *,
    open_ranks: Callable[[], Sequence[RankTransport]],
) -> SleepingTransfer | None:
    if transport is None:
        return None
    return SleepingTransfer(
        transport,
        [each for each in connectors if each is not None],
        open_ranks=open_ranks,
        # By CUDA IPC.
        shares_memory=config.device == "cuda" and config.require_transport in ("any", "shm"),
    )


class _StepCounter:
    """The engine's step number for heartbeats; the connector is built before the core."""

    core: EngineCore | None = None

    def __call__(self) -> int:
        return self.core.step_seq if self.core is not None else 0


def _check_chunks(config: EngineConfig, max_model_len: int) -> None:
    scheduler = config.scheduler
    if not scheduler.has_chunked_prefill and scheduler.max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}, "
            "without chunked prefill (scheduling_mode v0 has none) "
            f"it must be at least max_model_len ({max_model_len})"
        )


def _log_loaded(
    info: EngineInfo, source: ModelSource, manager: KVCacheManager, duration_s: float
) -> None:
    logger.info(
        "loaded %s in %.1f s: %d blocks of %d tokens (%.0f MiB of KV), "
        "max_model_len %d (%.1f requests of it at once), %s",
        info.model,
        duration_s,
        info.num_blocks,
        info.block_size,
        info.num_blocks * source.spec.block_bytes / 2**20,
        info.max_model_len,
        info.num_blocks / manager.num_blocks_needed(info.max_model_len),
        info.dtype,
    )
