"""What connectors of owners and readers share: the lock, the open links, and how these end."""

import logging
import threading
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from pdserve_common.errors import KVTransferError
from pdserve_common.observability import defects
from pdserve_engine.kv_transfer.base import ConnectorContext, KVIdentity
from pdserve_engine.kv_transfer.connectors.links import KVLink, LinkTable

logger = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")


class Connector(ABC, Generic[MessageT]):
    """One end of the handoff, which takes messages of `MessageT`. One lock guards all state; under
    it only calls are made that neither block nor call back.
    """

    def __init__(self, context: ConnectorContext) -> None:
        self._transport = context.transport
        self._identity = context.identity
        self._metrics = context.metrics
        self._step_seq = context.step_seq
        self._clock = context.clock
        self._lock = threading.Lock()
        self._links = LinkTable(context.clock)
        self._is_suspended = False
        # What has gone wrong in here, and why the worker must not go on.
        self._defect: str | None = None

    @property
    def identity(self) -> KVIdentity:
        """Who this worker is to its peers."""
        return self._identity

    # ---- the engine thread

    @abstractmethod
    def fence_all(self, reason: str) -> None:
        """End every session before blocks change hands."""

    def suspend(self, reason: str) -> None:
        """End every link, and have none before `resume`. All sessions are over."""
        with self._lock:
            self._is_suspended = True
            self._drop_links(reason)

    def resume(self) -> None:
        """Have links again."""
        with self._lock:
            self._is_suspended = False

    def failure(self) -> str | None:
        return self._defect or self._transport.failure

    def disconnect(self) -> None:
        """End every session and every link, and leave the transport to another connector."""
        self.fence_all("shutdown")
        with self._lock:
            self._drop_links("shutdown")

    def shutdown(self) -> None:
        self.disconnect()
        self._transport.close()

    # ---- the KvLink: the event loop's thread

    def on_message(self, link: KVLink, message: MessageT) -> None:
        """Take a message of the peer. Anything late or unknown is counted and ignored (K8)."""
        with self._lock:
            is_known = self._links.is_open(link)
            if is_known:
                self._links.heard(link)
                is_known = self._take_message(link, message)
            if not is_known:
                self._metrics.late_messages.inc()

    def link_lost(self, link: KVLink, reason: str) -> None:
        """The link is gone, and what needs it is over. May be called again, on any thread."""
        with self._lock:
            self._drop_link(link, reason)

    def on_tick(self) -> None:
        """Send heartbeats, end what is overdue. Call it every HEARTBEAT_S, also while the engine is
        idle.
        """
        try:
            self._tick()
        except Exception as error:  # a defect: nobody waits for ticks, but `failure` is asked for
            defects.record("kv_link", error, "this worker")
            self._defect = f"a tick of the KV connector failed: {error!r}"

    def _tick(self) -> None:
        with self._lock:
            now = self._clock()
            tick = self._links.tick(self._step_seq())
            for link in tick.silent:
                self._drop_link(link, "silent")
            self._expire(now, tick.stalled_s)

    # ---- under the lock

    @abstractmethod
    def _take_message(self, link: KVLink, message: MessageT) -> bool:
        """Return False if it is late, unknown or makes no sense."""

    @abstractmethod
    def _on_link_lost(self, link: KVLink, reason: str) -> None:
        """End what needs the link."""

    @abstractmethod
    def _expire(self, now: float, stalled_s: float) -> None:
        """End what is overdue, `stalled_s` of which is our own delay and nobody else's."""

    def _check_not_suspended(self) -> None:
        if self._is_suspended:
            raise KVTransferError(f"{self._identity.engine_id} is asleep")

    def _drop_links(self, reason: str) -> None:
        for link in self._links.all():
            self._drop_link(link, reason)

    def _replace_link(self, engine_id: str) -> None:
        """A peer has dialed again: the link that was open is over."""
        old = self._links.get(engine_id)
        if old is not None:
            self._drop_link(old, "replaced")

    def _add_link(self, link: KVLink) -> None:
        self._links.add(link)
        self._metrics.links.inc()
        self._metrics.peer_came(link.engine_id)

    def _drop_link(self, link: KVLink, reason: str) -> None:
        if not self._links.remove(link):
            return
        self._on_link_lost(link, reason)
        link.handle.close(reason)
        self._metrics.links.dec()
        self._metrics.peer_went(link.engine_id)
        logger.info("link %d to %s ended: %s", link.number, link.engine_id, reason)
