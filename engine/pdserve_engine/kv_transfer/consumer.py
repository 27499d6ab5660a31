"""D's side of the handoff: reads the blocks of finished prefills out of P's memory.

What happens to a request is in pull_table.py; here are the threads and the links. Messages come on
the event loop's thread, READs end on the transfer thread, the rest happens on the engine's; one
lock guards all state. Under it only calls are made that neither block nor call back: the link's,
the transport's, `wakeup`, `request_link`.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pdserve_common.kv_types import (
    KVLinkHello,
    KVLinkRequestMessage,
    KVLinkResponseMessage,
    KVLinkWelcome,
)
from pdserve_common.metrics import KVTransferMetrics
from pdserve_engine.core.request import Request
from pdserve_engine.kv_transfer.base import (
    KVConnector,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVIdentity,
    KVLinkHandle,
    KVTransport,
    ReadResult,
)
from pdserve_engine.kv_transfer.endpoint import RequestLink
from pdserve_engine.kv_transfer.links import KVLink, LinkTable, check_welcome, make_hello
from pdserve_engine.kv_transfer.pull import Pull, PullState
from pdserve_engine.kv_transfer.pull_table import PullTable

if TYPE_CHECKING:
    from pdserve_engine.kv_cache import KVCache

logger = logging.getLogger(__name__)


class ConsumerConnector(KVConnector):
    """D's connector. `wakeup` makes the engine thread call take_output soon."""

    def __init__(
        self,
        transport: KVTransport,
        *,
        identity: KVIdentity,
        metrics: KVTransferMetrics,
        wakeup: Callable[[], None],
        step_seq: Callable[[], int],
        transfer_timeout_s: float = 5.0,
        ticket_timeout_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._metrics = metrics
        self._step_seq = step_seq
        self._ticket_timeout_s = ticket_timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._request_link: RequestLink | None = None
        self._dialing: set[str] = set()
        self._links = LinkTable(clock())
        self._welcomes: dict[KVLink, KVLinkWelcome] = {}
        self._table = PullTable(
            transport,
            layout=identity.layout,
            vocab_size=identity.vocab_size,
            d_epoch=identity.epoch,
            metrics=metrics,
            link_of=self._links.get,
            wakeup=wakeup,
            transfer_timeout_s=transfer_timeout_s,
            clock=clock,
        )

    @property
    def identity(self) -> KVIdentity:
        """Who this worker is to its peers."""
        return self._identity

    def bind_link_pool(self, request_link: RequestLink) -> None:
        """Set what dials `(engine_id, host, port)` and ends in link_up or link_failed."""
        self._request_link = request_link

    # ---- scheduler side: the engine thread

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if params is None or not params.do_remote_prefill:
            return
        with self._lock:
            pull = self._table.add_ticket(
                request.request_id,
                request.request.attempt,
                params.remote_engine_id,
                num_tokens=request.num_tokens,
                deadline=self._clock() + self._ticket_timeout_s,
            )
            if pull.state is PullState.WAITING and self._links.get(pull.engine_id) is None:
                self._dial(pull, params.remote_host, params.remote_port)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        with self._lock:
            pull = self._table.get(request.request_id)
            if pull is None or pull.state is PullState.DONE:
                return 0, False
            if pull.state is not PullState.READY:
                return None, True
            return max(0, pull.num_announced_tokens - num_computed_tokens), True

    def transferred_output_token_ids(self, request_id: str) -> tuple[int, ...]:
        with self._lock:
            pull = self._table.get(request_id)
            return pull.output_token_ids if pull is not None else ()

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        with self._lock:
            pull = self._table.get(request.request_id)
            # If not READY it has failed since, and the scheduler is about to hear of it.
            if pull is not None and pull.state is PullState.READY:
                self._table.allocate(pull, block_ids, num_external_tokens)

    def build_connector_meta(self) -> KVConnectorMetadata:
        with self._lock:
            return KVConnectorMetadata(loads=self._table.take_loads())

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> bool:
        with self._lock:
            return self._table.end_request(request.request_id, block_ids)

    def abort_session(self, request_id: str) -> None:
        """D has no sessions of its own: request_finished cancels."""

    def failure(self) -> str | None:
        return self._transport.failure

    def fence_all(self, reason: str) -> None:
        with self._lock:
            self._table.fence(reason)

    def take_output(self) -> KVConnectorOutput:
        with self._lock:
            return self._table.take_output()

    def num_open_sessions(self) -> int:
        with self._lock:
            return self._table.num_open()

    # ---- worker side: the engine thread

    def register_kv_cache(self, kv_cache: "KVCache") -> None:
        self._transport.register(kv_cache)

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        with self._lock:
            for load in metadata.loads:
                self._table.start(load, self._on_read_done, self._on_read_stalled)

    def shutdown(self) -> None:
        self.fence_all("shutdown")
        with self._lock:
            for link in self._links.all():
                self._drop_link(link, "shutdown")
        self._transport.close()

    # ---- the KvLink: the event loop's thread

    def hello(self) -> KVLinkHello:
        """What to send first on a new link."""
        return make_hello(self._identity, self._transport.name)

    def link_up(
        self, engine_id: str, welcome: KVLinkWelcome, handle: KVLinkHandle[KVLinkRequestMessage]
    ) -> KVLink:
        """P has welcomed us on a link dialed for `engine_id`. Raises KVTransferError if it is not
        the P we want; then the caller reports link_failed.
        """
        check_welcome(self._identity, engine_id, welcome)
        with self._lock:
            old = self._links.get(engine_id)
            if old is not None:
                self._drop_link(old, "replaced")
            link = KVLink(welcome.link, engine_id, welcome.epoch, handle, self._clock())
            link.peer = self._transport.add_peer(welcome, partial(self._on_peer_lost, link))
            self._links.add(link)
            self._welcomes[link] = welcome
            self._dialing.discard(engine_id)
            self._metrics.links.set(len(self._links))
        return link

    def link_failed(self, engine_id: str, reason: str) -> None:
        """A link that was asked for cannot be had: nobody waits for it any longer."""
        with self._lock:
            self._dialing.discard(engine_id)
            if self._links.get(engine_id) is None:
                self._fail_waiting(engine_id, reason)

    def link_lost(self, link: KVLink, reason: str) -> None:
        """The link is gone: its pulls fail. May be called again."""
        with self._lock:
            self._drop_link(link, reason)

    def on_message(self, link: KVLink, message: KVLinkResponseMessage) -> None:
        """Take a message of P. Anything late or unknown is counted and ignored (K8)."""
        with self._lock:
            is_known = self._links.is_open(link)
            if is_known:
                link.last_heard = self._clock()
                is_known = self._table.on_message(link, self._welcomes[link], message)
            if not is_known:
                self._metrics.late_messages.inc()

    def on_tick(self) -> None:
        """Send heartbeats, end what is overdue. Call it every TICK_S, also while the engine is
        idle.
        """
        with self._lock:
            now = self._clock()
            for link in self._links.tick(now, self._step_seq()):
                self._drop_link(link, "silent")
            self._table.expire(now)

    # ---- the transfer thread

    def _on_read_done(self, pull: Pull, result: ReadResult) -> None:
        with self._lock:
            self._table.read_done(pull, result)

    def _on_read_stalled(self, pull: Pull) -> None:
        with self._lock:
            self._table.read_stalled(pull)

    def _on_peer_lost(self, link: KVLink, reason: str) -> None:
        with self._lock:
            self._drop_link(link, reason)

    # ---- under the lock

    def _dial(self, pull: Pull, host: str, port: int) -> None:
        if self._request_link is None or not host:
            self._fail_waiting(pull.engine_id, f"no address for {pull.engine_id}")
        elif pull.engine_id not in self._dialing:
            self._dialing.add(pull.engine_id)
            self._request_link(pull.engine_id, host, port)

    def _fail_waiting(self, engine_id: str, reason: str) -> None:
        for pull in self._table.open_pulls():
            if pull.engine_id == engine_id:
                message = f"no link to {engine_id}: {reason}"
                self._table.fail_transfer(pull, "no_link", message, is_told=True)

    def _drop_link(self, link: KVLink, reason: str) -> None:
        if not self._links.remove(link):
            return
        self._table.end_link(link, reason)
        del self._welcomes[link]
        self._transport.remove_peer(link.peer)
        link.handle.close(reason)
        self._metrics.links.set(len(self._links))
        logger.info("link %d to %s ended: %s", link.number, link.engine_id, reason)
