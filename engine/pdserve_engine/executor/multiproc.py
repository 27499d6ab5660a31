"""The executor of a model over several processes, one a rank.

One thread starts the ranks and reads what they say. A step or a call is over when all of them have
answered; one that is gone, or that fails alone, is the end of all.
"""

import dataclasses
import logging
import math
import selectors
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pdserve_common.cores import cpu_limit, format_cores, share_cores, usable_cores
from pdserve_common.verbs import Call, ResultT
from pdserve_engine.config import EngineConfig
from pdserve_engine.core.executor import ExecutedStep, LoadedModel
from pdserve_engine.executor import messages
from pdserve_engine.executor.messages import Message
from pdserve_engine.executor.rank_process import RankProcess
from pdserve_engine.frames import Answer, ProtocolError
from pdserve_engine.grammar.native import CompiledGrammar
from pdserve_engine.kv_transfer.base import KVTransport
from pdserve_engine.request.sched_output import SchedulerOutput

logger = logging.getLogger(__name__)

# The others fail right behind a rank that has failed, if it is the step's fault.
FAILURE_GRACE_S = 5.0
STOP_TIMEOUT_S = 30.0
EXIT_TIMEOUT_S = 5.0
# How often the reading thread looks at what takes too long.
TICK_S = 1.0
# What a call may take that reads weights or computes the largest step.
CALL_TIMEOUT_S = 1800.0

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Pending:
    """What was sent to all ranks and not answered by all. Guarded by the executor's lock."""

    future: "Future[list[Any]]"
    # By rank.
    answers: dict[int, Any] = field(default_factory=dict)
    # When the first rank failed.
    failed_at: float | None = None


class MultiprocExecutor:
    """Implements `core.executor.Executor`. A lost rank is a lost engine: `failure` says so, all
    futures fail, and all ranks are killed.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_concurrent_batches = 2 if config.has_async_scheduling else 1
        self._configs = rank_configs(config)
        self._name = name
        self._clock = clock
        self._codec = messages.make_codec(_no_grammar)
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._next_number = 1
        self._failure: str | None = None
        self._is_stopping = False
        self._processes: list[RankProcess] = []
        self._has_started: Future[None] = Future()
        # The ranks end with the thread that has started them.
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    # ---- loading

    def load(self) -> LoadedModel:
        self._thread.start()
        self._has_started.result()
        log_level = logging.getLevelName(logging.getLogger().level).lower()
        calls = [
            messages.LoadRank(config=config, name=self._name, place=place, log_level=log_level)
            for config, place in zip(self._configs, self._places, strict=True)
        ]
        loaded = self._wait(self._begin(calls), calls[0])
        if len(set(loaded)) > 1:
            raise ValueError(f"the ranks differ in what they have loaded: {loaded}")
        return loaded[0]

    def determine_num_blocks(self) -> int:
        return min(self._call(messages.DetermineNumBlocks()))

    def make_pool(self, num_blocks: int, *, max_model_len: int) -> None:
        self._call(messages.MakePool(num_blocks=num_blocks, max_model_len=max_model_len))

    def register_kv_cache(self, transport: KVTransport) -> None:
        raise NotImplementedError

    # ---- steps

    def submit(self, scheduler_output: SchedulerOutput) -> "Future[ExecutedStep]":
        answers = self._begin([scheduler_output])
        return _then(answers, lambda steps: steps[0])

    def recover(self) -> None:
        self._begin([messages.Recover()], is_answered=False)

    def failure(self) -> str | None:
        return self._failure

    # ---- an operator's calls

    def sleep(self, level: int) -> int:
        return sum(self._call(messages.SleepRank(level)))

    def restore_weights(self) -> None:
        self._call(messages.RestoreWeights())

    def restore_kv_cache(self) -> None:
        self._call(messages.RestoreKVCache())

    def start_profile(self) -> "Future[None]":
        return self._first(messages.StartProfile())

    def stop_profile(self) -> "Future[str]":
        return self._first(messages.StopProfile())

    # ---- tools for tests

    def poison(self, block_ids: Sequence[int]) -> None:
        self._begin([messages.Poison(tuple(block_ids))], is_answered=False)

    def block_checksums(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        raise NotImplementedError

    # ---- the end

    def stop(self) -> bool:
        if self._failure is not None or not self._has_started.done():
            return True
        self._is_stopping = True
        try:
            stopped = self._begin([messages.StopRank()]).result(STOP_TIMEOUT_S)
        except Exception as error:  # a rank that is gone, or that hangs
            logger.error("the ranks did not stop: %s", error)
            return False
        return all(Answer.result_of(answer, messages.StopRank()) for answer in stopped)

    def close(self) -> None:
        """Wait for the processes to end, and kill those that do not."""
        for process in self._processes:
            process.close(EXIT_TIMEOUT_S)
        self._thread.join(EXIT_TIMEOUT_S)

    def abort(self) -> None:
        self._is_stopping = True
        self._lose("the engine cannot be loaded")
        self.close()

    # ---- asking the ranks; any thread

    def _call(self, call: Call[ResultT]) -> list[ResultT]:
        return self._wait(self._begin([call]), call)

    def _wait(self, answers: "Future[list[Any]]", call: Call[ResultT]) -> list[ResultT]:
        return [answer.result_of(call) for answer in answers.result(CALL_TIMEOUT_S)]

    def _first(self, call: Call[ResultT]) -> "Future[ResultT]":
        return _then(self._begin([call]), lambda answers: answers[0].result_of(call))

    def _begin(self, asked: Sequence[Message], *, is_answered: bool = True) -> "Future[list[Any]]":
        """Send all ranks the same message, or each its own; the future holds their answers, or the
        exception that all of them have raised.
        """
        future: Future[list[Any]] = Future()
        with self._lock:
            if self._failure is not None:
                future.set_exception(RuntimeError(self._failure))
                return future
            number = self._next_number
            self._next_number += 1
            if is_answered:
                self._pending[number] = _Pending(future)
            frames = [self._codec.encode(message, number) for message in asked]
            if len(frames) == 1:
                frames *= len(self._processes)
            try:
                for process, frame in zip(self._processes, frames, strict=True):
                    process.send(frame)
            except OSError as error:
                lost = f"rank {process.rank} takes nothing any more: {error}"
            else:
                return future
        self._lose(lost)
        return future

    # ---- the reading thread

    def _run(self) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="pdserve-ranks-") as folder:
                self._start(Path(folder))
                self._read_all()
        except BaseException as error:  # `load` may wait for this thread
            if not self._has_started.done():
                self._has_started.set_exception(error)
            self._lose(f"the thread that reads what the ranks say has died: {error!r}")

    def _start(self, folder: Path) -> None:
        size = len(self._configs)
        self._places = [
            messages.GroupPlace(rank=rank, size=size, store_path=str(folder / "store"))
            for rank in range(size)
        ]
        self._processes = [
            RankProcess(place.rank, config.cpu_cores or "", self._codec)
            for place, config in zip(self._places, self._configs, strict=True)
        ]
        self._has_started.set_result(None)

    def _read_all(self) -> None:
        """Until all ranks are gone."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.connection, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select(TICK_S):
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
                self._check_failures()

    def _read(self, process: RankProcess) -> bool:
        """Take in what a rank has said; False if it is gone."""
        try:
            for message, number in process.receive():
                self._on_answer(process.rank, message, number)
        except (OSError, EOFError, ProtocolError) as error:
            if not self._is_stopping:
                self._lose(f"rank {process.rank} is gone: {process.describe_end() or error}")
            return False
        return True

    def _on_answer(self, rank: int, message: Message, number: int) -> None:
        with self._lock:
            pending = self._pending.get(number)
            if pending is None:
                return
            pending.answers[rank] = message
            if isinstance(message, messages.Failed) and pending.failed_at is None:
                pending.failed_at = self._clock()
            if len(pending.answers) < len(self._processes):
                return
            del self._pending[number]
        answers = [pending.answers[rank] for rank in range(len(self._processes))]
        failed = [rank for rank, a in enumerate(answers) if isinstance(a, messages.Failed)]
        if not failed:
            pending.future.set_result(answers)
        elif len(failed) == len(answers):
            pending.future.set_exception(answers[0].to_exception())
        else:
            error = answers[failed[0]].to_exception()
            pending.future.set_exception(error)
            self._lose(f"rank {failed[0]} has failed where others have not: {error}")

    def _check_failures(self) -> None:
        """See whether a rank is long in failing with the others."""
        now = self._clock()
        with self._lock:
            overdue = [
                pending
                for pending in self._pending.values()
                if pending.failed_at is not None and now - pending.failed_at > FAILURE_GRACE_S
            ]
        if overdue:
            rank, failed = next(
                (rank, answer)
                for rank, answer in overdue[0].answers.items()
                if isinstance(answer, messages.Failed)
            )
            self._lose(f"rank {rank} has failed, others have not: {failed.to_exception()}")

    def _lose(self, reason: str) -> None:
        """A rank is lost, and with it all."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
            pending, self._pending = list(self._pending.values()), {}
        if not self._is_stopping:
            logger.error("%s", reason)
        for process in self._processes:
            process.kill()
        for each in pending:
            each.future.set_exception(RuntimeError(reason))


def rank_configs(config: EngineConfig) -> list[EngineConfig]:
    """Return each rank's, with its share of the cores and threads. Raises ValueError if there are
    fewer cores than ranks.
    """
    size, shares = config.tensor_parallel_size, None
    if config.cores and (shares := share_cores(config.cores, size)) is None:
        raise ValueError(
            f"tensor_parallel_size is {size}, cpu_cores is {config.cpu_cores}: they cannot be "
            "shared out, each rank's on one NUMA node"
        )
    num_threads = config.num_threads
    if not num_threads and not shares:
        num_threads = int(min(len(usable_cores()), cpu_limit() or math.inf))
    # Without the settings of the worker around it.
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(EngineConfig)}
    if num_threads:
        fields["num_threads"] = max(1, num_threads // size)
    return [
        EngineConfig(**fields | {"cpu_cores": format_cores(shares[rank]) if shares else None})
        for rank in range(size)
    ]


def _then(future: "Future[list[Any]]", function: Callable[[list[Any]], T]) -> "Future[T]":
    """Return a future of what the function makes of the answers."""
    result: Future[T] = Future()

    def pass_on(done: "Future[list[Any]]") -> None:
        error = done.exception()
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(function(done.result()))

    future.add_done_callback(pass_on)
    return result


def _no_grammar(text: str) -> CompiledGrammar:
    raise ProtocolError("a rank has sent a grammar")
