"""Handoffs whose connectors are in engine processes: every message is encoded on its way."""

from collections.abc import Iterator
from typing import Any

import pytest

from pdserve_common.errors import KVTransferError
from pdserve_common.types.kv import KVLinkHeartbeat, SessionEnded, SessionEndReason
from pdserve_engine.clients.link_proxies import ConsumerProxy, LinkHost, ProducerProxy, send_links
from pdserve_engine.clients.messages import CODEC, LinkMessage, LinkRef
from pdserve_engine.kv_transfer.ports import (
    BlocksLanded,
    PullFinished,
    PullLost,
    RequestFailed,
    StartAllowed,
    StartForbidden,
)
from pdserve_engine.request.request import RequestStatus
from support.handoff import make_identity


class Split:
    """A connector whose link methods are those of its proxy, as a service sees it."""

    def __init__(self, connector: Any, proxy_class: Any, name: str) -> None:
        self.connector = connector
        self.proxy = proxy_class(connector.identity, name, self._to_host)
        self.host = LinkHost(connector, send_links(self._to_proxy, self.proxy.kind))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.proxy if hasattr(self.proxy, name) else self.connector, name)

    @property
    def num_links(self) -> int:
        return len(self.proxy._links) + len(self.host._links)

    def _to_host(self, message: LinkMessage, ref: int) -> None:
        self.host.handle(*self._carried(message, ref))

    def _to_proxy(self, message: LinkMessage, ref: int) -> None:
        self.proxy.deliver(*self._carried(message, ref))

    def _carried(self, message: LinkMessage, ref: int) -> tuple[Any, int]:
        ((decoded, ref),) = CODEC.reader().feed(CODEC.encode(message, ref))
        kind, number = LinkRef.unpack(ref)
        assert kind is self.proxy.kind
        return decoded, number


@pytest.fixture
def split(pair: Any) -> Iterator[Any]:
    pair.p = Split(pair.p, ProducerProxy, pair.transport.name)
    pair.d = Split(pair.d, ConsumerProxy, pair.transport.name)
    pair.d.bind_link_pool(lambda *address: pair.dialed.append(address))
    return pair


def test_a_handoff_moves_the_blocks(split: Any) -> None:
    request = split.ticket()
    assert split.dialed == [("p0", "127.0.0.1", 1)]
    split.connect()
    split.prefill()
    finished = split.wait_for(PullFinished)
    assert finished.stats.num_reads == 3
    assert split.wait_for(BlocksLanded).output_token_ids == (77,)
    split.end_d(request)
    split.check_baseline()


def test_a_grant_crosses_both_ways(split: Any) -> None:
    split.connect()
    split.has_room = False
    request = split.ticket()
    prefill = split.ask()
    split.collect()
    split.has_room = True
    assert split.reserve(request)
    split.wait_for(StartAllowed)
    assert split.d.reclaim() is request
    split.give_d(request, frozenset())
    split.wait_for(StartForbidden)
    split.end_p(prefill, RequestStatus.FINISHED_ABORTED)
    split.wait_for(RequestFailed)
    split.end_d(request)
    split.check_baseline()


def test_a_d_that_differs_is_refused_by_name(split: Any) -> None:
    split.d.proxy.identity = make_identity("d0", compatibility_hash="other")
    with pytest.raises(
        KVTransferError, match="compatibility_hash differs: same on the owner, other on the reader"
    ):
        split.connect()
    assert split.p.num_links == 0


def test_a_p_that_nobody_dialed_is_refused(split: Any) -> None:
    split.to_d = split.to_p
    split.p.accept_link(split.d.hello(), split.to_d)
    welcome = split.to_d.messages.popleft()
    with pytest.raises(KVTransferError, match="dialed p9, p0 answered"):
        split.d.link_up("p9", welcome, split.to_p)


def test_a_p_whose_pool_makes_no_sense_is_dropped(split: Any) -> None:
    request = split.ticket()
    split.p.accept_link(split.d.hello(), split.to_d)
    welcome = split.to_d.messages.popleft()
    object.__setattr__(welcome.endpoint.ranks[0], "regions", ())
    split.d.link_up("p0", welcome, split.to_p)
    assert "there is no memory region" in split.to_p.closed_because
    assert "no link to p0" in split.wait_for(PullLost).lost.message
    split.end_d(request)


def test_a_lost_link_ends_its_sessions(split: Any) -> None:
    split.connect()
    request = split.ticket()
    prefill = split.ask()
    split.wait_for(StartAllowed)
    split.cut()
    split.wait_for(PullLost)
    split.end_p(prefill, RequestStatus.FINISHED_ERROR)
    split.end_d(request)
    assert split.p.num_links == split.d.num_links == 0
    split.check_baseline()


def test_messages_of_links_that_are_gone_are_ignored(split: Any) -> None:
    split.connect()
    p_link, d_link = split.p_link, split.d_link
    split.cut()
    split.p.on_message(p_link, KVLinkHeartbeat(step_seq=1))
    reason = SessionEndReason.FINISHED
    ended = SessionEnded(session=None, request_id="r", attempt=0, reason=reason, message="")
    split.d.on_message(d_link, ended)
    split.p.link_lost(p_link, "again")
    split.p.proxy.deliver(KVLinkHeartbeat(step_seq=1), p_link.number)


def test_ticks_send_heartbeats_through(split: Any) -> None:
    split.connect()
    split.p.on_tick()
    assert split.to_d.messages.pop() == KVLinkHeartbeat(step_seq=7)


def test_an_engine_process_that_dies_ends_the_streams(split: Any) -> None:
    split.connect()
    split.p.proxy.close("gone")
    split.d.proxy.close("gone")
    assert split.to_d.closed_because == split.to_p.closed_because == "gone"
