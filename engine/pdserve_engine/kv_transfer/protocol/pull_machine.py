"""Takes the steps of the reader's pulls: carries out the CONSUMER table of transitions.py, and
keeps account of what it has led to. Not thread-safe: the consumer's lock guards all of it.

An action may bring the next event, as when there is nothing to read of a chunk; so a pull's state
is set before its actions are carried out.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable
from functools import partial

from pdserve_common.errors import KVExpiredError, KVTransferError, RequestAbortedError
from pdserve_common.observability.logging import log_request
from pdserve_common.types.engine import KVLost
from pdserve_common.types.kv import (
    BlocksReady,
    CancelRequest,
    Granted,
    KVLinkRequestMessage,
    KVSessionId,
    Later,
    PrefixRequest,
    Release,
    ReleaseAck,
    Revoke,
)
from pdserve_engine.kv_transfer.base import ConnectorContext, ReadResult
from pdserve_engine.kv_transfer.connectors.links import SESSION_LOST, KVLink, RecentKeys
from pdserve_engine.kv_transfer.ports import (
    BlocksConfirmed,
    BlocksFreed,
    BlocksLanded,
    GrantRequested,
    KVEvent,
    PullFinished,
    PullLost,
    RequestFailed,
)
from pdserve_engine.kv_transfer.protocol.machine import check_carried_out, take_step
from pdserve_engine.kv_transfer.protocol.pull import (
    LossReason,
    Pull,
    PullKey,
    Read,
    make_read,
    num_blocks_of,
)
from pdserve_engine.kv_transfer.protocol.transitions import (
    CONSUMER,
    ConsumerAction,
    ConsumerEvent,
    ConsumerState,
    ReadAction,
    ReadEvent,
    ReadState,
)
from pdserve_engine.request.request import Request

logger = logging.getLogger(__name__)

ACK_TIMEOUT_S = 5.0  # The owner answers at once
# How long a lost pull waits for the router's decision, from when the router can know (K6).
HOLD_S = 5.0

# The owner has a session of ours open.
_SESSION_STATES = frozenset(
    {
        ConsumerState.EARLY,
        ConsumerState.AWAITING_GRANT,
        ConsumerState.GRANTED,
        ConsumerState.PULLING,
        ConsumerState.LANDED,
        ConsumerState.FETCHING,
    }
)
# It waits for the owner or for the scheduler.
_WAITING_STATES = _SESSION_STATES | {ConsumerState.TICKET, ConsumerState.REQUESTED}
_OVER_STATES = frozenset({ConsumerState.ACCEPTED, ConsumerState.ENDED})
# The owner has not kept the blocks for as long as it took, or the reader's pool changes hands.
_EXPIRY_REASONS = frozenset({"expired", "fenced", "not_valid"})


class PullMachine:
    """The pulls of one reader, their READs, and what the scheduler is to hear of them."""

    def __init__(
        self,
        context: ConnectorContext,
        *,
        link_of: Callable[[str], KVLink | None],
        on_read_done: Callable[[Read, ReadResult], None],
        on_read_stalled: Callable[[Read], None],
    ) -> None:
        """How a READ ends is told on the transfer thread, without the lock."""
        self._transport = context.transport
        self._read_timeout_s = context.read_timeout_s
        self._layout = context.identity.layout
        self._metrics = context.metrics
        self._link_of = link_of
        self._on_read_done = on_read_done
        self._on_read_stalled = on_read_stalled
        self._wakeup = context.wakeup
        self._clock = context.clock
        self.pulls: dict[PullKey, Pull] = {}
        self.by_session: dict[KVSessionId, Pull] = {}
        # Requests that are over here, so that the owner need not wait for an answer when it asks
        # for them.
        self.ended = RecentKeys()
        self.num_in: Counter[ConsumerState] = Counter()
        self._num_unlanded = 0
        self._kv_events: list[KVEvent] = []
        # Lost pulls that the scheduler, and so the router, has not heard of yet.
        self._unheard: list[Pull] = []
        self._actions: dict[ConsumerAction, Callable[[Pull], None]] = {
            ConsumerAction.REQUEST_GRANT: self._request_grant,
            ConsumerAction.SEND_PREFIX_REQUEST: self._send_prefix_request,
            ConsumerAction.SEND_GRANTED: self._send_granted,
            ConsumerAction.SEND_LATER: lambda pull: _send(pull, Later(session=_session_of(pull))),
            ConsumerAction.SEND_REVOKE: lambda pull: _send(pull, Revoke(session=_session_of(pull))),
            ConsumerAction.POST_READ: self._post_read,
            ConsumerAction.SEND_RELEASE: self._send_release,
            ConsumerAction.CONFIRM: self._confirm,
            ConsumerAction.START_FIRST_STEP: self._start_first_step,
            ConsumerAction.ACCEPT: self._accept,
            ConsumerAction.GIVE_BACK: self._give_back,
            ConsumerAction.SEND_CANCEL: self._send_cancel,
            ConsumerAction.REPORT_LOST: self._report_lost,
            ConsumerAction.FAIL_REQUEST: self._fail_request,
            ConsumerAction.VOID_REQUEST: self._void_request,
        }
        check_carried_out(self._actions, ConsumerAction)

    def num_open(self) -> int:
        """Pulls of requests that are here and not over, and READs whose pull is over."""
        num_pulls = len(self.pulls) - self.num_in[ConsumerState.EARLY]
        return num_pulls - self.num_in[ConsumerState.ACCEPTED] + self._num_unlanded

    def check_idle(self) -> None:
        """Raise AssertionError, with what is left, unless nothing is of any pull."""
        assert not self.pulls, f"not over: {list(self.pulls)}"
        assert not self.by_session, f"the owner may still name {list(self.by_session)}"
        assert not +self.num_in, f"counted: {+self.num_in}"
        assert self._num_unlanded == 0, f"{self._num_unlanded} READs have not landed"

    def take_events(self) -> list[KVEvent]:
        """For the scheduler, which comes between two steps only. What it hears the router hears at
        once, so holds begin here; until then they are bounded as the running step is.
        """
        for pull in self._unheard:
            pull.deadline = self._clock() + HOLD_S
        self._unheard.clear()
        events, self._kv_events = self._kv_events, []
        return events

    def add(self, key: PullKey, state: ConsumerState, timeout_s: float) -> Pull:
        now = self._clock()
        pull = Pull(key, state, since=now, timeout_s=timeout_s, deadline=now + timeout_s)
        self.pulls[key] = pull
        self._count(state, +1)
        return pull

    def open_session(self, pull: Pull, link: KVLink, session: KVSessionId) -> None:
        pull.session, pull.link = session, link
        pull.asked_time = self._clock()
        self.by_session[session] = pull

    def tell(self, event: KVEvent) -> None:
        """Have the scheduler hear of it."""
        self._kv_events.append(event)
        self._wakeup()

    def is_grant_request_pending(self, request: Request) -> bool:
        """Is there a grant request of the request that the scheduler has not heard of yet?"""
        return any(isinstance(n, GrantRequested) and n.request is request for n in self._kv_events)

    def advance(self, pull: Pull, event: ConsumerEvent) -> bool:
        """Take a step of the CONSUMER table. False: the event comes too late."""
        before = pull.state
        actions = take_step(CONSUMER, pull, event)
        if actions is None:
            return False
        entered = pull.state
        self._on_entered(pull, before)
        if entered in _WAITING_STATES:
            pull.deadline = self._clock() + pull.timeout_s
        for action in actions:
            self._actions[action](pull)
        if entered is ConsumerState.ENDED:
            self._forget(pull)
        return True

    def lose(self, pull: Pull, event: ConsumerEvent, reason: LossReason, message: str) -> bool:
        """As `advance`, for an event that ends the pull."""
        if event not in CONSUMER[pull.state]:
            return False
        pull.reason, pull.message = reason, message
        if event is not ConsumerEvent.SESSION_VOID:
            self._warn_lost(pull)
        return self.advance(pull, event)

    def lose_protocol(self, pull: Pull, what: str) -> bool:
        message = f"{pull.engine_id} {what}"
        return self.lose(pull, ConsumerEvent.GIVEN_UP, "protocol", message)

    # ---- blocks, from their announcement to the owner's acknowledgement

    def add_read(self, pull: Pull, message: BlocksReady) -> None:
        """Note what the next POST_READ posts. `message` has passed find_bad_blocks."""
        read = make_read(pull, message, self._layout)
        read.reservation.reads.append(read)
        read.reservation.num_announced = read.end_block

    def apply_read_result(self, read: Read, result: ReadResult, num_wrong_blocks: int) -> None:
        """Nothing writes into the READ's blocks any more."""
        pull = read.pull
        read.reservation.count_landed(result, self._clock())
        if result.is_ok:
            by_transport = self._metrics.transfer_bytes.labels(pull.engine_id, result.transport)
            by_transport.inc(result.num_bytes)
        if ReadAction.FREE_BLOCKS in read.advance(ReadEvent.LANDED):
            self._on_late_landing(pull)
            self.tell(BlocksFreed(read.local_block_ids))
        elif not result.is_ok:
            self.lose(pull, ConsumerEvent.READ_FAILED, "read_error", result.error)
        elif num_wrong_blocks:
            self._metrics.checksum_mismatches.inc(num_wrong_blocks)
            message = f"{num_wrong_blocks} blocks of {pull.engine_id} came with a wrong checksum"
            self.lose(pull, ConsumerEvent.READ_FAILED, "checksum", message)
        elif self.advance(pull, ConsumerEvent.READ_LANDED):
            self.maybe_complete(pull)

    def give_read_up(self, read: Read) -> None:
        """It makes no progress, but may land at any time: its blocks stay until it is done."""
        if read.state is ReadState.POSTED:
            message = f"READ stalled for {self._read_timeout_s:g} s"
            self.lose(read.pull, ConsumerEvent.READ_FAILED, "stall", message)

    def apply_release_ack(self, pull: Pull, message: ReleaseAck) -> bool:
        """Return False if it makes no sense."""
        if ConsumerEvent.CONFIRMED not in CONSUMER[pull.state]:
            return False
        reservation = pull.granted
        if not reservation.num_confirmed < message.through_block <= reservation.num_released:
            return False
        if not message.valid:
            text = f"{pull.engine_id} had ended the session before its blocks were read"
            return self.lose(pull, ConsumerEvent.SESSION_LOST, "not_valid", text)
        reservation.num_confirmed = message.through_block
        self.advance(pull, ConsumerEvent.CONFIRMED)
        self.maybe_complete(pull)
        return True

    def maybe_complete(self, pull: Pull) -> None:
        """Go on if everything has landed, and end if all of it is confirmed."""
        reservation, num_blocks = pull.granted, num_blocks_of(pull.num_tokens, self._layout)
        if reservation.prefill_done_at < math.inf and reservation.num_landed == num_blocks:
            self.advance(pull, ConsumerEvent.ALL_LANDED)
            if reservation.num_confirmed == num_blocks:
                self.advance(pull, ConsumerEvent.COMPLETED)

    def _on_late_landing(self, pull: Pull) -> None:
        """A READ of a pull that is over has landed."""
        self._num_unlanded -= 1
        self._metrics.unlanded_reads.set(self._num_unlanded)
        text = "a READ from %s that was given up has landed; %d more may"
        _log(pull, logging.INFO, text, pull.engine_id, self._num_unlanded)

    # ---- what the steps do

    def _request_grant(self, pull: Pull) -> None:
        self.tell(GrantRequested(pull.ticket, pull.asked_time))

    def _send_prefix_request(self, pull: Pull) -> None:
        message = PrefixRequest(
            request_id=pull.request_id,
            attempt=pull.attempt,
            first_block=pull.granted.first_block,
            block_hashes=pull.block_hashes,
        )
        _send(pull, message)

    def _send_granted(self, pull: Pull) -> None:
        _send(pull, Granted(session=_session_of(pull), first_block=pull.granted.first_block))

    def _post_read(self, pull: Pull) -> None:
        read = pull.granted.reads[-1]
        if not read.local_block_ids:
            read.advance(ReadEvent.LANDED)
            self.advance(pull, ConsumerEvent.READ_LANDED)
            return
        assert pull.link is not None, "a pull has a link while blocks are announced"
        try:
            self._transport.read(
                pull.link.peer,
                read.remote_block_ids,
                read.local_block_ids,
                self._read_timeout_s,
                partial(self._on_read_done, read),
                partial(self._on_read_stalled, read),
            )
        except KVTransferError as error:
            read.advance(ReadEvent.LANDED)  # nothing was posted that could land
            self.lose(pull, ConsumerEvent.READ_FAILED, "read_error", error.message)
            return
        read.reservation.count_posted(self._clock())

    def _send_release(self, pull: Pull) -> None:
        """For what is here without a hole, if that is more than before."""
        reservation = pull.granted
        through = reservation.num_landed
        if through == reservation.num_released:
            return
        reservation.num_released = through
        reservation.ack_deadline = min(reservation.ack_deadline, self._clock() + ACK_TIMEOUT_S)
        _send(pull, Release(session=_session_of(pull), through_block=through))

    def _confirm(self, pull: Pull) -> None:
        reservation = pull.granted
        for read in reservation.reads:
            if read.end_block <= reservation.num_confirmed:
                read.advance(ReadEvent.CONFIRMED)
        is_owed = reservation.num_confirmed < reservation.num_released
        reservation.ack_deadline = self._clock() + ACK_TIMEOUT_S if is_owed else math.inf
        num_tokens = pull.num_confirmed_tokens(self._layout.block_size)
        self.tell(BlocksConfirmed(pull.ticket, num_tokens))

    def _start_first_step(self, pull: Pull) -> None:
        self.tell(BlocksLanded(pull.ticket, pull.granted.output_token_ids, self._clock()))

    def _accept(self, pull: Pull) -> None:
        reservation = pull.granted
        pull.deadline = math.inf
        stats = reservation.stats(self._clock())
        if stats.num_reads:
            self._metrics.transfer_duration.labels(pull.engine_id).observe(stats.transfer_s)
        self._metrics.transfer_exposed.labels(pull.engine_id).observe(stats.exposed_s)
        self._metrics.release_ack_duration.labels(pull.engine_id).observe(stats.release_ack_s)
        self.tell(PullFinished(pull.ticket, stats))
        pull.reservation = None  # the blocks are the request's own from here on

    def _give_back(self, pull: Pull) -> None:
        if pull.reservation is None:
            return
        unlanded = pull.reservation.drop_reads()
        pull.kept = frozenset(i for read in unlanded for i in read.local_block_ids)
        pull.reservation = None
        self._num_unlanded += len(unlanded)
        self._metrics.unlanded_reads.set(self._num_unlanded)
        self._metrics.abandoned_reads.inc(len(unlanded))
        if unlanded:
            text = "%d READs from %s have not landed; until then %d blocks stay out of use"
            _log(pull, logging.WARNING, text, len(unlanded), pull.engine_id, len(pull.kept))

    def _send_cancel(self, pull: Pull) -> None:
        link = self._link_of(pull.engine_id)
        if link is not None:
            link.handle.send(make_cancel(pull.key, pull.reason))

    def _report_lost(self, pull: Pull) -> None:
        pull.deadline = math.inf
        self._unheard.append(pull)
        self._metrics.transfer_failures.labels(pull.engine_id, pull.reason).inc()
        num_tokens = pull.num_confirmed_tokens(self._layout.block_size)
        lost = KVLost(num_confirmed_tokens=num_tokens, reason=pull.reason, message=pull.message)
        self.tell(PullLost(pull.ticket, lost))

    def _fail_request(self, pull: Pull) -> None:
        cls = KVExpiredError if pull.reason in _EXPIRY_REASONS else KVTransferError
        self.tell(RequestFailed(pull.ticket, cls(pull.message).to_engine_error()))
        text = "the router has not decided within %g s; what is held is free"
        _log(pull, logging.WARNING, text, HOLD_S)

    def _void_request(self, pull: Pull) -> None:
        """Nobody's fault: the router knows of it from the owner's own output."""
        pull.deadline = math.inf
        self.tell(RequestFailed(pull.ticket, RequestAbortedError(pull.message).to_engine_error()))

    # ---- inside

    def _warn_lost(self, pull: Pull) -> None:
        num_tokens = pull.num_confirmed_tokens(self._layout.block_size)
        _log(
            pull,
            logging.WARNING,
            SESSION_LOST,
            pull.session or "(none yet)",
            pull.engine_id,
            pull.state.name,
            self._clock() - pull.since,
            f"{pull.reason}: {pull.message}",
            _consequence(pull, num_tokens),
        )

    def _forget(self, pull: Pull) -> None:
        self._count(pull.state, -1)
        del self.pulls[pull.key]
        if pull.request is not None:
            self.ended.add(pull.key)

    def _on_entered(self, pull: Pull, before: ConsumerState) -> None:
        if pull.state is before:
            return
        self._count(before, -1)
        self._count(pull.state, +1)
        if pull.state not in _SESSION_STATES and pull.session is not None:
            del self.by_session[pull.session]
            pull.session = pull.link = None

    def _count(self, state: ConsumerState, change: int) -> None:
        self.num_in[state] += change
        if state not in _OVER_STATES:
            self._metrics.sessions.labels(state.name.lower()).set(self.num_in[state])


def _consequence(pull: Pull, num_tokens: int) -> str:
    """Of a pull that is about to be lost."""
    if pull.state is ConsumerState.EARLY:
        return "the router has not sent the request yet"
    if pull.state in (ConsumerState.REQUESTED, ConsumerState.FETCHING):
        return "the prefix is computed here"
    return f"the router decides how it goes on, {num_tokens} tokens are held until then"


def make_cancel(key: PullKey, reason: str) -> CancelRequest:
    return CancelRequest(request_id=key[1], attempt=key[2], reason=reason)


def _log(pull: Pull, level: int, text: str, *args: object) -> None:
    log_request(logger, level, pull.request_id, pull.attempt, text, *args)


def _session_of(pull: Pull) -> KVSessionId:
    assert pull.session is not None, "pulls from awaiting_grant to landed have a session"
    return pull.session


def _send(pull: Pull, message: KVLinkRequestMessage) -> None:
    assert pull.link is not None, "pulls from awaiting_grant to landed have a link"
    pull.link.handle.send(message)
