"""The ranks of a model as threads of this process: quick to start, with the groups of processes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from pdserve_common.processes.calls import Answer, ResultT
from pdserve_engine.config import EngineConfig
from pdserve_engine.core.executor import AdapterStore, ExecutedStep, LoadedModel, RankCall
from pdserve_engine.executor.groups import join_group, placed_ranks
from pdserve_engine.executor.messages import AdapterCommand, RankSpec
from pdserve_engine.executor.rank_adapters import AdapterHost, RemoteAdapters
from pdserve_engine.executor.uniproc import UniprocExecutor
from pdserve_engine.kv.block_copier import BlockCopier
from pdserve_engine.kv_transfer.base import KVIdentity, RankTransport
from pdserve_engine.models.stage import Stage
from pdserve_engine.request.sched_output import SchedulerOutput
from pdserve_engine.runner.load.model_source import ModelSource
from pdserve_engine.runner.rank import Rank

T = TypeVar("T")


class ThreadedRanks:
    """Implements `core.executor.Executor`, but for an operator's calls."""

    def __init__(self, config: EngineConfig, folder: Path, *, largest_bytes: int = 1024) -> None:
        """What ranks tell each other goes in pieces of `largest_bytes`."""
        num_stages = config.pipeline_parallel_size
        self.is_pipelined = num_stages > 1
        self.max_concurrent_batches = max(num_stages, 2 if config.has_async_scheduling else 1)
        self._output_rank = config.tensor_parallel_size * (num_stages - 1)
        self._config = config
        self._pool = ThreadPoolExecutor(config.num_ranks)
        self.adapters: AdapterStore | None = None
        with placed_ranks(
            config.tensor_parallel_size, num_stages, folder, largest_bytes=largest_bytes
        ) as specs:
            # They wait for each other.
            self._ranks = list(self._pool.map(self._join, specs))

    def load(self) -> LoadedModel:
        return self._all(lambda rank: rank.load())[0]

    def determine_num_blocks(self) -> int:
        return min(self._all(lambda rank: rank.determine_num_blocks()))

    def make_pool(self, num_blocks: int, *, max_model_len: int) -> None:
        self._all(lambda rank: rank.make_pool(num_blocks, max_model_len=max_model_len))
        hosts = [AdapterHost(rank.adapters) for rank in self._ranks if rank.adapters is not None]

        def tell(command: AdapterCommand) -> None:
            for host in hosts:
                host.handle(command)

        if hosts:
            self.adapters = RemoteAdapters(
                ask=lambda call: self._pool.submit(
                    lambda: [Answer.of(host.read(call)) for host in hosts]
                ),
                tell=tell,
            )

    def open_block_copier(self) -> BlockCopier:
        raise AssertionError("tests with several ranks have no tiers")

    def open_transports(self, identity: KVIdentity) -> list[RankTransport]:
        raise NotImplementedError

    def submit(self, scheduler_output: SchedulerOutput) -> "Future[ExecutedStep]":
        futures = [rank.submit(scheduler_output) for rank in self._ranks]
        return self._pool.submit(lambda: [f.result() for f in futures][self._output_rank])

    def recover(self) -> None:
        for rank in self._ranks:
            rank.recover()

    def failure(self) -> str | None:
        return None

    def collective_rpc(self, call: RankCall[ResultT]) -> list[ResultT]:
        return self._all(lambda rank: rank.collective_rpc(call)[0])

    def stop(self) -> bool:
        return all(self._all(lambda rank: rank.stop()))

    def abort(self) -> None:
        self._pool.shutdown()

    def close(self) -> None:
        self._all(lambda rank: rank.close())
        self._pool.shutdown()

    def _join(self, spec: RankSpec) -> UniprocExecutor:
        join = partial(join_group, device=torch.device("cpu"))
        stage = Stage(spec.stage, spec.num_stages, join(spec.before), join(spec.after))
        group = join(spec.tensor_parallel)
        source = ModelSource(self._config, spec.rank, group, stage)
        rank = Rank(self._config, source, name=f"rank-{spec.rank}")
        return UniprocExecutor(rank, async_scheduling=True)

    def _all(self, function: Callable[[UniprocExecutor], T]) -> list[T]:
        return list(self._pool.map(partial(function), self._ranks))
