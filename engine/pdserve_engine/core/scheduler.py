"""Decides each step which requests compute how many tokens: vLLM V1's scheduler, a token budget.

There are no prefill and decode phases: every request catches up from num_computed_tokens to
num_tokens, running requests first, then waiting ones. Owned by the engine thread. Where a request
is, by status:

    WAITING, PREEMPTED       `waiting`
    WAITING_FOR_REMOTE_KVS   `remote_kvs`: a ticket without blocks, or a pull that owns its blocks;
                             `kv_ready` when they have come and there is no place in the batch yet
    RUNNING                  `running`
"""

import heapq
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdserve_common.engine_types import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineError,
    ErrorCode,
    KVTransferStats,
    PrefillStats,
    SchedulerStats,
)
from pdserve_engine.config import SchedulerConfig
from pdserve_engine.core.block_pool import KVCacheBlock
from pdserve_engine.core.kv_cache_manager import KVCacheManager
from pdserve_engine.core.request import Request, RequestStatus
from pdserve_engine.core.request_queue import make_request_queue
from pdserve_engine.core.sched_output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from pdserve_engine.core.stop import check_stop
from pdserve_engine.kv_transfer.base import KVConnector, KVConnectorMetadata

logger = logging.getLogger(__name__)

# Outputs by the client_index of the front end they go to.
ClientOutputs = dict[int, list[EngineCoreOutput]]


@dataclass(slots=True)
class _StepPlan:
    """The step being built."""

    token_budget: int
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_reqs: list[NewRequestData] = field(default_factory=list)
    cached_reqs: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)

    def take(self, request: Request, num_tokens: int) -> None:
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.token_budget -= num_tokens

    def give_back(self, request: Request) -> None:
        self.token_budget += self.num_scheduled_tokens.pop(request.request_id, 0)
        self.cached_reqs.pop(request.request_id, None)


class Scheduler:
    """The state of all requests of an engine."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        connector: KVConnector | None = None,
    ) -> None:
        self.config = config
        self.kv = kv_cache_manager
        self.connector = connector
        self.requests: dict[str, Request] = {}
        self.waiting = make_request_queue(config.scheduling_policy)
        self.running: list[Request] = []
        self.remote_kvs: dict[str, Request] = {}
        self.kv_ready: deque[Request] = deque()
        self.num_preemptions = 0
        self._finished_req_ids: set[str] = set()
        self._pending_outputs: ClientOutputs = {}
        # A heap of (deadline, order of arrival, request); ids may come again, requests do not.
        self._deadlines: list[tuple[float, int, Request]] = []
        self._num_added = 0

    # ---- requests in and out
    # -------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Take a request. Its id must not be in use."""
        assert request.request_id not in self.requests, "the front end refuses duplicates"
        self.requests[request.request_id] = request
        request.record_event(EngineCoreEventType.QUEUED)
        if request.request.deadline is not None:
            entry = (request.request.deadline, self._num_added, request)
            heapq.heappush(self._deadlines, entry)
            if len(self._deadlines) > 2 * len(self.requests) + 64:  # most are of ended requests
                self._deadlines = [e for e in self._deadlines if not e[2].status.is_finished]
                heapq.heapify(self._deadlines)
        self._num_added += 1
        if request.do_remote_prefill or request.do_remote_decode:
            if self.connector is None:
                error = EngineError(
                    code=ErrorCode.INVALID_ARGUMENT,
                    message="kv_transfer_params is set, this worker has no KV connector",
                )
                self.waiting.add_request(request)
                self.finish_requests([request.request_id], RequestStatus.FINISHED_ERROR, error)
                return
            self.connector.on_new_request(request)
        if request.needs_remote_kv:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self.remote_kvs[request.request_id] = request
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
            self._emit(self._pending_outputs, request, self._make_output(request))

    def take_pending_outputs(self) -> ClientOutputs:
        """Return the terminal outputs of requests that ended between steps."""
        outputs, self._pending_outputs = self._pending_outputs, {}
        return outputs

    def expire_deadlines(self, now: float) -> None:
        """End requests whose deadline has passed."""
        error = EngineError(
            code=ErrorCode.DEADLINE_EXCEEDED, message="the request's deadline passed"
        )
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, _, request = heapq.heappop(self._deadlines)
            self.finish_requests([request.request_id], RequestStatus.FINISHED_ERROR, error)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline (time.monotonic) of a request that is not over."""
        while self._deadlines and self._deadlines[0][2].status.is_finished:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def has_requests(self) -> bool:
        """Is any request here, running or not?"""
        return bool(self.requests)

    def has_schedulable_requests(self) -> bool:
        """Could the next step compute something? Requests that wait for remote KV do not count."""
        return bool(self.running or self.kv_ready or len(self.waiting))

    def has_finished_requests(self) -> bool:
        """Does the model runner still have to hear of ended requests?"""
        return bool(self._finished_req_ids)

    # ---- one step
    # ------------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan the next step."""
        self.update_from_kv_transfer()
        plan = _StepPlan(self.config.max_num_batched_tokens)
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_kv_ready(plan)
            self._schedule_waiting(plan)
        return self._build_output(plan)

    def update_from_output(
        self, scheduled: SchedulerOutput, result: ModelRunnerOutput
    ) -> ClientOutputs:
        """Take in what the step computed; returns every client's outputs."""
        outputs = self.take_pending_outputs()
        sampled = dict(zip(result.request_ids, result.sampled_token_ids, strict=True))
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:  # aborted while the model ran
                continue
            request.num_computed_tokens += num_tokens
            self.kv.cache_blocks(request, request.num_computed_tokens)
            num_nans = result.num_nans_in_logits.get(request_id, 0)
            token_ids = sampled.get(request_id, ())
            if num_nans:
                request.error = EngineError(
                    code=ErrorCode.INTERNAL, message=f"logits had {num_nans} NaN values"
                )
                self._end_running(request, RequestStatus.FINISHED_ERROR)
            elif token_ids:
                self._append_tokens(request, token_ids)
            else:
                continue
            self._emit(outputs, request, self._make_output(request, num_nans))
        return outputs

    def update_from_kv_transfer(self) -> None:
        """Take in what the connector reports: announcements, finished and failed pulls, returned
        blocks.
        """
        if self.connector is None:
            return
        news = self.connector.take_output()
        self.kv.free_block_ids(news.released_block_ids)
        self.kv.free_block_ids(news.landed_block_ids)
        for request_id in news.ready_to_load:
            request = self.remote_kvs.pop(request_id, None)
            if request is not None:
                request.status = RequestStatus.WAITING
                self.waiting.add_request(request)
        for request_id, stats in news.finished_recving.items():
            request = self.remote_kvs.pop(request_id, None)
            if request is not None:
                self._accept_transfer(request, stats)
        for request_id, error in news.failed_recving.items():
            if request_id in self.requests:
                self.requests[request_id].record_event(EngineCoreEventType.KV_LOST)
                self.finish_requests([request_id], RequestStatus.FINISHED_ERROR, error)

    def _accept_transfer(self, request: Request, stats: KVTransferStats) -> None:
        """D: the prompt's KV is here and P has confirmed it (rule K4); go on after P's tokens."""
        assert self.connector is not None
        request.kv_transfer_stats = stats
        request.kv_ready_time = time.monotonic()
        request.is_kv_loaded = True
        request.num_computed_tokens = request.num_prompt_tokens
        request.record_event(EngineCoreEventType.KV_ACCEPTED)
        self.kv.cache_blocks(request, request.num_computed_tokens)
        for token_id in self.connector.transferred_output_token_ids(request.request_id):
            request.append_output_token_ids((token_id,))
            status = check_stop(request)
            if status is not None:
                self._finish(request, status)
                self._emit(self._pending_outputs, request, self._make_output(request))
                return
        self.kv_ready.append(request)

    def make_stats(self, *, step_num_tokens: int, step_duration_s: float) -> SchedulerStats:
        """Return the load after a step."""
        pool = self.kv.block_pool
        waiting = [*self.waiting, *self.remote_kvs.values()]
        return SchedulerStats(
            num_running_reqs=len(self.running) + len(self.kv_ready),
            num_waiting_reqs=len(waiting),
            num_waiting_tokens=sum(r.num_tokens - r.num_computed_tokens for r in self.waiting),
            num_total_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_cached_blocks=pool.num_cached_blocks,
            num_open_kv_sessions=self.connector.num_open_sessions() if self.connector else 0,
            prefix_cache_queries=self.kv.prefix_cache_queries,
            prefix_cache_hits=self.kv.prefix_cache_hits,
            num_preemptions=self.num_preemptions,
            step_num_tokens=step_num_tokens,
            step_duration_s=step_duration_s,
        )

    # ---- planning
    # ------------------------------------------------------------------------------------------

    def _schedule_running(self, plan: _StepPlan) -> None:
        for request in list(self.running):
            if plan.token_budget == 0:
                return
            if request.status != RequestStatus.RUNNING:  # preempted in this step
                continue
            behind = request.num_tokens_with_spec - request.num_computed_tokens
            num_tokens = min(behind, plan.token_budget)
            new_block_ids = self._allocate_or_preempt(request, num_tokens, plan)
            if new_block_ids is None:
                return
            plan.take(request, num_tokens)
            plan.cached_reqs[request.request_id] = (new_block_ids, request.num_computed_tokens)

    def _allocate_or_preempt(
        self, request: Request, num_tokens: int, plan: _StepPlan
    ) -> list[int] | None:
        """Make room for `num_tokens` more, taking blocks from the least important running request
        if need be.
        """
        while True:
            block_ids = self.kv.allocate_slots(request, request.num_computed_tokens + num_tokens)
            if block_ids is not None:
                return block_ids
            victim = max(self.running) if self._is_priority else self.running[-1]
            self._preempt(victim, plan)
            if victim is request:
                return None

    def _preempt(self, request: Request, plan: _StepPlan) -> None:
        plan.give_back(request)
        plan.preempted.add(request.request_id)
        self.running.remove(request)
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.record_event(EngineCoreEventType.PREEMPTED)
        self.waiting.prepend_request(request)

    def _schedule_kv_ready(self, plan: _StepPlan) -> None:
        """Requests whose KV has arrived own their blocks: they come before the waiting ones."""
        while self.kv_ready and plan.token_budget > 0 and self._has_place:
            request = self.kv_ready[0]
            num_tokens = min(request.num_tokens - request.num_computed_tokens, plan.token_budget)
            target = request.num_computed_tokens + num_tokens
            if self.kv.allocate_slots(request, target) is None:
                return
            self.kv_ready.popleft()
            self._start_running(request, num_tokens, plan)

    def _schedule_waiting(self, plan: _StepPlan) -> None:
        while len(self.waiting) and plan.token_budget > 0 and self._has_place:
            request = self.waiting.peek_request()
            max_hit = (
                request.num_prompt_tokens if request.needs_remote_kv else request.num_tokens - 1
            )
            blocks, num_hit_tokens = self.kv.get_computed_blocks(request, max_hit)
            if request.needs_remote_kv:
                is_admitted = self._start_load(request, blocks, num_hit_tokens)
            else:
                is_admitted = self._admit(request, blocks, num_hit_tokens, plan)
            if not is_admitted:
                return

    def _admit(
        self, request: Request, blocks: Sequence[KVCacheBlock], num_hit_tokens: int, plan: _StepPlan
    ) -> bool:
        num_tokens = request.num_tokens - num_hit_tokens
        if num_tokens > plan.token_budget and not self.config.enable_chunked_prefill:
            return False
        # The whole prompt has to fit besides what running requests still need, or they would evict
        # each other.
        if not self.kv.can_allocate(request.num_tokens, blocks, num_spare=self._reserved_blocks()):
            return False
        num_tokens = min(num_tokens, plan.token_budget)
        if self.kv.allocate_slots(request, num_hit_tokens + num_tokens, blocks) is None:
            return False
        self.waiting.pop_request()
        self._record_admission(request, num_hit_tokens)
        request.num_computed_tokens = num_hit_tokens
        self._start_running(request, num_tokens, plan)
        return True

    def _start_load(
        self, request: Request, blocks: Sequence[KVCacheBlock], num_hit_tokens: int
    ) -> bool:
        """D: allocate the prompt's blocks and have the connector pull what is not cached here."""
        assert self.connector is not None
        num_external, _ = self.connector.get_num_new_matched_tokens(request, num_hit_tokens)
        if num_external is None:  # the announcement was withdrawn; its failure is on the way
            self.waiting.pop_request()
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self.remote_kvs[request.request_id] = request
            return True
        num_prompt = request.num_prompt_tokens
        if not self.kv.can_allocate(num_prompt + 1, blocks, num_spare=self._reserved_blocks()):
            return False
        if self.kv.allocate_slots(request, num_prompt, blocks) is None:
            return False
        self.waiting.pop_request()
        self._record_admission(request, num_hit_tokens)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_external_tokens = num_external
        self.remote_kvs[request.request_id] = request
        block_ids = self.kv.get_block_ids(request.request_id)
        self.connector.update_state_after_alloc(request, block_ids, num_external)
        return True

    def _start_running(self, request: Request, num_tokens: int, plan: _StepPlan) -> None:
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
            request.record_event(EngineCoreEventType.SCHEDULED)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        plan.take(request, num_tokens)
        plan.new_reqs.append(
            NewRequestData(
                request_id=request.request_id,
                all_token_ids=tuple(request.all_token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=request.sampling_params,
                seed=request.seed,
                eos_token_id=request.request.eos_token_id,
                block_ids=self.kv.get_block_ids(request.request_id),
                num_computed_tokens=request.num_computed_tokens,
            )
        )

    def _record_admission(self, request: Request, num_hit_tokens: int) -> None:
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = min(num_hit_tokens, request.num_prompt_tokens)
            self.kv.record_lookup(request.num_prompt_tokens, request.num_cached_tokens)

    @property
    def _has_place(self) -> bool:
        return len(self.running) < self.config.max_num_seqs

    @property
    def _is_priority(self) -> bool:
        return self.config.scheduling_policy == "priority"

    def _reserved_blocks(self) -> int:
        """Blocks admitted requests still need for their known tokens, and one more for each.

        Pulls count: they cannot be preempted, so their first decode step must find its block.
        """
        admitted = [*self.running, *self.kv_ready]
        admitted += [r for r in self.remote_kvs.values() if self.kv.num_blocks_of(r.request_id)]
        return sum(
            self.kv.blocks_for(request.num_tokens) + 1 - self.kv.num_blocks_of(request.request_id)
            for request in admitted
        )

    def _build_output(self, plan: _StepPlan) -> SchedulerOutput:
        cached = CachedRequestData(
            request_ids=list(plan.cached_reqs),
            new_block_ids=[(ids,) if ids else None for ids, _ in plan.cached_reqs.values()],
            num_computed_tokens=[num for _, num in plan.cached_reqs.values()],
        )
        finished, self._finished_req_ids = frozenset(self._finished_req_ids), set()
        metadata = self.connector.build_connector_meta() if self.connector else None
        return SchedulerOutput(
            scheduled_new_reqs=plan.new_reqs,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=plan.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(plan.num_scheduled_tokens.values()),
            finished_req_ids=finished,
            preempted_req_ids=frozenset(plan.preempted),
            kv_connector_metadata=metadata or KVConnectorMetadata(),
        )

    # ---- results
    # -------------------------------------------------------------------------------------------

    def _append_tokens(self, request: Request, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            request.append_output_token_ids((token_id,))
            status = check_stop(request)
            if status is not None:
                self._end_running(request, status)
                return
        if request.do_remote_decode:
            # P's part ends with the first token; is_handed_off tells this from a real end.
            self._end_running(request, RequestStatus.FINISHED_LENGTH_CAPPED)

    def _end_running(self, request: Request, status: RequestStatus) -> None:
        self.running.remove(request)
        self._finish(request, status)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Fence first, then free (rule K3): the connector ends its sessions before any block
        changes hands.
        """
        request.status = status
        del self.requests[request.request_id]
        self._finished_req_ids.add(request.request_id)
        block_ids = self.kv.get_block_ids(request.request_id)
        if self.connector is not None and self.connector.request_finished(request, block_ids):
            self.kv.take(request)
        else:
            self.kv.free(request)

    def _remove_from_queues(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
        elif request in self.kv_ready:
            self.kv_ready.remove(request)
        elif self.remote_kvs.pop(request.request_id, None) is None:
            self.waiting.remove_request(request)

    def _make_output(self, request: Request, num_nans: int = 0) -> EngineCoreOutput:
        first = request.num_emitted_tokens
        request.num_emitted_tokens = request.num_output_tokens
        new_token_ids = tuple(request.all_token_ids[request.num_prompt_tokens + first :])
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            first_token_index=first,
            attempt=request.request.attempt,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            events=request.take_events(),
            num_nans_in_logits=num_nans,
            kv_transfer_params=request.kv_transfer_params if request.is_handed_off else None,
            prefill_stats=_prefill_stats(request) if first == 0 and new_token_ids else None,
            kv_transfer_stats=request.take_kv_transfer_stats() if new_token_ids else None,
        )

    @staticmethod
    def _emit(outputs: ClientOutputs, request: Request, output: EngineCoreOutput) -> None:
        outputs.setdefault(request.request.client_index, []).append(output)


def _prefill_stats(request: Request) -> PrefillStats | None:
    """None on D after a pull: P has sent its own."""
    if request.is_kv_loaded or request.first_scheduled_time is None:
        return None
    return PrefillStats(
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=max(request.num_cached_tokens, 0),
        queue_s=request.first_scheduled_time - request.queued_time,
        prefill_s=time.monotonic() - request.first_scheduled_time,
    )
