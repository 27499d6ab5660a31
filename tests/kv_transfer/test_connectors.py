"""The handoff between ProducerConnector and ConsumerConnector over each transport. What each side
does in every state is in test_producer.py and test_consumer.py, and that no block is lost or freed
twice whatever happens in engine/test_handoff_engines.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pdserve_common.errors import (
    KVTransferError,
)
from pdserve_common.types.kv import PROTOCOL_VERSION
from pdserve_engine.kv_transfer.ports import (
    BlocksConfirmed,
    BlocksLanded,
    PullFinished,
    PullLost,
    RequestFailed,
)
from pdserve_engine.request.request import RequestStatus
from support.metrics import value


def same_blocks(pair: Any, ours: list[int], theirs: list[int]) -> bool:
    return torch.equal(pair.d_pool.tensor[ours], pair.p_pool.tensor[theirs])


def test_a_prefill_is_handed_over_while_it_runs(pair: Any) -> None:
    """A chunk is read and confirmed before the next one exists."""
    pair.connect()
    request, prefill = pair.handoff()
    p_blocks, d_blocks = pair.p_tables[prefill][0], pair.d_tables[request][0]
    for num_tokens in (16, 32):
        pair.compute(prefill, num_tokens)
        assert pair.wait_for(BlocksConfirmed).num_tokens == num_tokens
        num_blocks = num_tokens // 16
        assert same_blocks(pair, d_blocks[:num_blocks], p_blocks[:num_blocks])
        pair.p_pool.tensor[p_blocks[num_blocks]] += 1  # the next step writes it only now
    assert pair.end_p(prefill) == {p_blocks[2]}, "the others are read"
    assert pair.wait_for(BlocksLanded).output_token_ids == (77,)
    finished = pair.wait_for(PullFinished)
    assert finished.stats.num_reads == finished.stats.num_blocks == 3
    assert same_blocks(pair, d_blocks[:3], p_blocks[:3])
    pair.end_d(request)
    pair.check_baseline()


@pytest.mark.parametrize("fault", ["error", "stall"])
def test_a_read_that_fails_is_a_loss_of_its_request(pair: Any, fault: str) -> None:
    pair.connect()
    request, prefill = pair.handoff()
    pair.compute(prefill, 16)
    pair.wait_for(BlocksConfirmed)
    pair.transport.is_holding = True
    pair.compute(prefill, 32)
    pair.pump()
    if fault == "error":
        pair.transport.fail("remote disconnect")
        assert pair.to_p.closed_because == "remote disconnect"
        pair.p.link_lost(pair.p_link, "closed by D")
    else:
        pair.transport.stall()
    lost = pair.wait_for(PullLost).lost
    assert lost.reason == ("stall" if fault == "stall" else "read_error")
    assert lost.num_confirmed_tokens == 16
    assert pair.wait_for(RequestFailed).request is prefill
    pair.end_p(prefill, RequestStatus.FINISHED_ERROR)
    assert bool(pair.end_d(request)) is (fault == "stall")
    pair.transport.let_go()
    pair.check_baseline()


def test_the_next_attempt_goes_on_with_what_is_confirmed(pair: Any) -> None:
    """As the router decides: the same P again, the first attempt is superseded on D."""
    pair.connect()
    first, prefill = pair.handoff()
    pair.compute(prefill, 32)
    while pair.wait_for(BlocksConfirmed).num_tokens < 32:
        pass
    pair.end_p(prefill, RequestStatus.FINISHED_ERROR)
    assert pair.wait_for(PullLost).lost.num_confirmed_tokens == 32
    pair.num_cached_tokens = 32  # their blocks are in D's prefix cache
    assert pair.end_d(first) == frozenset()
    second, prefill = pair.handoff(attempt=1)
    pair.end_p(prefill)
    finished = pair.wait_for(PullFinished)
    assert finished.request is second
    assert finished.stats.num_blocks == 1
    pair.end_d(second)
    pair.check_baseline()


def test_silence_ends_a_link_but_heartbeats_keep_it(pair: Any) -> None:
    pair.connect()
    for _ in range(10):
        pair.now += 1
        pair.p.on_tick()
        pair.d.on_tick()
        pair.pump()
    assert value(pair.p_metrics.links) == value(pair.d_metrics.links) == 1
    request, prefill = pair.handoff()
    for _ in range(7):
        pair.now += 1
        pair.p.on_tick()
        pair.d.on_tick()  # and nothing arrives
    assert pair.to_d.closed_because == pair.to_p.closed_because == "silent"
    assert pair.wait_for(PullLost).lost.message == "link to p0 lost: silent"
    pair.end_p(prefill, RequestStatus.FINISHED_ERROR)
    pair.end_d(request)
    pair.check_baseline()


@pytest.mark.parametrize("kind", ["local"])
@pytest.mark.parametrize(
    ("field", "other", "says"),
    [
        (
            "compatibility_hash",
            "else",
            "compatibility_hash differs: same on the owner, else on the reader",
        ),
        ("min_protocol_version", PROTOCOL_VERSION + 1, "protocol versions differ"),
        ("connector", "nixl", "connector differs: local on the owner, nixl on the reader"),
    ],
)
def test_p_refuses_a_d_that_differs_and_says_how(
    pair: Any, field: str, other: Any, says: str
) -> None:
    hello = replace(pair.d.hello(), **{field: other})
    with pytest.raises(KVTransferError, match=says):
        pair.p.accept_link(hello, pair.to_d)
    layout = replace(hello.layout, block_size=32)
    hello = replace(pair.d.hello(), layout=layout)
    with pytest.raises(
        KVTransferError, match=r"layout.block_size differs: 16 on the owner, 32 on the reader"
    ):
        pair.p.accept_link(hello, pair.to_d)
    assert value(pair.p_metrics.links) == 0


@pytest.mark.parametrize("kind", ["local"])
def test_d_refuses_a_p_that_differs_before_it_reads_its_metadata(pair: Any) -> None:
    pair.p.accept_link(pair.d.hello(), pair.to_d)
    welcome = replace(pair.to_d.messages.popleft(), compatibility_hash="else")
    pair.connect()
    with pytest.raises(KVTransferError, match="compatibility_hash differs: else on the owner"):
        pair.d.link_up("p0", welcome, pair.to_p)
    with pytest.raises(KVTransferError, match="dialed p1, p0 answered"):
        pair.d.link_up("p1", welcome, pair.to_p)
    newer = replace(welcome, protocol_version=PROTOCOL_VERSION + 1)
    with pytest.raises(KVTransferError, match=f"protocol version {PROTOCOL_VERSION + 1}"):
        pair.d.link_up("p0", newer, pair.to_p)
