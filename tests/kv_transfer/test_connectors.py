"""The handoff between ProducerConnector and ConsumerConnector: what both sides do, and that no
block is lost or freed twice whatever happens.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve_common.engine_types import ErrorCode
from pdserve_common.errors import KVTransferError
from pdserve_common.kv_types import (
    BlocksReady,
    CancelRequest,
    KVLinkHeartbeat,
    KVSessionId,
    PrefillDone,
    Release,
    ReleaseAck,
    SessionEnded,
)
from pdserve_engine.core.request import RequestStatus


def code_of(news: Any, request_id: str = "r0") -> ErrorCode:
    return news.failed_recving[request_id].code


def test_a_finished_prefill_is_handed_over(pair: Any) -> None:
    pair.connect()
    request = pair.ticket()
    assert pair.d.get_num_new_matched_tokens(request, 0) == (None, True)
    _, p_blocks = pair.prefill()
    assert pair.p.num_open_sessions() == 1
    pair.pump()
    assert pair.collect().ready_to_load == ["r0"]
    d_blocks = pair.allocate(request)
    stats = pair.finish().finished_recving["r0"]
    assert torch.equal(pair.d_pool.tensor[d_blocks], pair.p_pool.tensor[p_blocks[:3]])
    assert pair.d.transferred_output_token_ids("r0") == (77,)
    assert stats.num_blocks == 3
    assert stats.num_bytes == 3 * pair.p_pool.block_bytes
    assert pair.d.get_num_new_matched_tokens(request, 0) == (0, False)
    pair.collect()
    assert len(pair.p_blocks.free) == 64, "P frees as soon as D has confirmed"
    pair.end_d(request, d_blocks)
    pair.check_baseline()


def test_blocks_that_d_has_cached_are_not_pulled(pair: Any) -> None:
    pair.connect()
    request = pair.ticket()
    _, p_blocks = pair.prefill()
    pair.pump()
    before = pair.d_pool.tensor.clone()
    assert pair.d.get_num_new_matched_tokens(request, 32) == (8, True)
    d_blocks = pair.allocate(request, num_hit_tokens=32)
    assert pair.finish().finished_recving["r0"].num_blocks == 1
    before[d_blocks[2]] = pair.p_pool.tensor[p_blocks[2]]
    assert torch.equal(pair.d_pool.tensor, before)
    pair.end_d(request, d_blocks)
    pair.check_baseline()


def test_a_prompt_that_d_has_cached_whole_needs_no_read(pair: Any) -> None:
    pair.connect()
    request = pair.ticket(num_tokens=32)
    pair.prefill(num_tokens=32)
    pair.pump()
    d_blocks = pair.allocate(request, num_hit_tokens=32)
    assert pair.finish().finished_recving["r0"].num_blocks == 0
    assert pair.d.transferred_output_token_ids("r0") == (77,)
    pair.end_d(request, d_blocks)
    pair.check_baseline()


@pytest.mark.parametrize("order", ["link first", "prefill first", "ticket last"])
def test_link_prefill_and_ticket_may_come_in_any_order(pair: Any, order: str) -> None:
    if order == "link first":
        pair.connect()
        request = pair.ticket()
        pair.prefill()
    elif order == "prefill first":
        pair.prefill()
        request = pair.ticket()
        assert pair.dialed == ["p0"]
        pair.connect()
    else:
        pair.connect()
        pair.prefill()
        pair.pump()
        assert pair.d.num_open_sessions() == 0, "an announcement alone is no work of D's"
        request = pair.ticket()
    pair.pump()
    assert pair.collect().ready_to_load == ["r0"]
    d_blocks = pair.allocate(request)
    assert "r0" in pair.finish().finished_recving
    pair.end_d(request, d_blocks)
    pair.check_baseline()


def test_only_one_link_is_asked_for(pair: Any) -> None:
    requests = [pair.ticket(f"r{i}") for i in range(3)]
    assert pair.dialed == ["p0"]
    pair.d.link_failed("p0", "refused")
    failed = pair.collect().failed_recving
    assert sorted(failed) == ["r0", "r1", "r2"]
    assert failed["r0"].message == "no link to p0: refused"
    assert failed["r0"].is_retryable
    pair.ticket("r3")
    assert pair.dialed == ["p0", "p0"]
    for request in requests:
        pair.end_d(request, [])


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (RequestStatus.FINISHED_STOPPED, ErrorCode.CANCELLED),
        (RequestStatus.FINISHED_ABORTED, ErrorCode.CANCELLED),
        (RequestStatus.FINISHED_ERROR, ErrorCode.KV_TRANSFER_FAILED),
    ],
)
@pytest.mark.parametrize("is_linked", [True, False])
def test_a_request_that_ends_at_p_voids_the_ticket(
    pair: Any, status: RequestStatus, code: ErrorCode, is_linked: bool
) -> None:
    if is_linked:
        pair.connect()
    request = pair.ticket()
    pair.prefill(status=status)
    if not is_linked:
        pair.connect()
    assert code_of(pair.finish()) is code
    pair.end_d(request, [])
    pair.check_baseline()


def test_an_end_at_p_is_remembered_for_a_late_ticket(pair: Any) -> None:
    pair.connect()
    pair.prefill(status=RequestStatus.FINISHED_STOPPED)
    pair.pump()
    request = pair.ticket()
    assert code_of(pair.collect()) is ErrorCode.CANCELLED
    pair.end_d(request, [])
    pair.check_baseline()


def test_a_request_aborted_on_d_before_its_prefill_keeps_no_blocks_on_p(pair: Any) -> None:
    pair.connect()
    pair.end_d(pair.ticket(), [])
    pair.pump()
    pair.prefill()
    assert pair.p.num_open_sessions() == 0
    pair.check_baseline()


@pytest.mark.parametrize("stage", ["announced", "allocated", "releasing", "accepted"])
def test_an_abort_on_d_frees_both_sides(pair: Any, stage: str) -> None:
    pair.connect()
    request = pair.ticket()
    pair.prefill()
    pair.pump()
    d_blocks: list[int] = []
    if stage == "allocated":
        d_blocks = pair.d_blocks.take(3)
        pair.d.update_state_after_alloc(request, (d_blocks,), 40)
        metadata = pair.d.build_connector_meta()
        assert not pair.end_d(request, d_blocks)
        pair.d.start_load_kv(metadata)  # too late: nothing is read
        assert pair.transport.num_pending_reads() == 0
    else:
        if stage != "announced":
            d_blocks = pair.allocate(request)
        if stage == "accepted":
            pair.finish()
        elif stage == "releasing":
            wait_for_release(pair)
        assert not pair.end_d(request, d_blocks)
    pair.check_baseline()


def wait_for_release(pair: Any) -> Release:
    while True:
        for message in list(pair.to_p.messages):
            if isinstance(message, Release):
                return message


def test_blocks_of_an_aborted_read_come_back_when_it_has_landed(pair: Any) -> None:
    pair.connect()
    request = pair.ticket()
    pair.prefill()
    pair.pump()
    pair.transport.is_holding = True
    d_blocks = pair.allocate(request)
    assert pair.end_d(request, d_blocks), "a READ may still write into them"
    pair.pump()
    pair.collect()
    assert len(pair.p_blocks.free) == 64, "P does not wait for D"
    assert len(pair.d_blocks.free) == 61
    assert pair.d_metrics.zombie_reads._value.get() == 1
    assert pair.d_metrics.sessions._value.get() == 1
    assert pair.d.num_open_sessions() == 1
    pair.transport.let_go()
    pair.check_baseline()
    assert pair.d_metrics.zombie_reads._value.get() == 0
    assert pair.d_metrics.sessions._value.get() == 0


@pytest.mark.parametrize("fault", ["error", "stall"])
def test_a_read_that_fails_fails_the_request_and_drops_the_link(pair: Any, fault: str) -> None:
    pair.connect()
    request = pair.ticket()
    pair.prefill()
    pair.pump()
    pair.transport.is_holding = True
    d_blocks = pair.allocate(request)
    if fault == "error":
        pair.transport.fail("remote disconnect")
        assert pair.to_p.closed_because == "remote disconnect"
    else:
        pair.transport.stall()
    news = pair.finish()
    assert code_of(news) is ErrorCode.KV_TRANSFER_FAILED
    assert news.failed_recving["r0"].is_retryable
    assert pair.end_d(request, d_blocks) == (fault == "stall")
    pair.p.link_lost(pair.p_link, "closed by D")
    pair.transport.let_go()
    pair.check_baseline()


def test_a_session_that_p_has_ended_is_not_accepted(pair: Any) -> None:
    """The copy may hold anything by then: rule K4."""
    pair.connect()
    request = pair.ticket()
    pair.prefill()
    pair.pump()
    d_blocks = pair.allocate(request)
    release = wait_for_release(pair)
    pair.p.fence_all("cache_reset")
    pair.to_d.messages.clear()  # SessionEnded is lost or late, the answer to Release decides
    pair.p.on_message(pair.p_link, release)
    pair.to_p.messages.clear()
    news = pair.finish()
    assert code_of(news) is ErrorCode.KV_EXPIRED
    assert not news.finished_recving
    pair.end_d(request, d_blocks)
    pair.check_baseline()


@pytest.mark.parametrize("stage", ["unannounced", "announced", "reading", "releasing"])
def test_a_lost_link_ends_its_sessions_on_both_sides(pair: Any, stage: str) -> None:
    pair.connect()
    request = pair.ticket()
    d_blocks: list[int] = []
    if stage != "unannounced":
        pair.prefill()
        pair.pump()
    if stage in ("reading", "releasing"):
        pair.transport.is_holding = stage == "reading"
        d_blocks = pair.allocate(request)
    if stage == "releasing":
        wait_for_release(pair)
    pair.cut()
    assert code_of(pair.finish()) is ErrorCode.KV_TRANSFER_FAILED
    assert pair.p.num_open_sessions() == 0
    assert pair.end_d(request, d_blocks) == (stage == "reading")
    pair.transport.let_go()
    pair.check_baseline()


@pytest.mark.parametrize("stage", ["waiting", "announced", "reading"])
def test_p_ends_a_session_without_progress(pair: Any, stage: str) -> None:
    if stage != "waiting":
        pair.connect()
    request = pair.ticket()
    pair.prefill()
    pair.pump()
    d_blocks: list[int] = []
    if stage == "reading":
        pair.transport.is_holding = True
        d_blocks = pair.allocate(request)
    pair.now += 31
    wakeups = pair.num_wakeups
    pair.p.on_tick()
    assert pair.num_wakeups > wakeups, "the engine may be idle"
    assert pair.p.num_open_sessions() == 0
    if stage == "waiting":
        pair.d.link_failed("p0", "gone")
    pair.finish()
    assert pair.end_d(request, d_blocks) == (stage == "reading")
    pair.transport.let_go()
    pair.check_baseline()


def test_d_gives_an_announcement_up_at_its_deadline(pair: Any) -> None:
    pair.connect()
    request = pair.ticket()
    pair.prefill()
    pair.pump()
    pair.now += 31
    pair.d.on_tick()
    assert code_of(pair.finish()) is ErrorCode.KV_EXPIRED
    assert pair.p.num_open_sessions() == 0, "P was told"
    pair.end_d(request, [])
    pair.check_baseline()


def test_announcements_whose_ticket_never_comes_are_forgotten(pair: Any) -> None:
    pair.connect()
    pair.prefill()
    pair.pump()
    pair.now += 31
    pair.d.on_tick()
    pair.pump()
    pair.check_baseline()
    assert pair.d._table._pulls == {}
    assert pair.d._table._num_early == 0
    request = pair.ticket()
    assert code_of(pair.collect()) is ErrorCode.KV_EXPIRED
    pair.end_d(request, [])


def test_silence_ends_a_link_but_heartbeats_keep_it(pair: Any) -> None:
    pair.connect()
    for _ in range(10):
        pair.now += 1
        pair.p.on_tick()
        pair.d.on_tick()
        pair.pump()
    assert pair.p_metrics.links._value.get() == pair.d_metrics.links._value.get() == 1
    request = pair.ticket()
    pair.prefill()
    for _ in range(7):
        pair.now += 1
        pair.p.on_tick()
        pair.d.on_tick()  # and nothing arrives
    assert pair.to_d.closed_because == pair.to_p.closed_because == "silent"
    assert code_of(pair.finish()) is ErrorCode.KV_TRANSFER_FAILED
    pair.end_d(request, [])
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
    request = pair.ticket()
    pair.prefill()
    pair.pump()
    d_blocks = pair.allocate(request)
    stale = wait_for_release(pair)
    pair.p.shutdown()
    pair.p_blocks.free = list(range(64))
    old_link = pair.p_link
    pair.start_p()
    pair.connect()  # D hears of it before it noticed the old link's end
    pair.p.on_message(pair.p_link, stale)  # through a proxy that kept the connection
    assert pair.to_d.messages[-1] == ReleaseAck(
        session=stale.session, through_block=stale.through_block, valid=False
    )
    pair.p.on_message(old_link, stale)
    assert code_of(pair.finish()) is ErrorCode.KV_TRANSFER_FAILED
    assert pair.late("p") == 2
    pair.end_d(request, d_blocks)
    request = pair.ticket("r1")
    pair.prefill("r1")
    pair.pump()
    d_blocks = pair.allocate(request)
    assert "r1" in pair.finish("r1").finished_recving
    pair.end_d(request, d_blocks)
    pair.check_baseline()


def test_a_restarted_d_ends_the_old_ones_sessions(pair: Any) -> None:
    pair.connect()
    pair.prefill()
    old, old_link = pair.to_d, pair.p_link
    pair.p.accept_link(
        replace(pair.d.hello(), epoch="another"),
        SimpleNamespace(send=lambda message: None, close=lambda reason: None),
    )
    assert old.closed_because == "replaced"
    assert pair.p.num_open_sessions() == 0
    pair.p.link_lost(old_link, "closed")  # its own reader reports it too
    assert pair.p_metrics.links._value.get() == 1
    pair.to_d.messages.clear()
    pair.check_baseline()


def test_repeated_and_unknown_messages_to_p_change_nothing(pair: Any) -> None:
    pair.connect()
    request = pair.ticket()
    pair.prefill()
    pair.pump()
    d_blocks = pair.allocate(request)
    release = wait_for_release(pair)
    other = KVSessionId(p_epoch="x", d_epoch="y", link=1, seq=1)
    for message in (
        Release(session=other, through_block=3),
        replace(release, through_block=1000),
        CancelRequest(request_id="nobody", attempt=0, reason=""),
        CancelRequest(request_id="r0", attempt=-1, reason="an older attempt"),
        KVLinkHeartbeat(step_seq=1),
        pair.d.hello(),
    ):
        pair.p.on_message(pair.p_link, message)
    assert pair.p.num_open_sessions() == 1
    acks = [m for m in pair.to_d.messages if isinstance(m, ReleaseAck)]
    assert [ack.valid for ack in acks] == [False, False]
    pair.to_d.messages.clear()
    pair.to_p.messages.append(release)  # twice
    assert "r0" in pair.finish().finished_recving
    pair.pump()
    pair.end_d(request, d_blocks)
    pair.check_baseline()


def test_repeated_and_unknown_messages_to_d_change_nothing(pair: Any) -> None:
    pair.connect()
    request = pair.ticket()
    pair.prefill()
    ready, done = pair.to_d.messages
    other = replace(ready.session, p_epoch="stale")
    pair.to_d.messages.clear()
    wrong = [
        replace(ready, session=other),
        replace(ready, session=replace(ready.session, link=99)),
        replace(ready, attempt=5),
        ReleaseAck(session=ready.session, through_block=3, valid=True),
        SessionEnded(session=other, request_id="r0", attempt=0, reason="expired"),
        SessionEnded(session=None, request_id="r0", attempt=9, reason="expired"),
    ]
    for message in [*wrong, ready, *wrong, ready, done, *wrong, ready, done]:
        pair.d.on_message(pair.d_link, message)
    assert pair.late("d") == 3 * len(wrong) + 3
    d_blocks = pair.allocate(request)
    wait_for_release(pair)
    for message in (ready, done, *wrong[:3]):
        pair.d.on_message(pair.d_link, message)
    news = pair.finish()
    assert list(news.finished_recving) == ["r0"]
    pair.d.on_message(pair.d_link, ReleaseAck(session=ready.session, through_block=3, valid=False))
    assert not pair.collect().failed_recving
    pair.end_d(request, d_blocks)
    for message in (ready, done):
        pair.d.on_message(pair.d_link, message)
    pair.check_baseline()
    assert pair.d._table._pulls == {}


def test_a_session_is_released_over_its_own_link_only(pair: Any) -> None:
    pair.connect()
    request = pair.ticket()
    pair.prefill()
    release = Release(session=pair.to_d.messages[0].session, through_block=3)
    answers: list[Any] = []
    stranger = SimpleNamespace(send=answers.append, close=lambda reason: None)
    link = pair.p.accept_link(replace(pair.d.hello(), engine_id="d1"), stranger)
    pair.p.on_message(link, release)
    pair.p.on_message(link, CancelRequest(request_id="r0", attempt=0, reason=""))
    assert not answers[-1].valid
    assert pair.p.num_open_sessions() == 1
    pair.pump()
    pair.end_d(request, [])
    pair.check_baseline()


def test_a_session_belongs_to_one_request_only(pair: Any) -> None:
    pair.connect()
    requests = [pair.ticket("r0"), pair.ticket("r1")]
    pair.prefill("r0")
    ready = pair.to_d.messages[0]
    pair.pump()
    pair.d.on_message(pair.d_link, replace(ready, request_id="r1"))
    assert pair.late("d") == 1
    for request in requests:
        pair.end_d(request, [])
    pair.check_baseline()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ready, done: (replace(ready, block_ids=((1, 2, 64),)), done), "block 64"),
        (lambda ready, done: (replace(ready, block_ids=((1,), (2,))), done), "KV groups"),
        (lambda ready, done: (replace(ready, block_ids=((1, 2),)), done), "announced 2 blocks"),
        (lambda ready, done: (replace(ready, first_block=1), done), "announced 0 blocks"),
        (lambda ready, done: (ready, replace(done, num_tokens=41)), "announced 41 tokens of 40"),
        (lambda ready, done: (ready, replace(done, num_tokens=0)), "for 0 tokens"),
        (lambda ready, done: (ready, replace(done, output_token_ids=())), "sent no token"),
    ],
)
def test_announcements_that_make_no_sense_fail_the_request(
    pair: Any, change: Any, says: str
) -> None:
    pair.connect()
    request = pair.ticket()
    pair.prefill()
    messages: tuple[BlocksReady, PrefillDone] = change(*pair.to_d.messages)
    pair.to_d.messages.clear()
    for message in messages:
        pair.d.on_message(pair.d_link, message)
    news = pair.finish()
    assert code_of(news) is ErrorCode.KV_TRANSFER_FAILED
    assert says in news.failed_recving["r0"].message
    pair.end_d(request, [])
    pair.check_baseline()


def test_a_later_attempt_is_not_touched_by_the_earlier_ones_messages(pair: Any) -> None:
    pair.connect()
    first = pair.ticket()
    pair.end_d(first, [])
    second = pair.ticket(attempt=1)
    pair.pump()
    pair.prefill(attempt=0)
    pair.prefill(attempt=1)
    pair.pump()
    d_blocks = pair.allocate(second)
    assert "r0" in pair.finish().finished_recving
    pair.end_d(second, d_blocks)
    pair.check_baseline()


def test_fencing_d_fails_every_open_pull(pair: Any) -> None:
    pair.connect()
    request = pair.ticket()
    pair.prefill()
    pair.pump()
    pair.transport.is_holding = True
    d_blocks = pair.allocate(request)
    pair.d.fence_all("weights")
    assert code_of(pair.finish()) is ErrorCode.KV_EXPIRED
    assert pair.end_d(request, d_blocks)
    pair.transport.let_go()
    pair.check_baseline()


def test_p_frees_what_is_released_early_and_the_rest_later(pair: Any) -> None:
    pair.connect()
    request = pair.ticket()
    pair.prefill()
    ready = pair.to_d.messages[0]
    pair.pump()
    pair.p.on_message(pair.p_link, Release(session=ready.session, through_block=2))
    pair.collect()
    assert len(pair.p_blocks.free) == 63
    pair.to_d.messages.clear()
    pair.end_d(request, [])
    pair.check_baseline()


@pytest.mark.parametrize("kind", ["local"])
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("compatibility_hash", "else", "compatibility_hash differs: same on P, else on D"),
        ("min_protocol_version", 2, "protocol versions differ"),
        ("connector", "nixl", "connector differs: local on P, nixl on D"),
    ],
)
def test_p_refuses_a_d_that_differs_and_says_how(
    pair: Any, field: str, value: Any, says: str
) -> None:
    hello = replace(pair.d.hello(), **{field: value})
    with pytest.raises(KVTransferError, match=says):
        pair.p.accept_link(hello, pair.to_d)
    layout = replace(hello.layout, block_size=32)
    hello = replace(pair.d.hello(), layout=layout)
    with pytest.raises(KVTransferError, match=r"layout.block_size differs: 16 on P, 32 on D"):
        pair.p.accept_link(hello, pair.to_d)
    assert pair.p_metrics.links._value.get() == 0


@pytest.mark.parametrize("kind", ["local"])
def test_d_refuses_a_p_that_differs_before_it_reads_its_metadata(pair: Any) -> None:
    pair.connect()
    welcome = replace(pair.p._welcome(pair.p_link), compatibility_hash="else")
    with pytest.raises(KVTransferError, match="compatibility_hash differs: else on P"):
        pair.d.link_up("p0", welcome, pair.to_p)
    with pytest.raises(KVTransferError, match="dialed p1, p0 answered"):
        pair.d.link_up("p1", welcome, pair.to_p)
