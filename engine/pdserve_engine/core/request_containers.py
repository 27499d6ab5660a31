"""Where requests are, and the ways into the batch, out of it and to an end.

waiting          WAITING, PREEMPTED
running          RUNNING
kv_ready         WAITING: it owns blocks (pulled, or shared by its fork's source) and there was
                 no slot in the batch yet
forks            WAITING: its source's prompt is not computed yet
remote_decodes   WAITING, PREEMPTED: on prefill, before decode has reserved its blocks
remote_prefills  WAITING_FOR_REMOTE_KVS: on decode, a ticket, or blocks that are being filled, or
                 that are while its grammar is being compiled
tier_loads       WAITING_FOR_REMOTE_KVS: the start of its prompt is read from a tier of this worker
prefix_pulls     WAITING_FOR_REMOTE_KVS: on prefill, the start of its prompt is read from another
                 worker
waiting_for_fsm  WAITING_FOR_FSM: its grammar is being compiled, and it waits for nothing else
"""

import math
from collections.abc import Callable
from functools import partial

from pdserve_common.types.engine import EngineCoreEventType
from pdserve_engine.config import SchedulerConfig
from pdserve_engine.core.features.adapter_pool import AdapterPool
from pdserve_engine.core.features.encoder_cache_manager import EncoderCacheManager
from pdserve_engine.core.features.forks import Forks
from pdserve_engine.core.features.waiting_for_fsm import WaitingForFSM
from pdserve_engine.core.handoff.decode_grants import RemotePrefills
from pdserve_engine.core.handoff.decode_slots import DecodeSlots
from pdserve_engine.core.handoff.prefill_grant_requests import RemoteDecodes
from pdserve_engine.core.handoff.prefixes import PrefixPulls
from pdserve_engine.core.in_flight import InFlight
from pdserve_engine.core.isolated_requests import IsolatedRequests
from pdserve_engine.core.running import KVReady, Running
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.kv_transfer.ports import ConsumerPort, PrefixConsumerPort, ProducerPort
from pdserve_engine.request.request import Request, RequestStatus
from pdserve_engine.request.request_queue import make_request_queue


class RequestContainers:
    """All requests of an engine that have not ended, each in one container."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        in_flight: InFlight,
        encoder_cache: EncoderCacheManager,
        *,
        producer: ProducerPort | None,
        consumer: ConsumerPort | None,
        prefix_consumer: PrefixConsumerPort | None,
        offload: PrefixConsumerPort | None,
        adapters: AdapterPool,
        waiting_for_fsm: WaitingForFSM,
        clock: Callable[[], float],
    ) -> None:
        self._kv = kv_cache_manager
        self._in_flight = in_flight
        self._encoder_cache = encoder_cache
        self._adapters = adapters
        self.requests: dict[str, Request] = {}
        self.waiting = make_request_queue(config.scheduling_policy)
        self.running = Running(kv_cache_manager)
        self.kv_ready = KVReady()
        self.forks = Forks(kv_cache_manager)
        self.waiting_for_fsm = waiting_for_fsm
        self.remote_decodes = RemoteDecodes(
            producer,
            kv_cache_manager,
            self.waiting,
            partial(make_request_queue, config.scheduling_policy),
            config.max_num_batched_tokens,
            clock,
        )
        self.decode_slots = DecodeSlots(config, self.running, self.kv_ready, self.forks)
        self.remote_prefills = RemotePrefills(consumer, kv_cache_manager, self.decode_slots, clock)
        self.tier_loads = PrefixPulls(offload, kv_cache_manager, clock)
        self.prefix_pulls = PrefixPulls(prefix_consumer, kv_cache_manager, clock)
        self.prefixes = (self.tier_loads, self.prefix_pulls)
        self.ports = (self.remote_decodes.port, self.remote_prefills.port)
        self.isolated = IsolatedRequests(self.remote_decodes)
        self.num_preemptions = 0
        self.num_late_masks = 0
        # How many of the requests that wait were running before.
        self.num_preempted = 0

    @property
    def waiting_since(self) -> float:
        """When the next waiting request came; infinity if there is none."""
        return self.waiting.peek_request().queued_time if len(self.waiting) else math.inf

    @property
    def num_ahead(self) -> int:
        """Waiting requests, 0 or 1, that have the next slot."""
        return int(len(self.waiting) > 0 and self.waiting.peek_request().has_begun)

    def start(self, request: Request) -> None:
        """A request joins the batch."""
        self._remove(request)
        self.running.add(request)

    def preempt(self, request: Request) -> None:
        """A running request gives its blocks up and waits, before those that have not begun."""
        self.running.remove_request(request)
        self.remote_decodes.fence(request)  # before its blocks are free (rule K3)
        request.progress.preempted()
        self._kv.free(request)
        self._encoder_cache.free(request)
        request.status = RequestStatus.PREEMPTED
        self.num_preempted += 1
        self.num_preemptions += 1
        self._in_flight.preempted_req_ids.add(request.request_id)
        request.record_event(EngineCoreEventType.PREEMPTED)
        if not self.remote_decodes.prepend(request):
            self.waiting.prepend_request(request)

    def finish(self, request: Request, status: RequestStatus) -> None:
        """A request ends. Fence first, then free (rule K3): the ports end its sessions before any
        block changes hands.
        """
        kept = frozenset().union(*(each.request_finished(request) for each in self.prefixes))
        self._remove(request)
        request.status = status
        del self.requests[request.request_id]
        self._in_flight.finished_req_ids.add(request.request_id)
        for fork in self.forks.take(request):  # they are computed like any other request
            self.waiting.add_request(fork)
        self.isolated.remove(request)
        kept |= self.remote_decodes.request_finished(request)
        kept |= self.remote_prefills.request_finished(request)
        self._adapters.release(request)
        self._encoder_cache.free(request)
        taken = [block.block_id for block in self._kv.take(request)]
        self._in_flight.free(request, [block_id for block_id in taken if block_id not in kept])

    def _remove(self, request: Request) -> None:
        self.num_preempted -= request.status is RequestStatus.PREEMPTED
        request.leave()
