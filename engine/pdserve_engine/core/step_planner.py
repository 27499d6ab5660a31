"""Plans one step: which requests compute how many tokens, and which get or lose blocks for it.

There are no prefill and decode phases: every request catches up from num_computed_tokens to its
last known token, running requests first, then waiting ones. With scheduling_mode "v0" prompts are
computed whole and apart from decodes, as vLLM V0 did.
"""

import enum
from collections.abc import Callable, Iterable

from pdserve_common.types.engine import EngineCoreEventType
from pdserve_engine.config import SchedulerConfig
from pdserve_engine.core.admission import Admission
from pdserve_engine.core.features.drafts import Drafts
from pdserve_engine.core.features.encoder_cache_manager import EncoderCacheManager
from pdserve_engine.core.in_flight import InFlight
from pdserve_engine.core.request_containers import RequestContainers
from pdserve_engine.core.step_plan import StepPlan
from pdserve_engine.kv.kv_cache_manager import ComputedBlocks, KVCacheManager
from pdserve_engine.request.request import Request, RequestStatus
from pdserve_engine.request.sched_output import NewRequestData

# Prompts that have to wait for a place among the partial prefills and are overtaken in one step.
MAX_SKIPPED = 16


class _Outcome(enum.Enum):
    """What became of a waiting request."""

    ADMITTED = enum.auto()
    # It would not fit, and those behind it have to wait as well.
    NO_ROOM = enum.auto()
    # It would be computed in chunks, as too many are already; shorter prompts may overtake it.
    NO_PARTIAL_PREFILL = enum.auto()


class Planner:
    """Takes requests into a plan, and into the batch or out of it."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        containers: RequestContainers,
        admission: Admission,
        in_flight: InFlight,
        encoder_cache: EncoderCacheManager,
        drafts: Drafts | None,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._drafts = drafts
        self._kv = kv
        self._containers = containers
        self._admission = admission
        self._in_flight = in_flight
        self._encoder_cache = encoder_cache
        self._clock = clock

    def plan(self, *, admits_new: bool) -> StepPlan:
        """Plan a step. Unless it `admits_new`, waiting requests that have not begun stay where they
        are.
        """
        plan = StepPlan(
            self._config.max_num_batched_tokens,
            admits_new,
            tells_tokens=self._config.num_stages > 1,
        )
        isolated = self._containers.isolated.next()
        if isolated is not None:
            self._schedule_isolated(isolated, plan)
        elif self._config.scheduling_mode == "v0":
            self._schedule_phase(plan)
        else:
            self._schedule_probes(plan)
            self._schedule_running(plan)
            self._schedule_newcomers(plan)
        if self._drafts is not None and isolated is None:
            self._drafts.add(plan)
        return plan

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
        if plan.admits_new:
            self._schedule_waiting(plan)
        else:
            self._schedule_preempted(plan)

    # ---- by where requests are

    def _schedule_probes(self, plan: StepPlan) -> None:
        """Before all else: they are to find out in time that a worker works, however busy it is."""
        self._schedule_those(self._containers.running.probes(), plan)
        kv_ready, waiting = self._containers.kv_ready, self._containers.waiting
        if kv_ready and kv_ready.peek().is_probe:
            self._schedule_kv_ready(plan, is_probe=True)
        while plan.admits_new and len(waiting):
            request = waiting.peek_request()
            if not (request.is_probe and self._admission.may_add(request, plan)):
                return
            if self._admit(request, plan) is not _Outcome.ADMITTED:
                return

    def _schedule_running(self, plan: StepPlan) -> None:
        self._schedule_those(list(self._containers.running), plan)

    def _schedule_those(self, running: Iterable[Request], plan: StepPlan) -> None:
        is_pipelined = self._config.num_stages > 1
        for request in running:
            if plan.token_budget == 0 or plan.needs_drain:
                return
            if not request.can_continue:  # it may have been preempted in this step
                continue
            if is_pipelined and request.progress.num_output_placeholders:
                continue  # the first stage is told of a token only when it has come back
            if request not in plan.scheduled:  # else it is a probe
                self._continue_running(request, plan)

    def _schedule_kv_ready(
        self, plan: StepPlan, *, is_decode: bool | None = None, is_probe: bool = False
    ) -> None:
        """Requests that own their prompt's blocks come before the waiting ones.

        `is_decode` takes only those that have one token left to compute, or only the others;
        `is_probe` only probes.
        """
        kv_ready = self._containers.kv_ready
        while kv_ready and self._admission.may_add(kv_ready.peek(), plan):
            request = kv_ready.peek()
            if is_decode is not None and is_decode != (request.num_uncomputed_tokens == 1):
                return
            if is_probe and not request.is_probe:
                return
            start = request.progress.num_computed_tokens
            num_tokens = self._chunk(request, start, request.num_uncomputed_tokens, plan)
            if not num_tokens or self._kv.allocate_slots(request, start + num_tokens) is None:
                return
            self._start_running(request, num_tokens, plan)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        containers, waiting = self._containers, self._containers.waiting
        if containers.remote_prefills.come_before(containers.waiting_since):
            self._schedule_preempted(plan)
            return
        skipped: list[Request] = []
        while len(waiting):
            request = waiting.peek_request()
            if request.is_probe:  # it has had its turn
                skipped.append(waiting.pop_request())
                continue
            if not self._admission.may_add(request, plan):
                break
            if not (request.has_begun or containers.decode_slots.may_run()):
                break
            outcome = self._admit(request, plan)
            if outcome is _Outcome.NO_ROOM:
                break
            if outcome is _Outcome.NO_PARTIAL_PREFILL:
                if len(skipped) >= MAX_SKIPPED:
                    break
                skipped.append(waiting.pop_request())
        for request in reversed(skipped):
            waiting.prepend_request(request)

    def _schedule_preempted(self, plan: StepPlan) -> None:
        """While nothing new is taken, those that had been running still finish."""
        if self._containers.num_preempted == 0:
            return
        for request in [r for r in self._containers.waiting if r.status is RequestStatus.PREEMPTED]:
            if not self._admission.may_add(request, plan):
                return
            self._admit(request, plan)

    def _schedule_isolated(self, isolated: Request, plan: StepPlan) -> None:
        """Plan a step for one request of a step that failed, and for no other."""
        if isolated.status is RequestStatus.RUNNING:
            if not isolated.is_output_complete:
                self._continue_running(isolated, plan)
        elif not self._admit_isolated(isolated, plan):
            # Others hold the slot or the blocks it needs: they first.
            self._schedule_running(plan)
            self._schedule_kv_ready(plan)

    def _admit_isolated(self, isolated: Request, plan: StepPlan) -> bool:
        if not self._admission.may_add(isolated, plan):
            return False
        return self._admit(isolated, plan) is _Outcome.ADMITTED

    # ---- one request

    def _continue_running(self, request: Request, plan: StepPlan) -> None:
        progress = request.progress
        start = progress.num_computed_tokens
        num_left = num_tokens = request.num_uncomputed_tokens
        if num_left > 1 or request.mm_features:
            num_tokens = self._chunk(request, start, num_left, plan)
            if not num_tokens:
                return
        target = start + num_tokens
        new_block_ids = None
        if target > progress.num_slots:
            new_block_ids = self._allocate_or_preempt(request, target, plan)
            if new_block_ids is None:
                return
        self._take(request, num_tokens, num_left, plan)
        plan.cached_reqs[request] = new_block_ids

    def _take(self, request: Request, num_tokens: int, num_left: int, plan: StepPlan) -> None:
        if request.mm_features:
            self._encoder_cache.allocate(request, request.progress.num_computed_tokens, num_tokens)
        plan.take(request, num_tokens, num_left)

    def _chunk(self, request: Request, start: int, num_tokens: int, plan: StepPlan) -> int:
        """Return how many of `num_tokens` tokens from `start` on the step may compute; 0 if there
        is no room for a picture.
        """
        threshold = self._config.long_prefill_token_threshold
        if threshold and self._config.has_chunked_prefill:
            num_tokens = min(num_tokens, threshold)
        num_tokens = min(num_tokens, plan.token_budget)
        if request.mm_features:
            num_tokens = self._encoder_cache.num_fitting(request, start, num_tokens)
        return num_tokens

    def _admit(self, request: Request, plan: StepPlan) -> _Outcome:
        """Give a request that waits its blocks and its first tokens."""
        blocks, num_hit_tokens = self._find_cached(request)
        num_left = request.num_tokens - num_hit_tokens
        num_tokens = self._chunk(request, num_hit_tokens, num_left, plan)
        if not num_tokens:
            return _Outcome.NO_ROOM
        if num_tokens < num_left:
            if not self._config.has_chunked_prefill:
                return _Outcome.NO_ROOM
            if plan.num_partial_prefills >= self._config.max_num_partial_prefills:
                return _Outcome.NO_PARTIAL_PREFILL
        # The whole prompt has to fit besides what admitted requests still need, or they would
        # evict each other.
        if not self._admission.can_allocate(request, blocks, plan):
            return _Outcome.NO_ROOM
        if self._kv.allocate_slots(request, num_hit_tokens + num_tokens, blocks) is None:
            return _Outcome.NO_ROOM
        if not self._containers.remote_decodes.may_start(request):
            self._kv.free(request)
            return _Outcome.NO_ROOM
        if plan.num_reserved_blocks is not None:
            plan.num_reserved_blocks += self._admission.num_missing_blocks(request)
        self._kv.record_lookup(request, num_hit_tokens)
        request.progress.found(num_hit_tokens)
        self._start_running(request, num_tokens, plan)
        self._containers.remote_decodes.start(request)
        return _Outcome.ADMITTED

    def _find_cached(self, request: Request) -> tuple[ComputedBlocks, int]:
        if not request.reads_prefix_cache:
            return self._kv.empty_computed_blocks, 0
        return self._kv.get_computed_blocks(request, request.num_tokens - 1)

    def _start_running(self, request: Request, num_tokens: int, plan: StepPlan) -> None:
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self._clock()
        request.record_event(EngineCoreEventType.SCHEDULED)
        self._containers.start(request)
        self._take(request, num_tokens, request.num_uncomputed_tokens, plan)
        plan.new_reqs.append(
            NewRequestData(
                request_id=request.request_id,
                all_token_ids=(*request.all_token_ids, *request.handoff.pulled_token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=request.sampling_params,
                seed=request.seed,
                eos_token_id=request.core_request.eos_token_id,
                block_ids=self._kv.get_block_ids(request.request_id),
                num_computed_tokens=request.progress.num_computed_tokens,
                grammar=request.grammar,
                adapter=request.adapter,
                pooling_params=request.pooling_params,
                mm_features=request.mm_features,
            )
        )

    # ---- its blocks

    def _allocate_or_preempt(
        self, request: Request, target: int, plan: StepPlan
    ) -> tuple[list[int], ...] | None:
        """Make room for the first `target` tokens, taking blocks from the least important running
        requests if need be. None: the request itself had to give way, or nothing may be taken yet.
        """
        while True:
            block_ids = self._kv.allocate_slots(request, target)
            if block_ids is not None:
                return block_ids
            if self._containers.remote_prefills.reclaim():
                continue
            if self._in_flight:
                plan.needs_drain = True
                return None
            victim = self._choose_victim()
            plan.give_back(victim)
            plan.has_preempted = True
            self._containers.preempt(victim)
            if victim is request:
                return None

    def _choose_victim(self) -> Request:
        # None whose first step is speculative: rolled back, it still keeps its blocks.
        victims = [r for r in self._containers.running if not r.handoff.needs_remote_kv]
        return max(victims) if self._config.scheduling_policy == "priority" else victims[-1]
