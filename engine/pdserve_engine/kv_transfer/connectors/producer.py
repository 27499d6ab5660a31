"""Prefill's side of the handoff: has decode reserve blocks before a prefill starts, announces what
the prefill has written, and keeps it until decode has read it.

The threads, the links and the releases are in owner.py.
"""

from collections.abc import Mapping

from pdserve_common.metrics.services import begin
from pdserve_common.types.engine import EngineCoreRequest, ErrorFault
from pdserve_common.types.kv import (
    CancelRequest,
    Granted,
    Later,
    PrefixRequest,
    Revoke,
    SessionEndReason,
)
from pdserve_engine.kv_transfer.base import ConnectorContext
from pdserve_engine.kv_transfer.connectors.links import KVLink, RecentKeys
from pdserve_engine.kv_transfer.connectors.owner import KindMessage, OwnerConnector
from pdserve_engine.kv_transfer.protocol.session import Session
from pdserve_engine.kv_transfer.protocol.transitions import ProducerEvent, ProducerState
from pdserve_engine.request.request import Request, RequestStatus

# What decode says to a grant request: the event it is, and its name in metrics.
_ANSWERS: Mapping[type, tuple[ProducerEvent, str]] = {
    Granted: (ProducerEvent.GRANTED, "granted"),
    Later: (ProducerEvent.LATER, "later"),
    Revoke: (ProducerEvent.REVOKED, "revoked"),
}

_END_REASONS = {
    RequestStatus.FINISHED_ABORTED: SessionEndReason.ABORTED,
    RequestStatus.FINISHED_ERROR: SessionEndReason.ERROR,
}


class ProducerConnector(OwnerConnector):
    """Prefill's connector of requests that are decoded elsewhere, a ProducerPort."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        begin(self._metrics.grants, answer=(answer for _, answer in _ANSWERS.values()))
        # Given up by decode before prefill asked for them: (engine id, request id, attempt).
        self._cancelled = RecentKeys()

    # ---- the event loop's thread

    def on_dispatched(self, request: EngineCoreRequest) -> None:
        """Nothing: decode dials."""

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

    # ---- under the lock

    def _hand_off(self, session: Session, block_ids: tuple[list[int], ...]) -> frozenset[int]:
        session.add_blocks(block_ids, session.num_blocks)
        if session.first_block == session.num_blocks:
            self._machine.advance(session, ProducerEvent.PREFILLED_ALL_CACHED)
        else:
            self._machine.advance(session, ProducerEvent.PREFILLED)
        return session.keep()

    def _take_message_of_kind(
        self, link: KVLink, session: Session | None, message: KindMessage
    ) -> bool:
        if session is None or isinstance(message, PrefixRequest):
            return False
        return self._on_answer(session, message)

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

    def _on_unknown_cancel(self, link: KVLink, message: CancelRequest) -> bool:
        self._cancelled.add((link.engine_id, message.request_id, message.attempt))
        return True


def _end_reason(request: Request) -> SessionEndReason:
    if request.error is not None and request.error.fault is ErrorFault.REQUEST:
        # As if it had been aborted: the router has prefill's own error, and no transfer has failed.
        return SessionEndReason.ABORTED
    return _END_REASONS.get(request.status, SessionEndReason.FINISHED)
