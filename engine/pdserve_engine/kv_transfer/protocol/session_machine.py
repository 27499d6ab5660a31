"""Takes the steps of the owner's sessions: carries out the PRODUCER table of transitions.py, and
keeps account of what it has led to. Not thread-safe: the producer's lock guards all of it.

Sessions that are not over are in `_sessions`, those that the reader knows of in `_open` as well;
leaving both is the fence (rule K3).
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from pdserve_common.errors import KVTransferError
from pdserve_common.metrics.services import begin
from pdserve_common.observability.logging import log_request
from pdserve_common.types.kv import (
    RANKS_PROTOCOL_VERSION,
    BlocksReady,
    GrantRequest,
    KVLinkResponseMessage,
    KVSessionId,
    PrefillDone,
    PrefixReady,
    PrefixRequest,
    Release,
    ReleaseAck,
    SessionEnded,
    SessionEndReason,
)
from pdserve_engine.kv.block_pool import NULL_BLOCK_ID
from pdserve_engine.kv_transfer.base import ConnectorContext
from pdserve_engine.kv_transfer.connectors.links import SESSION_LOST, KVLink
from pdserve_engine.kv_transfer.ports import (
    BlocksFreed,
    KVEvent,
    RequestFailed,
    StartAllowed,
    StartDeferred,
    StartForbidden,
)
from pdserve_engine.kv_transfer.protocol.machine import check_carried_out, take_step
from pdserve_engine.kv_transfer.protocol.session import Session, SessionKey
from pdserve_engine.kv_transfer.protocol.transitions import (
    PRODUCER,
    ProducerAction,
    ProducerEvent,
    ProducerState,
)
from pdserve_engine.request.request import Request

logger = logging.getLogger(__name__)

MAX_UNDELIVERED = 4096
# How long a session waits for its reader to dial, which it does when it hears of the request, also
# in the midst of a step.
LINK_WAIT_S = 5.0
# Why the events that end sessions do; FINISHED brings its own reason.
_REASONS: Mapping[ProducerEvent, SessionEndReason] = {
    ProducerEvent.PREEMPTED: SessionEndReason.PREEMPTED,
    ProducerEvent.EXPIRED: SessionEndReason.EXPIRED,
    ProducerEvent.FENCED: SessionEndReason.FENCED,
    ProducerEvent.REVOKED: SessionEndReason.REVOKED,
    ProducerEvent.CANCELLED: SessionEndReason.CANCELLED,
    ProducerEvent.LINK_LOST: SessionEndReason.LINK_LOST,
    ProducerEvent.RELEASED_ALL: SessionEndReason.RELEASED,
    ProducerEvent.PREFILLED_ALL_CACHED: SessionEndReason.RELEASED,
    ProducerEvent.NOT_FOUND: SessionEndReason.NOT_CACHED,
}

# Ends that nobody has asked for: an operator reads of them.
_LOSSES = frozenset({ProducerEvent.EXPIRED, ProducerEvent.FENCED, ProducerEvent.LINK_LOST})


class SessionMachine:
    """The sessions of one owner, and what the scheduler and readers are to hear of them."""

    def __init__(
        self, context: ConnectorContext, *, link_of: Callable[[str], KVLink | None]
    ) -> None:
        self._transport = context.transport
        self._identity = context.identity
        self._metrics = context.metrics
        begin(
            self._metrics.sessions_ended,
            reason=(str(reason) for reason in SessionEndReason if reason),
        )
        self._link_of = link_of
        self._wakeup = context.wakeup
        self._session_timeout_s = context.session_timeout_s
        self._checksum = context.checksum
        self._clock = context.clock
        self._next_seq = 1
        self._sessions: dict[str, Session] = {}  # by request id
        self._open: dict[KVSessionId, Session] = {}
        self._num_exported = 0
        self._kv_events: list[KVEvent] = []
        # Requests that the scheduler is told to end: the reader knows already.
        self._failed: set[Request] = set()
        # For readers whose link is not here yet: until when to keep it, and what to tell.
        self._undelivered: OrderedDict[tuple[str, str], tuple[float, SessionEnded]] = OrderedDict()
        # All but SEND_INVALID_ACK, which is for sessions that are in no map any more: `refuse`.
        self._actions: Mapping[ProducerAction, Callable[[Session], None]] = {
            ProducerAction.ALLOW_START: self._allow_start,
            ProducerAction.FORBID_START: self._forbid_start,
            ProducerAction.DEFER_START: self._defer_start,
            ProducerAction.ANNOUNCE: self._announce,
            ProducerAction.SEND_PREFILL_DONE: self._send_prefill_done,
            ProducerAction.ANNOUNCE_PREFIX: self._announce_prefix,
            ProducerAction.SEND_VALID_ACK: self._send_valid_ack,
            ProducerAction.FENCE: self._fence,
            ProducerAction.FREE: self._free,
            ProducerAction.FREE_RELEASED: self._free_released,
            ProducerAction.SEND_SESSION_ENDED: self._send_session_ended,
            ProducerAction.FAIL_REQUEST: self._fail_request,
        }
        check_carried_out(self._actions, set(ProducerAction) - {ProducerAction.SEND_INVALID_ACK})

    def __len__(self) -> int:
        """Sessions that are not over."""
        return len(self._sessions)

    def check_idle(self) -> None:
        """Raise AssertionError, with what is left, unless nothing is of any session."""
        assert not self._sessions, f"not over: {list(self._sessions)}"
        assert not self._open, f"the reader may still name {list(self._open)}"
        assert self._num_exported == 0, f"{self._num_exported} sessions are exported"
        assert not self._failed, f"waiting for their end: {self._failed}"

    def all(self) -> list[Session]:
        return list(self._sessions.values())

    def get(self, request_id: str) -> Session | None:
        """Return the session of whatever attempt of the request has one."""
        return self._sessions.get(request_id)

    def find(self, request: Request) -> Session | None:
        """Return the request's session, not another attempt's."""
        session = self._sessions.get(request.request_id)
        is_its = session is not None and session.is_of(request)
        return session if is_its else None

    def find_open(self, session_id: KVSessionId, link: KVLink) -> Session | None:
        """Return the session of that id, if it is one of that link."""
        session = self._open.get(session_id)
        return session if session is not None and session.link is link else None

    def take_events(self) -> list[KVEvent]:
        events, self._kv_events = self._kv_events, []
        return events

    def advance(
        self,
        session: Session,
        event: ProducerEvent,
        reason: SessionEndReason = SessionEndReason.UNSPECIFIED,
        detail: str = "",
    ) -> bool:
        """Take the table's step; False, and nothing, if it has none. `reason`: of FINISHED; with
        `detail` people read why the session is over.
        """
        before = session.state
        actions = take_step(PRODUCER, session, event)
        if actions is None:
            return False
        logger.debug("request %s: %s", session.key.request_id, event.name)
        session.reason = _REASONS.get(event, reason)
        session.message = f"{session.reason}: {detail}" if detail else str(session.reason)
        if event in _LOSSES:
            self._warn_lost(session, before, actions)
        session.deadline = self._clock() + self._session_timeout_s
        self._count(before, -1)
        self._count(session.state, +1)
        for action in actions:
            self._actions[action](session)
        return True

    def add(self, request: Request) -> Session:
        """Begin a session, to be opened when the reader's link is up."""
        num_tokens = request.num_prompt_tokens + len(request.core_request.resume_output_token_ids)
        key = _key_of(request)
        return self._add(key, ProducerState.ASKING, num_tokens, LINK_WAIT_S, request)

    def add_prefix(self, link: KVLink, wanted: PrefixRequest) -> Session:
        """The reader asks for a prefix: begin a session, to be opened when its blocks are found."""
        key = SessionKey(link.engine_id, wanted.request_id, wanted.attempt)
        num_blocks = wanted.first_block + len(wanted.block_hashes)
        num_tokens = num_blocks * self._identity.layout.block_size
        session = self._add(key, ProducerState.LOOKING_UP, num_tokens, self._session_timeout_s)
        session.link = link
        session.start_at(wanted.first_block)
        return session

    def _add(
        self,
        key: SessionKey,
        state: ProducerState,
        num_tokens: int,
        timeout_s: float,
        request: Request | None = None,
    ) -> Session:
        now = self._clock()
        session = Session(
            key,
            state,
            num_tokens,
            self._identity.layout,
            request=request,
            now=now,
            deadline=now + min(timeout_s, self._session_timeout_s),
        )
        self._sessions[key.request_id] = session
        self._count(session.state, +1)
        return session

    def open(self, session: Session, link: KVLink) -> None:
        """The reader's link is up: ask it for blocks."""
        self.give_id(session, link)
        session.deadline = self._clock() + self._session_timeout_s
        message = GrantRequest(
            session=session.open_id,
            request_id=session.key.request_id,
            attempt=session.key.attempt,
            num_tokens=session.num_tokens,
        )
        link.handle.send(message)

    def give_id(self, session: Session, link: KVLink) -> None:
        """The reader is about to hear of the session (rule K1)."""
        session.link = link
        session.id = KVSessionId(
            p_epoch=self._identity.epoch,
            d_epoch=link.epoch,
            link=link.number,
            seq=self._next_seq,
        )
        self._next_seq += 1
        self._open[session.id] = session

    def open_waiting(self, link: KVLink) -> None:
        """A reader has dialed: tell it what it has missed and ask it for what waits."""
        for key in [key for key in self._undelivered if key[0] == link.engine_id]:
            link.handle.send(self._undelivered.pop(key)[1])
        for session in self._sessions.values():
            if session.engine_id == link.engine_id and session.link is None:
                self.open(session, link)

    def expire(self, now: float, stalled_s: float) -> None:
        """End what is overdue, `stalled_s` of which is not the reader's delay but our own."""
        for session in self.all():
            session.deadline += stalled_s
            if session.deadline <= now:
                self.advance(session, ProducerEvent.EXPIRED)
        while self._undelivered and next(iter(self._undelivered.values()))[0] <= now:
            self._undelivered.popitem(last=False)

    def tell_end(self, request: Request, reason: SessionEndReason) -> None:
        """The request ends on the owner without a session: the reader's ticket is void, unless the
        reader knows.
        """
        if request in self._failed:
            self._failed.discard(request)
        else:
            key = _key_of(request)
            self._send_ended(key.engine_id, _make_ended(None, key, reason, str(reason)))

    def refuse(self, link: KVLink, release: Release) -> None:
        """What the table says of ENDED sessions: the release is not valid."""
        self._send_ack(link, release, is_valid=False)

    # ---- actions

    def _allow_start(self, session: Session) -> None:
        waited_s = self._clock() - session.asked_at
        self._metrics.grant_wait.labels(session.engine_id).observe(waited_s)
        self.tell(StartAllowed(session.request, self._clock()))

    def _forbid_start(self, session: Session) -> None:
        self.tell(StartForbidden(session.request))

    def _defer_start(self, session: Session) -> None:
        self.tell(StartDeferred(session.request))

    def _announce(self, session: Session) -> None:
        message = self._make_ready(session)
        if message is not None:
            self._send(session, message)
            self._transport.poll_soon()

    def _announce_prefix(self, session: Session) -> None:
        blocks = self._make_ready(session)
        assert blocks is not None, "blocks were found"
        _, request_id, attempt = session.key
        message = PrefixReady(request_id=request_id, attempt=attempt, blocks=blocks)
        self._send(session, message)
        self._transport.poll_soon()

    def _make_ready(self, session: Session) -> BlocksReady | None:
        """Return the announcement of what is new; None if nothing is."""
        first_block = session.num_announced
        was_exported = session.is_exported
        groups = session.take_unannounced()
        if session.num_announced == first_block:
            return None
        if not was_exported:
            self._export(1)
        # The message has no null blocks: the reader does not read those entries.
        return BlocksReady(
            session=session.open_id,
            first_block=first_block,
            block_ids=tuple(tuple(max(block_id, 0) for block_id in ids) for ids in groups),
            checksums=self._checksums(session, groups),
        )

    def _send_prefill_done(self, session: Session) -> None:
        request = session.request
        message = PrefillDone(
            session=session.open_id,
            num_tokens=session.num_tokens,
            output_token_ids=tuple(request.all_token_ids[session.num_tokens :]),
            timeout_s=self._session_timeout_s,
            prefill_stats=request.measure_prefill(),
        )
        self._send(session, message)

    def _send_valid_ack(self, session: Session) -> None:
        assert session.link is not None
        assert session.release is not None, "a release is being answered"
        self._send_ack(session.link, session.release, is_valid=True)

    def _fence(self, session: Session) -> None:
        """Nothing of the session is valid from here on (K3)."""
        del self._sessions[session.key.request_id]
        if session.id is not None:
            del self._open[session.id]
        if session.is_exported:
            self._export(-1)
        self._metrics.sessions_ended.labels(str(session.reason)).inc()

    def _free(self, session: Session) -> None:
        self._free_through(session, session.num_blocks)

    def _free_released(self, session: Session) -> None:
        self._free_through(session, session.num_released)

    def _send_session_ended(self, session: Session) -> None:
        ended = _make_ended(session.id, session.key, session.reason, session.message)
        self._send_ended(session.engine_id, ended)

    def _fail_request(self, session: Session) -> None:
        self._failed.add(session.request)
        error = KVTransferError(f"handing KV over to {session.engine_id} failed: {session.message}")
        self.tell(RequestFailed(session.request, error.to_engine_error()))

    # ---- helpers

    def _warn_lost(
        self, session: Session, before: ProducerState, actions: tuple[ProducerAction, ...]
    ) -> None:
        is_failed = ProducerAction.FAIL_REQUEST in actions
        log_request(
            logger,
            logging.WARNING,
            session.key.request_id,
            session.key.attempt,
            SESSION_LOST,
            session.id or "(none yet)",
            session.engine_id,
            before.name,
            self._clock() - session.asked_at,
            session.message,
            "the router decides how it goes on" if is_failed else "its blocks are free",
        )

    def _count(self, state: ProducerState, change: int) -> None:
        if state is not ProducerState.ENDED:
            self._metrics.sessions.labels(state.name.lower()).inc(change)

    def tell(self, event: KVEvent) -> None:
        self._kv_events.append(event)
        self._wakeup()

    def _send(self, session: Session, message: KVLinkResponseMessage) -> None:
        assert session.link is not None
        session.link.handle.send(message)

    def _send_ack(self, link: KVLink, release: Release, *, is_valid: bool) -> None:
        ack = ReleaseAck(
            session=release.session, through_block=release.through_block, valid=is_valid
        )
        link.handle.send(ack)
        self._metrics.release_acks.labels(str(is_valid).lower()).inc()

    def _send_ended(self, engine_id: str, message: SessionEnded) -> None:
        link = self._link_of(engine_id)
        if link is not None:
            link.handle.send(message)
            return
        deadline = self._clock() + self._session_timeout_s
        self._undelivered[engine_id, message.request_id] = (deadline, message)
        if len(self._undelivered) > MAX_UNDELIVERED:
            self._undelivered.popitem(last=False)

    def _free_through(self, session: Session, through_block: int) -> None:
        block_ids = session.take_kept(through_block)
        if block_ids:
            self.tell(BlocksFreed(block_ids))

    def _export(self, change: int) -> None:
        """One session more, or less, of which the reader may be reading."""
        was_exporting = self._num_exported > 0
        self._num_exported += change
        if (self._num_exported > 0) is not was_exporting:
            self._transport.set_exporting(not was_exporting)

    def _checksums(
        self, session: Session, groups: Sequence[Sequence[int]]
    ) -> tuple[tuple[int, ...], ...]:
        """Per group one for each block and KV head, 0 for blocks that the reader does not read;
        none for a the reader that knows others.
        """
        link, checksum = session.link, self._checksum
        assert link is not None, "what is announced has a link"
        if checksum is None or link.protocol_version < RANKS_PROTOCOL_VERSION:
            return ()
        num_heads = self._identity.layout.num_kv_heads

        def checksums_of(block_ids: Sequence[int]) -> tuple[int, ...]:
            sums = iter(checksum([i for i in block_ids if i != NULL_BLOCK_ID]))
            return tuple(
                0 if i == NULL_BLOCK_ID else next(sums) for i in block_ids for _ in range(num_heads)
            )

        return tuple(map(checksums_of, groups))


def _make_ended(
    session_id: KVSessionId | None, key: SessionKey, reason: SessionEndReason, message: str
) -> SessionEnded:
    return SessionEnded(
        session=session_id,
        request_id=key.request_id,
        attempt=key.attempt,
        reason=reason,
        message=message,
    )


def _key_of(request: Request) -> SessionKey:
    params = request.kv_transfer_params
    assert params is not None, "only requests that will be decoded elsewhere have sessions"
    attempt = request.core_request.attempt
    return SessionKey(params.remote_engine_id, request.request_id, attempt)
