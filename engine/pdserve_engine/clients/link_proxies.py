"""KvLinks when the connector is in the engine process: the services' side, and the connector's."""

import itertools
from collections.abc import Callable, Iterable
from typing import ClassVar

from pdserve_common.errors import KVTransferError
from pdserve_common.types.kv import (
    KVLinkHello,
    KVLinkRequestMessage,
    KVLinkResponseMessage,
    KVLinkWelcome,
)
from pdserve_engine.clients.messages import (
    ConnectorKind,
    DialLink,
    LinkClosed,
    LinkFailed,
    LinkLost,
    LinkMessage,
    LinkRef,
    LinkTick,
    LinkUp,
)
from pdserve_engine.kv_transfer.base import KVIdentity, KVLinkHandle
from pdserve_engine.kv_transfer.connectors.endpoint import (
    KVConsumerEndpoint,
    KVProducerEndpoint,
    RequestLink,
)
from pdserve_engine.kv_transfer.connectors.links import (
    KVLink,
    check_welcome,
    find_mismatch,
    make_hello,
)

# Sends a message of a link by its number, or of ALL of a connector's.
Send = Callable[[LinkMessage, int], None]
ALL = 0


def send_links(send: Send, connector: ConnectorKind) -> Send:
    """Return how messages of a connector's links are sent, made of how messages are."""
    return lambda message, number: send(message, LinkRef(connector, number).pack())


class _Proxy:
    """The services' side: gives links their numbers. Used on the event loop's thread only."""

    kind: ClassVar[ConnectorKind]

    def __init__(self, identity: KVIdentity, connector: str, send: Send) -> None:
        self.identity = identity
        self._connector = connector
        self._send = send_links(send, self.kind)
        self._links: dict[int, KVLink] = {}
        self._numbers = itertools.count(ALL + 1)

    def on_message(
        self, link: KVLink, message: KVLinkRequestMessage | KVLinkResponseMessage
    ) -> None:
        self._send(message, link.number)

    def link_lost(self, link: KVLink, reason: str) -> None:
        if self._links.pop(link.number, None) is not None:
            self._send(LinkLost(reason), link.number)

    def on_tick(self) -> None:
        self._send(LinkTick(), ALL)

    def deliver(self, message: LinkMessage, number: int) -> None:
        """Take a message of the connector; those for links that are gone are ignored."""
        link = self._links.get(number)
        if link is None:
            return
        if isinstance(message, LinkClosed):
            link.handle.close(message.reason)
        else:
            link.handle.send(message)

    def close(self, reason: str) -> None:
        """The engine process is gone: end every stream."""
        for link in self._links.values():
            link.handle.close(reason)

    def _add(
        self,
        engine_id: str,
        epoch: str,
        handle: KVLinkHandle[KVLinkRequestMessage] | KVLinkHandle[KVLinkResponseMessage],
    ) -> KVLink:
        link = KVLink(next(self._numbers), engine_id, epoch, handle)
        self._links[link.number] = link
        return link


class ProducerProxy(_Proxy):
    """A KVProducerEndpoint."""

    kind = ConnectorKind.PRODUCER

    def accept_link(
        self, hello: KVLinkHello, handle: KVLinkHandle[KVLinkResponseMessage]
    ) -> KVLink:
        # The connector checks the same; here it can still be answered with an exception.
        mismatch = find_mismatch(self.identity, self._connector, hello)
        if mismatch is not None:
            raise KVTransferError(mismatch)
        link = self._add(hello.engine_id, hello.epoch, handle)
        self._send(hello, link.number)
        return link


class ConsumerProxy(_Proxy):
    """A KVConsumerEndpoint."""

    kind = ConnectorKind.CONSUMER
    _request_link: RequestLink | None = None

    def bind_link_pool(self, request_link: RequestLink) -> None:
        self._request_link = request_link

    def hello(self) -> KVLinkHello:
        return make_hello(self.identity, self._connector)

    def link_up(
        self, engine_id: str, welcome: KVLinkWelcome, handle: KVLinkHandle[KVLinkRequestMessage]
    ) -> KVLink:
        check_welcome(self.identity, engine_id, welcome)
        link = self._add(engine_id, welcome.epoch, handle)
        self._send(LinkUp(engine_id, welcome), link.number)
        return link

    def link_failed(self, engine_id: str, reason: str) -> None:
        self._send(LinkFailed(engine_id, reason), ALL)

    def deliver(self, message: LinkMessage, number: int) -> None:
        if not isinstance(message, DialLink):
            super().deliver(message, number)
        elif self._request_link is not None:
            self._request_link(message.engine_id, message.host, message.port)
        else:
            self.link_failed(message.engine_id, "nothing dials")


class _Handle:
    """The KVLinkHandle of a link whose stream is in the worker's process."""

    def __init__(self, number: int, send: Send) -> None:
        self._number = number
        self._send = send

    def send(self, message: KVLinkRequestMessage | KVLinkResponseMessage) -> None:
        self._send(message, self._number)

    def close(self, reason: str) -> None:
        self._send(LinkClosed(reason), self._number)


class LinkHost:
    """The connector's side: hands it what the service received. On the event loop's thread, never
    behind an engine step. `send` may be called on any thread.
    """

    def __init__(self, connector: KVProducerEndpoint | KVConsumerEndpoint, send: Send) -> None:
        self._connector = connector
        self._send = send
        self._links: dict[int, KVLink] = {}
        if isinstance(connector, KVConsumerEndpoint):
            connector.bind_link_pool(lambda *address: send(DialLink(*address), ALL))

    @property
    def identity(self) -> KVIdentity:
        return self._connector.identity

    def handle(self, message: LinkMessage, number: int) -> None:
        """Raises ProtocolError for a message that this role does not get."""
        if isinstance(message, LinkTick):
            self._connector.on_tick()
        elif isinstance(message, LinkLost):
            link = self._links.pop(number, None)
            if link is not None:
                self._connector.link_lost(link, message.reason)
        elif number in self._links:
            self._connector.on_message(self._links[number], message)  # type: ignore[arg-type]
        else:
            self._open(message, number)

    def _open(self, message: LinkMessage, number: int) -> None:
        connector = self._connector
        handle = _Handle(number, self._send)
        try:
            if isinstance(message, KVLinkHello) and isinstance(connector, KVProducerEndpoint):
                self._links[number] = connector.accept_link(message, handle)
            elif isinstance(message, LinkUp) and isinstance(connector, KVConsumerEndpoint):
                self._links[number] = connector.link_up(message.engine_id, message.welcome, handle)
            elif isinstance(message, LinkFailed) and isinstance(connector, KVConsumerEndpoint):
                connector.link_failed(message.engine_id, message.reason)
        except KVTransferError as error:
            handle.close(error.message)
            if isinstance(message, LinkUp) and isinstance(connector, KVConsumerEndpoint):
                connector.link_failed(message.engine_id, error.message)


def host_links(connectors: Iterable[object], send: Send) -> dict[ConnectorKind, LinkHost]:
    """Return the hosts of those that have links."""
    hosts = {}
    for connector in connectors:
        if isinstance(connector, KVProducerEndpoint):
            kind = ConnectorKind.PRODUCER
        elif isinstance(connector, KVConsumerEndpoint):
            kind = ConnectorKind.CONSUMER
        else:
            continue
        hosts[kind] = LinkHost(connector, send_links(send, kind))
    return hosts
