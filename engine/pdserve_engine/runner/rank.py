"""What a rank of an executor holds: a model, a KV pool and a profiler."""

import logging
from collections.abc import Callable

from pdserve_engine.config import EngineConfig
from pdserve_engine.core.executor import AdapterStore, LoadedModel
from pdserve_engine.core.features.encoder_cache_manager import encoder_cache_size
from pdserve_engine.kv.kv_cache import KVCache
from pdserve_engine.kv.memory import release_unused
from pdserve_engine.kv_transfer.base import KVIdentity, RankTransport
from pdserve_engine.kv_transfer.transport.factory import make_transport
from pdserve_engine.models.base import Model
from pdserve_engine.models.config import ModelConfig
from pdserve_engine.request.sched_output import AsyncModelRunnerOutput, SchedulerOutput
from pdserve_engine.runner.draft.draft_source import DraftModelSource
from pdserve_engine.runner.draft.drafter import DraftModel
from pdserve_engine.runner.load.kv_sizing import measure_largest_step, num_blocks_that_fit
from pdserve_engine.runner.load.make_runner import make_runner
from pdserve_engine.runner.load.model_source import ModelSource
from pdserve_engine.runner.load.numerics import numerics_id
from pdserve_engine.runner.load.threads import use_threads
from pdserve_engine.runner.operate.profiler import StepProfiler
from pdserve_engine.runner.operate.sleep import SleepingMemory
from pdserve_engine.runner.run.adapters import RunnerAdapters
from pdserve_kernels import CudaKernels, name_of, select, use_on_cuda

logger = logging.getLogger(__name__)


class Rank:
    """`core.executor.Executor` and `rank_calls.py` say when each of its methods may be called."""

    def __init__(self, config: EngineConfig, source: ModelSource, *, name: str) -> None:
        """`name` begins the names of traces."""
        self._config = config
        self._source = source
        self.profiler = StepProfiler(config.profile_dir, name=name)

    def load(self) -> LoadedModel:
        use_threads(self._config)
        use_on_cuda(_cuda_kernels(self._config))
        self._model: Model = self._source.load()
        draft = self._source.draft
        self._draft = None if draft is None else DraftModel(draft.load(), draft.spec)
        device = self._source.device
        return LoadedModel(
            is_row_independent=self._model.is_row_independent,
            numerics_id=numerics_id(self._config, self._model, device),
            kernels=name_of(select(device)),
            max_adapter_file_bytes=self._source.max_adapter_file_bytes(self._model),
        )

    def determine_num_blocks(self, *, max_concurrent_batches: int) -> int:
        spec, device = self._source.spec, self._source.device
        step_bytes = measure_largest_step(self._config, self._model, spec, device, self._draft)
        logger.info("the largest step takes %.0f MiB besides weights and KV", step_bytes / 2**20)
        release_unused(device)
        max_model_len = self._model.config.max_model_len
        return num_blocks_that_fit(
            self._config,
            spec,
            device,
            max_model_len=max_model_len,
            max_concurrent_batches=max_concurrent_batches,
            step=step_bytes,
            adapters=self._source.adapter_bytes(self._model),
            pictures=_picture_bytes(self._config, self._model.config),
            draft_spec=None if self._draft is None else self._draft.spec,
        )

    def make_pool(self, num_blocks: int, *, max_model_len: int) -> None:
        source = self._source
        self.kv_cache = KVCache(source.spec, num_blocks=num_blocks, device=source.device)
        self.runner = make_runner(
            self._model,
            self.kv_cache,
            max_num_seqs=self._config.scheduler.max_batch_size,
            max_model_len=max_model_len,
            logits_processors=source.logits_processors,
        )
        self._use_grammar_drafts()
        if self._config.has_adapters:
            self.runner.reserve_adapters(self._config.max_loras, self._config.max_lora_rank)
        del self._model  # the runner's alone: a sleep gives it back
        memory = SleepingMemory(
            self.runner,
            self.kv_cache,
            device=source.device,
            load_model=source.reload,
        )
        self._memories = [memory]
        if self._draft is not None and source.draft is not None:
            self._use_draft_model(self._draft, source.draft)
        del self._draft
        self.runner.capture_graphs()

    def adapter_store(
        self, *, behind_steps: Callable[[Callable[[], None]], object]
    ) -> AdapterStore | None:
        """`behind_steps` has a function called when the steps begun so far are over."""
        if not self._config.has_adapters:
            return None
        return RunnerAdapters(self.runner, self._source.read_adapter, behind_steps)

    def _use_grammar_drafts(self) -> None:
        if self._config.speculation == "none":
            return
        try:
            self.runner.use_grammar_drafts(self._source.encoder())
        except ValueError as error:
            logger.warning("grammars propose no drafts: %s", error)

    def _use_draft_model(self, draft: DraftModel, source: DraftModelSource) -> None:
        max_num_batched_tokens = self._config.scheduler.max_num_batched_tokens
        drafter = self.runner.use_draft_model(draft, max_num_batched_tokens)
        memory = SleepingMemory(
            drafter,
            drafter.kv_cache,
            device=self._source.device,
            load_model=source.load,
        )
        self._memories.append(memory)

    def open_transport(self, identity: KVIdentity) -> RankTransport:
        """Register the pool with a transport, which has to prove that it moves bytes. Raises
        KVTransferError.
        """
        config = self._config
        transport = make_transport(
            identity,
            rank=self._source.rank,
            require_transport=config.require_transport,
            device=config.device,
        )
        transport.register(self.kv_cache)
        transport.self_check()
        return transport

    def sleep(self, level: int, *, keeps_pool: bool = False) -> int:
        self.runner.release_graphs()
        self.runner.encoder_cache.clear()
        if self.runner.drafter is not None:
            self.runner.drafter.forget()
        memory, *others = self._memories
        num_bytes = memory.release(level, keeps_pool=keeps_pool)
        return num_bytes + sum(other.release(level) for other in others)

    def restore_weights(self) -> None:
        for memory in self._memories:
            memory.restore_weights()
        self._capture_graphs()

    def restore_kv_cache(self) -> None:
        for memory in self._memories:
            memory.restore_kv_cache()
        self._capture_graphs()

    def _capture_graphs(self) -> None:
        """Once all is back that they read; weights and pool may come back one by one."""
        if all(memory.is_complete for memory in self._memories):
            self.runner.capture_graphs()

    def close(self) -> None:
        """Give the pool's memory back."""
        self.runner.close()
        self.kv_cache.close()

    def execute_model(self, scheduler_output: SchedulerOutput) -> AsyncModelRunnerOutput:
        """Begin a step, behind those that were begun before."""
        return self.runner.execute_model(scheduler_output)


def _picture_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Return what the embeddings of pictures take that are kept."""
    num_tokens = encoder_cache_size(model.vision, config.scheduler.max_num_batched_tokens)
    return num_tokens * model.hidden_size * model.dtype.itemsize


def _cuda_kernels(config: EngineConfig) -> CudaKernels:
    if config.deterministic:
        return "triton.deterministic"
    return "triton" if config.attention_backend is None else "triton.flash_attn"
