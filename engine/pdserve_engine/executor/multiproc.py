"""The executor of a model over several processes, one a rank. A lost rank is a lost engine."""

import dataclasses
import logging
import math
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from pdserve_common.processes.call_thread import CallThread
from pdserve_common.processes.calls import Call, ResultT
from pdserve_common.processes.cores import cpu_limit, format_cores, share_cores, usable_cores
from pdserve_common.types.kv import KVShard
from pdserve_engine.config import EngineConfig
from pdserve_engine.core.executor import AdapterStore, ExecutedStep, LoadedModel, Pending
from pdserve_engine.executor import messages
from pdserve_engine.executor.build import check_equal, this_build
from pdserve_engine.executor.gpus import check_gpus
from pdserve_engine.executor.groups import memories_of, placed_ranks
from pdserve_engine.executor.messages import TransportEvent
from pdserve_engine.executor.rank_adapters import RemoteAdapters
from pdserve_engine.executor.rank_supervisor import RankSupervisor
from pdserve_engine.executor.rank_transport import RemoteTransport
from pdserve_engine.kv.block_copier import BlockCopier
from pdserve_engine.kv_transfer.base import KVIdentity, RankTransport
from pdserve_engine.kv_transfer.transport.shards import merge_checksums
from pdserve_engine.request.sched_output import EMPTY_MODEL_RUNNER_OUTPUT, SchedulerOutput
from pdserve_engine.runner.rank_calls import BlockChecksums

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0
EXIT_TIMEOUT_S = 5.0
# What a call may take that reads weights or computes the largest step.
CALL_TIMEOUT_S = 1800.0


class MultiprocExecutor:
    """Implements `core.executor.Executor`: all ranks do the same, and an answer is there when all
    have answered.
    """

    def __init__(
        self, config: EngineConfig, *, name: str, hidden_size: int, compatibility_hash: str
    ) -> None:
        """`name` begins the names of traces. The ranks have to find the model of that hash. Raises
        ValueError for cores or GPUs that do not suffice, OSError if a process cannot be started.
        """
        if config.device == "cuda":
            check_gpus(config.num_ranks)
        num_stages = config.pipeline_parallel_size
        self.is_pipelined = num_stages > 1
        self.max_concurrent_batches = max(num_stages, 2 if config.has_async_scheduling else 1)
        # The first of the last stage samples.
        self._output_rank = config.tensor_parallel_size * (num_stages - 1)
        self._configs = rank_configs(config)
        self._name = name
        self._compatibility_hash = compatibility_hash
        # By rank.
        self._transports: list[RemoteTransport] = []
        self._shards: list[KVShard] = []
        self._num_kv_heads = 0
        self._events = CallThread("kv-transfer")
        self._folder = tempfile.TemporaryDirectory(prefix="pdserve-ranks-")
        with placed_ranks(
            config.tensor_parallel_size,
            num_stages,
            Path(self._folder.name),
            # A step's sums, in fp32.
            largest_bytes=config.scheduler.max_num_batched_tokens * hidden_size * 4,
            is_on_cpu=config.device == "cpu",
        ) as self._specs:
            commands = [
                (config.cpu_cores or "", memories_of(spec))
                for config, spec in zip(self._configs, self._specs, strict=True)
            ]
            self._ranks = RankSupervisor(commands, self._on_event)
        self.adapters: AdapterStore | None = None
        if config.has_adapters:
            ask, tell = self._ranks.ask, self._ranks.tell_behind_steps
            self.adapters = RemoteAdapters(ask=ask, tell=tell)

    @property
    def pids(self) -> list[int]:
        """The ranks' processes."""
        return self._ranks.pids

    # ---- loading

    def load(self) -> LoadedModel:
        builds: list[dict[str, str]] = self.collective_rpc(messages.DescribeBuild())
        check_equal("the engine", this_build(), builds)
        log_level = logging.getLevelName(logging.getLogger().level).lower()
        calls = [
            messages.LoadRank(config=config, name=self._name, spec=spec, log_level=log_level)
            for config, spec in zip(self._configs, self._specs, strict=True)
        ]
        loaded = _results(self._ranks.ask(*calls), calls[0])
        model = {"compatibility_hash": self._compatibility_hash}
        hashes = [{"compatibility_hash": rank.compatibility_hash} for rank in loaded]
        check_equal("the engine", model, hashes)
        models = [rank.model._asdict() for rank in loaded]
        check_equal("rank 0", models[0], models)
        return loaded[0].model

    def determine_num_blocks(self) -> int:
        return min(self.collective_rpc(messages.DetermineNumBlocks()))

    def make_pool(self, num_blocks: int, *, max_model_len: int) -> None:
        self.collective_rpc(messages.MakePool(num_blocks=num_blocks, max_model_len=max_model_len))

    def open_block_copier(self) -> BlockCopier:
        raise AssertionError("the config of several ranks is refused")

    def open_transports(self, identity: KVIdentity) -> list[RankTransport]:
        self._num_kv_heads = identity.layout.num_kv_heads
        self._transports = [
            RemoteTransport(
                send=partial(self._ranks.tell, ranks=[rank]),
                close=partial(self._close_transport, rank),
            )
            for rank in range(len(self._ranks))
        ]
        endpoints = self.collective_rpc(messages.OpenTransport(identity))
        for transport, endpoint in zip(self._transports, endpoints, strict=True):
            transport.opened(endpoint)
        self._shards = [endpoint.shard for endpoint in endpoints if endpoint.shard is not None]
        return list(self._transports)

    # ---- steps

    def submit(self, scheduler_output: SchedulerOutput) -> Pending[ExecutedStep]:
        if scheduler_output.is_empty:  # pipelines have many while all requests are on their way
            nothing: Future[ExecutedStep] = Future()
            nothing.set_result(ExecutedStep(EMPTY_MODEL_RUNNER_OUTPUT, 0.0))
            return nothing
        return self._ranks.ask_behind_steps(
            scheduler_output, lambda answers: answers[self._output_rank]
        )

    def recover(self) -> None:
        self._ranks.tell_behind_steps(messages.Recover())

    def failure(self) -> str | None:
        return self._ranks.failure

    # ---- what all ranks do

    def collective_rpc(self, call: Call[ResultT]) -> list[ResultT]:
        return _results(self._ranks.ask(call), call)

    def collective_rpc_behind_steps(self, call: Call[ResultT]) -> Pending[list[ResultT]]:
        return self._ranks.ask_behind_steps(
            call, lambda answers: [answer.result_of(call) for answer in answers]
        )

    # ---- tools for tests

    def block_checksums(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        parts = self.collective_rpc(BlockChecksums(tuple(block_ids)))
        return merge_checksums(self._shards, parts, self._num_kv_heads)

    # ---- the end

    def stop(self) -> bool:
        if self.failure() is not None:
            return True
        stop = messages.StopRank()
        try:
            stopped: list[bool] = _results(self._ranks.ask_behind_steps(stop), stop, STOP_TIMEOUT_S)
        except Exception as error:  # a rank that hangs, or that is gone
            logger.error("the ranks do not stop: %s", error)
            return False
        return all(stopped)

    def abort(self) -> None:
        self._ranks.expect_end()
        self._ranks.kill("the engine cannot be loaded")
        self._end()

    def close(self) -> None:
        self._ranks.expect_end()
        self._ranks.tell(messages.CloseRank())
        self._end()

    def _end(self) -> None:
        self._ranks.close(EXIT_TIMEOUT_S)
        self._events.close(EXIT_TIMEOUT_S)
        self._folder.cleanup()

    def _close_transport(self, rank: int) -> None:
        if self.failure() is not None:
            return  # it has gone with its rank
        call = messages.CloseTransport()
        _results(self._ranks.ask(call, ranks=[rank]), call, STOP_TIMEOUT_S)

    def _on_event(self, rank: int, event: TransportEvent) -> None:
        # Whoever is told may ask the ranks something, and wait for the answer.
        self._events.post(
            partial(self._transports[rank].on_event, event),
            "kv_transfer",
            costs="this engine",
            # Nobody would hear of the READ's end, and its blocks would stay with it.
            on_defect=lambda error: self._ranks.kill(f"a KV event cannot be taken: {error!r}"),
        )


def rank_configs(config: EngineConfig) -> list[EngineConfig]:
    """Return each rank's, with its share of the cores and threads. Raises ValueError if there are
    fewer cores than ranks.
    """
    size, shares = config.num_ranks, None
    if config.cores and (shares := share_cores(config.cores, size)) is None:
        raise ValueError(
            f"cpu_cores is {config.cpu_cores}, they cannot be shared out among {size} ranks, each "
            "rank's on one NUMA node"
        )
    num_threads = config.num_threads
    if not num_threads and not shares:
        num_threads = int(min(len(usable_cores()), cpu_limit() or math.inf))
    # Without the settings of the worker around it.
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(EngineConfig)}
    if num_threads:
        fields["num_threads"] = max(1, num_threads // size)
    cores = [format_cores(share) for share in shares] if shares else [None] * size
    return [EngineConfig(**fields | {"cpu_cores": cores[rank]}) for rank in range(size)]


def _results(
    answers: Pending[list[Any]], call: Call[ResultT], timeout_s: float = CALL_TIMEOUT_S
) -> list[ResultT]:
    return [answer.result_of(call) for answer in answers.result(timeout_s)]
