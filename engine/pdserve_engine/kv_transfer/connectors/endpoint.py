"""The KvLink's side of a connector: what a service that carries a KvLink's messages calls.

ProducerConnector and ConsumerConnector implement it where the engine runs in the service's
process; clients/link_proxies.py does where it does not. All methods are called on the event
loop's thread and return at once.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from pdserve_common.types.kv import (
    KVLinkHello,
    KVLinkRequestMessage,
    KVLinkResponseMessage,
    KVLinkWelcome,
)
from pdserve_engine.kv_transfer.base import KVIdentity, KVLinkHandle, MessageT_contra
from pdserve_engine.kv_transfer.connectors.links import KVLink

# Asks for a link to `(engine_id, host, port)`; may be called on any thread.
RequestLink = Callable[[str, str, int], None]


class KVLinkEndpoint(Protocol[MessageT_contra]):
    """What both ends have in common."""

    @property
    def identity(self) -> KVIdentity:
        """Who this worker is to its peers."""

    def on_message(self, link: KVLink, message: MessageT_contra) -> None:
        """Take a message of the peer; late ones are ignored."""

    def link_lost(self, link: KVLink, reason: str) -> None:
        """The link's stream has ended. May be called again."""

    def on_tick(self) -> None:
        """Send heartbeats and end what is overdue; to be called every HEARTBEAT_S."""


@runtime_checkable
class KVProducerEndpoint(KVLinkEndpoint[KVLinkRequestMessage], Protocol):
    """The owner's end."""

    def accept_link(
        self, hello: KVLinkHello, handle: KVLinkHandle[KVLinkResponseMessage]
    ) -> KVLink:
        """Admit a reader; the welcome goes through `handle`. Raises KVTransferError that names what
        differs.
        """


@runtime_checkable
class KVConsumerEndpoint(KVLinkEndpoint[KVLinkResponseMessage], Protocol):
    """The reader's end."""

    def bind_link_pool(self, request_link: RequestLink) -> None:
        """Set what dials; each call of it ends in link_up or link_failed."""

    def hello(self) -> KVLinkHello:
        """What to send first on a new link."""

    def link_up(
        self, engine_id: str, welcome: KVLinkWelcome, handle: KVLinkHandle[KVLinkRequestMessage]
    ) -> KVLink:
        """The owner has welcomed us on a link dialed for `engine_id`. Raises KVTransferError if it
        is not the owner we want; then the caller reports link_failed.
        """

    def link_failed(self, engine_id: str, reason: str) -> None:
        """A link that was asked for cannot be had."""
