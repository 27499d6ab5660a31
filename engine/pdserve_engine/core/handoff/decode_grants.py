"""Decode's side of the handoff in the scheduler: requests whose KV another worker computes, from
the router's ticket until they can run.

A ticket holds nothing. When prefill asks, the request gets its blocks, if there is room and a slot
in sight, and prefill may start. Among grant requests and local requests whoever has had to wait for
long is the next to get blocks, so that nobody starves; preempted requests come before all of them.
Probes, of which few are let in at a time, need only free blocks.
"""

import bisect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pdserve_common.types.engine import EngineCoreEventType
from pdserve_engine.core.handoff.decode_slots import DecodeSlots, SlotForecast
from pdserve_engine.kv.kv_cache_manager import ComputedBlocks, KVCacheManager
from pdserve_engine.kv_transfer.ports import ConsumerPort, NoConnector
from pdserve_engine.request.request import Request, RequestContainer, RequestStatus

# A request that has waited this long for blocks is not overtaken by later ones.
OVERDUE_S = 1.0
# Requests that have blocks and do not run may hold this share of the pool, or one of them any.
MAX_SHARE = 0.25
# Grant requests that have to wait and are overtaken in one step.
MAX_SKIPPED = 16


@dataclass(slots=True, eq=False)
class _GrantRequest:
    request: Request
    since: float
    # Prefill knows that it has to wait.
    is_deferred: bool = False

    def is_overdue(self, now: float) -> bool:
        return now - self.since > OVERDUE_S


class Room(NamedTuple):
    """What limits grants; counted once for many grant requests."""

    # Blocks of pulls that do not run.
    num_held: int
    # Free blocks that a grant has to leave.
    num_spare: int
    slot_forecast: SlotForecast


# A probe finds a slot of its own, and is too small for the other limits.
_ROOM_OF_PROBES = Room(num_held=0, num_spare=0, slot_forecast=SlotForecast([0], [], 0.0))


class RemotePrefills(RequestContainer):
    """Requests that wait for their KV, and prefill's grant requests for them. What is done
    to one that is computed here does nothing.
    """

    statuses = (RequestStatus.WAITING_FOR_REMOTE_KVS,)

    def __init__(
        self,
        port: ConsumerPort | None,
        kv_cache_manager: KVCacheManager,
        decode_slots: DecodeSlots,
        clock: Callable[[], float],
    ) -> None:
        self.port: ConsumerPort = NoConnector() if port is None else port
        self._has_port = port is not None
        self._kv = kv_cache_manager
        self._decode_slots = decode_slots
        self._clock = clock
        # And when prefill asked for blocks last; before that, or after a rollback: when it came.
        self._requests: dict[Request, float] = {}
        self._grant_requests: deque[_GrantRequest] = deque()
        self._probe_grant_requests: deque[_GrantRequest] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def with_blocks(self) -> Iterator[Request]:
        """Those that own blocks: granted, being pulled, or lost and on hold."""
        return (request for request in self._requests if request.progress.num_slots)

    def come_before(self, waiting_since: float) -> bool:
        """Must a local request that has waited since then leave its blocks to an overdue grant
        request?
        """
        first = self._grant_requests[0] if self._grant_requests else None
        if first is None or not first.is_overdue(self._clock()):
            return False
        return first.since < waiting_since

    def can_serve(self, request: Request) -> bool:
        """False: it is computed elsewhere, and this worker cannot pull its KV."""
        return self._has_port or not request.do_remote_prefill

    def add(self, request: Request) -> bool:
        """Take the router's ticket; False if the request is computed here."""
        if not request.do_remote_prefill:
            return False
        self.port.on_new_request(request)
        self.wait(request)
        return True

    def wait(self, request: Request) -> None:
        """The request waits for its KV, or for prefill to acknowledge the release."""
        request.entered(self)
        self._requests[request] = self._clock()

    def request_finished(self, request: Request) -> frozenset[int]:
        """Return those of its blocks that a READ may still land in."""
        if not request.do_remote_prefill:
            return frozenset()
        return self.port.request_finished(request, self._kv.get_block_ids(request.request_id))

    def remove_request(self, request: Request) -> None:
        del self._requests[request]
        request.left()
        self.drop_grant_request(request)

    def land(self, request: Request) -> None:
        """All of its KV is here: forget it."""
        self._decode_slots.land(request)
        self.remove_request(request)

    def add_grant_request(self, request: Request, since: float) -> None:
        """Prefill wants to start the request, and has asked at `since` (by the clock, not after
        now); it gets its blocks when serve_grant_requests finds room.
        """
        # It may have asked, withdrawn and asked again before the first grant request had its turn.
        queue = self._queue_like(request)
        if all(other.request is not request for other in queue):
            self._requests[request] = since
            # Prefill may have asked before its ticket was here: then younger grant requests are
            # here already.
            bisect.insort(queue, _GrantRequest(request, since), key=lambda other: other.since)

    def drop_grant_request(self, request: Request) -> None:
        """Prefill's grant request, if there is one, does not count any more, whether granted or
        not.
        """
        self._decode_slots.withdraw(request)
        queue = self._queue_like(request)
        for other in [other for other in queue if other.request is request]:
            queue.remove(other)

    def grant_probes(self, num_free_slots: Callable[[], int]) -> None:
        """Give blocks to probes' grant requests, however many others wait."""
        while self._probe_grant_requests and num_free_slots() > 0:
            if not self._reserve(self._probe_grant_requests[0].request, _ROOM_OF_PROBES):
                return
            self._probe_grant_requests.popleft()

    def serve_grant_requests(self, find_room: Callable[[], Room], waiting_since: float) -> None:
        """Give blocks to grant requests, oldest first; none overtakes an overdue one, or a local
        request that has waited since `waiting_since` if that is overdue.
        """
        now = self._clock()
        is_overdue = now - waiting_since > OVERDUE_S
        room: Room | None = None
        num_skipped = 0
        for grant_request in list(self._grant_requests):
            if num_skipped == MAX_SKIPPED or (is_overdue and waiting_since < grant_request.since):
                return
            room = room or find_room()
            if self._reserve(grant_request.request, room):
                self._grant_requests.remove(grant_request)
                room = None
            elif grant_request.is_overdue(now):
                return
            else:
                num_skipped += 1

    def defer_grant_requests(self) -> None:
        """Have prefill know, once, of each grant request that has not been granted, that it has to
        wait.
        """
        for grant_request in self._grant_requests:
            if not grant_request.is_deferred:
                grant_request.is_deferred = True
                self.port.defer(grant_request.request)

    def give_back(self, request: Request, kept: frozenset[int]) -> None:
        """Prefill has withdrawn its grant request: free what was reserved, but for the `kept`
        blocks.
        """
        self.drop_grant_request(request)
        self._free(request, kept)

    def reclaim(self) -> bool:
        """Free the blocks of the youngest request that prefill has announced nothing of; its grant
        request stands as if it had not been granted. False if there is none.
        """
        request = self.port.reclaim()
        if request is None:
            return False
        self._decode_slots.withdraw(request)
        self._free(request)
        grant_request = _GrantRequest(request, self._requests[request], is_deferred=True)
        bisect.insort_left(self._queue_like(request), grant_request, key=lambda other: other.since)
        return True

    def _queue_like(self, request: Request) -> deque[_GrantRequest]:
        return self._probe_grant_requests if request.is_probe else self._grant_requests

    def _reserve(self, request: Request, room: Room) -> bool:
        """Give a request blocks for all its known tokens, those that are cached here among them,
        and tell prefill. False if there is no room; True also if prefill has withdrawn its grant
        request.
        """
        if not self._decode_slots.may_grant(request, room.slot_forecast):
            return False
        num_tokens = request.num_tokens
        blocks, num_hit_tokens = self._kv.get_computed_blocks(request, num_tokens)
        if not self._fits(request, blocks, room):
            return False
        added = self._kv.allocate_slots(request, num_tokens, blocks, num_remote_tokens=num_tokens)
        if added is None:
            return False
        block_ids = self._kv.get_block_ids(request.request_id)
        if self.port.grant(request, block_ids, num_hit_tokens):
            self._decode_slots.promise(request)
            self._kv.record_lookup(request, num_hit_tokens)
            request.record_event(EngineCoreEventType.KV_TRANSFER_STARTED)
        else:
            self._free(request)
        return True

    def _fits(self, request: Request, blocks: ComputedBlocks, room: Room) -> bool:
        """Besides what admitted requests still need, and without filling the pool with requests
        that do not run.
        """
        needed = self._kv.num_blocks_needed(request.num_tokens)
        max_held = MAX_SHARE * self._kv.block_pool.num_blocks
        if room.num_held and room.num_held + needed > max_held:
            return False
        # With room for the first token that decode itself computes.
        return self._kv.can_allocate(request.num_tokens + 1, blocks, num_spare=room.num_spare)

    def _free(self, request: Request, kept: frozenset[int] = frozenset()) -> None:
        taken = [block.block_id for block in self._kv.take(request)]
        self._kv.free_block_ids([block_id for block_id in taken if block_id not in kept])
