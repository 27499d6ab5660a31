"""D's pulls as a state machine. Not thread-safe: the consumer's lock guards all of it.

    state      event                                    next       what happens
    -          ticket (on_new_request)                  WAITING
    -          BlocksReady before the ticket            WAITING    remembered until its deadline
    WAITING    PrefillDone, and the ticket is here      READY      named in ready_to_load
    READY      blocks allocated, some lack              ALLOCATED
    READY      same, all is cached here                 DONE       Release, finished_recving
    ALLOCATED  start_load_kv                            LOADING    READ posted
    LOADING    READ done                                RELEASING  Release of all blocks
    RELEASING  ReleaseAck(valid)                        DONE       finished_recving (K4)
    open       SessionEnded, link lost, deadline,       FAILED     failed_recving; CancelRequest if
               READ failed or stalled, not valid                   P does not know
    any        request_finished                         -          CancelRequest if it was open

"Open" are the states before DONE. A pull that ends under its READ is a zombie: its blocks come back
in landed_block_ids when the READ has landed (K5).
"""

import logging
from collections.abc import Callable
from functools import partial

from pdserve_common.engine_types import EngineError, ErrorCode
from pdserve_common.errors import KVTransferError
from pdserve_common.kv_types import (
    BlocksReady,
    CancelRequest,
    KVLayout,
    KVLinkHeartbeat,
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
from pdserve_engine.kv_transfer.base import (
    KVConnectorOutput,
    KVLoad,
    KVTransport,
    ReadResult,
    first_read_blocks,
)
from pdserve_engine.kv_transfer.links import KVLink, RecentKeys
from pdserve_engine.kv_transfer.pull import (
    Pull,
    PullState,
    code_of_end,
    find_bad_blocks,
    find_bad_end,
)

logger = logging.getLogger(__name__)

# Announcements may come before the router's ticket; so many are remembered, for so long.
MAX_EARLY = 4096
EARLY_TIMEOUT_S = 30.0
MAX_SESSION_S = 600.0  # whatever P says
ACK_TIMEOUT_S = 5.0  # P answers at once


class PullTable:
    """All pulls of one D, and what the scheduler is to hear of them."""

    def __init__(
        self,
        transport: KVTransport,
        *,
        layout: KVLayout,
        vocab_size: int,
        d_epoch: str,
        metrics: KVTransferMetrics,
        link_of: Callable[[str], KVLink | None],
        wakeup: Callable[[], None],
        transfer_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._vocab_size = vocab_size
        self._d_epoch = d_epoch
        self._metrics = metrics
        self._link_of = link_of
        self._wakeup = wakeup
        self._transfer_timeout_s = transfer_timeout_s
        self._clock = clock
        self._pulls: dict[str, Pull] = {}  # by request id
        self._by_session: dict[KVSessionId, Pull] = {}
        self._allocated: list[Pull] = []
        # Requests that are over here, so that P's last messages about them are known as late.
        self._ended = RecentKeys()
        self._num_early = 0
        self._num_zombies = 0
        self._output = KVConnectorOutput()

    # ---- the scheduler's side

    def get(self, request_id: str) -> Pull | None:
        return self._pulls.get(request_id)

    def open_pulls(self) -> list[Pull]:
        return [pull for pull in self._pulls.values() if pull.is_open]

    def num_open(self) -> int:
        return sum(pull.has_ticket for pull in self.open_pulls()) + self._num_zombies

    def take_output(self) -> KVConnectorOutput:
        output, self._output = self._output, KVConnectorOutput()
        return output

    def add_ticket(
        self, request_id: str, attempt: int, engine_id: str, *, num_tokens: int, deadline: float
    ) -> Pull:
        """The router's word that P will announce this request, or has done so already."""
        is_over = (request_id, attempt) in self._ended
        pull = self._pulls.get(request_id)
        if pull is not None and (pull.has_ticket or pull.attempt != attempt):
            self._remove(pull)
            pull = None
        if pull is None:
            pull = self._add(request_id, attempt, engine_id)
        else:
            self._num_early -= 1
        pull.has_ticket = True
        pull.num_tokens = num_tokens
        pull.deadline = deadline
        if is_over:
            message = (
                f"request {request_id!r}, attempt {attempt}, has ended here before: its "
                "announcement expired before it came, or the id is used twice"
            )
            self._fail(pull, ErrorCode.KV_EXPIRED, "expired", message)
        elif pull.engine_id != engine_id:
            self._fail_protocol(pull, f"announced a request that was sent to {engine_id}")
        elif pull.state is PullState.FAILED:
            self._report_failure(pull)
        elif pull.is_prefill_done:
            self._make_ready(pull)
        self._show_open()
        return pull

    def allocate(
        self, pull: Pull, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """A READY pull has its blocks; the last `num_external_tokens` are to come."""
        pull.allocated_at = self._clock()
        num_local = pull.num_announced_tokens - num_external_tokens
        first_block = num_local // self._layout.block_size
        firsts = first_read_blocks(self._layout, pull.num_announced_tokens)
        pull.set_load(block_ids, [max(first, first_block) for first in firsts])
        if not pull.load_remote:
            self._send_release(pull)
            self._finish(pull)
            return
        pull.state = PullState.ALLOCATED
        self._allocated.append(pull)

    def take_loads(self) -> tuple[KVLoad, ...]:
        """Return what is to be read, once."""
        allocated, self._allocated = self._allocated, []
        return tuple(pull.load() for pull in allocated if pull.state is PullState.ALLOCATED)

    def start(
        self,
        load: KVLoad,
        on_done: Callable[[Pull, ReadResult], None],
        on_stall: Callable[[Pull], None],
    ) -> None:
        """Post the READ, unless the pull has ended since. The callbacks have to take the lock."""
        pull = self._pulls.get(load.request_id)
        if pull is None or pull.session != load.session or pull.state is not PullState.ALLOCATED:
            return
        assert pull.link is not None, "a pull has a link from its announcement on"
        try:
            self._transport.read(
                pull.link.peer,
                load.remote_block_ids,
                load.local_block_ids,
                self._transfer_timeout_s,
                partial(on_done, pull),
                partial(on_stall, pull),
            )
        except KVTransferError as error:
            self.fail_transfer(pull, "read_error", error.message)
            return
        pull.state = PullState.LOADING
        pull.is_reading = True

    def end_request(self, request_id: str, block_ids: tuple[list[int], ...]) -> bool:
        """The request is over on D. True: the blocks are kept until the READ has landed."""
        pull = self._pulls.get(request_id)
        if pull is None:
            return False
        if pull.is_open:
            self._send_cancel(pull, "aborted")
        self._remove(pull)
        if not pull.is_reading:
            return False
        pull.kept_block_ids = [i for ids in block_ids for i in ids if i != NULL_BLOCK_ID]
        return True

    # ---- P's side

    def on_message(
        self, link: KVLink, welcome: KVLinkWelcome, message: KVLinkResponseMessage
    ) -> bool:
        """Return False if the message is late, unknown or makes no sense (K8)."""
        if isinstance(message, KVLinkHeartbeat | KVLinkWelcome):
            return isinstance(message, KVLinkHeartbeat)
        if message.session is not None and not link.owns(message.session, self._d_epoch):
            return False
        if isinstance(message, ReleaseAck):
            return self._on_release_ack(message)
        pull = self._find(link, message)
        if pull is None:
            return False
        if isinstance(message, BlocksReady):
            return self._on_blocks_ready(pull, link, welcome, message)
        if isinstance(message, PrefillDone):
            return self._on_prefill_done(pull, message)
        return self._on_session_ended(pull, message)

    def end_link(self, link: KVLink, reason: str) -> None:
        """All that needs this link fails, also tickets that P has not answered yet."""
        for pull in self.open_pulls():
            if pull.engine_id == link.engine_id:
                message = f"link to {link.engine_id} lost: {reason}"
                self.fail_transfer(pull, "link_lost", message, is_told=True)

    # ---- READs and ends

    def read_done(self, pull: Pull, result: ReadResult) -> None:
        """The READ has landed: nothing writes into its blocks any more."""
        pull.is_reading = False
        if pull.state is PullState.LOADING and result.is_ok:
            pull.state = PullState.RELEASING
            pull.landed_at = self._clock()
            pull.deadline = pull.landed_at + ACK_TIMEOUT_S
            pull.result = result
            self._send_release(pull)
        elif pull.state is PullState.LOADING:
            self.fail_transfer(pull, "read_error", result.error)
        else:
            self._show_zombies(-1)
            self._show_open()
            if pull.kept_block_ids is not None:
                self._output.landed_block_ids.extend(pull.kept_block_ids)
            self._wakeup()

    def read_stalled(self, pull: Pull) -> None:
        if pull.state is PullState.LOADING:
            self.fail_transfer(pull, "stall", f"READ stalled for {self._transfer_timeout_s:g} s")

    def expire(self, now: float) -> None:
        # A posted READ has the transport's own deadline.
        for pull in [p for p in self._pulls.values() if p.deadline <= now and not p.is_reading]:
            if pull.is_open:
                self._send_cancel(pull, "expired")
                message = f"KV pull from {pull.engine_id} timed out in state {pull.state.name}"
                self._fail(pull, ErrorCode.KV_EXPIRED, "expired", message)
            if not pull.has_ticket:
                self._remove(pull)

    def fence(self, reason: str) -> None:
        for pull in self.open_pulls():
            self._send_cancel(pull, reason)
            self._fail(pull, ErrorCode.KV_EXPIRED, "fenced", f"KV pull was fenced: {reason}")

    def fail_transfer(
        self, pull: Pull, reason: str, message: str, *, is_told: bool = False
    ) -> None:
        if not is_told:
            self._send_cancel(pull, reason)
        self._fail(pull, ErrorCode.KV_TRANSFER_FAILED, reason, message)

    # ---- inside

    def _add(self, request_id: str, attempt: int, engine_id: str) -> Pull:
        pull = Pull(request_id, attempt, engine_id, self._clock() + EARLY_TIMEOUT_S)
        self._pulls[request_id] = pull
        return pull

    def _remove(self, pull: Pull) -> None:
        del self._pulls[pull.request_id]
        if pull.session is not None:
            del self._by_session[pull.session]
        self._num_early -= not pull.has_ticket
        self._ended.add((pull.request_id, pull.attempt))
        if pull.is_open and pull.is_reading:
            self._show_zombies(+1)
        pull.state = PullState.FAILED
        self._show_open()

    def _find(self, link: KVLink, message: BlocksReady | PrefillDone | SessionEnded) -> Pull | None:
        """Return the pull a message is about; the first one may come before the ticket."""
        pull = self._pulls.get(message.request_id)
        if pull is None:
            key = (message.request_id, message.attempt)
            if key in self._ended or self._num_early >= MAX_EARLY:
                if isinstance(message, BlocksReady):
                    # Nobody here will ever release these blocks: P need not wait for its deadline.
                    cancel = CancelRequest(
                        request_id=message.request_id, attempt=message.attempt, reason="unwanted"
                    )
                    link.handle.send(cancel)
                return None
            pull = self._add(message.request_id, message.attempt, link.engine_id)
            self._num_early += 1
        return pull if pull.is_about(link, message) else None

    def _on_blocks_ready(
        self, pull: Pull, link: KVLink, welcome: KVLinkWelcome, message: BlocksReady
    ) -> bool:
        if self._by_session.setdefault(message.session, pull) is not pull:
            return False  # it is another request's
        pull.link, pull.session = link, message.session
        bad = find_bad_blocks(message, self._layout, welcome)
        if bad is not None:
            self._fail_protocol(pull, bad)
            return True
        return pull.add_blocks(message)

    def _on_prefill_done(self, pull: Pull, message: PrefillDone) -> bool:
        if pull.is_prefill_done:
            return False
        bad = find_bad_end(pull, message, self._layout, self._vocab_size)
        if bad is not None:
            self._fail_protocol(pull, bad)
            return True
        pull.is_prefill_done = True
        pull.num_announced_tokens = message.num_tokens
        pull.output_token_ids = message.output_token_ids
        pull.announced_at = self._clock()
        pull.session_deadline = pull.announced_at + min(message.timeout_s, MAX_SESSION_S)
        if pull.has_ticket:
            self._make_ready(pull)
        return True

    def _make_ready(self, pull: Pull) -> None:
        if pull.num_tokens != pull.num_announced_tokens:
            self._fail_protocol(
                pull, f"announced {pull.num_announced_tokens} tokens of {pull.num_tokens}"
            )
            return
        pull.state = PullState.READY
        pull.deadline = pull.session_deadline
        self._output.ready_to_load.append(pull.request_id)
        self._wakeup()

    def _on_release_ack(self, message: ReleaseAck) -> bool:
        pull = self._by_session.get(message.session)
        if pull is None or pull.state is not PullState.RELEASING:
            return False
        if message.through_block != pull.num_remote_blocks:
            return False
        self._metrics.release_acks.labels(str(message.valid).lower()).inc()
        if message.valid:
            self._finish(pull)
        else:
            self._fail(pull, ErrorCode.KV_EXPIRED, "not_valid", "P ended the session before")
        return True

    def _on_session_ended(self, pull: Pull, message: SessionEnded) -> bool:
        code = code_of_end(message.reason)
        self._fail(pull, code, "session_ended", f"P {pull.engine_id} ended it: {message.reason}")
        return True

    def _send_release(self, pull: Pull) -> None:
        assert pull.link is not None, "an announced pull has a link"
        assert pull.session is not None, "an announced pull has a session"
        pull.link.handle.send(Release(session=pull.session, through_block=pull.num_remote_blocks))

    def _send_cancel(self, pull: Pull, reason: str) -> None:
        link = pull.link or self._link_of(pull.engine_id)
        if link is not None:
            cancel = CancelRequest(request_id=pull.request_id, attempt=pull.attempt, reason=reason)
            link.handle.send(cancel)

    def _finish(self, pull: Pull) -> None:
        result, stats = pull.result, pull.stats(self._clock())
        pull.state = PullState.DONE
        self._output.finished_recving[pull.request_id] = stats
        self._metrics.transfer_exposed.observe(stats.exposed_s)
        if result is not None:
            self._metrics.transfer_bytes.labels(result.transport).inc(result.num_bytes)
            self._metrics.transfer_duration.observe(result.duration_s)
            self._metrics.release_ack_duration.observe(stats.release_ack_s)
        self._show_open()
        self._wakeup()

    def _fail_protocol(self, pull: Pull, what: str) -> None:
        self.fail_transfer(pull, "protocol", f"P {pull.engine_id} {what}")

    def _fail(self, pull: Pull, code: ErrorCode, reason: str, message: str) -> None:
        if pull.is_reading:
            self._show_zombies(+1)
        pull.state = PullState.FAILED
        is_retryable = code is not ErrorCode.CANCELLED
        pull.error = EngineError(code=code, message=message, is_retryable=is_retryable)
        if is_retryable:
            self._metrics.transfer_failures.labels(reason).inc()
            logger.warning("KV pull of %s failed: %s", pull.request_id, message)
        if pull.has_ticket:
            self._report_failure(pull)
        self._show_open()

    def _report_failure(self, pull: Pull) -> None:
        assert pull.error is not None, "failed pulls have an error"
        self._output.failed_recving[pull.request_id] = pull.error
        self._wakeup()

    def _show_zombies(self, change: int) -> None:
        self._num_zombies += change
        self._metrics.zombie_reads.set(self._num_zombies)

    def _show_open(self) -> None:
        self._metrics.sessions.set(self.num_open())
