"""vLLM V1's scheduler, as an engine calls it: requests come in, steps go out, results come back.

Owned by the engine thread. It has the requests in `RequestContainers`, plans steps with `Planner`
(step_planner.py decides which requests compute how many tokens), keeps them in `InFlight`, and
applies what comes with `Results` and `KVEvents`.

Steps may be planned before the ones before them have finished (async scheduling). While a step is
in flight its blocks are nobody else's: requests that end give them up when the step is over, and
preemption waits until nothing is in flight (`needs_drain`).
"""

import enum
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pdserve_common.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    PdserveError,
    RequestFailedError,
)
from pdserve_common.types.capabilities import adapter_not_held
from pdserve_common.types.engine import (
    DraftStats,
    EngineCoreEventType,
    EngineError,
    SchedulerStats,
)
from pdserve_common.types.tensors import TensorNotHeldError
from pdserve_engine.config import SchedulerConfig
from pdserve_engine.core.admission import Admission
from pdserve_engine.core.features.adapter_pool import AdapterPool
from pdserve_engine.core.features.draft_prefills import DraftPrefills
from pdserve_engine.core.features.drafts import Drafts
from pdserve_engine.core.features.encoder_cache_manager import (
    EncoderCacheManager,
    encoder_cache_size,
)
from pdserve_engine.core.features.forks import find_source
from pdserve_engine.core.features.pictures import TENSOR_NOT_HELD, refuse_pictures
from pdserve_engine.core.features.waiting_for_fsm import CompileGrammar, WaitingForFSM
from pdserve_engine.core.handoff.kv_events import KVEvents
from pdserve_engine.core.handoff.prefixes import PrefixLoans, PrefixPulls
from pdserve_engine.core.in_flight import InFlight
from pdserve_engine.core.request_containers import RequestContainers
from pdserve_engine.core.results import Results
from pdserve_engine.core.step_plan import DECODE, StepPlan
from pdserve_engine.core.step_planner import Planner
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.kv_transfer.ports import (
    ConsumerPort,
    KVPort,
    NoConnector,
    OffloadPort,
    PrefixConsumerPort,
    PrefixProducerPort,
    ProducerPort,
)
from pdserve_engine.request.deadlines import Deadlines
from pdserve_engine.request.handoff import HeldResult
from pdserve_engine.request.outputs import ClientOutputs, Outputs
from pdserve_engine.request.request import Request, RequestStatus
from pdserve_engine.request.sched_output import ModelRunnerOutput, SchedulerOutput
from pdserve_engine.spec_decode.proposer import Proposer

if TYPE_CHECKING:
    from pdserve_engine.models.config import VisionConfig


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
        prefix_producer: PrefixProducerPort | None = None,
        prefix_consumer: PrefixConsumerPort | None = None,
        offload: OffloadPort | None = None,
        compile_grammar: CompileGrammar | None = None,
        adapters: AdapterPool | None = None,
        proposer: Proposer | None = None,
        vision: "VisionConfig | None" = None,
        wakeup: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wakeup` is called on any thread when `update_from_kv_transfer` has something to apply
        that no port reports: a grammar was compiled.
        """
        self.config = config
        self.kv = kv_cache_manager
        self.pause_state = PauseState.UNPAUSED
        # Set when a step could not be planned without a preemption while others were in flight.
        self.needs_drain = False
        self.adapters = AdapterPool() if adapters is None else adapters
        self._clock = clock
        self._deadlines = Deadlines()
        self._outputs = Outputs()
        self._vision = vision
        self.encoder_cache = EncoderCacheManager(
            encoder_cache_size(vision, config.max_num_batched_tokens)
        )
        self.in_flight = InFlight(self.kv, self.encoder_cache)
        self.containers = RequestContainers(
            config,
            self.kv,
            self.in_flight,
            self.encoder_cache,
            producer=producer,
            consumer=consumer,
            prefix_consumer=prefix_consumer,
            offload=offload,
            adapters=self.adapters,
            waiting_for_fsm=WaitingForFSM(compile_grammar, wakeup),
            clock=clock,
        )
        self.requests = self.containers.requests
        self.waiting = self.containers.waiting
        self.running = self.containers.running
        self._offload: OffloadPort = NoConnector() if offload is None else offload
        self._prefix_loans = PrefixLoans(prefix_producer, self.kv)
        self._admission = Admission(config, self.kv, self.containers)
        self._drafts = None if proposer is None else Drafts(config, self.kv, proposer)
        self._draft_prefills = DraftPrefills(config, self.kv, self.containers, self._drafts)
        self._planner = Planner(
            config,
            self.kv,
            self.containers,
            self._admission,
            self.in_flight,
            self.encoder_cache,
            self._drafts,
            clock,
        )
        self._results = Results(
            self.kv, self.containers, self._admission, self._outputs, on_draft=self._on_draft
        )
        self._kv_events = KVEvents(
            self.kv, self.containers, self._results, self.in_flight, self._outputs
        )

    # ---- requests in and out

    def add_request(self, request: Request) -> None:
        """Take a request. If its id is in use, it supersedes an earlier attempt."""
        earlier = self.requests.get(request.request_id)
        if earlier is not None:
            self._supersede(earlier, request)
        self.requests[request.request_id] = request
        request.record_event(EngineCoreEventType.QUEUED)
        self._deadlines.add(request)
        self._put(request)

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
            if request is not None:
                self._results.finish(request, status, error)

    def take_outputs(self) -> ClientOutputs:
        """Return what is new since the last call, by client."""
        return self._outputs.take()

    def expire_deadlines(self, now: float) -> None:
        """End requests whose deadline has passed. Those whose prefix is overdue are queued by the
        next `update_from_kv_transfer`.
        """
        error = DeadlineExceededError("the request's deadline passed").to_engine_error()
        for request in self._deadlines.take_passed(now):
            self.finish_requests([request.request_id], RequestStatus.FINISHED_ERROR, error)

    def next_deadline(self) -> float | None:
        """Return the earliest deadline (by the clock) of a request that is not over, or of the wait
        for its prefix.
        """
        waits = (each.next_deadline for each in self.containers.prefixes)
        deadlines = (self._deadlines.next(), *waits)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def has_requests(self) -> bool:
        """Is any request here, running or not?"""
        return bool(self.requests)

    def has_admitted_requests(self) -> bool:
        """Is any request computed, half computed, or does it hold or pull blocks?"""
        containers = self.containers
        is_running = (
            containers.running or containers.kv_ready or containers.num_preempted or self.in_flight
        )
        is_pulling = any(containers.prefixes) or any(containers.remote_prefills.with_blocks())
        return bool(is_running or is_pulling)

    def has_schedulable_requests(self) -> bool:
        """Could the next step compute something? Requests that wait for remote KV do not count."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return False
        # After a speculative first step it waits as well.
        if self.containers.kv_ready or not all(
            request.handoff.needs_remote_kv for request in self.running
        ):
            return True
        if self.pause_state is PauseState.UNPAUSED:
            return len(self.waiting) > 0 or self._draft_prefills.has_any()
        return bool(self.containers.num_preempted) and any(
            request.status is RequestStatus.PREEMPTED for request in self.waiting
        )

    @property
    def has_drafts(self) -> bool:
        """May a step bring more than one token of a request?"""
        return self._drafts is not None

    @property
    def num_preemptions(self) -> int:
        return self.containers.num_preemptions

    @property
    def num_open_sessions(self) -> int:
        """KV sessions (on decode: tickets, pulls and unlanded READs) that are not over."""
        return sum(port.num_open_sessions() for port in self._ports)

    @property
    def _ports(self) -> tuple[KVPort, ...]:
        containers = self.containers
        return (
            *containers.ports,
            *(each.port for each in containers.prefixes),
            self._prefix_loans.port,
        )

    def abort_sessions(self, request_ids: Iterable[str]) -> None:
        """End the sessions of requests that were handed off. Unknown ids are ignored."""
        self.containers.remote_decodes.abort_sessions(request_ids)

    def fence_all(self, reason: str) -> None:
        """End every KV session before blocks change hands (rule K3)."""
        for port in self._ports:
            port.fence_all(reason)

    def cancel_stores(self) -> None:
        """Have no block held for the tiers that is not stored yet."""
        self.kv.free_block_ids(self._offload.cancel_stores())

    def reset_prefix_cache(self, *, keeps_tiers: bool) -> None:
        """Forget what is cached, here and in the tiers, and pictures. No block is held."""
        self.kv.block_pool.reset_prefix_cache()
        if not keeps_tiers:
            self._offload.clear()
        self.encoder_cache.reset()

    def has_finished_requests(self) -> bool:
        """Does the model runner still have to hear of ended requests?"""
        return bool(self.in_flight.finished_req_ids)

    # ---- one step

    def schedule(self) -> SchedulerOutput:
        """Plan the next step; its results go to update_from_output, in the order of planning."""
        self.update_from_kv_transfer()
        if self.pause_state is PauseState.PAUSED_ALL:
            plan = StepPlan(token_budget=0)
        else:
            plan = self._plan()
            self._draft_prefills.add(plan)
        if self.pause_state is PauseState.UNPAUSED:
            self.containers.remote_decodes.on_step(has_room=plan.takes_more)
        self.needs_drain = plan.needs_drain
        if plan.scheduled:
            self.containers.decode_slots.on_step()
        return self.in_flight.add(plan, self.running.count_common_prefix_blocks())

    def _plan(self) -> StepPlan:
        """Plan a step. Requests that turn out to lack a picture's pixels, as another worker was to
        compute them, end.
        """
        while True:
            plan = self._planner.plan(admits_new=self.pause_state is PauseState.UNPAUSED)
            lacking = self.encoder_cache.take_lacking()
            for request in lacking:
                error = TensorNotHeldError(TENSOR_NOT_HELD).to_engine_error()
                self._results.finish(request, RequestStatus.FINISHED_ERROR, error)
            if plan.scheduled or not lacking:
                return plan

    def update_from_kv_transfer(self) -> None:
        """Apply what the ports and the grammar compiler report, then see who may have blocks."""
        for request, error in self.containers.waiting_for_fsm.take_compiled():
            self._apply_grammar(request, error)
        self._kv_events.apply()
        containers = self.containers
        for request in containers.tier_loads.take_ready():
            self._queue_with_tiers(request)
        for request in containers.prefix_pulls.take_ready():
            self._queue_with_prefix(request)
        self._prefix_loans.apply(self._admission.num_spare_blocks)
        if self.pause_state is PauseState.UNPAUSED:
            containers.remote_prefills.grant_probes(self._admission.num_free_probe_slots)
            # Preempted requests come first, or a stream of small grant requests would keep them out
            # for ever.
            if not containers.num_preempted:
                containers.remote_prefills.serve_grant_requests(
                    self._admission.room_for_pulls, containers.waiting_since
                )
            containers.remote_prefills.defer_grant_requests()
            containers.remote_decodes.ask_next()
            return
        is_all = self.pause_state is PauseState.PAUSED_ALL
        containers.remote_decodes.take_back(even_preempted=is_all)
        if not is_all and containers.num_preempted:
            containers.remote_decodes.ask_preempted()

    def update_from_output(self, result: ModelRunnerOutput, duration_s: float) -> None:
        """Apply what the oldest step in flight computed, which took so long."""
        # Prefill may have acknowledged the release while the model ran: then nothing has to be held
        # back.
        self._kv_events.apply()
        sampled = dict(zip(result.request_ids, result.sampled_token_ids, strict=True))
        step = self.in_flight.pop()
        if len(self.adapters):
            self.adapters.num_steps += any(request.adapter for request in step)
        if self._drafts is not None:
            self._drafts.observe_step(step, result, duration_s)
        results, annotated_ids = self._results, result.annotated_ids
        is_awaited = bool(self.containers.forks or self.containers.isolated)
        for request, scheduled in step.items():
            if request.status is not RequestStatus.RUNNING:  # it ended, or lost its KV, meanwhile
                continue
            request_id = request.request_id
            token_ids = sampled.get(request_id, ())
            if request.handoff.needs_remote_kv:
                request.handoff.hold(HeldResult(scheduled, token_ids, result, self._clock()))
            elif (
                scheduled is not DECODE
                or len(token_ids) != 1
                or request_id in annotated_ids
                or is_awaited
                or request.do_remote_decode
            ):
                results.apply_step(request, scheduled, token_ids, result)
            else:
                results.apply_token(request, token_ids[0])
        self.in_flight.free_deferred()

    def discard_steps(self, steps: Iterable[SchedulerOutput], message: str) -> None:
        """Of the steps in flight, which are given and all over, the oldest raised: none counts.

        Whatever runs is computed again. A step of one request fails it; of several, each is tried
        alone, also if others have ended meanwhile: it may have been their fault.
        """
        failed = self.in_flight.discard(steps)
        # A speculative first step is only rolled back: its release may still be acknowledged.
        to_try = [
            r for r in failed if r.status is RequestStatus.RUNNING and not r.handoff.needs_remote_kv
        ]
        for request in reversed(list(self.running)):
            if request.handoff.needs_remote_kv:
                self._kv_events.rollback_first_step(request)
            else:
                self.containers.preempt(request)
        if len(failed) == 1:
            error = RequestFailedError(message).to_engine_error()
            request_ids = [r.request_id for r in to_try]
            self.finish_requests(request_ids, RequestStatus.FINISHED_ERROR, error)
        else:
            self.containers.isolated.note_failed(to_try)

    def try_first(self, request: Request) -> None:
        """Take a request and compute nothing else until it has brought a token."""
        self.add_request(request)
        self.containers.isolated.put_first(request)

    def make_stats(self, *, step_num_tokens: int, step_duration_s: float) -> SchedulerStats:
        """Return the load after a step."""
        pool, containers = self.kv.block_pool, self.containers
        decodes = containers.remote_decodes
        num_waiting = len(self.requests) - len(self.running)
        num_here = num_waiting - len(containers.remote_prefills) - len(decodes)
        waiting_for_prefix = [request for each in containers.prefixes for request in each]
        num_here -= len(containers.waiting_for_fsm) + len(waiting_for_prefix)
        num_tokens = self.waiting.num_tokens + decodes.num_tokens
        num_tokens += sum(request.num_tokens for request in waiting_for_prefix)
        held_up = decodes.held_up
        return SchedulerStats(
            num_slots=self.config.max_num_seqs,
            num_running_reqs=len(self.running),
            num_waiting_reqs=num_waiting,
            num_waiting_for_decode_reqs=num_here - decodes.num_granted + held_up.num_requests,
            num_waiting_tokens=num_tokens - held_up.num_tokens,
            num_total_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_cached_blocks=pool.num_free_cached_blocks,
            num_open_kv_sessions=self.num_open_sessions,
            prefix_cache_queries=self.kv.prefix_cache_queries,
            prefix_cache_hits=self.kv.prefix_cache_hits,
            num_preemptions=self.num_preemptions,
            num_late_masks=containers.num_late_masks,
            num_loras=len(self.adapters),
            num_lora_loads=self.adapters.num_loads,
            num_lora_evictions=self.adapters.num_evictions,
            num_lora_steps=self.adapters.num_steps,
            num_waiting_for_fsm_reqs=len(containers.waiting_for_fsm),
            num_common_prefix_blocks=max(self.running.num_common_prefix_blocks, default=0),
            step_num_tokens=step_num_tokens,
            step_duration_s=step_duration_s,
        )

    def _on_draft(self, request: Request, stats: DraftStats) -> None:
        assert self._drafts is not None, "it has made the draft"
        self._drafts.observe_draft(request, stats)

    # ---- a new request

    def _put(self, request: Request) -> None:
        """Put a new request where it waits, or refuse it."""
        decodes, prefills = self.containers.remote_decodes, self.containers.remote_prefills
        if not (decodes.can_serve(request) and prefills.can_serve(request)):
            refusal = InvalidRequestError(
                "kv_transfer_params is set, this worker has no KV connector",
                field="kv_transfer_params",
            )
            self._results.finish(request, RequestStatus.FINISHED_ERROR, refusal.to_engine_error())
            return
        if not self.adapters.acquire(request):  # it was held when the request was checked
            assert request.core_request.lora_request is not None
            gone = adapter_not_held(request.core_request.lora_request)
            self._results.finish(request, RequestStatus.FINISHED_ERROR, gone.to_engine_error())
            return
        error = refuse_pictures(request, self._vision) or self.containers.waiting_for_fsm.start(
            request
        )
        is_ticket = prefills.add(request)  # also one that ends at once: its connector knows of it
        if error is not None:
            self._results.finish(request, RequestStatus.FINISHED_ERROR, error.to_engine_error())
        elif is_ticket:
            return
        elif self.containers.waiting_for_fsm.has_grammar(request):
            self._queue(request)
        else:
            self.containers.waiting_for_fsm.add(request)

    def _apply_grammar(self, request: Request, error: PdserveError | None) -> None:
        """The grammar of a request that was waited for is ready: it may start, or ends."""
        if error is not None:
            self._results.finish(request, RequestStatus.FINISHED_ERROR, error.to_engine_error())
        elif request in self.containers.remote_prefills:
            self._kv_events.queue_landed(request)
        else:
            request.leave()
            self._queue(request)

    def _queue(self, request: Request) -> None:
        """Put a new request where it waits for the start of its prompt, or for its turn."""
        if not self._waits_for(self.containers.tier_loads, request):
            self._queue_with_tiers(request)

    def _queue_with_tiers(self, request: Request) -> None:
        """The same of one for which the tiers have no more than is here."""
        if not self._waits_for(self.containers.prefix_pulls, request):
            self._queue_with_prefix(request)

    def _waits_for(self, pulls: PrefixPulls, request: Request) -> bool:
        # Asleep it has no pool to read into.
        is_unpaused = self.pause_state is PauseState.UNPAUSED
        return is_unpaused and pulls.add(request, self._admission.num_spare_blocks)

    def _queue_with_prefix(self, request: Request) -> None:
        """Put a request whose prefix is here, or will not come, where it waits for its turn."""
        _, request.num_cached_when_queued = self.kv.get_computed_blocks(
            request, request.num_tokens - 1
        )
        if self.containers.remote_decodes.add(request):
            return
        source = find_source(request, self.requests)
        if source is None:
            self.waiting.insert_request(request)
            return
        self.containers.forks.add(source, request)
        if source.is_prompt_computed:
            self._results.release_forks(source)

    def _supersede(self, earlier: Request, request: Request) -> None:
        """A later attempt of the same request takes over; nobody is told of the earlier one's end.

        What was confirmed of its KV is in the prefix cache, where the later one finds it. Its forks
        wait for that one.
        """
        assert request.core_request.attempt > earlier.core_request.attempt, (
            "the front end refuses others"
        )
        containers = self.containers
        forks = containers.forks.take(earlier)
        containers.finish(earlier, RequestStatus.FINISHED_ABORTED)
        for fork in forks:
            if find_source(fork, {request.request_id: request}) is request:
                containers.forks.add(request, fork)
            else:
                containers.waiting.add_request(fork)
