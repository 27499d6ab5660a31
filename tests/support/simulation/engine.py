"""The engine client of a simulation: InprocEngineClient without its thread; its steps take virtual
time.
"""

import asyncio
import queue
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pdserve_common.runtime import Runtime
from pdserve_engine.clients.inproc import InprocEngineClient
from pdserve_engine.core.executor import ExecutedStep
from pdserve_engine.executor.uniproc import UniprocExecutor
from pdserve_engine.request.sched_output import ModelRunnerOutput, SchedulerOutput
from support.modelled_rank import ModelledRank

MIN_STEP_S, MAX_STEP_S = 2e-3, 80e-3
# Some steps are slow, as when a machine swaps.
SLOW_SHARE, MAX_SLOW_STEP_S = 0.005, 0.5


class CheckedRank(ModelledRank):
    """Tells of steps that read KV which is not their request's."""

    wrong_token = 499

    def __init__(self, memory: Any, on_wrong: Callable[[str], None]) -> None:
        super().__init__(memory, (None,))
        self._on_wrong = on_wrong

    def watch(self, request_id: str, is_right: bool) -> None:
        if not is_right:
            self._on_wrong(request_id)


class VirtualExecutor(UniprocExecutor):
    """Computes a step when it begins or when it ends, by chance: what happens to the KV meanwhile
    is seen or not.
    """

    def __init__(self, rank: CheckedRank, chance: random.Random) -> None:
        # Not that of UniprocExecutor, which starts threads.
        self.is_pipelined, self.max_concurrent_batches, self.adapters = False, 1, None
        self._virtual_rank, self._random = rank, chance
        # By how much steps take longer than they should.
        self.slowness = 1.0
        self._steps: deque[tuple[SchedulerOutput, Future[ExecutedStep], float]] = deque()

    def submit(self, scheduler_output: SchedulerOutput) -> "Future[ExecutedStep]":
        future: Future[ExecutedStep] = Future()
        duration_s = self._random.uniform(MIN_STEP_S, MAX_STEP_S) * self.slowness
        if self._random.random() < SLOW_SHARE:
            duration_s += self._random.uniform(0.0, MAX_SLOW_STEP_S)
        if not scheduler_output.num_scheduled_tokens:
            duration_s = 0.0
        self._steps.append((scheduler_output, future, duration_s))
        if self._random.random() < 0.5:
            self._compute(*self._steps[0])
        return future

    def stop(self) -> bool:
        return True

    def close(self) -> None:
        """The memory goes with the worker."""

    async def wait(self) -> None:
        """Let the time of the oldest step pass."""
        step = self._steps.popleft()
        await asyncio.sleep(step[-1])
        if not step[1].done():
            self._compute(*step)

    def _compute(
        self, step: SchedulerOutput, future: "Future[ExecutedStep]", duration_s: float
    ) -> None:
        output: ModelRunnerOutput = self._virtual_rank.execute_model(step)
        future.set_result(ExecutedStep(output, duration_s))


class _Inputs(queue.SimpleQueue[Any]):
    """Tells when something is put into it."""

    def __init__(self, on_put: Callable[[], None]) -> None:
        super().__init__()
        self._on_put = on_put

    def put(self, *args: Any, **options: Any) -> None:
        super().put(*args, **options)
        self._on_put()


class VirtualEngineClient(InprocEngineClient):
    """Steps on the event loop, as one of its tasks."""

    def __init__(
        self,
        executor: VirtualExecutor,
        *,
        runtime: Runtime,
        on_death: Callable[[str], None],
    ) -> None:
        """`on_death` is told of a defect that has ended it: no fault does."""
        super().__init__(runtime)
        self._executor = executor
        self._on_death = on_death
        self._has_input = asyncio.Event()
        self._inputs = _Inputs(self._has_input.set)

    @property
    def num_owned(self) -> int:
        """Requests that have not got their end."""
        return len(self._owners)

    async def close(self) -> None:
        self._is_draining = self._is_stopped = True
        self._control.close("the engine is stopped")
        self.wake()
        await asyncio.gather(self._task)
        self._loaded.close()

    def begin(self) -> None:
        """Take the engine's turns from now on."""
        self._task = asyncio.create_task(self._step_until_stopped())

    async def _step_until_stopped(self) -> None:
        try:
            await self._step_until_error()
        except Exception as error:  # as InprocEngineClient's thread
            self._error = f"the engine died: {error!r}"
            self._on_death(self._error)
            self._announce_death()

    async def _step_until_error(self) -> None:
        may_step = False
        while not self._is_stopped:
            if not may_step:
                await self._wait_for_any_input()
            turn = self.begin_turn()
            if turn.result is None:
                await self._executor.wait()
            may_step = self.end_turn(turn)
            await asyncio.sleep(0)

    async def _wait_for_any_input(self) -> None:
        if self._inputs.empty():
            self._has_input.clear()
            # Not wait_for, which has different turns in different versions of Python.
            timer = asyncio.get_running_loop().call_later(self.max_wait_s(), self._has_input.set)
            await self._has_input.wait()
            timer.cancel()
