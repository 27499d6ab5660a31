"""P's side of the handoff: sessions keep the blocks of finished prefills until D has read them.

A session that is in the table is open, one that is not is over; removing it is the fence (K3).

    state    event                                      next     what happens
    -        request_finished, link of its D is up      OPEN     BlocksReady, PrefillDone
    -        request_finished, no link of its D         WAITING  blocks are kept
    WAITING  accept_link of that D                      OPEN     BlocksReady, PrefillDone
    OPEN     Release of some blocks                     OPEN     ReleaseAck(valid), those are freed
    OPEN     Release of all blocks                      -        ReleaseAck(valid), all are freed
    any      CancelRequest, abort, deadline, fence_all  -        SessionEnded, all are freed
    OPEN     its link is lost or replaced               -        all are freed
    -        Release                                    -        ReleaseAck(not valid)

Messages come on the event loop's thread, the rest on the engine's; one lock guards all state. Under
it only calls are made that neither block nor call back: the link's, the transport's, `wakeup`.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve_common.errors import KVTransferError
from pdserve_common.kv_types import (
    PROTOCOL_VERSION,
    BlocksReady,
    CancelRequest,
    KVLinkHello,
    KVLinkRequestMessage,
    KVLinkResponseMessage,
    KVLinkWelcome,
    KVSessionId,
    PrefillDone,
    Release,
    ReleaseAck,
    SessionEnded,
)
from pdserve_common.metrics import KVTransferMetrics
from pdserve_engine.core.block_pool import NULL_BLOCK_ID
from pdserve_engine.core.request import Request, RequestStatus
from pdserve_engine.kv_transfer.base import (
    KVConnector,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVIdentity,
    KVLinkHandle,
    KVTransport,
    first_read_blocks,
)
from pdserve_engine.kv_transfer.links import KVLink, LinkTable, RecentKeys, find_mismatch

if TYPE_CHECKING:
    from pdserve_engine.kv_cache import KVCache

logger = logging.getLogger(__name__)

MAX_UNDELIVERED = 4096
# How long a session waits for its D to dial. Once announced it has the whole session timeout: D, or
# the loss of its link, says when the blocks are not wanted any more.
LINK_WAIT_S = 30.0


@dataclass(slots=True, eq=False)
class _Session:
    request_id: str
    attempt: int
    engine_id: str  # of D
    # All blocks of the request per group, some null; the first num_announced hold its prompt.
    block_ids: tuple[tuple[int, ...], ...]
    num_announced: int
    num_tokens: int
    output_token_ids: tuple[int, ...]
    deadline: float
    num_released: int = 0
    # Both set while OPEN.
    link: KVLink | None = None
    id: KVSessionId | None = None


class ProducerConnector(KVConnector):
    """P's connector. `wakeup` makes the engine thread call take_output soon."""

    def __init__(
        self,
        transport: KVTransport,
        *,
        identity: KVIdentity,
        metrics: KVTransferMetrics,
        wakeup: Callable[[], None],
        step_seq: Callable[[], int],
        session_timeout_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._metrics = metrics
        self._wakeup = wakeup
        self._step_seq = step_seq
        self._session_timeout_s = session_timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._links = LinkTable(clock())
        self._next_link = 1
        self._next_seq = 1
        self._sessions: dict[str, _Session] = {}  # by request id
        self._open: dict[KVSessionId, _Session] = {}
        self._released_block_ids: list[int] = []
        # Given up by D before their prefill was done: (engine id, request id, attempt).
        self._cancelled = RecentKeys()
        # For Ds whose link is not here yet: until when to keep it, and what to tell.
        self._undelivered: OrderedDict[tuple[str, str], tuple[float, SessionEnded]] = OrderedDict()
        self._is_exporting = False

    @property
    def identity(self) -> KVIdentity:
        """Who this worker is to its peers."""
        return self._identity

    # ---- scheduler side: the engine thread

    def on_new_request(self, request: Request) -> None:
        """Nothing to note: P's work for D begins when the prefill is done."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def transferred_output_token_ids(self, request_id: str) -> tuple[int, ...]:
        return ()

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """P loads nothing."""

    def build_connector_meta(self) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> bool:
        params = request.kv_transfer_params
        if params is None or not params.do_remote_decode:
            return False
        key = (params.remote_engine_id, request.request_id, request.request.attempt)
        with self._lock:
            if request.is_handed_off and key not in self._cancelled:
                self._start_session(request, params.remote_engine_id, block_ids)
                return True
            self._tell_end(request, params.remote_engine_id)
            return False

    def abort_session(self, request_id: str) -> None:
        with self._lock:
            session = self._sessions.get(request_id)
            if session is not None:
                self._end(session, "aborted")

    def failure(self) -> str | None:
        return self._transport.failure

    def fence_all(self, reason: str) -> None:
        with self._lock:
            for session in list(self._sessions.values()):
                self._end(session, reason)

    def take_output(self) -> KVConnectorOutput:
        with self._lock:
            released, self._released_block_ids = self._released_block_ids, []
        return KVConnectorOutput(released_block_ids=released)

    def num_open_sessions(self) -> int:
        return len(self._sessions)

    # ---- worker side: the engine thread

    def register_kv_cache(self, kv_cache: "KVCache") -> None:
        self._transport.register(kv_cache)

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """P loads nothing."""

    def shutdown(self) -> None:
        self.fence_all("shutdown")
        with self._lock:
            for link in self._links.all():
                self._drop_link(link, "shutdown")
        self._transport.close()

    # ---- the KvLink: the event loop's thread

    def accept_link(
        self, hello: KVLinkHello, handle: KVLinkHandle[KVLinkResponseMessage]
    ) -> KVLink:
        """Admit a D: sends it the welcome and what waits for it. Raises KVTransferError that names
        what differs.
        """
        mismatch = find_mismatch(self._identity, self._transport.name, hello)
        if mismatch is not None:
            raise KVTransferError(mismatch)
        with self._lock:
            old = self._links.get(hello.engine_id)
            if old is not None:
                self._drop_link(old, "replaced")
            link = KVLink(self._next_link, hello.engine_id, hello.epoch, handle, self._clock())
            self._next_link += 1
            self._links.add(link)
            self._metrics.links.set(len(self._links))
            self._transport.expect_peer()
            handle.send(self._welcome(link))
            self._deliver_waiting(link)
        return link

    def on_message(self, link: KVLink, message: KVLinkRequestMessage) -> None:
        """Take a message of D. Anything late or unknown is counted and ignored (K8)."""
        with self._lock:
            if not self._links.is_open(link):
                self._metrics.late_messages.inc()
                return
            link.last_heard = self._clock()
            if isinstance(message, Release):
                self._on_release(link, message)
            elif isinstance(message, CancelRequest):
                self._on_cancel(link, message)
            elif isinstance(message, KVLinkHello):
                self._metrics.late_messages.inc()

    def link_lost(self, link: KVLink, reason: str) -> None:
        """The link is gone: its sessions are over. May be called again."""
        with self._lock:
            self._drop_link(link, reason)

    def on_tick(self) -> None:
        """Send heartbeats, end what is overdue. Call it every TICK_S, also while the engine is
        idle.
        """
        with self._lock:
            now = self._clock()
            for link in self._links.tick(now, self._step_seq()):
                self._drop_link(link, "silent")
            for session in [s for s in self._sessions.values() if s.deadline <= now]:
                self._end(session, "expired")
            while self._undelivered and next(iter(self._undelivered.values()))[0] <= now:
                self._undelivered.popitem(last=False)

    # ---- under the lock

    def _start_session(
        self, request: Request, engine_id: str, block_ids: tuple[list[int], ...]
    ) -> None:
        if request.request_id in self._sessions:  # an earlier attempt
            self._end(self._sessions[request.request_id], "superseded")
        num_resumed = len(request.request.resume_output_token_ids)
        num_tokens = request.num_prompt_tokens + num_resumed
        firsts = first_read_blocks(self._identity.layout, num_tokens)
        for ids, first in zip(block_ids, firsts, strict=True):
            assert NULL_BLOCK_ID not in ids[first:], f"{request.request_id} lacks what D reads"
        session = _Session(
            request_id=request.request_id,
            attempt=request.request.attempt,
            engine_id=engine_id,
            block_ids=tuple(tuple(ids) for ids in block_ids),
            num_announced=-(-num_tokens // self._identity.layout.block_size),
            num_tokens=num_tokens,
            output_token_ids=tuple(request.output_token_ids[num_resumed:]),
            deadline=self._clock() + min(LINK_WAIT_S, self._session_timeout_s),
        )
        self._sessions[session.request_id] = session
        link = self._links.get(engine_id)
        if link is not None:
            self._announce(session, link)
        self._show_sessions()

    def _announce(self, session: _Session, link: KVLink) -> None:
        session.link = link
        session.id = KVSessionId(
            p_epoch=self._identity.epoch,
            d_epoch=link.epoch,
            link=link.number,
            seq=self._next_seq,
        )
        self._next_seq += 1
        self._open[session.id] = session
        session.deadline = self._clock() + self._session_timeout_s
        ready = BlocksReady(
            session=session.id,
            request_id=session.request_id,
            attempt=session.attempt,
            first_block=0,
            # The message has no null blocks: D does not read those entries.
            block_ids=tuple(
                tuple(max(block_id, 0) for block_id in ids[: session.num_announced])
                for ids in session.block_ids
            ),
            num_tokens=session.num_tokens,
        )
        done = PrefillDone(
            session=session.id,
            request_id=session.request_id,
            attempt=session.attempt,
            num_tokens=session.num_tokens,
            output_token_ids=session.output_token_ids,
            timeout_s=self._session_timeout_s,
        )
        link.handle.send(ready)
        link.handle.send(done)

    def _deliver_waiting(self, link: KVLink) -> None:
        for session in self._sessions.values():
            if session.engine_id == link.engine_id and session.link is None:
                self._announce(session, link)
        for key in [key for key in self._undelivered if key[0] == link.engine_id]:
            link.handle.send(self._undelivered.pop(key)[1])
        self._show_sessions()

    def _end(self, session: _Session, reason: str, *, is_told: bool = True) -> None:
        """Fence, then hand out the blocks; nothing is valid from the first line on (K3)."""
        del self._sessions[session.request_id]
        if session.id is not None:
            del self._open[session.id]
        if is_told:
            self._send_ended(
                session.engine_id,
                SessionEnded(
                    session=session.id,
                    request_id=session.request_id,
                    attempt=session.attempt,
                    reason=reason,
                ),
            )
        self._free(session, None)
        self._metrics.sessions_ended.labels(reason).inc()
        self._show_sessions()
        logger.debug("session of %s ended: %s", session.request_id, reason)

    def _free(self, session: _Session, through_block: int | None) -> None:
        """Give back blocks not given back before, up to `through_block`; None: all there are."""
        for ids in session.block_ids:
            given = ids[session.num_released : through_block]
            self._released_block_ids.extend(i for i in given if i != NULL_BLOCK_ID)
        if through_block is not None:
            session.num_released = through_block
        self._wakeup()

    def _tell_end(self, request: Request, engine_id: str) -> None:
        """The request ends at P: D's ticket is void, and so is a session of it."""
        reasons = {RequestStatus.FINISHED_ABORTED: "aborted", RequestStatus.FINISHED_ERROR: "error"}
        reason = reasons.get(request.status, "finished")
        session = self._sessions.get(request.request_id)
        if session is not None:
            self._end(session, reason)
            if session.attempt == request.request.attempt:
                return
        ended = SessionEnded(
            session=None,
            request_id=request.request_id,
            attempt=request.request.attempt,
            reason=reason,
        )
        self._send_ended(engine_id, ended)

    def _send_ended(self, engine_id: str, message: SessionEnded) -> None:
        link = self._links.get(engine_id)
        if link is not None:
            link.handle.send(message)
            return
        deadline = self._clock() + self._session_timeout_s
        self._undelivered[engine_id, message.request_id] = (deadline, message)
        if len(self._undelivered) > MAX_UNDELIVERED:
            self._undelivered.popitem(last=False)

    def _drop_link(self, link: KVLink, reason: str) -> None:
        if not self._links.remove(link):
            return
        for session in [s for s in self._open.values() if s.link is link]:
            self._end(session, "link_lost", is_told=False)
        link.handle.close(reason)
        self._metrics.links.set(len(self._links))
        logger.info("link %d to %s ended: %s", link.number, link.engine_id, reason)

    def _on_release(self, link: KVLink, message: Release) -> None:
        session = self._open.get(message.session)
        is_valid = (
            session is not None
            and session.link is link
            and message.through_block <= session.num_announced
        )
        ack = ReleaseAck(
            session=message.session, through_block=message.through_block, valid=is_valid
        )
        link.handle.send(ack)
        self._metrics.release_acks.labels(str(is_valid).lower()).inc()
        if session is None or not is_valid:
            self._metrics.late_messages.inc()
        elif message.through_block == session.num_announced:
            self._end(session, "released", is_told=False)
        elif message.through_block > session.num_released:
            session.deadline = self._clock() + self._session_timeout_s
            self._free(session, message.through_block)

    def _on_cancel(self, link: KVLink, message: CancelRequest) -> None:
        session = self._sessions.get(message.request_id)
        if session is None or session.attempt < message.attempt:
            self._cancelled.add((link.engine_id, message.request_id, message.attempt))
        elif session.attempt == message.attempt and session.engine_id == link.engine_id:
            self._end(session, "cancelled")
        else:
            self._metrics.late_messages.inc()

    def _welcome(self, link: KVLink) -> KVLinkResponseMessage:
        return KVLinkWelcome(
            protocol_version=PROTOCOL_VERSION,
            engine_id=self._identity.engine_id,
            epoch=self._identity.epoch,
            compatibility_hash=self._identity.compatibility_hash,
            link=link.number,
            endpoint=self._transport.endpoint(),
        )

    def _show_sessions(self) -> None:
        self._metrics.sessions.set(len(self._sessions))
        if bool(self._open) != self._is_exporting:
            self._is_exporting = bool(self._open)
            self._transport.set_exporting(self._is_exporting)
