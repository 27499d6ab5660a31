"""Prefixes whose KV is elsewhere, with another worker or in a tier: `PrefixPulls` has the requests
that wait for one before they are computed here, `PrefixLoans` answers workers who ask for what is
cached.

A request waits for its prefix before it asks its decode for room, and gives the prefix's blocks
back to the prefix cache before it does: whoever holds blocks here never waits for blocks elsewhere.
"""

from collections.abc import Callable, Iterator

from pdserve_engine.kv.block_pool import NULL_BLOCK_ID
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.kv_transfer.ports import (
    BlocksConfirmed,
    BlocksFreed,
    KVEvent,
    NoConnector,
    PrefixConsumerPort,
    PrefixEnded,
    PrefixProducerPort,
    PrefixWanted,
    PullFinished,
    PullLost,
    RequestFailed,
)
from pdserve_engine.request.request import Request, RequestContainer, RequestStatus

# Prefixes that are being read, and those that are lent, may each hold this share of the pool; one
# alone that is read, more.
MAX_SHARE = 0.25
_ENDS = PullFinished | PrefixEnded | PullLost | RequestFailed


class PrefixPulls(RequestContainer):
    """Requests that wait for a prefix from one port. They keep their place in the queue: that goes
    by their arrival.
    """

    statuses = (RequestStatus.WAITING_FOR_REMOTE_KVS,)

    def __init__(
        self,
        port: PrefixConsumerPort | None,
        kv_cache_manager: KVCacheManager,
        clock: Callable[[], float],
    ) -> None:
        self.port: PrefixConsumerPort = NoConnector() if port is None else port
        self._has_port = port is not None
        self._kv = kv_cache_manager
        self._clock = clock
        # And when each stops waiting.
        self._deadlines: dict[Request, float] = {}

    def __len__(self) -> int:
        return len(self._deadlines)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._deadlines)

    @property
    def next_deadline(self) -> float | None:
        return min(self._deadlines.values(), default=None)

    def add(self, request: Request, find_num_spare: Callable[[], int]) -> bool:
        """Have a new request's prefix read. False if it is computed at once: nobody has more of it
        than is cached here, or its blocks would leave fewer than `find_num_spare` free.
        """
        if not self._has_port or not request.reads_prefix_cache:
            return False
        # The last token is computed here, or there would be nothing to sample from.
        max_num_tokens = request.num_tokens - 1
        blocks, num_hit_tokens = self._kv.get_computed_blocks(request, max_num_tokens)
        num_tokens = min(self.port.find_prefix(request, num_hit_tokens), max_num_tokens)
        num_tokens -= num_tokens % self._kv.block_size
        if num_tokens <= num_hit_tokens or not self._has_share_left(num_tokens):
            return False
        if not self._kv.can_allocate(num_tokens, blocks, num_spare=find_num_spare()):
            return False
        self._kv.allocate_slots(request, num_tokens, blocks, num_remote_tokens=num_tokens)
        request.entered(self)
        block_ids = self._kv.get_block_ids(request.request_id)
        timeout_s = self.port.fetch(request, block_ids, num_tokens, num_hit_tokens)
        self._deadlines[request] = self._clock() + timeout_s
        return True

    def remove_request(self, request: Request) -> None:
        del self._deadlines[request]
        request.left()

    def request_finished(self, request: Request) -> frozenset[int]:
        """The request ends; return those of its blocks that a READ may still land in."""
        if request not in self:
            return frozenset()
        return self.port.request_finished(request, self._kv.get_block_ids(request.request_id))

    def take_ready(self) -> list[Request]:
        """Apply what has come; return the requests that wait no longer, and hold nothing."""
        ended = [request for event in self.port.take_events() for request in self._apply(event)]
        now = self._clock()
        ended += [request for request, deadline in self._deadlines.items() if deadline <= now]
        ended = list(dict.fromkeys(ended))
        for request in ended:
            self._stop_waiting(request)
        return ended

    def _apply(self, event: KVEvent) -> Iterator[Request]:
        if isinstance(event, BlocksFreed):
            self._kv.free_block_ids(event.block_ids)
        elif isinstance(event, BlocksConfirmed) and event.request in self:
            self._kv.cache_blocks(event.request, event.num_tokens)
        elif isinstance(event, _ENDS) and event.request in self:
            yield event.request

    def _stop_waiting(self, request: Request) -> None:
        """What is confirmed is in the prefix cache."""
        kept = self.request_finished(request)
        taken = [block.block_id for block in self._kv.take(request)]
        self._kv.free_block_ids([block_id for block_id in taken if block_id not in kept])
        self.remove_request(request)

    def _has_share_left(self, num_tokens: int) -> bool:
        if not self._deadlines:
            return True
        num_held = sum(self._kv.num_blocks_of(request.request_id) for request in self)
        num_needed = self._kv.num_blocks_needed(num_tokens)
        return num_held + num_needed <= MAX_SHARE * self._kv.block_pool.num_blocks


class PrefixLoans:
    """Blocks of the prefix cache that others read. Each is held as long as one may."""

    def __init__(self, port: PrefixProducerPort | None, kv_cache_manager: KVCacheManager) -> None:
        self.port: PrefixProducerPort = NoConnector() if port is None else port
        self._kv = kv_cache_manager
        self._num_lent = 0

    def apply(self, find_num_spare: Callable[[], int]) -> None:
        """Answer who has asked, unless the loan would leave fewer than `find_num_spare` blocks
        free; take back what has been read.
        """
        for event in self.port.take_events():
            if isinstance(event, BlocksFreed):
                self._give_back(event.block_ids)
            elif isinstance(event, PrefixWanted):
                self._lend(event, find_num_spare())

    def _lend(self, wanted: PrefixWanted, num_spare: int) -> None:
        max_num = int(MAX_SHARE * self._kv.block_pool.num_blocks) - self._num_lent
        block_ids = self._kv.hold_cached(
            wanted.block_hashes, wanted.first_block, max_num=max_num, num_spare=num_spare
        )
        held = [i for ids in block_ids for i in ids if i != NULL_BLOCK_ID]
        self._num_lent += len(held)
        if not self.port.lend(wanted, block_ids):
            self._give_back(held)

    def _give_back(self, block_ids: "tuple[int, ...] | list[int]") -> None:
        self._num_lent -= len(block_ids)
        self._kv.free_block_ids(block_ids)
