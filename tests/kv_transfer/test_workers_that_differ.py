"""Workers that differ: in how their models are cut, and in the protocol they speak."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from pdserve.v1 import kv_transfer_service_pb2 as kv_pb2
from pdserve_common.errors import KVTransferError
from pdserve_common.types.kv import BlocksReady, KVLinkHello, KVLinkWelcome
from pdserve_common.wire import (
    kv_link_request_from_proto,
    kv_link_request_to_proto,
    kv_link_response_from_proto,
    kv_link_response_to_proto,
)
from pdserve_engine.kv_transfer.connectors.links import check_welcome, find_mismatch, make_hello
from pdserve_engine.kv_transfer.ports import PullLost
from support.handoff import Pair, Wire, make_identity
from support.metrics import value
from support.shards import CUTS, CutPair, Cuts

TWO_HEADS = Cuts(2, (1, 1), (1, 1)).spec


@pytest.fixture
def cut_pair(kind: str, cuts: str) -> Iterator[CutPair]:
    pair = CutPair(kind, CUTS[cuts])
    with_checksums(pair)
    yield pair
    pair.close()


def with_checksums(pair: Pair) -> None:
    """Let P send them; D compares in any case."""
    pair.p.shutdown()
    pair.start_p(checksum=pair.p_pool.block_checksums)


@pytest.mark.parametrize("cuts", CUTS)
def test_a_prefill_is_handed_over_between_workers_that_are_cut_differently(
    cut_pair: CutPair,
) -> None:
    cut_pair.connect()
    cut_pair.hand_over()
    assert value(cut_pair.d_metrics.checksum_mismatches) == 0


@pytest.mark.parametrize("kind", ["local"])
@pytest.mark.parametrize("cuts", ["tp 2:1", "tp 4:2", "pp 1:2"])
def test_a_wrong_byte_is_seen_whoever_holds_it(cut_pair: CutPair) -> None:
    cut_pair.connect()
    request, prefill = cut_pair.handoff()
    block = cut_pair.d_tables[request][0][0]
    right = cut_pair.d_pool.block_checksums

    def damaged(block_ids: Any) -> tuple[int, ...]:
        cut_pair.d_pool.pools[-1].tensor[block, -1, -1, -1, -1, -1] += 1
        return right(block_ids)

    cut_pair.checksum = damaged
    cut_pair.end_p(prefill)
    assert "1 blocks of p0 came with a wrong checksum" in cut_pair.wait_for(PullLost).lost.message
    cut_pair.end_d(request)
    cut_pair.check_baseline()


# ---- protocol version 3


def of_version_3(hello: KVLinkHello) -> KVLinkHello:
    """What an older D sends, as it arrives."""
    message = kv_link_request_to_proto(hello)
    message.hello.min_protocol_version = message.hello.max_protocol_version = 3
    message.hello.layout.ClearField("num_kv_heads")
    message.hello.layout.ClearField("head_bytes")
    arrived = kv_pb2.KvLinkRequest.FromString(message.SerializeToString())
    parsed = kv_link_request_from_proto(arrived)
    assert isinstance(parsed, KVLinkHello)
    return parsed


def as_read_by_version_3(welcome: KVLinkWelcome) -> KVLinkWelcome:
    """What an older D finds in a welcome, and what an older P sends."""
    message = kv_link_response_to_proto(welcome)
    message.welcome.ClearField("ranks")
    message.welcome.protocol_version = 3
    arrived = kv_pb2.KvLinkResponse.FromString(message.SerializeToString())
    parsed = kv_link_response_from_proto(arrived)
    assert isinstance(parsed, KVLinkWelcome)
    return parsed


@pytest.fixture
def old_pair(kind: str) -> Iterator[Pair]:
    """Two heads, as checksums of a head alone would be those of version 3."""
    pair = Pair(kind, TWO_HEADS)
    with_checksums(pair)
    pair.to_d, pair.to_p = Wire(), Wire()
    yield pair
    pair.close()


def test_an_older_d_reads_from_a_p_of_one_rank(old_pair: Pair) -> None:
    old_pair.p_link = old_pair.p.accept_link(of_version_3(old_pair.d.hello()), old_pair.to_d)
    welcome = old_pair.to_d.messages.popleft()
    assert welcome.protocol_version == 3
    old_pair.d_link = old_pair.d.link_up("p0", as_read_by_version_3(welcome), old_pair.to_p)
    sent: list[Any] = []
    send = old_pair.to_d.send
    old_pair.to_d.send = lambda message: (sent.append(message), send(message))  # type: ignore
    old_pair.hand_over()
    announced = [message for message in sent if isinstance(message, BlocksReady)]
    assert announced
    assert not any(message.checksums for message in announced), "it knows others"


def test_d_reads_from_an_older_p(old_pair: Pair) -> None:
    """Its checksums, one for each block, are not looked at."""
    old_pair.p_link = old_pair.p.accept_link(old_pair.d.hello(), old_pair.to_d)
    welcome = as_read_by_version_3(old_pair.to_d.messages.popleft())
    (rank,) = welcome.endpoint.ranks
    assert rank.shard is None
    old_pair.d_link = old_pair.d.link_up("p0", welcome, old_pair.to_p)
    deliver = old_pair.d.on_message

    def with_old_checksums(link: Any, message: Any) -> None:
        if isinstance(message, BlocksReady):
            sums = tuple(tuple(1 for _ in ids) for ids in message.block_ids)
            message = replace(message, checksums=sums)
        deliver(link, message)

    old_pair.d.on_message = with_old_checksums  # type: ignore[method-assign]
    old_pair.hand_over()


def test_a_p_with_several_ranks_refuses_an_older_d_by_name() -> None:
    p = make_identity("p0", num_ranks=2)
    assert find_mismatch(p, "local", make_hello(make_identity("d0"), "local")) is None
    mismatch = find_mismatch(p, "local", of_version_3(make_hello(make_identity("d0"), "local")))
    assert mismatch == (
        "the reader speaks protocol version 3, which knows workers of one rank: p0 has 2"
    )


def test_a_d_with_several_ranks_refuses_an_older_p_by_name() -> None:
    d = make_identity("d0", num_ranks=2)
    hello = make_hello(d, "local")
    assert (hello.min_protocol_version, hello.max_protocol_version) == (4, 4)
    pair = Pair("local")
    pair.p.accept_link(pair.d.hello(), pair.to_d)
    welcome = pair.to_d.messages.popleft()
    pair.close()
    check_welcome(d, "p0", welcome)
    with pytest.raises(KVTransferError, match=r"the owner speaks protocol version 3, .*: d0 has 2"):
        check_welcome(d, "p0", replace(welcome, protocol_version=3))


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (
            lambda layout: replace(layout, num_kv_heads=7),
            "layout.num_kv_heads differs: 1 on the owner",
        ),
        (
            lambda layout: replace(layout, head_bytes=7),
            "layout.head_bytes differs: 8192 on the owner",
        ),
    ],
)
def test_heads_are_compared_with_those_who_know_them(
    change: Callable[[Any], Any], differs: str
) -> None:
    p = make_identity("p0")
    hello = make_hello(p, "local")
    other = replace(hello, layout=change(hello.layout))
    mismatch = find_mismatch(p, "local", other)
    assert mismatch is not None
    assert mismatch.startswith(differs)
    assert find_mismatch(p, "local", replace(other, max_protocol_version=3)) is None
