"""The inner loop of an engine: schedule, execute, update. Owned by the engine thread."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from pdserve_common.engine_types import EngineCoreRequest, SamplingParams, SchedulerStats
from pdserve_engine.core.request import Request, RequestStatus
from pdserve_engine.core.sched_output import ModelRunnerOutput, SchedulerOutput
from pdserve_engine.core.scheduler import ClientOutputs, Scheduler
from pdserve_engine.kv_transfer.base import KVConnector

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs the model on a scheduled step; ModelRunner is one."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput: ...


class StepResult(NamedTuple):
    """What one step brought."""

    outputs: ClientOutputs
    stats: SchedulerStats
    # Whether the model ran.
    has_computed: bool
    # False: stepping again is of no use before something changes from outside.
    has_progressed: bool


class EngineCore:
    """One engine without threads: the caller brings requests and calls step."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        connector: KVConnector | None,
        max_model_len: int,
        take_aborts: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """`take_aborts` returns the ids aborted since it was last called; asked while a step is
        under way.
        """
        self.scheduler = scheduler
        self.executor = executor
        self.connector = connector
        self._max_model_len = max_model_len
        self._take_aborts = take_aborts
        self.step_seq = 0

    def add_request(self, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        seed = params.seed if params is not None and params.seed is not None else 0
        self.scheduler.add_request(Request(request, max_model_len=self._max_model_len, seed=seed))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests, and the KV sessions of requests that were handed off. Unknown ids are
        ignored.
        """
        request_ids = tuple(request_ids)
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        if self.connector is not None:
            for request_id in request_ids:
                self.connector.abort_session(request_id)

    def has_work(self) -> bool:
        """Is there anything to step for? Requests that wait for remote KV wake the engine when it
        comes.
        """
        return self.scheduler.has_schedulable_requests() or self.scheduler.has_finished_requests()

    def step(self) -> StepResult:
        """Run one step. The model's exceptions pass through: the caller ends the engine."""
        start = time.monotonic()
        self.scheduler.expire_deadlines(start)
        scheduler_output = self.scheduler.schedule()
        if self.connector is not None:
            self.connector.start_load_kv(scheduler_output.kv_connector_metadata)
        model_output = self.executor.execute_model(scheduler_output)
        self.abort_requests(self._take_aborts())
        outputs = self.scheduler.update_from_output(scheduler_output, model_output)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if num_tokens:
            self.step_seq += 1
        stats = self.scheduler.make_stats(
            step_num_tokens=num_tokens, step_duration_s=time.monotonic() - start
        )
        # A preemption frees blocks for others, even if this step had to end with it.
        has_progressed = num_tokens > 0 or bool(scheduler_output.preempted_req_ids)
        return StepResult(outputs, stats, num_tokens > 0, has_progressed)

    def poll(self) -> StepResult:
        """Take in KV news, deadlines and aborts without running the model."""
        self.scheduler.expire_deadlines(time.monotonic())
        self.scheduler.update_from_kv_transfer()
        stats = self.scheduler.make_stats(step_num_tokens=0, step_duration_s=0.0)
        return StepResult(self.scheduler.take_pending_outputs(), stats, False, False)

    def warm_up(self, num_tokens: int) -> None:
        """Run one prompt and one decode step, so that the first request finds everything
        initialised.
        """
        num_tokens = max(1, min(num_tokens, self._max_model_len - 2))
        self.add_request(
            EngineCoreRequest(
                request_id="warm-up",
                prompt_token_ids=(0,) * num_tokens,
                sampling_params=SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
            )
        )
        while self.has_work():
            self.step()
        self.scheduler.kv.block_pool.reset_prefix_cache()
        self.scheduler.kv.prefix_cache_queries = self.scheduler.kv.prefix_cache_hits = 0
        self.step_seq = 0
