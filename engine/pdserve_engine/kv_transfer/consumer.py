"""D's side of the handoff: pulls read the blocks of finished prefills out of P's memory.

    state      event                                    next       what happens
    -          ticket (on_new_request)                  WAITING    asks for a link if there is none
    -          BlocksReady before the ticket            WAITING    remembered until its deadline
    WAITING    PrefillDone, and the ticket is here      READY      named in ready_to_load
    READY      update_state_after_alloc, blocks lack    ALLOCATED
    READY      same, all is cached here                 DONE       Release, finished_recving
    ALLOCATED  start_load_kv                            LOADING    READ posted
    LOADING    READ done                                RELEASING  Release of all blocks
    RELEASING  ReleaseAck(valid)                        DONE       finished_recving (K4)
    open       SessionEnded, link lost, deadline,       FAILED     failed_recving; CancelRequest if
               READ failed or stalled, not valid                   P does not know
    any        request_finished                         -          CancelRequest if it was open

A pull that ends while its READ is posted is a zombie: the blocks come back in landed_block_ids when
the READ has landed (K5). There is no other way from FAILED on: retries are new requests.

Messages come on the event loop's thread, READs end on the transfer thread, the rest happens on the
engine's; one lock guards all state. Under it only calls are made that neither block nor call back:
the link's, the transport's, `wakeup`, `request_link`.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pdserve_common.engine_types import EngineError, ErrorCode, KVTransferStats
from pdserve_common.errors import KVTransferError
from pdserve_common.kv_types import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    BlocksReady,
    CancelRequest,
    KVLinkHello,
    KVLinkResponseMessage,
    KVLinkWelcome,
    PrefillDone,
    Release,
    ReleaseAck,
    SessionEnded,
)
from pdserve_common.metrics import KVTransferMetrics
from pdserve_engine.core.request import Request
from pdserve_engine.kv_transfer.base import (
    KVConnector,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVIdentity,
    KVLinkHandle,
    KVLoad,
    KVTransport,
    ReadResult,
)
from pdserve_engine.kv_transfer.links import (
    KVLink,
    LinkTable,
    RecentKeys,
    find_hash_mismatch,
)
from pdserve_engine.kv_transfer.pull import Pull, PullState, find_bad_blocks, find_bad_end

if TYPE_CHECKING:
    from pdserve_engine.kv_cache import KVCache

logger = logging.getLogger(__name__)

RequestLink = Callable[[str, str, int], None]

# Announcements may come before the router's ticket; this many are remembered.
MAX_EARLY = 4096
# P answers a Release at once; its process may have stopped, which the heartbeat tells too.
ACK_TIMEOUT_S = 5.0
# How a session that P ended looks to the request: P's own reasons and what they mean here.
_CANCELLED_REASONS = frozenset({"finished", "aborted"})


class ConsumerConnector(KVConnector):
    """D's connector. `wakeup` makes the engine thread call take_output soon."""

    def __init__(
        self,
        transport: KVTransport,
        *,
        identity: KVIdentity,
        metrics: KVTransferMetrics,
        wakeup: Callable[[], None],
        step_seq: Callable[[], int],
        transfer_timeout_s: float = 5.0,
        ticket_timeout_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._metrics = metrics
        self._wakeup = wakeup
        self._step_seq = step_seq
        self._transfer_timeout_s = transfer_timeout_s
        self._ticket_timeout_s = ticket_timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._request_link: RequestLink | None = None
        self._dialing: set[str] = set()
        self._links = LinkTable(clock())
        self._welcomes: dict[KVLink, KVLinkWelcome] = {}
        self._pulls: dict[str, Pull] = {}  # by request id
        self._num_early = 0
        self._allocated: list[Pull] = []
        # Requests that are over here: (request id, attempt).
        self._ended = RecentKeys()
        self._num_zombies = 0
        self._output = KVConnectorOutput()

    def bind_link_pool(self, request_link: RequestLink) -> None:
        """Set what dials `(engine_id, host, port)` and ends in link_up or link_failed."""
        self._request_link = request_link

    # ---- scheduler side: the engine thread

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if params is None or not params.do_remote_prefill:
            return
        with self._lock:
            pull = self._take_early(request.request_id, request.request.attempt)
            if pull is None:
                pull = self._add_pull(
                    request.request_id, request.request.attempt, params.remote_engine_id
                )
            pull.has_ticket = True
            pull.num_tokens = request.num_tokens
            pull.deadline = self._clock() + self._ticket_timeout_s
            if pull.engine_id != params.remote_engine_id:
                self._fail_protocol(pull, f"{pull.engine_id} announced a request of another worker")
            elif pull.state is PullState.FAILED:
                pass
            elif pull.is_prefill_done:
                self._make_ready(pull)
            elif pull.link is None and self._links.get(pull.engine_id) is None:
                self._dial(pull, params.remote_host, params.remote_port)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        with self._lock:
            pull = self._pulls.get(request.request_id)
            if pull is None or pull.state is PullState.DONE:
                return 0, False
            if pull.state is not PullState.READY:
                return None, True
            return max(0, pull.num_announced_tokens - num_computed_tokens), True

    def transferred_output_token_ids(self, request_id: str) -> tuple[int, ...]:
        with self._lock:
            pull = self._pulls.get(request_id)
            return pull.output_token_ids if pull is not None else ()

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        with self._lock:
            pull = self._pulls.get(request.request_id)
            if pull is None or pull.state is not PullState.READY:
                return  # failed since; the scheduler is about to hear of it
            pull.allocated_at = self._clock()
            if num_external_tokens == 0:
                self._send_release(pull)
                self._finish(pull)
                return
            num_local = pull.num_announced_tokens - num_external_tokens
            first = num_local // self._identity.layout.block_size
            last = pull.num_remote_blocks
            remote = (block_id for ids in pull.remote_block_ids for block_id in ids[first:last])
            local = (block_id for ids in block_ids for block_id in ids[first:last])
            pull.load_remote, pull.load_local = tuple(remote), tuple(local)
            assert len(pull.load_remote) == len(pull.load_local), "too few blocks were allocated"
            pull.state = PullState.ALLOCATED
            self._allocated.append(pull)

    def build_connector_meta(self) -> KVConnectorMetadata:
        with self._lock:
            allocated, self._allocated = self._allocated, []
            loads = [
                KVLoad(
                    request_id=pull.request_id,
                    session=pull.session,
                    remote_block_ids=pull.load_remote,
                    local_block_ids=pull.load_local,
                )
                for pull in allocated
                if pull.state is PullState.ALLOCATED and pull.session is not None
            ]
        return KVConnectorMetadata(loads=tuple(loads))

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> bool:
        with self._lock:
            pull = self._pulls.pop(request.request_id, None)
            if pull is None:
                return False
            if pull.is_open:
                self._send_cancel(pull, "aborted")
                self._stop(pull)
            self._ended.add((pull.request_id, pull.attempt))
            self._show_sessions()
            if not pull.is_reading:
                return False
            pull.kept_block_ids = [block_id for ids in block_ids for block_id in ids]
            return True

    def fence_all(self, reason: str) -> None:
        with self._lock:
            for pull in self._open_pulls():
                self._send_cancel(pull, reason)
                self._fail(pull, ErrorCode.KV_EXPIRED, "fenced", f"KV session ended: {reason}")

    def take_output(self) -> KVConnectorOutput:
        with self._lock:
            output, self._output = self._output, KVConnectorOutput()
        return output

    def num_open_sessions(self) -> int:
        with self._lock:
            return sum(pull.has_ticket for pull in self._open_pulls()) + self._num_zombies

    # ---- worker side: the engine thread

    def register_kv_cache(self, kv_cache: "KVCache") -> None:
        self._transport.register(kv_cache)

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        with self._lock:
            for load in metadata.loads:
                pull = self._pulls.get(load.request_id)
                if pull is None or pull.session != load.session:
                    continue  # aborted since
                if pull.state is PullState.ALLOCATED and pull.link is not None:
                    self._post_read(pull, pull.link, load)

    def shutdown(self) -> None:
        self.fence_all("shutdown")
        with self._lock:
            for link in self._links.all():
                self._drop_link(link, "shutdown")
        self._transport.close()

    # ---- the KvLink: the event loop's thread

    def hello(self) -> KVLinkHello:
        """What to send first on a new link."""
        return KVLinkHello(
            min_protocol_version=MIN_PROTOCOL_VERSION,
            max_protocol_version=PROTOCOL_VERSION,
            engine_id=self._identity.engine_id,
            epoch=self._identity.epoch,
            compatibility_hash=self._identity.compatibility_hash,
            layout=self._identity.layout,
            connector=self._transport.name,
        )

    def link_up(self, engine_id: str, welcome: KVLinkWelcome, handle: KVLinkHandle) -> KVLink:
        """P has welcomed us on a link dialed for `engine_id`. Raises KVTransferError if it is not
        the P we want; then the caller reports link_failed.
        """
        if welcome.engine_id != engine_id:
            raise KVTransferError(f"dialed {engine_id}, {welcome.engine_id} answered")
        if not MIN_PROTOCOL_VERSION <= welcome.protocol_version <= PROTOCOL_VERSION:
            raise KVTransferError(f"P wants protocol version {welcome.protocol_version}")
        # Before anything of the transport's metadata is looked at.
        mismatch = find_hash_mismatch(
            welcome.compatibility_hash, self._identity.compatibility_hash
        )
        if mismatch is not None:
            raise KVTransferError(mismatch)
        with self._lock:
            old = self._links.get(engine_id)
            if old is not None:
                self._drop_link(old, "replaced")
            link = KVLink(welcome.link, engine_id, welcome.epoch, handle, self._clock())
            link.peer = self._transport.add_peer(welcome, partial(self._on_peer_lost, link))
            self._links.add(link)
            self._welcomes[link] = welcome
            self._dialing.discard(engine_id)
            self._metrics.links.set(len(self._links))
        return link

    def link_failed(self, engine_id: str, reason: str) -> None:
        """A link that was asked for cannot be had: nobody waits for it any longer."""
        with self._lock:
            self._dialing.discard(engine_id)
            if self._links.get(engine_id) is not None:
                return
            for pull in self._open_pulls():
                if pull.engine_id == engine_id and pull.link is None:
                    self._fail_transfer(pull, "no_link", f"no link to {engine_id}: {reason}")

    def link_lost(self, link: KVLink, reason: str) -> None:
        """The link is gone: its pulls fail. May be called again."""
        with self._lock:
            self._drop_link(link, reason)

    def on_message(self, link: KVLink, message: KVLinkResponseMessage) -> None:
        """Take a message of P. Anything late or unknown is counted and ignored (K8)."""
        with self._lock:
            is_late = not self._links.is_open(link)
            if not is_late:
                link.last_heard = self._clock()
                is_late = not self._dispatch(link, message)
            if is_late:
                self._metrics.late_messages.inc()

    def on_tick(self) -> None:
        """Send heartbeats, end what is overdue. Call it every TICK_S, also while the engine is
        idle.
        """
        with self._lock:
            now = self._clock()
            for link in self._links.tick(now, self._step_seq()):
                self._drop_link(link, "silent")
            for pull in [p for p in self._open_pulls() if p.deadline <= now]:
                self._send_cancel(pull, "expired")
                message = f"P {pull.engine_id} or this worker was too slow in {pull.state.name}"
                self._fail(pull, ErrorCode.KV_EXPIRED, "expired", message)
