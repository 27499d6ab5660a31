"""What the connectors tell the scheduler, and on decode the speculative first step.

Decode's first step of a request is speculative: it runs when the blocks have landed, before prefill
has acknowledged their release (rule K4). Such a request still `needs_remote_kv`: what the step
brought is held until the release is acknowledged, nobody shares its blocks and it cannot be
preempted. If the release is not acknowledged, the step is rolled back.
"""

from dataclasses import replace

from pdserve_common.types.engine import (
    EngineCoreEventType,
    ErrorCode,
    KVLost,
    KVTransferStats,
)
from pdserve_engine.core.in_flight import InFlight
from pdserve_engine.core.request_containers import RequestContainers
from pdserve_engine.core.results import Results
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.kv_transfer.ports import (
    BlocksConfirmed,
    BlocksFreed,
    BlocksLanded,
    BlocksReturned,
    GrantRequested,
    KVEvent,
    PrefixWanted,
    PullFinished,
    PullLost,
    RequestFailed,
    StartAllowed,
    StartDeferred,
    StartForbidden,
)
from pdserve_engine.request.outputs import Outputs
from pdserve_engine.request.request import Request, RequestStatus


class KVEvents:
    """Applies events of KV transfer to requests."""

    def __init__(
        self,
        kv: KVCacheManager,
        containers: RequestContainers,
        results: Results,
        in_flight: InFlight,
        outputs: Outputs,
    ) -> None:
        self._kv = kv
        self._containers = containers
        self._results = results
        self._in_flight = in_flight
        self._outputs = outputs

    def apply(self) -> None:
        """Apply all that have come."""
        for port in self._containers.ports:
            for event in port.take_events():
                self._apply(event)

    def rollback_first_step(self, request: Request) -> None:
        """Decode: undo the request's first step, if it has begun. The request keeps its blocks."""
        request.progress.rolled_back()
        if request in self._containers.remote_prefills:
            return
        request.leave()
        self._in_flight.preempted_req_ids.add(request.request_id)
        request.handoff.hold(None)
        request.first_scheduled_time = None
        self._containers.remote_prefills.wait(request)

    def queue_landed(self, request: Request) -> None:
        """Decode: let a request start whose KV has landed, unless that or its grammar is
        not here.
        """
        containers = self._containers
        is_here = request.progress.num_computed_tokens > 0
        if is_here and containers.waiting_for_fsm.has_grammar(request):
            containers.remote_prefills.land(request)
            containers.kv_ready.add(request)

    def _apply(self, event: KVEvent) -> None:
        if isinstance(event, BlocksFreed):
            self._kv.free_block_ids(event.block_ids)
            return
        assert not isinstance(event, PrefixWanted), "PrefixLoans takes it"
        request, containers = event.request, self._containers
        if containers.requests.get(request.request_id) is not request:
            return  # it has ended meanwhile
        match event:
            case StartAllowed():
                containers.remote_decodes.allow(request, event.granted_time)
            case StartForbidden():
                containers.remote_decodes.forbid(request)
            case StartDeferred():
                containers.remote_decodes.defer(request)
            case GrantRequested():
                containers.remote_prefills.add_grant_request(request, event.requested_time)
            case BlocksConfirmed():
                self._kv.cache_blocks(request, event.num_tokens)
            case BlocksReturned():
                containers.remote_prefills.give_back(request, event.kept)
            case BlocksLanded():
                self._land(request, event)
            case PullFinished():
                self._accept_pull(request, event.stats)
            case PullLost():
                self._lose_pull(request, event.lost)
            case RequestFailed():
                is_void = event.error.code is ErrorCode.CANCELLED
                status = RequestStatus.FINISHED_ABORTED if is_void else RequestStatus.FINISHED_ERROR
                self._results.finish(request, status, event.error)

    def _land(self, request: Request, event: BlocksLanded) -> None:
        request.handoff.landed(event.landed_time, event.output_token_ids)
        request.record_event(EngineCoreEventType.KV_TRANSFER_FINISHED, event.landed_time)
        self._queue_first_step(request)

    def _queue_first_step(self, request: Request) -> None:
        """Decode: all KV has landed: queue the first step after prefill's tokens, unless they are
        the last.
        """
        request.progress.pulled(len(request.handoff.pulled_token_ids))
        if request.is_output_complete:
            return
        request.progress.found(request.num_tokens)
        self.queue_landed(request)

    def _accept_pull(self, request: Request, stats: KVTransferStats) -> None:
        """Decode: prefill has acknowledged that all blocks were right (rule K4): apply what was
        held.
        """
        request.handoff.accepted(stats)
        request.record_event(EngineCoreEventType.KV_ACCEPTED)
        self._kv.cache_blocks(request, request.num_tokens)
        self._results.release_forks(request)
        if request in self._containers.remote_prefills and not request.progress.num_computed_tokens:
            self._queue_first_step(request)
        self._results.apply_pulled_tokens(request)
        held = request.handoff.held_result
        if held is not None and not request.status.is_finished:
            self._results.apply_step(request, held.scheduled, held.token_ids, held.result)
        request.handoff.hold(None)

    def _lose_pull(self, request: Request, lost: KVLost) -> None:
        """Decode: the rest will not come: wait for the router's decision, and tell it what is
        here.
        """
        self.rollback_first_step(request)
        self._containers.remote_prefills.drop_grant_request(request)
        request.record_event(EngineCoreEventType.KV_LOST)
        self._outputs.emit(request, kv_lost=self._limit_to_cached(request, lost))

    def _limit_to_cached(self, request: Request, lost: KVLost) -> KVLost:
        """Decode: what is confirmed and the next attempt will find: nothing without prefix caching,
        or if the sliding windows of those tokens have not come.
        """
        _, num_tokens = self._kv.get_computed_blocks(request, lost.num_confirmed_tokens)
        return replace(lost, num_confirmed_tokens=num_tokens)
