"""D's side of the handoff: reads the blocks of a prompt out of P's memory while P computes it.

What happens to a request is in pull_events.py; here are the threads and the links. Messages come on
the event loop's thread, READs end on the transfer thread, the rest happens on the engine's; one
lock guards all state. Under it only calls are made that neither block nor call back: the link's,
the transport's, `wakeup`, `request_link`.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from pdserve_common.engine_types import EngineCoreRequest
from pdserve_common.kv_types import (
    KVLinkHello,
    KVLinkRequestMessage,
    KVLinkResponseMessage,
    KVLinkWelcome,
)
from pdserve_common.metrics import KVTransferMetrics, begin
from pdserve_engine.kv_transfer.base import KVIdentity, KVLinkHandle, KVTransport, ReadResult
from pdserve_engine.kv_transfer.endpoint import RequestLink
from pdserve_engine.kv_transfer.links import KVLink, LinkTable, check_welcome, make_hello
from pdserve_engine.kv_transfer.ports import KVEvent
from pdserve_engine.kv_transfer.pull import FAILURE_REASONS, ChunkRead
from pdserve_engine.kv_transfer.pull_events import PullEvents
from pdserve_engine.request.request import Request

logger = logging.getLogger(__name__)


class ConsumerConnector:
    """D's connector, a ConsumerPort. `wakeup` makes the engine thread call take_events soon.

    A pull to which nothing happens for `session_timeout_s` is lost, whatever it waits for; a READ
    without progress for `transfer_timeout_s` is given up.
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
        transfer_timeout_s: float = 5.0,
        session_timeout_s: float = 600.0,
        checksum: Callable[[Sequence[int]], tuple[int, ...]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._metrics = metrics
        self._step_seq = step_seq
        self._transfer_timeout_s = transfer_timeout_s
        self._checksum = checksum
        self._clock = clock
        self._lock = threading.Lock()
        self._request_link: RequestLink | None = None
        self._dialing: set[str] = set()
        self._links = LinkTable(clock)
        # What has gone wrong in here, and why the worker must not go on.
        self._defect: str | None = None
        self._events = PullEvents(
            layout=identity.layout,
            vocab_size=identity.vocab_size,
            d_epoch=identity.epoch,
            metrics=metrics,
            link_of=self._links.get,
            post=self._post,
            wakeup=wakeup,
            session_timeout_s=session_timeout_s,
            clock=clock,
        )

    @property
    def identity(self) -> KVIdentity:
        """Who this worker is to its peers."""
        return self._identity

    def bind_link_pool(self, request_link: RequestLink) -> None:
        """Set what dials `(engine_id, host, port)` and ends in link_up or link_failed."""
        self._request_link = request_link

    # ---- the event loop's thread

    def on_dispatched(self, request: EngineCoreRequest) -> None:
        if request.attempt:
            with self._lock:
                self._events.keep_held(request.request_id)
        params = request.kv_transfer_params
        if params is not None and params.do_remote_prefill:
            self.dial(params.remote_engine_id, params.remote_host, params.remote_port)

    # ---- the engine thread

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        assert params is not None, "it has a ticket"
        with self._lock:
            self._events.add_ticket(request)
        # Again: there may have been no link to be had when it was dispatched.
        self.dial(params.remote_engine_id, params.remote_host, params.remote_port)

    def grant(
        self, request: Request, block_ids: tuple[list[int], ...], num_cached_tokens: int
    ) -> bool:
        with self._lock:
            return self._events.grant(request, block_ids, num_cached_tokens)

    def defer(self, request: Request) -> None:
        with self._lock:
            self._events.defer(request)

    def reclaim(self) -> Request | None:
        with self._lock:
            return self._events.reclaim()

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> frozenset[int]:
        with self._lock:
            return self._events.end_request(request)

    def fence_all(self, reason: str) -> None:
        with self._lock:
            self._events.fence(reason)

    def take_events(self) -> list[KVEvent]:
        with self._lock:
            return self._events.take_events()

    def num_open_sessions(self) -> int:
        with self._lock:
            return self._events.num_open()

    def failure(self) -> str | None:
        return self._defect or self._transport.failure

    def shutdown(self) -> None:
        self.fence_all("shutdown")
        with self._lock:
            for link in self._links.all():
                self._drop_link(link, "shutdown")
        self._transport.close()

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
            old = self._links.get(engine_id)
            if old is not None:
                self._drop_link(old, "replaced")
            link = KVLink(welcome.link, engine_id, welcome.epoch, handle)
            link.peer = self._transport.add_peer(welcome, partial(self._on_peer_lost, link))
            link.num_blocks = sum(region.num_blocks for region in welcome.endpoint.regions)
            self._links.add(link)
            self._dialing.discard(engine_id)
            self._metrics.links.set(len(self._links))
            self._metrics.peer_came(engine_id)
            begin(self._metrics.transfer_failures, peer=(engine_id,), reason=FAILURE_REASONS)
        return link

    def link_failed(self, engine_id: str, reason: str) -> None:
        """A link that was asked for cannot be had: nobody waits for it any longer."""
        with self._lock:
            self._dialing.discard(engine_id)
            if self._links.get(engine_id) is None:
                self._lose_waiting(engine_id, reason)

    def link_lost(self, link: KVLink, reason: str) -> None:
        """The link is gone: its pulls are lost. May be called again."""
        with self._lock:
            self._drop_link(link, reason)

    def on_message(self, link: KVLink, message: KVLinkResponseMessage) -> None:
        """Take a message of P. Anything late or unknown is counted and ignored (K8)."""
        with self._lock:
            is_known = self._links.is_open(link)
            if is_known:
                self._links.heard(link)
                is_known = self._events.on_message(link, message)
            if not is_known:
                self._metrics.late_messages.inc()

    def on_tick(self) -> None:
        """Send heartbeats, end what is overdue. Call it every HEARTBEAT_S, also while the engine is
        idle.
        """
        try:
            self._tick()
        except Exception as error:  # a defect: nobody waits for ticks, but `failure` is asked for
            logger.exception("a tick of the KV connector failed")
            self._defect = f"a tick of the KV connector failed: {error!r}"

    # ---- the transfer thread

    def _on_read_done(self, read: ChunkRead, result: ReadResult) -> None:
        # It may take long: not under the lock.
        num_wrong_blocks = self._num_wrong_blocks(read) if result.is_ok else 0
        with self._lock:
            self._events.read_done(read, result, num_wrong_blocks)

    def _num_wrong_blocks(self, read: ChunkRead) -> int:
        if self._checksum is None or not read.checksums:
            return 0
        landed = self._checksum(read.local_block_ids)
        return sum(ours != theirs for ours, theirs in zip(landed, read.checksums, strict=True))

    def _on_read_stalled(self, read: ChunkRead) -> None:
        with self._lock:
            message = f"READ stalled for {self._transfer_timeout_s:g} s"
            self._events.read_stalled(read, message)

    def _on_peer_lost(self, link: KVLink, reason: str) -> None:
        with self._lock:
            self._drop_link(link, reason)

    def _tick(self) -> None:
        with self._lock:
            now = self._clock()
            tick = self._links.tick(self._step_seq())
            for link in tick.silent:
                self._drop_link(link, "silent")
            self._events.expire(now, tick.overslept_s)

    # ---- under the lock

    def _post(self, read: ChunkRead) -> None:
        link = read.pull.link
        assert link is not None, "a pull has a link while blocks are announced"
        self._transport.read(
            link.peer,
            read.remote_block_ids,
            read.local_block_ids,
            self._transfer_timeout_s,
            partial(self._on_read_done, read),
            partial(self._on_read_stalled, read),
        )

    def _lose_waiting(self, engine_id: str, reason: str) -> None:
        self._events.end_link(engine_id, "no_link", f"no link to {engine_id}: {reason}")
        self._metrics.peer_went(engine_id)

    def _drop_link(self, link: KVLink, reason: str) -> None:
        if not self._links.remove(link):
            return
        self._events.end_link(
            link.engine_id, "link_lost", f"link to {link.engine_id} lost: {reason}"
        )
        self._transport.remove_peer(link.peer)
        link.handle.close(reason)
        self._metrics.links.set(len(self._links))
        self._metrics.peer_went(link.engine_id)
        logger.info("link %d to %s ended: %s", link.number, link.engine_id, reason)
