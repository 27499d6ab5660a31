"""The executor of a model that one process runs, this one."""

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from pdserve_common.call_thread import CallThread
from pdserve_engine.core.executor import ExecutedStep, LoadedModel
from pdserve_engine.kv_transfer.base import KVTransport
from pdserve_engine.request.sched_output import SchedulerOutput
from pdserve_engine.runner.rank import Rank

STOP_TIMEOUT_S = 30.0

T = TypeVar("T")


class UniprocExecutor:
    """Calls its only rank on the caller's thread. With `async_scheduling` steps and profiles run
    on a thread of their own until `stop`, and one may wait behind another.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        async_scheduling: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self._clock = clock
        self._model_thread = CallThread("model") if async_scheduling else None
        self.max_concurrent_batches = 2 if async_scheduling else 1
        self._is_broken_off = False

    def load(self) -> LoadedModel:
        return self.rank.load()

    def determine_num_blocks(self) -> int:
        return self.rank.determine_num_blocks(max_concurrent_batches=self.max_concurrent_batches)

    def make_pool(self, num_blocks: int, *, max_model_len: int) -> None:
        self.rank.make_pool(num_blocks, max_model_len=max_model_len)

    def register_kv_cache(self, transport: KVTransport) -> None:
        transport.register(self.rank.kv_cache)
        transport.self_check()

    def submit(self, scheduler_output: SchedulerOutput) -> "Future[ExecutedStep]":
        return self._call(functools.partial(self._execute, scheduler_output))

    def recover(self) -> None:
        self._is_broken_off = False

    def failure(self) -> str | None:
        return None  # what ends this process ends the engine as well

    def sleep(self, level: int) -> int:
        return self.rank.memory.release(level)

    def restore_weights(self) -> None:
        self.rank.memory.restore_weights()

    def restore_kv_cache(self) -> None:
        self.rank.memory.restore_kv_cache()

    def start_profile(self) -> "Future[None]":
        return self._call(self.rank.profiler.start)

    def stop_profile(self) -> "Future[str]":
        return self._call(self.rank.profiler.stop)

    def poison(self, block_ids: Sequence[int]) -> None:
        self.rank.kv_cache.poison(block_ids)

    def block_checksums(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        return self.rank.kv_cache.block_checksums(block_ids)

    def stop(self) -> bool:
        return self._model_thread is None or self._model_thread.close(STOP_TIMEOUT_S)

    def close(self) -> None:
        self.rank.close()

    def _execute(self, scheduler_output: SchedulerOutput) -> ExecutedStep:
        if self._is_broken_off:
            raise RuntimeError("the step before this one failed")
        self._is_broken_off = True  # until the step has succeeded
        start = self._clock()
        output = self.rank.execute_model(scheduler_output)
        self._is_broken_off = False
        return ExecutedStep(output, self._clock() - start)

    def _call(self, function: Callable[[], T]) -> "Future[T]":
        if self._model_thread is not None:
            return self._model_thread.submit(function)
        future: Future[T] = Future()
        try:
            future.set_result(function())
        except Exception as error:  # kept for whoever waits, as the thread's would be
            future.set_exception(error)
        return future
