"""The handoff between ProducerConnector and ConsumerConnector: what both sides do, and that no
block is lost or freed twice whatever happens.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pdserve_common.engine_types import ErrorCode
from pdserve_common.errors import (
    DeadlineExceededError,
    DrainingError,
    KVTransferError,
    PdserveError,
    RequestFailedError,
)
from pdserve_common.kv_types import PROTOCOL_VERSION, Release, ReleaseAck, SessionEnded
from pdserve_engine.kv_transfer.ports import (
    BlocksClaimed,
    BlocksConfirmed,
    BlocksLanded,
    PullFinished,
    PullLost,
    RequestFailed,
    StartAllowed,
    StartDeferred,
    StartForbidden,
)
from pdserve_engine.request.request import Request, RequestStatus
from support.metrics import value


def handoff(pair: Any, request_id: str = "r0", **fields: Any) -> tuple[Request, Request]:
    """Both legs of a request that P has been allowed to start, and has."""
    request = pair.ticket(request_id, **fields)
    prefill = pair.ask(request_id, **fields)
    pair.wait_for(StartAllowed, request_id)
    assert pair.start(prefill)
    return request, prefill


def same_blocks(pair: Any, ours: list[int], theirs: list[int]) -> bool:
    return torch.equal(pair.d_pool.tensor[ours], pair.p_pool.tensor[theirs])


def test_a_prefill_is_handed_over_while_it_runs(pair: Any) -> None:
    """A chunk is read and confirmed before the next one exists."""
    pair.connect()
    request, prefill = handoff(pair)
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


def test_p_frees_what_is_read_before_the_rest_has_landed(pair: Any) -> None:
    pair.connect()
    request, prefill = handoff(pair, num_tokens=48)
    pair.compute(prefill, 16)
    pair.wait_for(BlocksConfirmed)
    pair.transport.is_holding = True
    pair.compute(prefill, 32)
    assert len(pair.end_p(prefill)) == 2
    pair.collect()
    pair.transport.land()
    assert pair.wait_for(BlocksConfirmed).num_tokens == 32
    assert len(pair.p_blocks.free) == 63
    pair.transport.land()
    pair.wait_for(PullFinished)
    pair.end_d(request)
    pair.check_baseline()


@pytest.mark.parametrize("num_cached", [16, 32])
def test_what_d_has_cached_is_not_pulled(pair: Any, num_cached: int) -> None:
    pair.connect()
    pair.num_cached_tokens = num_cached
    request, prefill = handoff(pair)
    p_blocks, d_blocks = pair.p_tables[prefill][0], pair.d_tables[request][0]
    expected = pair.d_pool.tensor.clone()
    pair.compute(prefill, 32)
    pair.end_p(prefill)
    num_blocks = num_cached // 16
    assert pair.wait_for(PullFinished).stats.num_blocks == 3 - num_blocks
    expected[d_blocks[num_blocks:3]] = pair.p_pool.tensor[p_blocks[num_blocks:3]]
    assert torch.equal(pair.d_pool.tensor, expected)
    pair.end_d(request)
    pair.check_baseline()


def test_a_prompt_that_d_has_cached_whole_moves_no_block(pair: Any) -> None:
    pair.connect()
    pair.num_cached_tokens = 32
    request = pair.ticket(num_tokens=32)
    pair.prefill(num_tokens=32)
    finished = pair.wait_for(PullFinished)
    assert finished.stats.num_reads == 0
    assert pair.wait_for(BlocksLanded).output_token_ids == (77,)
    pair.end_d(request)
    pair.check_baseline()


@pytest.mark.parametrize("order", ["link first", "question first", "ticket last"])
def test_link_question_and_ticket_may_come_in_any_order(pair: Any, order: str) -> None:
    if order == "question first":
        prefill = pair.ask()
        request = pair.ticket()
        assert pair.dialed == ["p0"]
        pair.connect()
    else:
        pair.connect()
        request = pair.ticket() if order == "link first" else None
        prefill = pair.ask()
        pair.pump()
        request = request or pair.ticket()
    pair.wait_for(StartAllowed)
    assert pair.start(prefill)
    pair.end_p(prefill)
    pair.wait_for(PullFinished)
    pair.end_d(request)
    pair.check_baseline()


def test_p_waits_for_ds_room_without_holding_blocks(pair: Any) -> None:
    pair.connect()
    pair.has_room = False
    request = pair.ticket()
    prefill = pair.ask()
    assert [type(n) for n in pair.collect()] == [BlocksClaimed, StartDeferred]
    assert not pair.start(prefill)
    assert len(pair.p_blocks.free) == 64
    pair.has_room = True
    assert pair.reserve(request)
    pair.wait_for(StartAllowed)
    assert pair.start(prefill)
    pair.end_p(prefill)
    pair.wait_for(PullFinished)
    pair.end_d(request)
    pair.check_baseline()


def test_a_grant_that_is_taken_back_is_given_again(pair: Any) -> None:
    pair.connect()
    request = pair.ticket()
    prefill = pair.ask()
    pair.wait_for(StartAllowed)
    assert pair.d.reclaim() is request
    pair.give_d(request, frozenset())
    pair.wait_for(StartForbidden)
    assert pair.reserve(request)
    pair.wait_for(StartAllowed)
    assert pair.start(prefill)
    pair.end_p(prefill)
    pair.wait_for(PullFinished)
    pair.end_d(request)
    pair.check_baseline()


@pytest.mark.parametrize("is_granted_again", [False, True])
@pytest.mark.parametrize("is_announced", [False, True])
def test_a_grant_that_is_taken_back_while_p_starts_is_a_loss(
    pair: Any, is_announced: bool, is_granted_again: bool
) -> None:
    pair.connect()
    request, prefill = handoff(pair)
    assert pair.d.reclaim() is request  # P has started, D does not know
    pair.give_d(request, frozenset())
    if is_announced:
        pair.compute(prefill, 32)
    if is_granted_again:
        assert pair.reserve(request)
    pair.wait_for(PullLost)
    assert pair.wait_for(RequestFailed).request is prefill
    assert pair.end_p(prefill, RequestStatus.FINISHED_ERROR) == frozenset()
    pair.end_d(request)
    pair.check_baseline()


@pytest.mark.parametrize("stage", ["started", "reading", "confirmed"])
def test_a_request_that_p_preempts_is_handed_over_later(pair: Any, stage: str) -> None:
    pair.connect()
    request, prefill = handoff(pair)
    pair.transport.is_holding = stage == "reading"
    if stage != "started":
        pair.compute(prefill, 32)
        pair.pump()
    if stage == "confirmed":
        pair.wait_for(BlocksConfirmed)
    pair.preempt(prefill)
    pair.p.ask(prefill)
    pair.wait_for(StartAllowed)
    late = pair.d_tables[request][0][:3]
    if stage == "reading":
        assert pair.d.num_open_sessions() == 2, "a zombie"
        pair.transport.land()
        pair.transport.is_holding = False
    assert pair.start(prefill)
    pair.compute(prefill, 32)
    p_blocks = pair.p_tables[prefill][0]
    pair.end_p(prefill)
    assert pair.wait_for(PullFinished).stats.num_blocks == 3
    assert same_blocks(pair, late, p_blocks[:3])
    pair.end_d(request)
    pair.check_baseline()


@pytest.mark.parametrize(
    ("status", "error", "is_loss"),
    [
        (RequestStatus.FINISHED_STOPPED, None, False),
        (RequestStatus.FINISHED_ABORTED, None, False),
        (RequestStatus.FINISHED_ERROR, None, True),
        (RequestStatus.FINISHED_ERROR, DrainingError("shutdown"), True),
        # Of what is the request's own doing the router blames no pair.
        (RequestStatus.FINISHED_ERROR, RequestFailedError("NaN"), False),
        (RequestStatus.FINISHED_ERROR, DeadlineExceededError("late"), False),
    ],
)
@pytest.mark.parametrize("stage", ["unlinked", "waiting", "granted", "reading"])
def test_a_request_that_ends_at_p_ends_the_ticket(
    pair: Any, status: RequestStatus, error: PdserveError | None, is_loss: bool, stage: str
) -> None:
    if stage != "unlinked":
        pair.connect()
    if stage in ("granted", "reading"):
        request, prefill = handoff(pair)
    else:
        request, prefill = pair.ticket(), pair.request("p")
    if stage == "reading":
        pair.transport.is_holding = True
        pair.compute(prefill, 32)
        pair.pump()
    prefill.error = error.to_engine_error() if error is not None else None
    assert pair.end_p(prefill, status) == frozenset()
    if stage == "unlinked":
        pair.connect()
    if is_loss:
        assert pair.wait_for(PullLost).lost.message == "P p0 ended it: error"
    else:
        failed = pair.wait_for(RequestFailed).error
        assert failed.code is ErrorCode.CANCELLED
    assert bool(pair.end_d(request)) is (stage == "reading")
    pair.transport.let_go()
    pair.check_baseline()


@pytest.mark.parametrize("stage", ["asked", "granted", "reading", "handed off", "accepted"])
def test_a_request_that_ends_at_d_frees_both_sides(pair: Any, stage: str) -> None:
    pair.connect()
    if stage == "asked":
        pair.has_room = False
        request, prefill = pair.ticket(), pair.ask()
        pair.collect()
    else:
        request, prefill = handoff(pair)
    if stage in ("reading", "handed off"):
        pair.transport.is_holding = True
        pair.compute(prefill, 32)
        pair.pump()
    if stage in ("handed off", "accepted"):
        pair.end_p(prefill)
    if stage == "accepted":
        pair.wait_for(PullFinished)
    kept = pair.end_d(request)
    assert bool(kept) is (stage in ("reading", "handed off"))
    pair.collect()
    if stage in ("asked", "granted", "reading"):
        pair.end_p(prefill, RequestStatus.FINISHED_ERROR)
    assert len(pair.p_blocks.free) == 64, "P does not wait for D's READs"
    assert len(pair.d_blocks.free) == 64 - len(kept)
    pair.transport.let_go()
    pair.check_baseline()


def test_a_request_that_d_gave_up_is_not_prefilled_for_it(pair: Any) -> None:
    pair.connect()
    pair.end_d(pair.ticket())
    pair.collect()
    prefill = pair.ask()
    assert pair.wait_for(RequestFailed).request is prefill
    pair.end_p(prefill, RequestStatus.FINISHED_ERROR)
    pair.check_baseline()


@pytest.mark.parametrize("fault", ["error", "stall"])
def test_a_read_that_fails_is_a_loss_of_its_request(pair: Any, fault: str) -> None:
    pair.connect()
    request, prefill = handoff(pair)
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


def test_a_session_that_p_has_ended_is_not_accepted(pair: Any) -> None:
    """The copy may hold anything by then: rule K4."""
    pair.connect()
    request, prefill = handoff(pair)
    pair.transport.is_holding = True
    pair.end_p(prefill)
    pair.pump()
    pair.p.fence_all("cache_reset")
    (ended,) = pair.to_d.messages
    assert isinstance(ended, SessionEnded)
    pair.to_d.messages.clear()  # it is late: the answer to Release decides
    pair.transport.land()
    event = pair.wait_for(PullLost)
    assert event.lost.reason == "not_valid"
    assert event.lost.num_confirmed_tokens == 0
    assert not [n for n in pair.told if isinstance(n, BlocksConfirmed | PullFinished)]
    pair.end_d(request)
    pair.check_baseline()


@pytest.mark.parametrize("stage", ["ticket", "asked", "granted", "reading", "handed off"])
def test_a_lost_link_ends_its_sessions_on_both_sides(pair: Any, stage: str) -> None:
    pair.connect()
    prefill = None
    if stage == "ticket":
        request = pair.ticket()
    elif stage == "asked":
        request, prefill = pair.ticket(), pair.ask()
    else:
        request, prefill = handoff(pair)
    if stage in ("reading", "handed off"):
        pair.transport.is_holding = True
        pair.compute(prefill, 32)
        pair.pump()
    if stage == "handed off":
        pair.end_p(prefill)
        pair.pump()
    pair.cut()
    assert pair.wait_for(PullLost).lost.reason == "link_lost"
    assert pair.p.num_open_sessions() == 0
    if stage in ("asked", "granted", "reading"):
        assert pair.wait_for(RequestFailed).request is prefill
        pair.end_p(prefill, RequestStatus.FINISHED_ERROR)
    assert bool(pair.end_d(request)) is (stage in ("reading", "handed off"))
    pair.transport.let_go()
    pair.check_baseline()


def test_the_next_attempt_goes_on_with_what_is_confirmed(pair: Any) -> None:
    """As the router decides: the same P again, the first attempt is superseded on D."""
    pair.connect()
    first, prefill = handoff(pair)
    pair.compute(prefill, 32)
    while pair.wait_for(BlocksConfirmed).num_tokens < 32:
        pass
    pair.end_p(prefill, RequestStatus.FINISHED_ERROR)
    assert pair.wait_for(PullLost).lost.num_confirmed_tokens == 32
    pair.num_cached_tokens = 32  # their blocks are in D's prefix cache
    assert pair.end_d(first) == frozenset()
    second, prefill = handoff(pair, attempt=1)
    pair.end_p(prefill)
    finished = pair.wait_for(PullFinished)
    assert finished.request is second
    assert finished.stats.num_blocks == 1
    pair.end_d(second)
    pair.check_baseline()


def test_p_ends_a_session_without_progress(pair: Any) -> None:
    pair.connect()
    request, prefill = handoff(pair)
    pair.transport.is_holding = True
    pair.end_p(prefill)
    pair.collect()
    for _ in range(30):
        pair.now += 1
        pair.d.on_tick()
        pair.p.on_tick()
        pair.pump()
    assert pair.p.num_open_sessions() == 0
    assert pair.wait_for(PullLost).lost.reason == "expired"
    assert pair.end_d(request)
    pair.transport.let_go()
    pair.check_baseline()


def test_silence_ends_a_link_but_heartbeats_keep_it(pair: Any) -> None:
    pair.connect()
    for _ in range(10):
        pair.now += 1
        pair.p.on_tick()
        pair.d.on_tick()
        pair.pump()
    assert value(pair.p_metrics.links) == value(pair.d_metrics.links) == 1
    request, prefill = handoff(pair)
    for _ in range(7):
        pair.now += 1
        pair.p.on_tick()
        pair.d.on_tick()  # and nothing arrives
    assert pair.to_d.closed_because == pair.to_p.closed_because == "silent"
    assert pair.wait_for(PullLost).lost.message == "link to p0 lost: silent"
    pair.end_p(prefill, RequestStatus.FINISHED_ERROR)
    pair.end_d(request)
    pair.check_baseline()


def test_a_tick_that_comes_late_blames_no_peer(pair: Any) -> None:
    pair.connect()
    pair.now += 60  # our own process was stopped
    pair.p.on_tick()
    pair.d.on_tick()
    assert not pair.to_d.closed_because
    assert not pair.to_p.closed_because


def test_a_restarted_p_is_a_new_peer(pair: Any) -> None:
    pair.connect()
    request, prefill = handoff(pair)
    pair.transport.is_holding = True
    pair.end_p(prefill)
    pair.pump()
    pair.transport.land()
    (stale,) = pair.to_p.messages
    assert isinstance(stale, Release)
    pair.p.shutdown()
    pair.p_blocks.free = list(range(64))
    old_link, old_p = pair.p_link, pair.p
    pair.start_p()
    pair.connect()  # D hears of it before it noticed the old link's end
    pair.transport.is_holding = False
    pair.p.on_message(pair.p_link, stale)  # through a proxy that kept the connection
    assert pair.to_d.messages[-1] == ReleaseAck(
        session=stale.session, through_block=stale.through_block, valid=False
    )
    old_p.on_message(old_link, stale)
    assert pair.wait_for(PullLost).lost.message == "link to p0 lost: replaced"
    assert pair.late("p") == 2
    pair.end_d(request)
    request, prefill = handoff(pair, "r1")
    pair.end_p(prefill)
    pair.wait_for(PullFinished, "r1")
    pair.end_d(request)
    pair.check_baseline()


def test_fencing_d_loses_every_open_pull(pair: Any) -> None:
    pair.connect()
    ticket = pair.ticket("r1")
    request, prefill = handoff(pair)
    pair.transport.is_holding = True
    pair.end_p(prefill)
    pair.pump()
    pair.d.fence_all("weights")
    for request_id in ("r0", "r1"):
        assert pair.wait_for(PullLost, request_id).lost.reason == "fenced"
    assert pair.p.num_open_sessions() == 0, "P was told"
    assert pair.end_d(request)
    pair.end_d(ticket)
    pair.transport.let_go()
    pair.check_baseline()


@pytest.mark.parametrize("kind", ["local"])
@pytest.mark.parametrize(
    ("field", "other", "says"),
    [
        ("compatibility_hash", "else", "compatibility_hash differs: same on P, else on D"),
        ("min_protocol_version", PROTOCOL_VERSION + 1, "protocol versions differ"),
        ("connector", "nixl", "connector differs: local on P, nixl on D"),
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
    with pytest.raises(KVTransferError, match=r"layout.block_size differs: 16 on P, 32 on D"):
        pair.p.accept_link(hello, pair.to_d)
    assert value(pair.p_metrics.links) == 0


@pytest.mark.parametrize("kind", ["local"])
def test_d_refuses_a_p_that_differs_before_it_reads_its_metadata(pair: Any) -> None:
    pair.p.accept_link(pair.d.hello(), pair.to_d)
    welcome = replace(pair.to_d.messages.popleft(), compatibility_hash="else")
    pair.connect()
    with pytest.raises(KVTransferError, match="compatibility_hash differs: else on P"):
        pair.d.link_up("p0", welcome, pair.to_p)
    with pytest.raises(KVTransferError, match="dialed p1, p0 answered"):
        pair.d.link_up("p1", welcome, pair.to_p)
    newer = replace(welcome, protocol_version=PROTOCOL_VERSION + 1)
    with pytest.raises(KVTransferError, match=f"protocol version {PROTOCOL_VERSION + 1}"):
        pair.d.link_up("p0", newer, pair.to_p)
