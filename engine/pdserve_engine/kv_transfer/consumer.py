"""D's side of the handoff: reads the blocks of a prompt out of P's memory while P computes it.

The wishes of the scheduler, the messages of P, READs that end and deadlines become events of the
CONSUMER and READ tables of protocol.py; what becomes of a pull is in pull_machine.py. Messages come
on the event loop's thread, READs end on the transfer thread, the rest happens on the engine's; one
lock guards all state. Under it only calls are made that neither block nor call back: the link's,
the transport's, `wakeup`, `request_link`.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pdserve_common.engine_types import EngineCoreRequest
from pdserve_common.kv_types import (
    BlocksReady,
    GrantRequest,
    KVLinkHeartbeat,
    KVLinkHello,
    KVLinkRequestMessage,
    KVLinkResponseMessage,
    KVLinkWelcome,
    PrefillDone,
    ReleaseAck,
    SessionEnded,
    SessionEndReason,
)
from pdserve_common.metrics import KVTransferMetrics, begin
from pdserve_engine.kv_transfer.base import (
    KVIdentity,
    KVLinkHandle,
    KVTransport,
    ReadResult,
    rank_to_read,
)
from pdserve_engine.kv_transfer.connector import Connector
from pdserve_engine.kv_transfer.endpoint import RequestLink
from pdserve_engine.kv_transfer.links import KVLink, check_welcome, make_hello
from pdserve_engine.kv_transfer.ports import BlocksFreed, BlocksReturned, KVEvent
from pdserve_engine.kv_transfer.protocol import (
    CONSUMER,
    ConsumerEvent,
    ConsumerState,
    ReadAction,
    ReadEvent,
    ReadState,
)
from pdserve_engine.kv_transfer.pull import (
    FAILURE_REASONS,
    LossReason,
    Pull,
    PullKey,
    Read,
    find_bad_blocks,
    find_bad_end,
    make_read,
    make_reservation,
    num_blocks_of,
)
from pdserve_engine.kv_transfer.pull_machine import PullMachine, make_cancel
from pdserve_engine.request.request import Request

# P may ask before D's engine has taken the router's ticket, which it does between two steps,
# however long these are. This many questions are remembered.
MAX_EARLY = 4096

# How P's reasons to end a session look to D; any other is a loss like "session_ended".
_VOID_REASONS = frozenset(
    {SessionEndReason.FINISHED, SessionEndReason.ABORTED, SessionEndReason.SUPERSEDED}
)
_LOSS_REASONS: Mapping[SessionEndReason, LossReason] = {
    SessionEndReason.EXPIRED: "expired",
    SessionEndReason.FENCED: "fenced",
}


class ConsumerConnector(Connector[KVLinkResponseMessage]):
    """D's connector, a ConsumerPort. `wakeup` makes the engine thread call take_events soon.

    A pull to which nothing happens for `session_timeout_s` is lost, whatever it waits for; a READ
    without progress for `read_timeout_s` is given up.
    `checksum` returns the CRC-32 of each of some blocks: with it, blocks that P sends checksums of
    are checked when they have landed.
    """

    def __init__(
        self,
        transport: KVTransport,
        *,
        identity: KVIdentity,
        metrics: KVTransferMetrics,
        wakeup: Callable[[], None],
        step_seq: Callable[[], int],
        read_timeout_s: float = 5.0,
        session_timeout_s: float = 600.0,
        checksum: Callable[[Sequence[int]], tuple[int, ...]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            transport, identity=identity, metrics=metrics, step_seq=step_seq, clock=clock
        )
        self._layout = identity.layout
        self._read_timeout_s = read_timeout_s
        self._session_timeout_s = session_timeout_s
        self._checksum = checksum
        self._request_link: RequestLink | None = None
        self._dialing: set[str] = set()
        self._num_grants = 0
        self._machine = PullMachine(
            layout=identity.layout,
            metrics=metrics,
            link_of=self._links.get,
            post=self._post,
            wakeup=wakeup,
            clock=clock,
        )

    def bind_link_pool(self, request_link: RequestLink) -> None:
        """Set what dials `(engine_id, host, port)` and ends in link_up or link_failed."""
        self._request_link = request_link

    # ---- the event loop's thread

    def on_dispatched(self, request: EngineCoreRequest) -> None:
        if request.attempt:
            with self._lock:
                self._keep_held(request.request_id)
        params = request.kv_transfer_params
        if params is not None and params.do_remote_prefill:
            self.dial(params.remote_engine_id, params.remote_host, params.remote_port)

    # ---- the engine thread

    def on_new_request(self, request: Request) -> None:
        with self._lock:
            self._add_ticket(request)
        params = request.kv_transfer_params
        assert params is not None, "it has a ticket"
        # Again: there may have been no link to be had when it was dispatched.
        self.dial(params.remote_engine_id, params.remote_host, params.remote_port)

    def grant(
        self, request: Request, block_ids: tuple[list[int], ...], num_cached_tokens: int
    ) -> bool:
        with self._lock:
            pull = self._machine.pulls.get(_key_of(request))
            # A claim that the scheduler has not heard of yet is not the one it answers.
            if (
                pull is None
                or pull.state is not ConsumerState.CLAIMED
                or self._machine.is_claim_pending(request)
            ):
                return False
            self._num_grants += 1
            pull.kept = frozenset()
            pull.reservation = make_reservation(
                block_ids, num_cached_tokens, self._num_grants, self._layout
            )
            return self._machine.advance(pull, ConsumerEvent.RESERVED)

    def defer(self, request: Request) -> None:
        with self._lock:
            pull = self._machine.pulls.get(_key_of(request))
            if pull is not None:
                self._machine.advance(pull, ConsumerEvent.NO_ROOM)

    def reclaim(self) -> Request | None:
        with self._lock:
            granted = [p for p in self._machine.pulls.values() if p.state is ConsumerState.GRANTED]
            if not granted:
                return None
            pull = max(granted, key=lambda pull: pull.granted.number)
            self._machine.advance(pull, ConsumerEvent.RECLAIMED)
            return pull.request

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> frozenset[int]:
        with self._lock:
            pull = self._machine.pulls.get(_key_of(request))
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

    def num_open_sessions(self) -> int:
        with self._lock:
            return self._machine.num_open()

    def dial(self, engine_id: str, host: str, port: int) -> None:
        """Get a link to a P unless there is one, or one on its way. Any thread may call it, also
        before a request needs the link.
        """
        with self._lock:
            if engine_id in self._dialing or self._links.get(engine_id) is not None:
                return
            if self._request_link is None or not host:
                self._lose_waiting(engine_id, f"no address for {engine_id}")
                return
            self._dialing.add(engine_id)
            self._request_link(engine_id, host, port)

    # ---- the KvLink: the event loop's thread

    def hello(self) -> KVLinkHello:
        """What to send first on a new link."""
        return make_hello(self._identity, self._transport.name)

    def link_up(
        self, engine_id: str, welcome: KVLinkWelcome, handle: KVLinkHandle[KVLinkRequestMessage]
    ) -> KVLink:
        """P has welcomed us on a link dialed for `engine_id`; one that was open is replaced. Raises
        KVTransferError if it is not the P we want; then the caller reports link_failed.
        """
        check_welcome(self._identity, engine_id, welcome)
        with self._lock:
            self._replace_link(engine_id)
            link = KVLink(welcome.link, engine_id, welcome.epoch, handle)
            link.peer = self._transport.add_peer(welcome, partial(self.link_lost, link))
            link.num_blocks = sum(region.num_blocks for region in rank_to_read(welcome).regions)
            self._dialing.discard(engine_id)
            self._add_link(link)
            begin(self._metrics.transfer_failures, peer=(engine_id,), reason=FAILURE_REASONS)
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
            self._apply_read_result(read, result, num_wrong_blocks)

    def _num_wrong_blocks(self, read: Read) -> int:
        if self._checksum is None or not read.checksums:
            return 0
        landed = self._checksum(read.local_block_ids)
        return sum(ours != theirs for ours, theirs in zip(landed, read.checksums, strict=True))

    def _on_read_stalled(self, read: Read) -> None:
        """It is given up, but may land at any time: its blocks stay until it is done."""
        with self._lock:
            if read.state is ReadState.POSTED:
                message = f"READ stalled for {self._read_timeout_s:g} s"
                self._machine.lose(read.pull, ConsumerEvent.READ_FAILED, "stall", message)

    # ---- under the lock: the scheduler and the router

    def _add_ticket(self, request: Request) -> None:
        """The router has sent this request: P will ask for its blocks, or has already."""
        key = _key_of(request)
        pull = self._machine.pulls.get(key)
        if pull is None:
            pull = self._machine.add(key, ConsumerState.TICKET, self._session_timeout_s)
            pull.request, pull.num_tokens = request, request.num_tokens
            return
        num_asked, pull.num_tokens = pull.num_tokens, request.num_tokens
        pull.request = request
        self._machine.advance(pull, ConsumerEvent.TICKETED)
        self._check_claim(pull, num_asked)

    def _keep_held(self, request_id: str) -> None:
        """The router has decided how the request goes on: what is held for it (K6) stays until the
        scheduler takes the next attempt in, however long its step is.
        """
        for pull in self._machine.pulls.values():
            if pull.request_id == request_id and pull.state is ConsumerState.LOST:
                pull.deadline = math.inf

    def _expire(self, now: float, overslept_s: float) -> None:
        """End what is overdue, `overslept_s` of which is not P's or the router's delay but ours."""
        pulls = self._machine.pulls.values()
        for pull in pulls:
            pull.postpone(overslept_s)
        for pull in [pull for pull in pulls if pull.due <= now]:
            if pull.state is ConsumerState.LOST:
                pull.deadline = math.inf
                self._machine.advance(pull, ConsumerEvent.HOLD_EXPIRED)
            else:
                message = f"KV pull from {pull.engine_id} timed out in state {pull.state.name}"
                self._machine.lose(pull, ConsumerEvent.GIVEN_UP, "expired", message)

    # ---- READs

    def _post(self, read: Read) -> None:
        link = read.pull.link
        assert link is not None, "a pull has a link while blocks are announced"
        self._transport.read(
            link.peer,
            read.remote_block_ids,
            read.local_block_ids,
            self._read_timeout_s,
            partial(self._on_read_done, read),
            partial(self._on_read_stalled, read),
        )

    def _apply_read_result(self, read: Read, result: ReadResult, num_wrong_blocks: int) -> None:
        """Nothing writes into the READ's blocks any more."""
        pull = read.pull
        read.reservation.count_landed(result, self._clock())
        if result.is_ok:
            by_transport = self._metrics.transfer_bytes.labels(pull.engine_id, result.transport)
            by_transport.inc(result.num_bytes)
        if ReadAction.FREE_BLOCKS in read.advance(ReadEvent.LANDED):
            self._machine.zombie_landed(pull)
            self._machine.tell(BlocksFreed(read.local_block_ids))
        elif not result.is_ok:
            self._machine.lose(pull, ConsumerEvent.READ_FAILED, "read_error", result.error)
        elif num_wrong_blocks:
            self._metrics.checksum_mismatches.inc(num_wrong_blocks)
            message = f"{num_wrong_blocks} blocks of {pull.engine_id} came with a wrong checksum"
            self._machine.lose(pull, ConsumerEvent.READ_FAILED, "checksum", message)
        elif self._machine.advance(pull, ConsumerEvent.READ_LANDED):
            self._maybe_complete(pull)

    # ---- links

    def _on_link_lost(self, link: KVLink, reason: str) -> None:
        self._end_link(link.engine_id, "link_lost", f"link to {link.engine_id} lost: {reason}")
        self._transport.remove_peer(link.peer)

    def _lose_waiting(self, engine_id: str, reason: str) -> None:
        self._end_link(engine_id, "no_link", f"no link to {engine_id}: {reason}")
        self._metrics.peer_went(engine_id)

    def _end_link(self, engine_id: str, reason: LossReason, message: str) -> None:
        """There is no link to a P: all that needs it is lost, also tickets it has not answered."""
        for pull in [pull for pull in self._machine.pulls.values() if pull.engine_id == engine_id]:
            self._machine.lose(pull, ConsumerEvent.SESSION_LOST, reason, message)

    # ---- messages

    def _take_message(self, link: KVLink, message: KVLinkResponseMessage) -> bool:
        if isinstance(message, KVLinkHeartbeat | KVLinkWelcome):
            return isinstance(message, KVLinkHeartbeat)
        if message.session is not None and not link.owns(message.session, self._identity.epoch):
            return False
        if isinstance(message, GrantRequest):
            return self._on_grant_request(link, message)
        if isinstance(message, SessionEnded):
            return self._on_session_ended(link, message)
        pull = self._machine.by_session.get(message.session)
        if pull is None:
            return False
        if isinstance(message, BlocksReady):
            return self._on_blocks_ready(pull, message)
        if isinstance(message, PrefillDone):
            return self._on_prefill_done(pull, message)
        return self._on_release_ack(pull, message)

    def _on_grant_request(self, link: KVLink, message: GrantRequest) -> bool:
        key = (link.engine_id, message.request_id, message.attempt)
        pull = self._machine.pulls.get(key)
        if message.session in self._machine.by_session:
            return False
        if pull is None:
            return self._add_early(key, link, message)
        if ConsumerEvent.ASKED not in CONSUMER[pull.state]:
            return False
        self._machine.open_session(pull, link, message.session)
        self._machine.advance(pull, ConsumerEvent.ASKED)
        self._check_claim(pull, message.num_tokens)
        return True

    def _add_early(self, key: PullKey, link: KVLink, message: GrantRequest) -> bool:
        """P asks for what the router has not told of yet, unless it is over already."""
        if key in self._machine.ended or self._machine.num_in[ConsumerState.EARLY] >= MAX_EARLY:
            link.handle.send(make_cancel(key, "unwanted"))
            return False
        pull = self._machine.add(key, ConsumerState.EARLY, self._session_timeout_s)
        pull.num_tokens = message.num_tokens
        self._machine.open_session(pull, link, message.session)
        return True

    def _check_claim(self, pull: Pull, num_asked: int) -> None:
        if num_asked != pull.num_tokens:
            self._machine.lose_protocol(
                pull, f"asked for {num_asked} tokens, it has {pull.num_tokens}"
            )

    def _on_blocks_ready(self, pull: Pull, message: BlocksReady) -> bool:
        if ConsumerEvent.ANNOUNCED not in CONSUMER[pull.state]:
            return False
        bad = find_bad_blocks(pull, message, self._layout)
        if bad is not None:
            return self._machine.lose_protocol(pull, bad)
        read = make_read(pull, message, self._layout)
        read.reservation.reads.append(read)
        read.reservation.num_announced = read.end_block
        return self._machine.advance(pull, ConsumerEvent.ANNOUNCED)

    def _on_prefill_done(self, pull: Pull, message: PrefillDone) -> bool:
        if ConsumerEvent.PREFILL_DONE not in CONSUMER[pull.state]:
            return False
        bad = find_bad_end(pull, message, self._layout, self._identity.vocab_size)
        if bad is not None:
            return self._machine.lose_protocol(pull, bad)
        reservation = pull.granted
        reservation.prefill_done_at = self._clock()
        reservation.output_token_ids = message.output_token_ids
        pull.timeout_s = min(message.timeout_s, pull.timeout_s)
        self._machine.advance(pull, ConsumerEvent.PREFILL_DONE)
        self._maybe_complete(pull)
        return True

    def _on_release_ack(self, pull: Pull, message: ReleaseAck) -> bool:
        if ConsumerEvent.CONFIRMED not in CONSUMER[pull.state]:
            return False
        reservation = pull.granted
        if not reservation.num_confirmed < message.through_block <= reservation.num_released:
            return False
        if not message.valid:
            message_text = f"P {pull.engine_id} had ended the session before its blocks were read"
            return self._machine.lose(pull, ConsumerEvent.SESSION_LOST, "not_valid", message_text)
        reservation.num_confirmed = message.through_block
        self._machine.advance(pull, ConsumerEvent.CONFIRMED)
        self._maybe_complete(pull)
        return True

    def _maybe_complete(self, pull: Pull) -> None:
        """Go on if everything has landed, and end if all of it is confirmed."""
        reservation, num_blocks = pull.granted, num_blocks_of(pull.num_tokens, self._layout)
        if reservation.prefill_done_at < math.inf and reservation.num_landed == num_blocks:
            self._machine.advance(pull, ConsumerEvent.ALL_LANDED)
            if reservation.num_confirmed == num_blocks:
                self._machine.advance(pull, ConsumerEvent.COMPLETED)

    def _on_session_ended(self, link: KVLink, message: SessionEnded) -> bool:
        pull = self._machine.pulls.get((link.engine_id, message.request_id, message.attempt))
        if pull is None or pull.session != message.session:
            return False
        if message.reason is SessionEndReason.PREEMPTED:
            return self._on_preempted(pull)
        text = f"P {link.engine_id} ended it: {message.message}"
        reason = _LOSS_REASONS.get(message.reason, "session_ended")
        is_void = message.reason in _VOID_REASONS
        event = ConsumerEvent.SESSION_VOID if is_void else ConsumerEvent.SESSION_LOST
        return self._machine.lose(pull, event, reason, text)

    def _on_preempted(self, pull: Pull) -> bool:
        """P will ask again. Until then the scheduler has neither a claim nor blocks for it."""
        is_known = self._machine.advance(pull, ConsumerEvent.SESSION_PREEMPTED)
        if is_known and pull.request is not None:
            self._machine.tell(BlocksReturned(pull.request, pull.kept))
        return is_known


def _key_of(request: Request) -> PullKey:
    params = request.kv_transfer_params
    assert params is not None, "only requests of the handoff come here"
    return params.remote_engine_id, request.request_id, request.core_request.attempt
