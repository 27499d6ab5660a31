"""Decides each step which requests compute how many tokens: vLLM V1's scheduler, a token budget.

There are no prefill and decode phases: every request catches up from num_computed_tokens to its
last known token, running requests first, then waiting ones. With scheduling_mode "v0" prompts are
computed whole and apart from decodes, as vLLM V0 did. Owned by the engine thread. Where a request
is, by status:

    WAITING, PREEMPTED       `waiting`; `remote_decodes`: on P, before D has reserved its blocks;
                             `forks`: those whose source's prompt is not computed yet; `kv_ready`:
                             it owns blocks (pulled, or shared by its fork's source) and there was
                             no place in the batch yet
    WAITING_FOR_REMOTE_KVS   `remote_prefills`: on D, a ticket, or blocks that are being filled
    RUNNING                  `running`

D's first step of a request is speculative: it runs when the blocks have landed, before P has
acknowledged their release (rule K4). Such a request still `needs_remote_kv`: what the step brought
is held until the release is acknowledged, nobody shares its blocks and it cannot be preempted. If
the release is not acknowledged, the step is rolled back.

Steps may be planned before the ones before them have finished (async scheduling). While a step is
in flight its blocks are nobody else's: requests that end give them up when the step is over, and
preemption waits until nothing is in flight (`needs_drain`).
"""

import enum
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from pdserve_common.engine_types import (
    EngineCoreEventType,
    EngineError,
    ErrorCode,
    KVLost,
    KVTransferStats,
    LogprobsLists,
    SchedulerStats,
)
from pdserve_common.errors import DeadlineExceededError, InvalidRequestError, RequestFailedError
from pdserve_engine.config import NUM_PROBE_SEATS, SchedulerConfig
from pdserve_engine.core.forks import Forks, find_source
from pdserve_engine.core.remote_decode import RemoteDecodes
from pdserve_engine.core.remote_prefill import RemotePrefills
from pdserve_engine.core.seats import Seats
from pdserve_engine.core.step_plan import StepPlan
from pdserve_engine.core.suspects import Suspects
from pdserve_engine.kv.kv_cache_manager import ComputedBlocks, KVCacheManager
from pdserve_engine.kv_transfer.ports import (
    BlocksClaimed,
    BlocksConfirmed,
    BlocksFreed,
    BlocksLanded,
    BlocksReturned,
    ConsumerPort,
    KVEvent,
    ProducerPort,
    PullFinished,
    PullLost,
    RequestFailed,
    StartAllowed,
    StartDeferred,
    StartForbidden,
)
from pdserve_engine.request.deadlines import Deadlines
from pdserve_engine.request.outputs import ClientOutputs, emit
from pdserve_engine.request.request import HeldResult, Request, RequestStatus
from pdserve_engine.request.request_queue import make_request_queue
from pdserve_engine.request.sched_output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from pdserve_engine.request.stop import check_stop

logger = logging.getLogger(__name__)

# Prompts that have to wait for a place among the partial prefills and are overtaken in one step.
MAX_SKIPPED = 16


class _Admission(enum.Enum):
    """What became of a waiting request."""

    ADMITTED = enum.auto()
    # It would not fit, and those behind it have to wait as well.
    NO_ROOM = enum.auto()
    # It would be computed in chunks, as too many are already; shorter prompts may overtake it.
    NO_PARTIAL_PREFILL = enum.auto()


class PauseState(enum.IntEnum):
    """What `schedule` may plan. Requests are accepted in every state."""

    UNPAUSED = 0
    # Waiting requests stay where they are, admitted ones go on.
    PAUSED_NEW = 1
    # Everything stays where it is.
    PAUSED_ALL = 2


class Scheduler:
    """The state of all requests of an engine."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        *,
        producer: ProducerPort | None = None,
        consumer: ConsumerPort | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._clock = clock
        self.kv = kv_cache_manager
        self.pause_state = PauseState.UNPAUSED
        self.requests: dict[str, Request] = {}
        self.waiting = make_request_queue(config.scheduling_policy)
        # Probes first.
        self.running: list[Request] = []
        self.remote_decodes = RemoteDecodes(
            producer,
            self.kv,
            lambda: make_request_queue(config.scheduling_policy),
            config.max_num_batched_tokens,
            clock,
        )
        self.kv_ready: deque[Request] = deque()
        self.forks = Forks(kv_cache_manager)
        self.seats = Seats(config, self.running, self.kv_ready, self.forks)
        self.remote_prefills = RemotePrefills(
            consumer, self.kv, self.seats, self._kept_out, self._num_spare_blocks, clock
        )
        self._ports = (self.remote_decodes.port, self.remote_prefills.port)
        self.num_preemptions = 0
        # Of the waiting requests, those that were running.
        self._num_preempted = 0
        # Set when a step could not be planned without a preemption while others were in flight.
        self.needs_drain = False
        self.suspects = Suspects(self.remote_decodes)
        # Steps that were planned and whose results have not come in, oldest first.
        self._in_flight: deque[dict[Request, int]] = deque()
        self._num_planned_steps = 0
        # Blocks of ended requests, and the step that may still use them.
        self._deferred_block_ids: deque[tuple[int, list[int]]] = deque()
        # Of the running requests, per KV group; None: the batch has changed.
        self._num_common_prefix_blocks: tuple[int, ...] | None = None
        # What the model runner still has to hear of.
        self._finished_req_ids: set[str] = set()
        self._preempted_req_ids: set[str] = set()
        self._outputs: ClientOutputs = {}
        self._deadlines = Deadlines()

    # ---- requests in and out

    def add_request(self, request: Request) -> None:
        """Take a request. If its id is in use, it supersedes an earlier attempt."""
        earlier = self.requests.get(request.request_id)
        if earlier is not None:
            self._supersede(earlier, request)
        self.requests[request.request_id] = request
        request.record_event(EngineCoreEventType.QUEUED)
        self._deadlines.add(request)
        can_serve = self.remote_decodes.can_serve(request)
        if not (can_serve and self.remote_prefills.can_serve(request)):
            error = InvalidRequestError(
                "kv_transfer_params is set, this worker has no KV connector",
                field="kv_transfer_params",
            )
            request.error = error.to_engine_error()
            self._finish(request, RequestStatus.FINISHED_ERROR)
            emit(self._outputs, request)
            return
        if self.remote_prefills.add(request) or self.remote_decodes.add(request):
            return
        source = find_source(request, self.requests)
        if source is not None:
            self.forks.add(source, request)
            if _is_prompt_computed(source):
                self._release_forks(source)
        else:
            self.waiting.add_request(request)

    def finish_requests(
        self,
        request_ids: Iterable[str],
        status: RequestStatus,
        error: EngineError | None = None,
    ) -> None:
        """End requests from outside (abort, error). Unknown ids are ignored; each gets its
        terminal output.
        """
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            self._remove_from_queues(request)
            request.error = error
            self._finish(request, status)
            emit(self._outputs, request)

    def take_outputs(self) -> ClientOutputs:
        """Return what is new since the last call, by client."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def expire_deadlines(self, now: float) -> None:
        """End requests whose deadline has passed."""
        error = DeadlineExceededError("the request's deadline passed").to_engine_error()
        for request in self._deadlines.take_passed(now):
            self.finish_requests([request.request_id], RequestStatus.FINISHED_ERROR, error)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline (by the clock) of a request that is not over."""
        return self._deadlines.next()

    def has_requests(self) -> bool:
        """Is any request here, running or not?"""
        return bool(self.requests)

    def has_admitted_requests(self) -> bool:
        """Is any request computed, half computed, or does it hold or pull blocks?"""
        is_running = self.running or self.kv_ready or self._num_preempted or self._in_flight
        return bool(is_running) or any(self.remote_prefills.with_blocks())

    def has_schedulable_requests(self) -> bool:
        """Could the next step compute something? Requests that wait for remote KV do not count."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return False
        # After a speculative first step it waits as well.
        if self.kv_ready or not all(request.needs_remote_kv for request in self.running):
            return True
        if self.pause_state is PauseState.UNPAUSED:
            return bool(len(self.waiting))
        return bool(self._num_preempted) and any(map(_is_preempted, self.waiting))

    @property
    def num_open_sessions(self) -> int:
        """KV sessions (on D: tickets, pulls and zombie READs) that are not over."""
        return sum(port.num_open_sessions() for port in self._ports)

    def fence_all(self, reason: str) -> None:
        """End every KV session before blocks change hands (rule K3)."""
        for port in self._ports:
            port.fence_all(reason)

    def has_finished_requests(self) -> bool:
        """Does the model runner still have to hear of ended requests?"""
        return bool(self._finished_req_ids)

    # ---- one step

    def schedule(self) -> SchedulerOutput:
        """Plan the next step; its results go to update_from_output, in the order of planning."""
        self.update_from_kv_transfer()
        self.needs_drain = False
        plan = StepPlan(self.config.max_num_batched_tokens)
        if self.pause_state is not PauseState.PAUSED_ALL:
            suspect = self.suspects.next()
            if suspect is not None:
                self._schedule_suspect(suspect, plan)
            elif self.config.scheduling_mode == "v0":
                self._schedule_phase(plan)
            else:
                self._schedule_probes(plan)
                self._schedule_running(plan)
                self._schedule_newcomers(plan)
        return self._commit(plan)

    def update_from_output(self, result: ModelRunnerOutput) -> None:
        """Apply what the oldest step in flight computed."""
        # P may have acknowledged the release while the model ran: then nothing has to be held back.
        self._apply_kv_events()
        sampled = dict(zip(result.request_ids, result.sampled_token_ids, strict=True))
        for request, num_tokens in self._in_flight.popleft().items():
            request.num_in_flight_tokens -= num_tokens
            if request.status is not RequestStatus.RUNNING:  # it ended, or lost its KV, meanwhile
                continue
            token_ids = sampled.get(request.request_id, ())
            if request.needs_remote_kv:
                request.held_result = HeldResult(num_tokens, token_ids, result, self._clock())
            else:
                self._apply_step(request, num_tokens, token_ids, result)
        self._free_deferred_blocks()

    def discard_steps(self, steps: Iterable[SchedulerOutput], message: str) -> None:
        """Of the steps in flight, which are given and all over, the oldest raised: none counts.

        Whatever runs is computed again. A step of one request fails it; of several, each is tried
        alone, also if others have ended meanwhile: it may have been their fault.
        """
        failed = self._in_flight[0]
        # A speculative first step is only rolled back: its release may still be acknowledged.
        suspects = [
            r for r in failed if r.status is RequestStatus.RUNNING and not r.needs_remote_kv
        ]
        for request in itertools.chain.from_iterable(self._in_flight):
            request.num_in_flight_tokens = 0
        self._in_flight.clear()
        self._free_deferred_blocks()
        for step in steps:  # the model runner may not have got so far
            self._finished_req_ids |= step.finished_req_ids
            self._preempted_req_ids |= step.preempted_req_ids
        for request in reversed(self.running):
            if request.needs_remote_kv:
                self._rollback_first_step(request)
            else:
                self._preempt(request)
        if len(failed) == 1:
            error = RequestFailedError(message).to_engine_error()
            request_ids = [r.request_id for r in suspects]
            self.finish_requests(request_ids, RequestStatus.FINISHED_ERROR, error)
        else:
            self.suspects.note_failed(suspects)

    def try_first(self, request: Request) -> None:
        """Take a request and compute nothing else until it has brought a token."""
        self.add_request(request)
        self.suspects.put_first(request)

    def make_stats(self, *, step_num_tokens: int, step_duration_s: float) -> SchedulerStats:
        """Return the load after a step."""
        pool = self.kv.block_pool
        num_remote = len(self.remote_prefills) + len(self.remote_decodes)
        num_here = len(self.waiting) + len(self.kv_ready) + len(self.forks)
        held_up = self.remote_decodes.held_up
        num_tokens = self.waiting.num_tokens + self.remote_decodes.num_tokens
        return SchedulerStats(
            num_slots=self.config.max_num_seqs,
            num_running_reqs=len(self.running),
            num_waiting_reqs=num_here + num_remote,
            num_waiting_for_decode_reqs=num_here
            - self.remote_decodes.num_granted
            + held_up.num_requests,
            num_waiting_tokens=num_tokens - held_up.num_tokens,
            num_total_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_cached_blocks=pool.num_free_cached_blocks,
            num_open_kv_sessions=self.num_open_sessions,
            prefix_cache_queries=self.kv.prefix_cache_queries,
            prefix_cache_hits=self.kv.prefix_cache_hits,
            num_preemptions=self.num_preemptions,
            num_common_prefix_blocks=max(self._num_common_prefix_blocks or (0,)),
            step_num_tokens=step_num_tokens,
            step_duration_s=step_duration_s,
        )

    # ---- planning

    def _schedule_phase(self, plan: StepPlan) -> None:
        """V0: a step of probes, or else of whole prompts, or else of decodes."""
        self._schedule_probes(plan)
        if not plan.scheduled:
            self._schedule_newcomers(plan, is_decode=False)
        if not plan.scheduled:
            self._schedule_running(plan)
            self._schedule_kv_ready(plan, is_decode=True)

    def _schedule_newcomers(self, plan: StepPlan, *, is_decode: bool | None = None) -> None:
        self._schedule_kv_ready(plan, is_decode=is_decode)
        if self.pause_state is PauseState.UNPAUSED:
            self._schedule_waiting(plan)
        else:
            self._schedule_preempted(plan)

    def _schedule_probes(self, plan: StepPlan) -> None:
        """Before all else: they are to find out in time that a worker works, however busy it is."""
        self._schedule_those(itertools.takewhile(_is_probe, list(self.running)), plan)
        if self.kv_ready and self.kv_ready[0].is_probe:
            self._schedule_kv_ready(plan, is_probe=True)
        while self.pause_state is PauseState.UNPAUSED and len(self.waiting):
            request = self.waiting.peek_request()
            if not (request.is_probe and self._may_add(request, plan)):
                return
            if self._try_to_admit(request, plan) is not _Admission.ADMITTED:
                return

    def _schedule_running(self, plan: StepPlan) -> None:
        self._schedule_those(list(self.running), plan)

    def _schedule_those(self, running: Iterable[Request], plan: StepPlan) -> None:
        for request in running:
            if plan.token_budget == 0 or self.needs_drain:
                return
            # Preempted in this step, its last token is coming, or its first step is speculative.
            is_running = request.status is RequestStatus.RUNNING
            if not is_running or request.is_output_complete or request.needs_remote_kv:
                continue
            if request not in plan.scheduled:  # else it is a probe
                self._continue_running(request, plan)

    def _continue_running(self, request: Request, plan: StepPlan) -> None:
        num_tokens = self._chunk(request.num_uncomputed_tokens, plan)
        target = request.num_computed_tokens + num_tokens
        if target <= request.num_slots:
            plan.take(request, num_tokens)
            plan.cached_reqs[request] = None
            return
        new_block_ids = self._allocate_or_preempt(request, target, plan)
        if new_block_ids is not None:
            plan.take(request, num_tokens)
            plan.cached_reqs[request] = new_block_ids

    def _chunk(self, num_tokens: int, plan: StepPlan) -> int:
        """Return how many of `num_tokens` the step may compute."""
        threshold = self.config.long_prefill_token_threshold
        if threshold and self.config.has_chunked_prefill:
            num_tokens = min(num_tokens, threshold)
        return min(num_tokens, plan.token_budget)

    def _allocate_or_preempt(
        self, request: Request, target: int, plan: StepPlan
    ) -> tuple[list[int], ...] | None:
        """Make room for the first `target` tokens, taking blocks from the least important running
        requests if need be. None: the request itself had to give way, or nothing may be taken yet.
        """
        while True:
            block_ids = self._allocate(request, target)
            if block_ids is not None:
                return block_ids
            if self.remote_prefills.reclaim():
                continue
            if self._in_flight:
                self.needs_drain = True
                return None
            # None whose first step is speculative: rolled back, it still keeps its blocks.
            victims = [r for r in self.running if not r.needs_remote_kv]
            victim = max(victims) if self._is_priority else victims[-1]
            plan.give_back(victim)
            plan.has_preempted = True
            self._preempt(victim)
            if victim is request:
                return None

    def _allocate(
        self,
        request: Request,
        target: int,
        blocks: ComputedBlocks = (),
        *,
        num_remote_tokens: int = 0,
    ) -> tuple[list[int], ...] | None:
        """Make room for the first `target` tokens; None if the pool has too few blocks."""
        block_ids = self.kv.allocate_slots(
            request, target, blocks, num_remote_tokens=num_remote_tokens
        )
        if block_ids is not None:
            request.num_slots = self.kv.blocks_for(target) * self.kv.block_size
        return block_ids

    def _leave_batch(self, request: Request) -> None:
        self.running.remove(request)
        self._num_common_prefix_blocks = None

    def _preempt(self, request: Request) -> None:
        self._leave_batch(request)
        waits_for_d = self.remote_decodes.preempt(request)  # fence first (rule K3)
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_output_placeholders = request.num_slots = 0
        self._num_preempted += 1
        self.num_preemptions += 1
        self._preempted_req_ids.add(request.request_id)
        request.record_event(EngineCoreEventType.PREEMPTED)
        if not waits_for_d:
            self.waiting.prepend_request(request)

    def _schedule_kv_ready(
        self, plan: StepPlan, *, is_decode: bool | None = None, is_probe: bool = False
    ) -> None:
        """Requests that own their prompt's blocks come before the waiting ones.

        `is_decode` takes only those that have one token left to compute, or only the others;
        `is_probe` only probes.
        """
        while self.kv_ready and self._may_add(self.kv_ready[0], plan):
            request = self.kv_ready[0]
            if is_decode is not None and is_decode != (request.num_uncomputed_tokens == 1):
                return
            if is_probe and not request.is_probe:
                return
            num_tokens = self._chunk(request.num_uncomputed_tokens, plan)
            if self._allocate(request, request.num_computed_tokens + num_tokens) is None:
                return
            self.kv_ready.popleft()
            self._start_running(request, num_tokens, plan)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        if self.remote_prefills.come_before(self._waiting_since()):
            self._schedule_preempted(plan)
            return
        skipped: list[Request] = []
        while len(self.waiting):
            request = self.waiting.peek_request()
            if request.is_probe:  # it has had its turn
                skipped.append(self.waiting.pop_request())
                continue
            if not self._may_add(request, plan):
                break
            if not (_has_begun(request) or self.seats.may_run()):
                break
            admission = self._try_to_admit(request, plan)
            if admission is _Admission.NO_ROOM:
                break
            if admission is _Admission.NO_PARTIAL_PREFILL:
                if len(skipped) >= MAX_SKIPPED:
                    break
                skipped.append(self.waiting.pop_request())
        for request in reversed(skipped):
            self.waiting.prepend_request(request)

    def _waiting_since(self) -> float:
        """When the next waiting request came; infinity if there is none."""
        return self.waiting.peek_request().queued_time if len(self.waiting) else math.inf

    def _num_ahead(self) -> int:
        """Waiting requests, 0 or 1, that have the next seat."""
        return int(len(self.waiting) > 0 and _has_begun(self.waiting.peek_request()))

    def _schedule_preempted(self, plan: StepPlan) -> None:
        """While nothing new is taken, those that had been running still finish."""
        if self._num_preempted == 0:
            return
        for request in list(filter(_is_preempted, self.waiting)):
            if not self._may_add(request, plan):
                return
            if self._admit(request, *self._find_cached(request), plan) is _Admission.ADMITTED:
                self.waiting.remove_request(request)

    def _find_cached(self, request: Request) -> tuple[ComputedBlocks, int]:
        if not request.reads_prefix_cache:
            return self.kv.empty_computed_blocks, 0
        return self.kv.get_computed_blocks(request, request.num_tokens - 1)

    def _try_to_admit(self, request: Request, plan: StepPlan) -> _Admission:
        """Give the next waiting request its blocks and its first tokens."""
        blocks, num_hit_tokens = self._find_cached(request)
        admission = self._admit(request, blocks, num_hit_tokens, plan)
        if admission is _Admission.ADMITTED:
            self.waiting.pop_request()
        return admission

    def _admit(
        self, request: Request, blocks: ComputedBlocks, num_hit_tokens: int, plan: StepPlan
    ) -> _Admission:
        num_left = request.num_tokens - num_hit_tokens
        num_tokens = self._chunk(num_left, plan)
        if num_tokens < num_left:
            if not self.config.has_chunked_prefill:
                return _Admission.NO_ROOM
            if plan.num_partial_prefills >= self.config.max_num_partial_prefills:
                return _Admission.NO_PARTIAL_PREFILL
        # The whole prompt has to fit besides what admitted requests still need, or they would
        # evict each other.
        if not self._can_allocate(request, blocks, plan):
            return _Admission.NO_ROOM
        if self._allocate(request, num_hit_tokens + num_tokens, blocks) is None:
            return _Admission.NO_ROOM
        if not self.remote_decodes.may_start(request):
            self.kv.free(request)
            request.num_slots = 0
            return _Admission.NO_ROOM
        self._record_admission(request, num_hit_tokens, plan)
        request.num_computed_tokens = num_hit_tokens
        self._start_running(request, num_tokens, plan)
        self.remote_decodes.start(request)
        return _Admission.ADMITTED

    def _start_running(self, request: Request, num_tokens: int, plan: StepPlan) -> None:
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._clock()
        request.record_event(EngineCoreEventType.SCHEDULED)
        self._num_preempted -= request.status is RequestStatus.PREEMPTED
        request.status = RequestStatus.RUNNING
        if request.is_probe:
            self.running.insert(0, request)
        else:
            self.running.append(request)
        self._num_common_prefix_blocks = None
        plan.take(request, num_tokens)
        plan.new_reqs.append(
            NewRequestData(
                request_id=request.request_id,
                all_token_ids=(*request.all_token_ids, *request.pulled_token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=request.sampling_params,
                seed=request.seed,
                eos_token_id=request.core_request.eos_token_id,
                block_ids=self.kv.get_block_ids(request.request_id),
                num_computed_tokens=request.num_computed_tokens,
            )
        )

    def _schedule_suspect(self, suspect: Request, plan: StepPlan) -> None:
        """Plan a step for one request of a step that failed, and for no other."""
        if suspect.status is RequestStatus.RUNNING:
            if not suspect.is_output_complete:
                self._continue_running(suspect, plan)
        elif self._admit_suspect(suspect, plan):
            self.waiting.remove_request(suspect)
        else:  # others hold the place or the blocks it needs: they first
            self._schedule_running(plan)
            self._schedule_kv_ready(plan)

    def _admit_suspect(self, suspect: Request, plan: StepPlan) -> bool:
        if not self._may_add(suspect, plan):
            return False
        return self._admit(suspect, *self._find_cached(suspect), plan) is _Admission.ADMITTED

    def _commit(self, plan: StepPlan) -> SchedulerOutput:
        """Turn the plan into a step that is in flight."""
        output = plan.build(
            finished_req_ids=frozenset(self._finished_req_ids),
            preempted_req_ids=frozenset(self._preempted_req_ids),
            num_common_prefix_blocks=self._common_prefix_blocks(),
        )
        self._finished_req_ids.clear()
        self._preempted_req_ids.clear()
        for request, num_tokens in plan.scheduled.items():
            request.num_computed_tokens += num_tokens
            request.num_in_flight_tokens += num_tokens
            if request.num_uncomputed_tokens == 0:
                request.num_output_placeholders += 1
        if plan.scheduled:
            self.seats.on_step()
        self._in_flight.append(plan.scheduled)
        self._num_planned_steps += 1
        return output

    def _common_prefix_blocks(self) -> tuple[int, ...]:
        """Found once per batch: running requests never change the blocks they have."""
        if self._num_common_prefix_blocks is None:
            self._num_common_prefix_blocks = self.kv.num_common_prefix_blocks(self.running)
        return self._num_common_prefix_blocks

    # ---- room

    def _may_add(self, request: Request, plan: StepPlan) -> bool:
        """May the request join the batch? Not if somebody has just given way for room."""
        if plan.token_budget == 0 or plan.has_preempted or self.needs_drain:
            return False
        if not request.is_probe:
            return self.seats.num_free > 0
        # A pull has its seat with its blocks.
        return request.num_slots > 0 or self._num_free_probe_seats() > 0

    def _num_free_probe_seats(self) -> int:
        """Of those that only probes may have: they take them with their blocks."""
        with_blocks = itertools.chain(
            self.running, self.kv_ready, self.remote_prefills.with_blocks()
        )
        return NUM_PROBE_SEATS - sum(map(_is_probe, with_blocks))

    @property
    def _is_priority(self) -> bool:
        return self.config.scheduling_policy == "priority"

    def _can_allocate(self, request: Request, blocks: ComputedBlocks, plan: StepPlan) -> bool:
        if request.is_probe:  # too small to look after others
            return self.kv.can_allocate(request.num_tokens, blocks)
        if plan.num_reserved_blocks is None:
            plan.num_reserved_blocks = self._num_reserved_blocks()
        num_spare = self._with_watermark(plan.num_reserved_blocks)
        return self.kv.can_allocate(request.num_tokens, blocks, num_spare=num_spare)

    def _num_spare_blocks(self) -> int:
        """Blocks that whoever is admitted now has to leave free."""
        return self._with_watermark(self._num_reserved_blocks())

    def _with_watermark(self, num_reserved: int) -> int:
        if not num_reserved:  # nobody could be preempted
            return 0
        return num_reserved + int(self.config.kv_watermark * self.kv.block_pool.num_blocks)

    def _num_reserved_blocks(self) -> int:
        """Blocks admitted requests still need for their known tokens, and one more for each.

        Pulls count: they cannot be preempted, so their first decode step must find its block.
        """
        pulls = self.remote_prefills.with_blocks()
        admitted = itertools.chain(self.running, self.kv_ready, pulls)
        return sum(map(self._num_missing_blocks, admitted))

    def _num_missing_blocks(self, request: Request) -> int:
        num_needed = self.kv.num_blocks_needed(request.num_tokens + self.kv.block_size)
        return max(0, num_needed - self.kv.num_blocks_of(request.request_id))

    def _record_admission(self, request: Request, num_hit_tokens: int, plan: StepPlan) -> None:
        if plan.num_reserved_blocks is not None:
            plan.num_reserved_blocks += self._num_missing_blocks(request)
        self.kv.record_lookup(request, num_hit_tokens)

    # ---- forks

    def _release_forks(self, source: Request) -> None:
        """The source's prompt is computed: its forks share the full blocks, and compute what comes
        behind those, if there is room; else they wait like any other request.
        """
        for fork in self.forks.take(source):
            # The fork needs a block for the prompt's end and one for what comes then.
            num_needed = self._num_missing_blocks(source) + 2 * self.kv.num_groups
            num_left = self.kv.block_pool.num_free_blocks - num_needed
            has_room = num_left >= self._num_spare_blocks()
            if has_room and self.forks.share(source, fork):
                self.kv_ready.append(fork)
            else:
                self.waiting.add_request(fork)

    def _dissolve_forks(self, source: Request) -> None:
        """The source is gone: its forks are computed like any other request."""
        for fork in self.forks.take(source):
            self.waiting.add_request(fork)

    # ---- results

    def _apply_step(
        self,
        request: Request,
        num_tokens: int,
        token_ids: Sequence[int],
        result: ModelRunnerOutput,
    ) -> None:
        """A step that computed `num_tokens` tokens of a request is over and counts."""
        end = request.num_finished_tokens
        if result.num_nans_in_logits.get(request.request_id):
            self.kv.forget_blocks(request)
        else:
            self._share_blocks(request)
        self.kv.remove_skipped_blocks(request, end)
        self._apply_result(request, end - num_tokens, token_ids, result)

    def _share_blocks(self, request: Request) -> None:
        """What is computed may be had by others."""
        self.kv.cache_blocks(request, request.num_finished_tokens)
        self.remote_decodes.announce(request)
        if _is_prompt_computed(request):
            self._release_forks(request)

    def _apply_result(
        self,
        request: Request,
        start: int,
        token_ids: Sequence[int],
        result: ModelRunnerOutput,
    ) -> None:
        """Apply what a step brought for a request, whose computed tokens begin at `start`."""
        request_id = request.request_id
        prompt_logprobs = result.prompt_logprobs.get(request_id)
        if prompt_logprobs is not None:
            prompt_logprobs = _new_prompt_logprobs(request, prompt_logprobs, start)
        num_nans = result.num_nans_in_logits.get(request_id, 0)
        error = result.errors.get(request_id)
        if num_nans:
            error = RequestFailedError(f"logits had {num_nans} NaN values").to_engine_error()
        if error is not None:
            request.error = error
            self._end_running(request, RequestStatus.FINISHED_ERROR)
        elif token_ids:
            self._apply_tokens(request, token_ids)
            self.suspects.remove(request)
        elif prompt_logprobs is None:
            return
        emit(
            self._outputs,
            request,
            logprobs=result.logprobs.get(request_id),
            prompt_logprobs=prompt_logprobs,
            num_nans=num_nans,
        )

    def _apply_tokens(self, request: Request, token_ids: Sequence[int]) -> None:
        status = _append_tokens(request, token_ids)
        if status is None and request.num_output_tokens >= request.output_limit:
            # P's part ends with the first token; is_handed_off tells this from a real end.
            status = RequestStatus.FINISHED_LENGTH_CAPPED
        if status is not None:
            self._end_running(request, status)

    def _end_running(self, request: Request, status: RequestStatus) -> None:
        self.seats.on_end(request)
        self._leave_batch(request)
        self._finish(request, status)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Fence first, then free (rule K3): the ports end its sessions before any block changes
        hands.
        """
        request.status = status
        del self.requests[request.request_id]
        self._finished_req_ids.add(request.request_id)
        self._dissolve_forks(request)
        self.suspects.remove(request)
        kept = self.remote_decodes.request_finished(request)
        kept |= self.remote_prefills.request_finished(request)
        taken = [block.block_id for block in self.kv.take(request)]
        freed = [block_id for block_id in taken if block_id not in kept]
        if request.num_in_flight_tokens:
            self._deferred_block_ids.append((self._num_planned_steps, freed))
        else:
            self.kv.free_block_ids(freed)

    def _free_deferred_blocks(self) -> None:
        """Free what ended requests held while a step that used it was in flight."""
        num_done = self._num_planned_steps - len(self._in_flight)
        while self._deferred_block_ids and self._deferred_block_ids[0][0] <= num_done:
            self.kv.free_block_ids(self._deferred_block_ids.popleft()[1])

    def _remove_from_queues(self, request: Request) -> None:
        if request in self.running:
            self._leave_batch(request)
        elif request in self.kv_ready:
            self.kv_ready.remove(request)
        elif not (self.forks.remove(request) or self.remote_prefills.remove(request)):
            self._num_preempted -= request.status is RequestStatus.PREEMPTED
            if not self.remote_decodes.remove(request):
                self.waiting.remove_request(request)

    # ---- KV transfer

    def update_from_kv_transfer(self) -> None:
        """Apply what the ports report, then see who may have blocks now."""
        self._apply_kv_events()
        if self.pause_state is PauseState.UNPAUSED:
            self.remote_prefills.grant_probes(self._num_free_probe_seats)
            # Preempted requests come first, or a stream of small claims would keep them out for
            # ever.
            if not self._num_preempted:
                self.remote_prefills.grant_claims(self._waiting_since(), self._num_ahead())
            self.remote_decodes.ask_next()
            return
        is_all = self.pause_state is PauseState.PAUSED_ALL
        for request in self.remote_decodes.take_back(even_preempted=is_all):
            self.waiting.remove_request(request)
        if not is_all and self._num_preempted:
            self.remote_decodes.ask_preempted()

    def _kept_out(self) -> Iterator[Request]:
        """Requests that own all their blocks and find no place in the batch."""
        ready = (request for request in self.kv_ready if not request.is_probe)
        return itertools.islice(ready, self.seats.num_free, None)

    def _apply_kv_events(self) -> None:
        for port in self._ports:
            for event in port.take_events():
                self._apply_kv_event(event)

    def _apply_kv_event(self, event: KVEvent) -> None:
        if isinstance(event, BlocksFreed):
            self.kv.free_block_ids(event.block_ids)
            return
        request = event.request
        if self.requests.get(request.request_id) is not request:
            return  # it has ended meanwhile
        match event:
            case StartAllowed():
                if self.remote_decodes.allow(request, event.granted_time):
                    self.waiting.add_request(request)
            case StartForbidden():
                if self.remote_decodes.forbid(request):
                    self.waiting.remove_request(request)
            case StartDeferred():
                self.remote_decodes.defer(request)
            case BlocksClaimed():
                self.remote_prefills.claim(request, event.claimed_time)
            case BlocksConfirmed():
                self.kv.cache_blocks(request, event.num_tokens)
            case BlocksReturned():
                self.remote_prefills.give_back(request, event.kept)
            case BlocksLanded():
                request.kv_ready_time = event.landed_time
                request.record_event(EngineCoreEventType.KV_TRANSFER_FINISHED)
                request.pulled_token_ids = event.output_token_ids
                self._queue_first_step(request)
            case PullFinished():
                self._accept_pull(request, event.stats)
            case PullLost():
                self._rollback_first_step(request)
                self.remote_prefills.drop_claim(request)
                request.record_event(EngineCoreEventType.KV_LOST)
                emit(self._outputs, request, kv_lost=self._limit_to_cached(request, event.lost))
            case RequestFailed():
                is_void = event.error.code is ErrorCode.CANCELLED
                status = RequestStatus.FINISHED_ABORTED if is_void else RequestStatus.FINISHED_ERROR
                self.finish_requests([request.request_id], status, event.error)

    def _limit_to_cached(self, request: Request, lost: KVLost) -> KVLost:
        """D: what is confirmed and the next attempt will find: nothing without prefix caching, or
        if the sliding windows of those tokens have not come.
        """
        _, num_tokens = self.kv.get_computed_blocks(request, lost.num_confirmed_tokens)
        return replace(lost, num_confirmed_tokens=num_tokens)

    def _queue_first_step(self, request: Request) -> None:
        """D: all KV has landed: queue the first step after P's tokens, unless they are the last."""
        request.num_output_placeholders = len(request.pulled_token_ids)
        if request.is_output_complete:
            return
        self.remote_prefills.land(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = request.num_tokens
        if request.is_probe:
            self.kv_ready.appendleft(request)
        else:
            self.kv_ready.append(request)

    def _rollback_first_step(self, request: Request) -> None:
        """D: undo the request's first step, if it has begun. The request keeps its blocks."""
        if request in self.remote_prefills:
            return
        self._remove_from_queues(request)
        self._preempted_req_ids.add(request.request_id)
        request.num_computed_tokens = request.num_output_placeholders = 0
        request.held_result = request.first_scheduled_time = None
        self.remote_prefills.wait(request)

    def _accept_pull(self, request: Request, stats: KVTransferStats) -> None:
        """D: P has acknowledged that all blocks were right (rule K4): apply what was held."""
        request.kv_transfer_stats = stats
        request.is_kv_loaded = True
        request.record_event(EngineCoreEventType.KV_ACCEPTED)
        self.kv.cache_blocks(request, request.num_tokens)
        self._release_forks(request)
        if request in self.remote_prefills:
            self._queue_first_step(request)
        self._apply_pulled_tokens(request)
        held = request.held_result
        if held is not None and not request.status.is_finished:
            self._apply_step(request, held.num_tokens, held.token_ids, held.result)
        request.held_result = None

    def _apply_pulled_tokens(self, request: Request) -> None:
        """D: P's tokens are the request's own now; one of them may end it."""
        pulled, request.pulled_token_ids = request.pulled_token_ids, ()
        status = _append_tokens(request, pulled)
        if status is not None:
            self._remove_from_queues(request)
            self._finish(request, status)
            emit(self._outputs, request)

    def _supersede(self, earlier: Request, request: Request) -> None:
        """A later attempt of the same request takes over; nobody is told of the earlier one's end.

        What was confirmed of its KV is in the prefix cache, where the later one finds it. Its forks
        wait for that one.
        """
        assert request.core_request.attempt > earlier.core_request.attempt, (
            "the front end refuses others"
        )
        forks = self.forks.take(earlier)
        self._remove_from_queues(earlier)
        self._finish(earlier, RequestStatus.FINISHED_ABORTED)
        for fork in forks:
            if find_source(fork, {request.request_id: request}) is request:
                self.forks.add(request, fork)
            else:
                self.waiting.add_request(fork)


def _append_tokens(request: Request, token_ids: Sequence[int]) -> RequestStatus | None:
    """Put tokens into the places that were kept for them; return the status of the request's end if
    one of them is the last.
    """
    request.num_output_placeholders -= len(token_ids)
    for token_id in token_ids:
        request.append_output_token_ids((token_id,))
        status = check_stop(request)
        if status is not None:
            return status
    return None


def _is_preempted(request: Request) -> bool:
    return request.status is RequestStatus.PREEMPTED


def _is_probe(request: Request) -> bool:
    return request.is_probe


def _has_begun(request: Request) -> bool:
    """Was it running once, here or at another worker?"""
    return request.is_redrive or _is_preempted(request)


def _is_prompt_computed(request: Request) -> bool:
    is_ready = not request.needs_remote_kv and request.num_slots > 0
    return is_ready and request.num_finished_tokens >= request.num_prompt_tokens


def _new_prompt_logprobs(
    request: Request, logprobs: LogprobsLists, start: int
) -> LogprobsLists | None:
    """Return those not emitted before, of a chunk that begins at token `start`.

    After a preemption the prompt is computed again.
    """
    num_known = request.num_emitted_prompt_logprobs - start
    if num_known >= len(logprobs):
        return None
    request.num_emitted_prompt_logprobs = start + len(logprobs)
    return logprobs[max(num_known, 0) :]
