"""Decode's side of the handoff: reads the blocks of a prompt out of prefill's memory while prefill
computes it.

The wishes of the scheduler and the messages of prefill become events of the CONSUMER table of
protocol/transitions.py; the threads, the links and the READs are in reader.py.
"""

import math
from collections.abc import Mapping

from pdserve_common.types.engine import EngineCoreRequest
from pdserve_common.types.kv import (
    BlocksReady,
    GrantRequest,
    PrefillDone,
    PrefixReady,
    SessionEnded,
    SessionEndReason,
)
from pdserve_engine.kv_transfer.connectors.links import KVLink
from pdserve_engine.kv_transfer.connectors.reader import KindMessage, ReaderConnector
from pdserve_engine.kv_transfer.ports import BlocksReturned
from pdserve_engine.kv_transfer.protocol.pull import (
    LossReason,
    Pull,
    PullKey,
    find_bad_blocks,
    find_bad_end,
    make_reservation,
)
from pdserve_engine.kv_transfer.protocol.pull_machine import make_cancel
from pdserve_engine.kv_transfer.protocol.transitions import CONSUMER, ConsumerEvent, ConsumerState
from pdserve_engine.request.request import Request

# Prefill may ask before decode's engine has taken the router's ticket, which it does between two
# steps, however long these are. This many questions are remembered.
MAX_EARLY = 4096

# How prefill's reasons to end a session look to decode; any other is a loss like "session_ended".
_VOID_REASONS = frozenset(
    {SessionEndReason.FINISHED, SessionEndReason.ABORTED, SessionEndReason.SUPERSEDED}
)
_LOSS_REASONS: Mapping[SessionEndReason, LossReason] = {
    SessionEndReason.EXPIRED: "expired",
    SessionEndReason.FENCED: "fenced",
}


class ConsumerConnector(ReaderConnector):
    """Decode's connector of requests whose prompt prefill computes, a ConsumerPort."""

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
            # A grant request that the scheduler has not heard of yet is not the one it answers.
            if (
                pull is None
                or pull.state is not ConsumerState.AWAITING_GRANT
                or self._machine.is_grant_request_pending(request)
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

    # ---- under the lock: the scheduler and the router

    def _add_ticket(self, request: Request) -> None:
        """The router has sent this request: prefill will ask for its blocks, or has already."""
        key = _key_of(request)
        pull = self._machine.pulls.get(key)
        if pull is None:
            pull = self._machine.add(key, ConsumerState.TICKET, self._session_timeout_s)
            pull.request, pull.num_tokens = request, request.num_tokens
            return
        num_asked, pull.num_tokens = pull.num_tokens, request.num_tokens
        pull.request = request
        self._machine.advance(pull, ConsumerEvent.TICKETED)
        self._check_grant_request(pull, num_asked)

    def _keep_held(self, request_id: str) -> None:
        """The router has decided how the request goes on: what is held for it (K6) stays until the
        scheduler takes the next attempt in, however long its step is.
        """
        for pull in self._machine.pulls.values():
            if pull.request_id == request_id and pull.state is ConsumerState.LOST:
                pull.deadline = math.inf

    def _key_of(self, request: Request) -> PullKey:
        return _key_of(request)

    # ---- messages

    def _take_message_of_kind(self, link: KVLink, message: KindMessage) -> bool:
        if isinstance(message, GrantRequest):
            return self._on_grant_request(link, message)
        if isinstance(message, PrefixReady):
            return False
        pull = self._machine.by_session.get(message.session)
        if pull is None:
            return False
        if isinstance(message, BlocksReady):
            return self._on_blocks_ready(pull, message)
        return self._on_prefill_done(pull, message)

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
        self._check_grant_request(pull, message.num_tokens)
        return True

    def _add_early(self, key: PullKey, link: KVLink, message: GrantRequest) -> bool:
        """Prefill asks for what the router has not told of yet, unless it is over already."""
        if key in self._machine.ended or self._machine.num_in[ConsumerState.EARLY] >= MAX_EARLY:
            link.handle.send(make_cancel(key, "unwanted"))
            return False
        pull = self._machine.add(key, ConsumerState.EARLY, self._session_timeout_s)
        pull.num_tokens = message.num_tokens
        self._machine.open_session(pull, link, message.session)
        return True

    def _check_grant_request(self, pull: Pull, num_asked: int) -> None:
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
        self._machine.add_read(pull, message)
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
        reservation.prefill_stats = message.prefill_stats
        pull.timeout_s = min(message.timeout_s, pull.timeout_s)
        self._machine.advance(pull, ConsumerEvent.PREFILL_DONE)
        self._machine.maybe_complete(pull)
        return True

    def _on_session_ended(self, link: KVLink, message: SessionEnded) -> bool:
        pull = self._machine.pulls.get((link.engine_id, message.request_id, message.attempt))
        if pull is None or pull.session != message.session:
            return False
        if message.reason is SessionEndReason.PREEMPTED:
            return self._on_preempted(pull)
        text = f"{link.engine_id} ended it: {message.message}"
        reason = _LOSS_REASONS.get(message.reason, "session_ended")
        is_void = message.reason in _VOID_REASONS
        event = ConsumerEvent.SESSION_VOID if is_void else ConsumerEvent.SESSION_LOST
        return self._machine.lose(pull, event, reason, text)

    def _on_preempted(self, pull: Pull) -> bool:
        """Prefill will ask again. Until then the scheduler has neither a grant request nor blocks
        for it.
        """
        is_known = self._machine.advance(pull, ConsumerEvent.SESSION_PREEMPTED)
        if is_known and pull.request is not None:
            self._machine.tell(BlocksReturned(pull.request, pull.kept))
        return is_known


def _key_of(request: Request) -> PullKey:
    params = request.kv_transfer_params
    assert params is not None, "only requests of the handoff come here"
    return params.remote_engine_id, request.request_id, request.core_request.attempt
