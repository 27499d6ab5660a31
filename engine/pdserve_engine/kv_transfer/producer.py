"""P's side of the handoff: has D reserve blocks before a prefill starts, announces what the prefill
has written, and keeps it until D has read it.

What becomes of a session is in session_machine.py; here are the threads and the links. Messages
come on the event loop's thread, the rest on the engine's; one lock guards all state. Under it only
calls are made that neither block nor call back: the link's, the transport's, `wakeup`.
"""

import time
from collections.abc import Callable, Mapping

from pdserve_common.engine_types import EngineCoreRequest, ErrorFault
from pdserve_common.errors import KVTransferError
from pdserve_common.kv_types import (
    PROTOCOL_VERSION,
    CancelRequest,
    Granted,
    KVLinkHeartbeat,
    KVLinkHello,
    KVLinkRequestMessage,
    KVLinkResponseMessage,
    KVLinkWelcome,
    Later,
    Release,
    Revoke,
    SessionEndReason,
)
from pdserve_common.metrics import KVTransferMetrics, begin
from pdserve_engine.kv_transfer.base import KVIdentity, KVLinkHandle, KVTransport
from pdserve_engine.kv_transfer.connector import Connector
from pdserve_engine.kv_transfer.links import KVLink, RecentKeys, find_mismatch
from pdserve_engine.kv_transfer.ports import KVEvent
from pdserve_engine.kv_transfer.protocol import (
    PRODUCER,
    ProducerEvent,
    ProducerState,
)
from pdserve_engine.kv_transfer.session import Session
from pdserve_engine.kv_transfer.session_machine import Checksum, SessionMachine
from pdserve_engine.request.request import Request, RequestStatus

# What D says to a grant request: the event it is, and its name in metrics.
_ANSWERS: Mapping[type, tuple[ProducerEvent, str]] = {
    Granted: (ProducerEvent.GRANTED, "granted"),
    Later: (ProducerEvent.LATER, "later"),
    Revoke: (ProducerEvent.REVOKED, "revoked"),
}

_END_REASONS = {
    RequestStatus.FINISHED_ABORTED: SessionEndReason.ABORTED,
    RequestStatus.FINISHED_ERROR: SessionEndReason.ERROR,
}


class ProducerConnector(Connector[KVLinkRequestMessage]):
    """P's connector, a ProducerPort. `wakeup` makes the engine thread call take_events soon."""

    def __init__(
        self,
        transport: KVTransport,
        *,
        identity: KVIdentity,
        metrics: KVTransferMetrics,
        wakeup: Callable[[], None],
        step_seq: Callable[[], int],
        session_timeout_s: float = 600.0,
        checksum: Checksum | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`checksum` returns a CRC-32 for each of the blocks it is given; None: send none.

        A session that makes no progress for `session_timeout_s` is over, whatever it waits for.
        """
        super().__init__(
            transport, identity=identity, metrics=metrics, step_seq=step_seq, clock=clock
        )
        begin(metrics.grants, answer=(answer for _, answer in _ANSWERS.values()))
        self._next_link = 1
        # Given up by D before P asked for them: (engine id, request id, attempt).
        self._cancelled = RecentKeys()
        self._machine = SessionMachine(
            transport,
            identity=identity,
            metrics=metrics,
            link_of=self._links.get,
            wakeup=wakeup,
            session_timeout_s=session_timeout_s,
            checksum=checksum,
            clock=clock,
        )

    # ---- the event loop's thread

    def on_dispatched(self, request: EngineCoreRequest) -> None:
        """Nothing: D dials."""

    # ---- the engine thread

    def ask(self, request: Request) -> None:
        with self._lock:
            old = self._machine.get(request.request_id)
            if old is not None:  # an earlier attempt
                self._machine.advance(old, ProducerEvent.FINISHED, SessionEndReason.SUPERSEDED)
            session = self._machine.add(request)
            link = self._links.get(session.engine_id)
            if session.key in self._cancelled:
                self._machine.advance(session, ProducerEvent.CANCELLED)
            elif link is not None:
                self._machine.open(session, link)

    def on_started(self, request: Request) -> bool:
        with self._lock:
            session = self._machine.find(request)
            return session is not None and self._machine.advance(session, ProducerEvent.STARTED)

    def on_blocks_computed(
        self, request: Request, num_tokens: int, block_ids: tuple[list[int], ...]
    ) -> None:
        with self._lock:
            session = self._machine.find(request)
            # What the last chunk has written waits for the handoff, which comes next: that makes
            # one READ of it and the tail, and none if the first token ends the request.
            if session is not None and num_tokens < session.num_tokens:
                session.add_blocks(block_ids, num_tokens // self._identity.layout.block_size)
                self._machine.advance(session, ProducerEvent.COMPUTED)

    def on_preempted(self, request: Request) -> None:
        with self._lock:
            session = self._machine.find(request)
            if session is not None:
                self._machine.advance(session, ProducerEvent.PREEMPTED)

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> frozenset[int]:
        with self._lock:
            session = self._machine.find(request)
            if session is None:
                self._machine.tell_end(request, _end_reason(request))
            elif request.is_handed_off:
                return self._hand_off(session, block_ids)
            else:
                self._machine.advance(session, ProducerEvent.FINISHED, _end_reason(request))
        return frozenset()

    def abort_session(self, request_id: str) -> None:
        with self._lock:
            session = self._machine.get(request_id)
            if session is not None and session.state is ProducerState.HANDED_OFF:
                self._machine.advance(session, ProducerEvent.FINISHED, SessionEndReason.ABORTED)

    def fence_all(self, reason: str) -> None:
        with self._lock:
            for session in self._machine.all():
                self._machine.advance(session, ProducerEvent.FENCED, detail=reason)

    def take_events(self) -> list[KVEvent]:
        with self._lock:
            return self._machine.take_events()

    def num_open_sessions(self) -> int:
        return len(self._machine)

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
            self._replace_link(hello.engine_id)
            link = KVLink(self._next_link, hello.engine_id, hello.epoch, handle)
            self._next_link += 1
            self._add_link(link)
            self._transport.expect_peer()
            handle.send(self._welcome(link))
            self._machine.open_waiting(link)
        return link

    # ---- under the lock

    def _hand_off(self, session: Session, block_ids: tuple[list[int], ...]) -> frozenset[int]:
        session.add_blocks(block_ids, session.num_blocks)
        if session.first_block == session.num_blocks:
            self._machine.advance(session, ProducerEvent.PREFILLED_ALL_CACHED)
        else:
            self._machine.advance(session, ProducerEvent.PREFILLED)
        return session.keep()

    def _take_message(self, link: KVLink, message: KVLinkRequestMessage) -> bool:
        match message:
            case KVLinkHeartbeat():
                return True
            case KVLinkHello():
                return False
            case CancelRequest():
                return self._on_cancel(link, message)
        self._transport.poke()  # D is at work
        session = self._machine.find_open(message.session, link)
        if isinstance(message, Release):
            return self._on_release(link, session, message)
        return session is not None and self._on_answer(session, message)

    def _on_answer(self, session: Session, message: Granted | Later | Revoke) -> bool:
        if isinstance(message, Granted) and message.first_block > session.num_blocks:
            return False
        event, answer = _ANSWERS[type(message)]
        if not self._machine.advance(session, event):
            return False
        if isinstance(message, Granted):
            session.start_at(message.first_block)
        self._metrics.grants.labels(answer).inc()
        return True

    def _on_release(self, link: KVLink, session: Session | None, message: Release) -> bool:
        if session is None or not _may_release(session, message.through_block):
            self._machine.refuse(link, message)
            return False
        session.release = message
        session.num_released = max(session.num_released, message.through_block)
        is_last = session.num_released == session.num_blocks
        if is_last and session.state is ProducerState.HANDED_OFF:
            return self._machine.advance(session, ProducerEvent.RELEASED_ALL)
        return self._machine.advance(session, ProducerEvent.RELEASED)

    def _on_cancel(self, link: KVLink, message: CancelRequest) -> bool:
        session = self._machine.get(message.request_id)
        attempt = -1 if session is None else session.request.core_request.attempt
        if session is None or attempt < message.attempt:
            self._cancelled.add((link.engine_id, message.request_id, message.attempt))
            return True
        if attempt > message.attempt or session.engine_id != link.engine_id:
            return False
        return self._machine.advance(session, ProducerEvent.CANCELLED)

    def _on_link_lost(self, link: KVLink, reason: str) -> None:
        for session in [s for s in self._machine.all() if s.link is link]:
            self._machine.advance(session, ProducerEvent.LINK_LOST)

    def _expire(self, now: float, overslept_s: float) -> None:
        self._machine.expire(now, overslept_s)

    def _welcome(self, link: KVLink) -> KVLinkResponseMessage:
        return KVLinkWelcome(
            protocol_version=PROTOCOL_VERSION,
            engine_id=self._identity.engine_id,
            epoch=self._identity.epoch,
            compatibility_hash=self._identity.compatibility_hash,
            link=link.number,
            endpoint=self._transport.endpoint(),
        )


def _may_release(session: Session, through_block: int) -> bool:
    is_running = ProducerEvent.RELEASED in PRODUCER[session.state]
    return is_running and through_block <= session.num_announced


def _end_reason(request: Request) -> SessionEndReason:
    if request.error is not None and request.error.fault is ErrorFault.REQUEST:
        # As if it had been aborted: the router has P's own error, and no transfer has failed.
        return SessionEndReason.ABORTED
    return _END_REASONS.get(request.status, SessionEndReason.FINISHED)
