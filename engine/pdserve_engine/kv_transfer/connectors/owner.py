"""The owner of blocks that another worker reads, be it a prompt that it computes or a prefix that
it has cached: it admits links, answers releases and ends sessions.

What becomes of a session is in session_machine.py. Messages come on the event loop's thread, the
rest on the engine's; one lock guards all state. Under it only calls are made that neither block nor
call back: the link's, the transport's, `wakeup`.
"""

from abc import abstractmethod

from pdserve_common.errors import KVTransferError
from pdserve_common.types.kv import (
    CancelRequest,
    Granted,
    KVLinkHeartbeat,
    KVLinkHello,
    KVLinkRequestMessage,
    KVLinkResponseMessage,
    KVLinkWelcome,
    Later,
    PrefixRequest,
    Release,
    Revoke,
)
from pdserve_engine.kv_transfer.base import ConnectorContext, KVLinkHandle
from pdserve_engine.kv_transfer.connectors.connector import Connector
from pdserve_engine.kv_transfer.connectors.links import KVLink, common_version, find_mismatch
from pdserve_engine.kv_transfer.ports import KVEvent
from pdserve_engine.kv_transfer.protocol.session import Session
from pdserve_engine.kv_transfer.protocol.session_machine import SessionMachine
from pdserve_engine.kv_transfer.protocol.transitions import PRODUCER, ProducerEvent, ProducerState

# What is not the same for both kinds of sessions.
KindMessage = Granted | Later | Revoke | PrefixRequest


class OwnerConnector(Connector[KVLinkRequestMessage]):
    """The owner's connector."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._next_link = 1
        self._machine = SessionMachine(context, link_of=self._links.get)

    # ---- the engine thread

    def fence_all(self, reason: str) -> None:
        with self._lock:
            for session in self._machine.all():
                self._machine.advance(session, ProducerEvent.FENCED, detail=reason)

    def take_events(self) -> list[KVEvent]:
        with self._lock:
            return self._machine.take_events()

    def check_idle(self) -> None:
        """Raise AssertionError, with what is left, unless nothing is of any session. When all have
        ended, and their requests.
        """
        with self._lock:
            self._machine.check_idle()

    def num_open_sessions(self) -> int:
        return len(self._machine)

    # ---- the KvLink: the event loop's thread

    def accept_link(
        self, hello: KVLinkHello, handle: KVLinkHandle[KVLinkResponseMessage]
    ) -> KVLink:
        """Admit a reader: sends it the welcome and what waits for it. Raises KVTransferError that
        names what differs, or if this worker is asleep.
        """
        mismatch = find_mismatch(self._identity, self._transport.name, hello)
        if mismatch is not None:
            raise KVTransferError(mismatch)
        with self._lock:
            self._check_not_suspended()
            self._replace_link(hello.engine_id)
            version = common_version(hello)
            link = KVLink(self._next_link, hello.engine_id, hello.epoch, handle, version)
            self._next_link += 1
            self._add_link(link)
            self._transport.expect_peer()
            handle.send(self._welcome(link))
            self._machine.open_waiting(link)
        return link

    # ---- under the lock

    @abstractmethod
    def _take_message_of_kind(
        self, link: KVLink, session: Session | None, message: KindMessage
    ) -> bool:
        """As _take_message; `session` is the one that the message names."""

    @abstractmethod
    def _on_unknown_cancel(self, link: KVLink, message: CancelRequest) -> bool:
        """The reader gives up what has no session, or that of an earlier attempt."""

    def _take_message(self, link: KVLink, message: KVLinkRequestMessage) -> bool:
        match message:
            case KVLinkHeartbeat():
                return True
            case KVLinkHello():
                return False
            case CancelRequest():
                return self._on_cancel(link, message)
        self._transport.poll_soon()  # The reader is at work
        if isinstance(message, PrefixRequest):
            return self._take_message_of_kind(link, None, message)
        session = self._machine.find_open(message.session, link)
        if isinstance(message, Release):
            return self._on_release(link, session, message)
        return self._take_message_of_kind(link, session, message)

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
        attempt = -1 if session is None else session.key.attempt
        if session is None or attempt < message.attempt:
            return self._on_unknown_cancel(link, message)
        if attempt > message.attempt or session.engine_id != link.engine_id:
            return False
        return self._machine.advance(session, ProducerEvent.CANCELLED)

    def _on_link_lost(self, link: KVLink, reason: str) -> None:
        for session in [s for s in self._machine.all() if s.link is link]:
            self._machine.advance(session, ProducerEvent.LINK_LOST)

    def _expire(self, now: float, stalled_s: float) -> None:
        self._machine.expire(now, stalled_s)

    def _welcome(self, link: KVLink) -> KVLinkResponseMessage:
        return KVLinkWelcome(
            protocol_version=link.protocol_version,
            engine_id=self._identity.engine_id,
            epoch=self._identity.epoch,
            compatibility_hash=self._identity.compatibility_hash,
            link=link.number,
            endpoint=self._transport.endpoint(),
        )


def _may_release(session: Session, through_block: int) -> bool:
    is_running = ProducerEvent.RELEASED in PRODUCER[session.state]
    return is_running and through_block <= session.num_announced
