"""Reads a prefix that another worker has cached before the rest of the prompt is computed here. The
reader is a prefill worker here, and the owner a decode worker.
"""

from pdserve_common.metrics.services import begin
from pdserve_common.types.engine import EngineCoreRequest, KVPrefixSource
from pdserve_common.types.kv import PrefixReady, SessionEnded, SessionEndReason
from pdserve_engine.kv_transfer.base import ConnectorContext
from pdserve_engine.kv_transfer.connectors.links import KVLink
from pdserve_engine.kv_transfer.connectors.reader import KindMessage, ReaderConnector
from pdserve_engine.kv_transfer.protocol.pull import (
    Pull,
    PullKey,
    find_bad_prefix,
    make_reservation,
)
from pdserve_engine.kv_transfer.protocol.transitions import CONSUMER, ConsumerEvent, ConsumerState
from pdserve_engine.request.request import Request

# Reasons to end a session that are nobody's failure.
_VOID_REASONS = frozenset(
    {
        SessionEndReason.NOT_CACHED,
        SessionEndReason.FINISHED,
        SessionEndReason.ABORTED,
        SessionEndReason.SUPERSEDED,
    }
)


# What a link brings at least, if it is worth waiting for.
MIN_BYTES_PER_S = 1e9
OUTCOMES = ("pulled", "not_cached", "failed", "given_up")


class PrefixConsumer(ReaderConnector):
    """The reader's connector of prefixes, a PrefixConsumerPort."""

    def __init__(self, context: ConnectorContext, *, timeout_s: float = 0.25) -> None:
        """A prefix is waited for `timeout_s`, and for as long as its bytes take."""
        super().__init__(context)
        begin(self._metrics.prefix_tokens, outcome=OUTCOMES)
        self._timeout_s = timeout_s

    # ---- the event loop's thread

    def on_dispatched(self, request: EngineCoreRequest) -> None:
        params = request.kv_transfer_params
        if params is not None and params.prefix_source is not None:
            self._dial_source(params.prefix_source)

    # ---- the engine thread

    def find_prefix(self, request: Request, num_cached_tokens: int) -> int:
        params = request.kv_transfer_params
        source = None if params is None else params.prefix_source
        return 0 if source is None else source.num_tokens

    def fetch(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        num_tokens: int,
        num_cached_tokens: int,
    ) -> float:
        block_size = self._layout.block_size
        with self._lock:
            key = _key_of(request)
            pull = self._machine.add(key, ConsumerState.REQUESTED, self._session_timeout_s)
            pull.request, pull.num_tokens = request, num_tokens
            first = num_cached_tokens // block_size
            pull.block_hashes = tuple(request.block_hashes[first : num_tokens // block_size])
            self._num_grants += 1
            pull.reservation = make_reservation(
                block_ids, num_cached_tokens, self._num_grants, self._layout
            )
            link = self._links.get(pull.engine_id)
            if link is not None:
                pull.link = link
                self._machine.advance(pull, ConsumerEvent.LINKED)
        self._dial_source(_source_of(request))
        num_bytes = len(pull.block_hashes) * len(block_ids) * self._layout.block_bytes
        return self._timeout_s + num_bytes / MIN_BYTES_PER_S

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> frozenset[int]:
        with self._lock:
            pull = self._machine.pulls.get(_key_of(request))
            if pull is not None:
                self._count(pull)
        return super().request_finished(request, block_ids)

    def _dial_source(self, source: KVPrefixSource) -> None:
        self.dial(source.engine_id, source.host, source.port)

    # ---- under the lock

    def _count(self, pull: Pull) -> None:
        """The scheduler ends a pull: what has come of it?"""
        outcome = _outcome_of(pull)
        num_tokens = len(pull.block_hashes) * self._layout.block_size
        self._metrics.prefix_tokens.labels(outcome).inc(num_tokens)
        self._metrics.prefix_duration.labels(outcome).observe(self._clock() - pull.since)

    def _key_of(self, request: Request) -> PullKey:
        return _key_of(request)

    def _on_linked(self, link: KVLink) -> None:
        for pull in list(self._machine.pulls.values()):
            if pull.engine_id == link.engine_id and pull.link is None:
                pull.link = link
                self._machine.advance(pull, ConsumerEvent.LINKED)

    def _take_message_of_kind(self, link: KVLink, message: KindMessage) -> bool:
        if not isinstance(message, PrefixReady):
            return False
        blocks = message.blocks
        pull = self._machine.pulls.get((link.engine_id, message.request_id, message.attempt))
        if (
            pull is None
            or ConsumerEvent.PREFIX_READY not in CONSUMER[pull.state]
            or blocks.session in self._machine.by_session
        ):
            return False  # it was given up, as the owner will hear
        bad = find_bad_prefix(pull, blocks, self._layout)
        if bad is not None:
            return self._machine.lose_protocol(pull, bad)
        self._machine.open_session(pull, link, blocks.session)
        num_blocks = blocks.first_block + len(blocks.block_ids[0])
        pull.num_tokens = num_blocks * self._layout.block_size
        pull.block_hashes = pull.block_hashes[: len(blocks.block_ids[0])]
        pull.granted.prefill_done_at = self._clock()
        self._machine.add_read(pull, blocks)
        self._machine.advance(pull, ConsumerEvent.PREFIX_READY)
        if ConsumerEvent.COMPLETED in CONSUMER[pull.state]:  # it may be lost already
            self._machine.maybe_complete(pull)
        return True

    def _on_session_ended(self, link: KVLink, message: SessionEnded) -> bool:
        pull = self._machine.pulls.get((link.engine_id, message.request_id, message.attempt))
        if pull is None or pull.session != message.session:
            return False
        is_void = message.reason in _VOID_REASONS
        event = ConsumerEvent.SESSION_VOID if is_void else ConsumerEvent.SESSION_LOST
        pull.is_void = is_void
        text = f"{link.engine_id} ended it: {message.message}"
        return self._machine.lose(pull, event, "session_ended", text)


def _outcome_of(pull: Pull) -> str:
    """One of OUTCOMES."""
    if pull.state is ConsumerState.ACCEPTED:
        return "pulled"
    if pull.state is not ConsumerState.LOST:
        return "given_up"
    return "not_cached" if pull.is_void else "failed"


def _source_of(request: Request) -> KVPrefixSource:
    params = request.kv_transfer_params
    assert params is not None, "only requests with a source come here"
    assert params.prefix_source is not None, "only requests with a source come here"
    return params.prefix_source


def _key_of(request: Request) -> PullKey:
    return _source_of(request).engine_id, request.request_id, request.core_request.attempt
