"""The reader of blocks that another worker owns, be it a prompt that that one computes or a prefix
that it has cached: it dials, posts READs, releases what has landed and gives up what is overdue.

READs that end, deadlines and messages become events of the CONSUMER and READ tables of
protocol/transitions.py; what becomes of a pull is in pull_machine.py. Messages come on the event
loop's thread, READs end on the transfer thread, the rest happens on the engine's; one lock guards
all state. Under it only calls are made that neither block nor call back: the link's, the
transport's, `wakeup`, `request_link`.
"""

import math
from abc import abstractmethod
from functools import partial

from pdserve_common.metrics.services import begin
from pdserve_common.types.kv import (
    BlocksReady,
    GrantRequest,
    KVLinkHeartbeat,
    KVLinkHello,
    KVLinkRequestMessage,
    KVLinkResponseMessage,
    KVLinkWelcome,
    PrefillDone,
    PrefixReady,
    ReleaseAck,
    SessionEnded,
)
from pdserve_engine.kv_transfer.base import ConnectorContext, KVLinkHandle, ReadResult
from pdserve_engine.kv_transfer.connectors.connector import Connector
from pdserve_engine.kv_transfer.connectors.endpoint import RequestLink
from pdserve_engine.kv_transfer.connectors.links import KVLink, check_welcome, make_hello
from pdserve_engine.kv_transfer.ports import KVEvent
from pdserve_engine.kv_transfer.protocol.pull import (
    FAILURE_REASONS,
    LossReason,
    PullKey,
    Read,
)
from pdserve_engine.kv_transfer.protocol.pull_machine import PullMachine
from pdserve_engine.kv_transfer.protocol.transitions import (
    ConsumerEvent,
    ConsumerState,
)
from pdserve_engine.request.request import Request

# What is not the same for both kinds of pulls.
KindMessage = GrantRequest | BlocksReady | PrefixReady | PrefillDone


class ReaderConnector(Connector[KVLinkResponseMessage]):
    """The reader's connector."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._layout = context.identity.layout
        self._session_timeout_s = context.session_timeout_s
        self._checksum = context.checksum
        self._request_link: RequestLink | None = None
        self._dialing: set[str] = set()
        # Wanted while suspended: (host, port) by engine id.
        self._dials_later: dict[str, tuple[str, int]] = {}
        self._num_grants = 0
        self._machine = PullMachine(
            context,
            link_of=self._links.get,
            on_read_done=self._on_read_done,
            on_read_stalled=self._on_read_stalled,
        )

    def bind_link_pool(self, request_link: RequestLink) -> None:
        """Set what dials `(engine_id, host, port)` and ends in link_up or link_failed."""
        self._request_link = request_link

    # ---- the engine thread

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> frozenset[int]:
        with self._lock:
            pull = self._machine.pulls.get(self._key_of(request))
            if pull is None:
                return frozenset()
            self._machine.advance(pull, ConsumerEvent.REQUEST_ENDED)
            return pull.kept

    def fence_all(self, reason: str) -> None:
        with self._lock:
            for pull in list(self._machine.pulls.values()):
                pull.is_fenced = True
                self._machine.lose(
                    pull, ConsumerEvent.FENCED, "fenced", f"KV pull was fenced: {reason}"
                )

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
        with self._lock:
            return self._machine.num_open()

    def dial(self, engine_id: str, host: str, port: int) -> None:
        """Get a link to an owner unless there is one, or one on its way. Any thread may call it,
        also before a request needs the link. While suspended it waits for `resume`.
        """
        with self._lock:
            if self._is_suspended:
                self._dials_later[engine_id] = (host, port)
                return
            if engine_id in self._dialing or self._links.get(engine_id) is not None:
                return
            if self._request_link is None or not host:
                self._lose_waiting(engine_id, f"no address for {engine_id}")
                return
            self._request_link(engine_id, host, port)
            self._dialing.add(engine_id)

    def resume(self) -> None:
        super().resume()
        with self._lock:
            dials, self._dials_later = self._dials_later, {}
        for engine_id, (host, port) in dials.items():
            self.dial(engine_id, host, port)

    # ---- the KvLink: the event loop's thread

    def hello(self) -> KVLinkHello:
        """What to send first on a new link."""
        return make_hello(self._identity, self._transport.name)

    def link_up(
        self, engine_id: str, welcome: KVLinkWelcome, handle: KVLinkHandle[KVLinkRequestMessage]
    ) -> KVLink:
        """The owner has welcomed us on a link dialed for `engine_id`; one that was open is
        replaced. Raises KVTransferError if it is not the owner we want; then the caller reports
        link_failed.
        """
        check_welcome(self._identity, engine_id, welcome)
        with self._lock:
            self._check_not_suspended()
            self._replace_link(engine_id)
            version = welcome.protocol_version
            link = KVLink(welcome.link, engine_id, welcome.epoch, handle, version)
            link.peer = self._transport.add_peer(welcome, partial(self.link_lost, link))
            # On all of its ranks.
            link.num_blocks = sum(r.num_blocks for r in welcome.endpoint.ranks[0].regions)
            self._dialing.discard(engine_id)
            self._add_link(link)
            begin(self._metrics.transfer_failures, peer=(engine_id,), reason=FAILURE_REASONS)
            self._on_linked(link)
        return link

    def link_failed(self, engine_id: str, reason: str) -> None:
        """A link that was asked for cannot be had: nobody waits for it any longer."""
        with self._lock:
            self._dialing.discard(engine_id)
            if self._links.get(engine_id) is None:
                self._lose_waiting(engine_id, reason)

    # ---- the transfer thread

    def _on_read_done(self, read: Read, result: ReadResult) -> None:
        # It may take long: not under the lock.
        num_wrong_blocks = self._num_wrong_blocks(read) if result.is_ok else 0
        with self._lock:
            self._machine.apply_read_result(read, result, num_wrong_blocks)

    def _num_wrong_blocks(self, read: Read) -> int:
        if self._checksum is None or not read.checksums:
            return 0
        landed = self._checksum(read.local_block_ids)
        num_heads = self._layout.num_kv_heads
        return sum(
            landed[start : start + num_heads] != read.checksums[start : start + num_heads]
            for start in range(0, len(read.checksums), num_heads)
        )

    def _on_read_stalled(self, read: Read) -> None:
        """It is given up, but may land at any time: its blocks stay until it is done."""
        with self._lock:
            self._machine.give_read_up(read)

    # ---- under the lock

    @abstractmethod
    def _key_of(self, request: Request) -> PullKey:
        """Name the request's pull."""

    @abstractmethod
    def _take_message_of_kind(self, link: KVLink, message: KindMessage) -> bool:
        """As _take_message."""

    @abstractmethod
    def _on_session_ended(self, link: KVLink, message: SessionEnded) -> bool:
        """The owner ends a session, or says that there will be none."""

    def _on_linked(self, link: KVLink) -> None:
        """The link to an owner is up: it may be waited for."""

    def _expire(self, now: float, stalled_s: float) -> None:
        """End what is overdue, `stalled_s` of which is not the owner's or the router's delay but
        ours.
        """
        pulls = self._machine.pulls.values()
        for pull in pulls:
            pull.postpone(stalled_s)
        for pull in [pull for pull in pulls if pull.due <= now]:
            if pull.state is ConsumerState.LOST:
                pull.deadline = math.inf
                self._machine.advance(pull, ConsumerEvent.HOLD_EXPIRED)
            else:
                message = f"KV pull from {pull.engine_id} timed out in state {pull.state.name}"
                self._machine.lose(pull, ConsumerEvent.GIVEN_UP, "expired", message)

    # ---- links

    def _on_link_lost(self, link: KVLink, reason: str) -> None:
        self._end_link(link.engine_id, "link_lost", f"link to {link.engine_id} lost: {reason}")
        self._transport.remove_peer(link.peer)

    def _lose_waiting(self, engine_id: str, reason: str) -> None:
        self._end_link(engine_id, "no_link", f"no link to {engine_id}: {reason}")
        self._metrics.peer_went(engine_id)

    def _end_link(self, engine_id: str, reason: LossReason, message: str) -> None:
        """There is no link to an owner: all that needs it is lost, also tickets it has not
        answered.
        """
        for pull in [pull for pull in self._machine.pulls.values() if pull.engine_id == engine_id]:
            self._machine.lose(pull, ConsumerEvent.SESSION_LOST, reason, message)

    # ---- messages

    def _take_message(self, link: KVLink, message: KVLinkResponseMessage) -> bool:
        if isinstance(message, KVLinkHeartbeat | KVLinkWelcome):
            return isinstance(message, KVLinkHeartbeat)
        blocks = message.blocks if isinstance(message, PrefixReady) else message
        session = blocks.session
        if session is not None and not link.owns(session, self._identity.epoch):
            return False
        if isinstance(message, SessionEnded):
            return self._on_session_ended(link, message)
        if not isinstance(message, ReleaseAck):
            return self._take_message_of_kind(link, message)
        pull = self._machine.by_session.get(message.session)
        return pull is not None and self._machine.apply_release_ack(pull, message)
