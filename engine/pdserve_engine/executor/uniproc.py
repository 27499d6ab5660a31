"""The executor of a model that one process runs, this one."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from pdserve_common.processes.call_thread import CallerThread, Calls, CallThread
from pdserve_common.processes.calls import ResultT
from pdserve_engine.core.executor import AdapterStore, ExecutedStep, LoadedModel, RankCall
from pdserve_engine.kv.block_copier import BlockCopier
from pdserve_engine.kv_transfer.base import KVIdentity, RankTransport
from pdserve_engine.request.sched_output import (
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from pdserve_engine.runner.rank import Rank

STOP_TIMEOUT_S = 30.0


class UniprocExecutor:
    """Calls its only rank on the caller's thread. With `async_scheduling` steps and profiles run
    on a thread of their own (`model_thread`) until `stop`, and one may wait behind another; a third
    thread waits for what a device computes, so that the next step is launched meanwhile.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        async_scheduling: bool,
        model_thread: Calls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self._clock = clock
        self._has_async_scheduling = async_scheduling
        if model_thread is None:
            model_thread = CallThread("model") if async_scheduling else CallerThread()
        self._model_thread = model_thread
        self._failure: str | None = None
        self._results_thread = CallThread("model-results")
        self._last_end = 0.0
        self.is_pipelined = False
        self.max_concurrent_batches = 2 if async_scheduling else 1
        self._is_broken_off = False
        self.adapters: AdapterStore | None = None

    def load(self) -> LoadedModel:
        return self.rank.load()

    def determine_num_blocks(self) -> int:
        return self.rank.determine_num_blocks(max_concurrent_batches=self.max_concurrent_batches)

    def make_pool(self, num_blocks: int, *, max_model_len: int) -> None:
        self.rank.make_pool(num_blocks, max_model_len=max_model_len)
        self.adapters = self.rank.adapter_store(behind_steps=self._post_behind_steps)

    def open_transports(self, identity: KVIdentity) -> list[RankTransport]:
        return [self.rank.open_transport(identity)]

    def open_block_copier(self) -> BlockCopier:
        return BlockCopier(self.rank.kv_cache)

    def submit(self, scheduler_output: SchedulerOutput) -> "Future[ExecutedStep]":
        if not self._has_async_scheduling:
            return self._model_thread.submit(lambda: self._finish(*self._launch(scheduler_output)))
        future: Future[ExecutedStep] = Future()
        self._model_thread.submit(functools.partial(self._launch_for, scheduler_output, future))
        return future

    def recover(self) -> None:
        self._is_broken_off = False

    def failure(self) -> str | None:
        return self._failure

    def collective_rpc(self, call: RankCall[ResultT]) -> list[ResultT]:
        return [call.run(self.rank)]

    def collective_rpc_behind_steps(self, call: RankCall[ResultT]) -> "Future[list[ResultT]]":
        return self._model_thread.submit(lambda: self.collective_rpc(call))

    def block_checksums(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        return self.rank.kv_cache.block_checksums(block_ids)

    def stop(self) -> bool:
        # What the one has launched, the other waits for.
        is_over = self._model_thread.close(STOP_TIMEOUT_S)
        return is_over and self._results_thread.close(STOP_TIMEOUT_S)

    def abort(self) -> None:
        """Nothing outlives whoever has called."""

    def close(self) -> None:
        if self.adapters is not None:
            self.adapters.close()
        self.rank.close()

    def _post_behind_steps(self, function: Callable[[], None]) -> None:
        """Steps that follow may need what it does: without that the engine has to end."""

        def fail(error: BaseException) -> None:
            self._failure = f"what was to come behind a step has failed: {error!r}"

        self._model_thread.post(function, "model", costs="this engine", on_defect=fail)

    def _launch_for(
        self, scheduler_output: SchedulerOutput, future: "Future[ExecutedStep]"
    ) -> None:
        """Launch a step, and have the other thread wait for it."""
        try:
            step, start = self._launch(scheduler_output)
            finish = functools.partial(self._finish_for, step, start, future)
            if isinstance(step, ModelRunnerOutput):
                finish()  # there is nothing to wait for
            else:
                self._results_thread.submit(finish)
        except BaseException as error:  # kept for whoever waits
            future.set_exception(error)

    def _finish_for(
        self, step: AsyncModelRunnerOutput, start: float, future: "Future[ExecutedStep]"
    ) -> None:
        try:
            future.set_result(self._finish(step, start))
        except BaseException as error:  # kept for whoever waits
            future.set_exception(error)

    def _launch(self, scheduler_output: SchedulerOutput) -> tuple[AsyncModelRunnerOutput, float]:
        if self._is_broken_off:
            raise RuntimeError("the step before this one failed")
        start = self._clock()
        with self._breaks_off():
            return self.rank.execute_model(scheduler_output), start

    def _finish(self, step: AsyncModelRunnerOutput, start: float) -> ExecutedStep:
        with self._breaks_off():
            output = step.get_output()
        # It waited for the step before, if that was still under way.
        start, self._last_end = max(start, self._last_end), self._clock()
        return ExecutedStep(output, self._last_end - start)

    @contextlib.contextmanager
    def _breaks_off(self) -> Iterator[None]:
        """Let an exception be the end of the steps behind, too."""
        try:
            yield
        except BaseException:  # whatever a model raises: those behind lack what it has not told
            self._is_broken_off = True
            raise
