"""One step of an engine: schedule, execute, update. Owned by the engine thread."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from pdserve_common.errors import DrainingError
from pdserve_common.types.engine import EngineCoreRequest, Generate, Pool, SchedulerStats
from pdserve_common.types.engine_client import NO_TENSORS, Tensors
from pdserve_common.types.kv import KVCacheEvents
from pdserve_common.types.pooling_params import PoolingParams
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.core.dump import dump_step
from pdserve_engine.core.executor import ExecutedStep, Executor, Pending
from pdserve_engine.core.scheduler import Scheduler
from pdserve_engine.request.outputs import ClientOutputs
from pdserve_engine.request.request import Request, RequestStatus
from pdserve_engine.request.sched_output import ModelRunnerOutput, SchedulerOutput
from pdserve_engine.request.watchdog import RunningStep, work_of

logger = logging.getLogger(__name__)

# After a longer step planning ahead saves next to nothing, and would keep requests that arrive
# meanwhile out of the next step.
MAX_LOOKAHEAD_STEP_S = 0.02
# After this many failing steps in a row a step of our own tells whose fault it is.
MAX_FAILURES_IN_A_ROW = 5
# Not printable, so that no front end's request has it (validate_request_id).
PROBE_ID = "\0engine-probe"
# The client_index of nobody.
NO_CLIENT = -1

T = TypeVar("T")


class StepResult(NamedTuple):
    """What one step brought."""

    outputs: ClientOutputs
    stats: SchedulerStats
    # Whether results of the model came in, and what there was to compute (watchdog.work_of).
    has_computed: bool
    work: int
    # False: stepping again is of no use before something changes from outside.
    has_progressed: bool
    # What has changed in what the pool has cached; None if nothing has, or nobody listens.
    kv_cache_events: KVCacheEvents | None


class _Batch(NamedTuple):
    """A step that was handed to the model."""

    scheduled: SchedulerOutput
    work: int
    pending: Pending[ExecutedStep]


class _Taken(NamedTuple):
    """The step whose results were taken in, if any."""

    has_progressed: bool
    num_tokens: int = 0
    work: int = 0
    duration_s: float = 0.0


class EngineCore:
    """One engine; its caller adds requests and calls `step` again and again."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: Executor,
        max_model_len: int,
        take_aborts: Callable[[], Iterable[str]] = tuple,
        pooling_task: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`take_aborts` returns the ids aborted since it was last called; asked while a step is
        under way. `pooling_task` is one that the model serves; None: it generates.
        """
        self.scheduler = scheduler
        self.executor = executor
        self._max_model_len = max_model_len
        self._take_aborts = take_aborts
        self._pooling_task = pooling_task
        self._clock = clock
        self._batch_queue: deque[_Batch] = deque()
        self._has_planned = False
        # The step that is computed or waited for; any thread may look.
        self.running_step: RunningStep | None = None
        # The last step that computed something. Unknown is taken for long.
        self._last = _Taken(has_progressed=False, num_tokens=1, duration_s=MAX_LOOKAHEAD_STEP_S)
        self._num_failures_in_a_row = 0
        # Requests that `hand_back` has ended; any thread may look.
        self.num_handed_back = 0
        self.step_seq = 0

    def add_request(
        self,
        request: EngineCoreRequest,
        tensors: Tensors = NO_TENSORS,
        *,
        queued_time: float | None = None,
    ) -> None:
        """See EngineClient. `queued_time` is when the worker got it, by the clock, if that was
        before now.
        """
        task = request.task
        seed = task.sampling_params.seed or 0 if isinstance(task, Generate) else 0
        self.scheduler.add_request(
            Request(
                request,
                max_model_len=self._max_model_len,
                seed=seed,
                tensors=tensors,
                queued_time=queued_time,
                clock=self._clock,
            )
        )

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests, and the KV sessions of requests that were handed off. Unknown ids are
        ignored.
        """
        request_ids = tuple(request_ids)
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self.scheduler.abort_sessions(request_ids)

    def hand_back(self) -> None:
        """End what is left, before a shutdown, so that front ends have it go on elsewhere after the
        tokens they have got.
        """
        error = DrainingError("the worker is shutting down").to_engine_error()
        request_ids = list(self.scheduler.requests)
        # On prefill every request has a session, on decode every session that lives has a request,
        # but for those of prefixes that it lends.
        self.num_handed_back += max(len(request_ids), self.scheduler.num_open_sessions)
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ERROR, error)
        self.scheduler.fence_all("shutdown")

    def has_work(self) -> bool:
        """Is there anything to step for? Requests that wait for remote KV wake the engine when it
        comes.
        """
        return (
            bool(self._batch_queue)
            or self.scheduler.has_schedulable_requests()
            or self.scheduler.has_finished_requests()
        )

    def step(self) -> StepResult:
        """Plan a step and hand it to the model; take in the oldest result, unless there is time to
        plan the next step first. Exceptions that cannot be pinned on requests pass through: the
        caller ends the engine.
        """
        result = self.begin_step()
        return self.finish_step() if result is None else result

    def begin_step(self) -> StepResult | None:
        """The part of `step` that waits for nothing. None: `finish_step` is the rest."""
        self.scheduler.expire_deadlines(self._clock())
        self._has_planned = not self._batch_queue or self._may_look_ahead()
        if self._has_planned:
            self._submit(self.scheduler.schedule())
            if self._may_look_ahead():
                return self._result(_Taken(has_progressed=True))
        return None

    def finish_step(self) -> StepResult:
        """Wait for the oldest step in flight, and take in what it brings."""
        taken = self._take_oldest()
        if not self._has_planned:
            # What has come in since may be computed by the next step.
            taken = taken._replace(has_progressed=True)
        return self._result(taken)

    def poll(self) -> StepResult:
        """Apply KV events and deadlines without running the model."""
        self.scheduler.expire_deadlines(self._clock())
        self.scheduler.update_from_kv_transfer()
        return self._result(_Taken(has_progressed=False))

    def finish_steps(self) -> None:
        """Wait for the steps in flight and take them in; their outputs come with the next result.

        For whoever is about to touch what steps use: memory, weights, caches.
        """
        while self._batch_queue:
            self._take_oldest()

    def wait_for(self, pending: Pending[T], work: int | None = None) -> T:
        """Return the result of a step, or of a call that comes behind steps."""
        self.running_step = RunningStep(self._clock(), work)
        try:
            return pending.result()
        finally:
            self.running_step = None

    def close(self) -> bool:
        """Stop the executor after the steps in flight; False if one of them hangs."""
        return self.executor.stop()

    # ---- the batch queue

    def _may_look_ahead(self) -> bool:
        """May another step be planned before the last one has brought its tokens?"""
        if not 0 < len(self._batch_queue) < self.executor.max_concurrent_batches:
            return False
        if self.scheduler.has_drafts:
            return False  # they stand behind a last token that is known
        num_tokens = self._batch_queue[-1].scheduled.total_num_scheduled_tokens
        expected_s = self._last.duration_s * max(1.0, num_tokens / self._last.num_tokens)
        # A pipeline computes nothing but that in its other stages.
        is_worth_it = self.executor.is_pipelined or expected_s < MAX_LOOKAHEAD_STEP_S
        return num_tokens > 0 and is_worth_it and not self.scheduler.needs_drain

    def _submit(self, scheduled: SchedulerOutput) -> None:
        work = work_of(scheduled)
        self.running_step = RunningStep(self._clock(), work)  # it may be over on return
        pending = self.executor.submit(scheduled)
        self.running_step = None
        self._batch_queue.append(_Batch(scheduled, work, pending))

    def _take_oldest(self) -> _Taken:
        scheduled, work, pending = self._batch_queue.popleft()
        try:
            output, duration_s = self.wait_for(pending, work)
        except Exception as error:  # whatever a model, a kernel or a plugin may raise
            self._isolate(scheduled, error)
            return _Taken(has_progressed=True)
        self.abort_requests(self._take_aborts())
        self.scheduler.update_from_output(output, duration_s)
        # A preemption frees blocks for others, even if this step had to end with it.
        has_computed = scheduled.num_scheduled_tokens or scheduled.draft_prefills
        taken = _Taken(
            has_progressed=bool(has_computed or scheduled.preempted_req_ids),
            num_tokens=scheduled.total_num_scheduled_tokens,
            work=work,
            duration_s=duration_s,
        )
        if taken.num_tokens:
            self.step_seq += 1
            self._last = taken
        self._check_nans(output)
        return taken

    def _check_nans(self, output: ModelRunnerOutput) -> None:
        """A step is over: does the model work? NaN logits may be of a request's own making, but
        where no request gets others it may be the model. Raises RuntimeError if it is.
        """
        if PROBE_ID in output.num_nans_in_logits:
            raise RuntimeError("the model brings NaN logits for a token of our own")
        sampled = zip(output.request_ids, output.sampled_token_ids, strict=True)
        brought = [rid for rid, token_ids in sampled if token_ids or rid in output.pooler_outputs]
        with_nans = [rid in output.num_nans_in_logits for rid in brought]
        if not all(with_nans):
            self._num_failures_in_a_row = 0
        elif with_nans:
            self._note_failure()

    def _isolate(self, scheduled: SchedulerOutput, error: Exception) -> None:
        """A step failed: find out whose fault it is. Raises the error if it is the engine's."""
        stats = self.scheduler.make_stats(step_num_tokens=0, step_duration_s=0.0)
        logger.error(
            "a step failed: %r; it was %s", error, dump_step(scheduled, stats), exc_info=error
        )
        is_lost = self.executor.failure() is not None
        if is_lost or scheduled.num_scheduled_tokens.keys() == {PROBE_ID}:
            raise error
        steps = [scheduled]
        while self._batch_queue:
            batch = self._batch_queue.popleft()
            batch.pending.exception()
            steps.append(batch.scheduled)
        self.executor.recover()
        self.scheduler.discard_steps(steps, f"the model failed on this request: {error!r}")
        self._note_failure()

    def _note_failure(self) -> None:
        self._num_failures_in_a_row += 1
        if self._num_failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            self._num_failures_in_a_row = 0
            self._probe()

    def _probe(self) -> None:
        """Have the model compute one token of ours, before anything else.

        The last probe may still wait for a block. It decides: each step that fails meanwhile takes
        its requests out of the batch, so that it gets its turn.
        """
        if PROBE_ID in self.scheduler.requests:
            return
        task: Generate | Pool = Generate(SamplingParams(temperature=0.0, max_tokens=1))
        if self._pooling_task is not None:
            task = Pool(PoolingParams(task=self._pooling_task))
        request = EngineCoreRequest(
            request_id=PROBE_ID,
            prompt_token_ids=(0,),
            task=task,
            client_index=NO_CLIENT,
        )
        self.scheduler.try_first(
            Request(request, max_model_len=self._max_model_len, seed=0, clock=self._clock)
        )

    def _result(self, taken: _Taken) -> StepResult:
        stats = self.scheduler.make_stats(
            step_num_tokens=taken.num_tokens, step_duration_s=taken.duration_s
        )
        outputs = self.scheduler.take_outputs()
        outputs.pop(NO_CLIENT, None)
        return StepResult(
            outputs,
            stats,
            taken.num_tokens > 0,
            taken.work,
            taken.has_progressed,
            self.scheduler.kv.block_pool.take_events(),
        )
