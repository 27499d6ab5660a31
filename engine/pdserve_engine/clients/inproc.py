"""InprocEngineClient: an EngineCore on a thread of this process, behind the EngineClient seam.

Two queues lead to the engine thread: `_inputs`, in order, and `_aborts`, which a running step
looks at before it hands out its tokens. Outputs come back on the event loop's thread.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from pdserve_common.errors import DrainingError, EngineDeadError
from pdserve_common.metrics.services import GrammarMetrics, KVTransferMetrics
from pdserve_common.observability import defects
from pdserve_common.processes.calls import Call, ResultT
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    SchedulerStats,
)
from pdserve_common.types.engine_client import (
    NO_TENSORS,
    EngineState,
    KVCacheEventsCallback,
    OutputsCallback,
    Tensors,
)
from pdserve_engine.assemble import LoadedEngine, load_engine
from pdserve_engine.clients.control import ControlClient
from pdserve_engine.clients.owners import RequestOwners
from pdserve_engine.config import EngineConfig, Role
from pdserve_engine.core.engine_core import StepResult
from pdserve_engine.kv_transfer.ports import KVConnector

logger = logging.getLogger(__name__)

# A step in pure torch releases the GIL, its Python parts should not wait 5 ms to get it back.
SWITCH_INTERVAL_S = 5e-4
JOIN_TIMEOUT_S = 30.0
DRAIN_POLL_S = 0.02
# After a drain: handing requests back takes one step, and is not waited for when one hangs.
HAND_BACK_TIMEOUT_S = 1.0
# An idle engine looks around at least this often.
MAX_WAIT_S = 60.0


class _Add(NamedTuple):
    request: EngineCoreRequest
    tensors: Tensors
    # When it came, by the clock: a step may be under way.
    queued_time: float


class _Abort(NamedTuple):
    request_ids: tuple[str, ...]


class _Call(NamedTuple):
    function: Callable[[], object]


_Input = _Add | _Abort | _Call


class Turn(NamedTuple):
    """A turn that has begun."""

    # None: the oldest step in flight is to be waited for.
    result: StepResult | None
    is_step: bool


# Called as observer(stats, outputs, has_computed).
StepObserver = Callable[[SchedulerStats, Sequence[EngineCoreOutput], bool], None]


class InprocEngineClient:
    """Owns the engine from `start`, or `open`, to `close`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._clock = runtime.now
        self._inputs: queue.SimpleQueue[_Input] = queue.SimpleQueue()
        self._aborts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._clients: dict[int, OutputsCallback] = {}
        self._owners = RequestOwners()
        self._next_client_index = 0
        self._on_kv_cache_events: KVCacheEventsCallback = lambda events: None
        self._is_draining = False
        self._is_stopped = False
        self._error: str | None = None
        self._stats = SchedulerStats()
        self._on_step: StepObserver | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    async def load(
        cls,
        config: EngineConfig,
        *,
        role: Role,
        engine_id: str,
        metrics: KVTransferMetrics,
        grammar_metrics: GrammarMetrics | None = None,
        on_step: StepObserver | None = None,
    ) -> "InprocEngineClient":
        """Load an engine without blocking the event loop, and start it. Raises what load_engine
        raises.
        """
        client = cls(Runtime())
        load = functools.partial(
            load_engine,
            config,
            role=role,
            engine_id=engine_id,
            metrics=metrics,
            grammar_metrics=grammar_metrics,
            wakeup=client.wake,
            take_aborts=client.take_aborts,
        )
        # On a thread that ends: OpenMP keeps a team for every thread that has used one, and with
        # more threads than cores its barriers sleep instead of spin, some 15 us each.
        loader = ThreadPoolExecutor(1, "load")
        try:
            loaded = await asyncio.get_running_loop().run_in_executor(loader, load)
        finally:
            loader.shutdown(wait=False)
        client.start(loaded, on_step)
        return client

    @property
    def connector(self) -> KVConnector | None:
        """What the service has to carry the KvLink's messages to."""
        return self._loaded.connector

    @property
    def prefix_connector(self) -> KVConnector | None:
        """The same for links over which prefixes are read."""
        return self._loaded.prefix_connector

    @property
    def _connectors(self) -> list[KVConnector]:
        both = (self._loaded.connector, self._loaded.prefix_connector)
        return [connector for connector in both if connector is not None]

    # ---- before serving

    def wake(self) -> None:
        """Make the engine thread look for KV events. Any thread."""
        self._inputs.put(_Call(lambda: None))

    def take_aborts(self) -> Iterable[str]:
        """The ids aborted since the last call; for EngineCore."""
        taken = []
        while True:
            try:
                taken.append(self._aborts.get_nowait())
            except queue.Empty:
                return taken

    def start(
        self,
        loaded: LoadedEngine,
        on_step: StepObserver | None = None,
    ) -> None:
        """Start the engine thread. `on_step` runs on the loop's thread after every step."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.open(loaded, on_step)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def open(self, loaded: LoadedEngine, on_step: StepObserver | None = None) -> None:
        """Serve an engine whose turns its caller takes on the event loop's thread."""
        self._loaded = loaded
        self._info = loaded.info
        self._core = loaded.core
        self._on_step = on_step
        self._stats = loaded.core.poll().stats
        if on_step is not None:
            on_step(self._stats, (), False)
        self._loop = asyncio.get_running_loop()
        self._control = ControlClient(
            loaded.control, post=self._post, call_soon=self._call_soon, runtime=self._runtime
        )

    # ---- EngineClient

    @property
    def info(self) -> EngineInfo:
        held = self._loaded.control.adapters
        if held.version != self._info.adapters_version:
            self._info = self._info.with_adapters(held)
        return self._info

    def register_client(self, on_outputs: OutputsCallback) -> int:
        index = self._next_client_index
        self._next_client_index += 1
        self._clients[index] = on_outputs
        return index

    def unregister_client(self, client_index: int) -> None:
        self._clients.pop(client_index, None)
        self.abort_requests(client_index, self._owners.of_client(client_index))
        self._owners.disown(client_index)

    def record_kv_cache_events(self, on_events: KVCacheEventsCallback) -> None:
        self._on_kv_cache_events = on_events
        self._post(self._core.scheduler.kv.block_pool.record_events)

    def add_request(self, request: EngineCoreRequest, tensors: Tensors = NO_TENSORS) -> None:
        if self._error is not None:
            raise EngineDeadError(self._error)
        if self._is_draining:
            raise DrainingError("the worker is shutting down")
        self._owners.add(request)
        for connector in self._connectors:
            connector.on_dispatched(request)
        self._inputs.put(_Add(request, tensors, self._clock()))

    def abort_requests(self, client_index: int, request_ids: Sequence[str]) -> None:
        # Ids without an owner may be requests that prefill has handed off: their sessions end.
        owners = self._owners
        mine = tuple(rid for rid in request_ids if not owners.is_anothers(rid, client_index))
        if mine:
            for request_id in mine:
                self._aborts.put(request_id)
            self._inputs.put(_Abort(mine))

    def stats(self) -> SchedulerStats:
        return self._stats

    def step_seq(self) -> int:
        return self._core.step_seq

    def is_alive(self) -> bool:
        return self._error is None and not self._is_stopped

    def problem(self) -> str | None:
        if self._error is not None:
            return self._error
        if (bound_s := self._overrun_s()) is not None:
            return f"a step has taken more than {bound_s:g} s"
        failures = (connector.failure() for connector in self._connectors)
        return self._core.executor.failure() or next(filter(None, failures), None)

    def _overrun_s(self) -> float | None:
        """Return the bound that a step has overrun, which it may never end."""
        return self._loaded.step_watch.overrun(self._core.running_step)

    # ---- control

    def state(self) -> EngineState:
        return self._loaded.control.state

    async def call(self, verb: Call[ResultT]) -> ResultT:
        self._loaded.step_watch.forget()  # the next step may be the first after a sleep
        return await self._control.call(verb)

    def _post(self, function: Callable[[], object]) -> None:
        self._inputs.put(_Call(function))

    # ---- the end

    async def drain(self, timeout_s: float) -> int:
        self._is_draining = True
        self._control.begin_drain()
        # A step that hangs or a broken transport would keep the rest from ending.
        await self._until(lambda: self._is_empty() or self.problem() is not None, timeout_s)
        if not self._is_empty():
            self._post(self._core.hand_back)
            await self._until(
                lambda: self._is_empty() or self._overrun_s() is not None, HAND_BACK_TIMEOUT_S
            )
        # Owners are left if the engine has not come to it: routers see their streams end.
        return self._core.num_handed_back + len(self._owners)

    def _is_empty(self) -> bool:
        return not self._owners and not self._stats.num_open_kv_sessions

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the condition holds or the engine has died; False after `timeout_s`."""
        deadline = self._clock() + timeout_s
        while self.is_alive() and not condition():
            if self._clock() > deadline:
                return False
            self.wake()
            await self._runtime.sleep(DRAIN_POLL_S)
        return True

    async def close(self) -> None:
        """Stop the engine after its current step and release transport and memory."""
        self._is_draining = True
        self._is_stopped = True
        self._control.close("the engine is stopped")
        self.wake()
        await asyncio.get_running_loop().run_in_executor(None, self._join_and_release)

    def _join_and_release(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join(JOIN_TIMEOUT_S)
        if (thread is not None and thread.is_alive()) or not self._loaded.close():
            self._error = "a step hangs: its memory is left to the system"

    # ---- engine thread, or whoever takes the turns

    def turn(self) -> bool:
        """Take what has come, and do a step if there is anything to step for. False: the next turn
        is due when something comes, or after `max_wait_s`.
        """
        return self.end_turn(self.begin_turn())

    def begin_turn(self) -> Turn:
        """The part of `turn` that does not wait for the model."""
        self._process_inputs()
        is_step = self._core.has_work()
        return Turn(self._core.begin_step() if is_step else self._core.poll(), is_step)

    def end_turn(self, turn: Turn) -> bool:
        """The rest of it: hand out what came of it."""
        result = self._core.finish_step() if turn.result is None else turn.result
        self._call_soon(self._deliver, result)
        self._control.after_step()
        # A step that changed nothing waits for an event: a request, freed blocks, a deadline. A
        # poll may have brought work.
        return self._core.has_work() and (result.has_progressed or not turn.is_step)

    def max_wait_s(self) -> float:
        """Return after how long a turn is due though nothing has come."""
        deadline = self._core.scheduler.next_deadline()
        if deadline is None:
            return MAX_WAIT_S
        return min(MAX_WAIT_S, max(0.0, deadline - self._clock()))

    def _run(self) -> None:
        # OpenMP's number of threads is each thread's own; torch sets this one's when asked.
        torch.get_num_threads()
        try:
            self._loop_until_stopped()
        except BaseException as error:
            defects.record("engine", error, "this engine")
            self._die(f"the engine died: {error!r}")

    def _die(self, reason: str) -> None:
        """Any thread."""
        if self._error is None:
            self._error = reason
            self._call_soon(self._announce_death)

    def _loop_until_stopped(self) -> None:
        may_step = False
        while not self._is_stopped:
            if not may_step:
                self._wait_for_input()
            may_step = self.turn()

    def _wait_for_input(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._handle(self._inputs.get(timeout=self.max_wait_s()))

    def _process_inputs(self) -> None:
        while True:
            try:
                self._handle(self._inputs.get_nowait())
            except queue.Empty:
                return

    def _handle(self, item: _Input) -> None:
        if isinstance(item, _Add):
            self._core.add_request(item.request, item.tensors, queued_time=item.queued_time)
        elif isinstance(item, _Abort):
            # What `_aborts` still holds is repeated here or further on in `_inputs`: it must not
            # be left to hit a later request of the same id.
            self.take_aborts()
            self._core.abort_requests(item.request_ids)
        else:
            item.function()

    def _call_soon(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The loop is closed: the process is on its way out.
            self._is_stopped = True

    # ---- event loop's thread

    def _deliver(self, result: StepResult) -> None:
        self._stats = result.stats
        try:
            self._loaded.step_watch.learn(result.work, result.stats.step_duration_s)
            if self._on_step is not None:
                all_outputs = [output for group in result.outputs.values() for output in group]
                self._on_step(result.stats, all_outputs, result.has_computed)
            if self._loaded.logs_iterations and result.has_computed:
                _log_iteration(self._core.step_seq, result.stats)
            if result.kv_cache_events is not None:
                self._on_kv_cache_events(result.kv_cache_events)
            for client_index, group in result.outputs.items():
                outputs = self._owners.release_ended(group)
                callback = self._clients.get(client_index)
                if callback is not None:
                    callback(
                        EngineCoreOutputs(
                            engine_index=self.info.data_parallel_rank,
                            outputs=outputs,
                            scheduler_stats=result.stats,
                            timestamp=self._clock(),
                        )
                    )
        except BaseException as error:  # requests may have lost tokens, or their end
            defects.record("engine", error, "this engine")
            self._die(f"a step's outputs cannot be delivered: {error!r}")

    def _announce_death(self) -> None:
        assert self._error is not None
        error = EngineDeadError(self._error).to_engine_error()
        self._owners.clear()
        self._control.close(self._error)
        for callback in list(self._clients.values()):
            with defects.contained("engine", "a client word of the engine's death"):
                callback(EngineCoreOutputs(engine_dead=error, timestamp=self._clock()))


def _log_iteration(step_seq: int, stats: SchedulerStats) -> None:
    logger.info(
        "step %d: %d running, %d waiting, %d tokens in %.1f ms, KV usage %.1f%%",
        step_seq,
        stats.num_running_reqs,
        stats.num_waiting_reqs,
        stats.step_num_tokens,
        1e3 * stats.step_duration_s,
        1e2 * stats.kv_cache_usage,
    )
