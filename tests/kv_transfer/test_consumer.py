"""D's half of the handoff against a P that the test plays: what D answers, reads, releases and
accepts, that it checks what P says, and how a pull is lost.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from pdserve_common.errors import KVTransferError
from pdserve_common.metrics import services as metrics
from pdserve_common.types.engine import ErrorCode
from pdserve_common.types.kv import (
    BlocksReady,
    CancelRequest,
    Granted,
    GrantRequest,
    KVLinkHeartbeat,
    KVSessionId,
    Later,
    PrefillDone,
    Release,
    ReleaseAck,
    Revoke,
    SessionEnded,
    SessionEndReason,
)
from pdserve_engine.kv.kv_cache import KVCacheSpec
from pdserve_engine.kv.kv_groups import group_layers
from pdserve_engine.kv_transfer.connectors import consumer
from pdserve_engine.kv_transfer.ports import (
    BlocksConfirmed,
    BlocksFreed,
    BlocksLanded,
    BlocksReturned,
    GrantRequested,
    PullFinished,
    PullLost,
    RequestFailed,
)
from pdserve_engine.kv_transfer.protocol.pull import LossReason
from pdserve_engine.kv_transfer.protocol.pull_machine import ACK_TIMEOUT_S, HOLD_S, PullMachine
from pdserve_engine.kv_transfer.protocol.transitions import (
    CONSUMER,
    ConsumerEvent,
    ConsumerState,
)
from pdserve_engine.request.request import Request
from support.handoff import SPEC, Pair, Wire, ended, make_identity, welcome_of
from support.metrics import series, value

State = ConsumerState


class World(Pair):
    """A D with a link to a P whose messages are the test's. READs are held until they are let go.

    A prompt is of 40 tokens: three blocks, the last one partial.
    """

    def __init__(self, spec: KVCacheSpec = SPEC) -> None:
        super().__init__("local", spec)
        self.transport.is_holding = True
        self.connect()
        self.seq = 0

    def pass_time(self, seconds: float) -> None:
        """P's heartbeats come, and D's ticks, when they should: every second."""
        for _ in range(int(seconds)):
            self.now += 1
            self.say(KVLinkHeartbeat(step_seq=0))
            self.d.on_tick()

    def hang(self, seconds: float) -> None:
        """D's event loop does nothing; then it ticks before it reads what P has said meanwhile."""
        self.now += seconds
        self.d.on_tick()

    def session(self) -> KVSessionId:
        """A new session of this link."""
        self.seq += 1
        return KVSessionId(
            p_epoch=self.p_identity.epoch,
            d_epoch=self.d.identity.epoch,
            link=self.d_link.number,
            seq=self.seq,
        )

    def say(self, *messages: Any) -> None:
        """P sends."""
        for message in messages:
            self.d.on_message(self.d_link, message)

    def heard(self) -> list[Any]:
        """What D has sent since."""
        messages = list(self.to_p.messages)
        self.to_p.messages.clear()
        return messages

    def told(self, *kinds: type) -> list[Any]:
        """What D's scheduler is told of these kinds; it answers nothing."""
        events = self.d.take_events()
        for item in events:
            if isinstance(item, BlocksFreed):
                self.d_blocks.give(item.block_ids)
        return [item for item in events if isinstance(item, kinds)] if kinds else events

    def claimed(self, request_id: str = "r0", **fields: Any) -> tuple[Request, KVSessionId]:
        request = self.ticket(request_id, **fields)
        session = self.session()
        self.say(ask(session, request_id, request.num_tokens, request.core_request.attempt))
        assert self.told() == [GrantRequested(request, 0.0)]
        return request, session

    def granted(self, num_cached: int = 0, **fields: Any) -> tuple[Request, KVSessionId]:
        request, session = self.claimed(**fields)
        self.num_cached_tokens = num_cached
        assert self.reserve(request)
        assert self.heard() == [Granted(session=session, first_block=num_cached // 16)]
        return request, session

    def pulling(self, **fields: Any) -> tuple[Request, KVSessionId]:
        """Blocks 0 and 1 of three are announced, by one message each; none has landed."""
        request, session = self.granted(**fields)
        self.say(ready(session, 0, 5), ready(session, 1, 9))
        assert len(self.transport.held) == 2
        return request, session

    def confirmed(self, **fields: Any) -> tuple[Request, KVSessionId]:
        """Block 0 is here and right, 1 under a READ."""
        request, session = self.pulling(**fields)
        self.transport.land()
        self.say(ack(session, 1))
        assert self.told() == [BlocksConfirmed(request, 16)]
        assert self.heard() == [Release(session=session, through_block=1)]
        return request, session

    def landed(self, **fields: Any) -> tuple[Request, KVSessionId]:
        """All three are here, their release is not acknowledged."""
        request, session = self.granted(**fields)
        self.say(ready(session, 0, 5, 9, 2), done(session))
        self.transport.land()
        (event,) = self.told()
        assert (type(event), event.request) == (BlocksLanded, request)
        return request, session

    def lost(self, request: Request) -> Any:
        (event,) = self.told(PullLost)
        assert event.request is request
        return event.lost

    def end(self, request: Request) -> None:
        """The request ends, and its READs land; nothing is left of it."""
        self.end_d(request)
        while self.transport.held:
            self.transport.land()
        self.told()
        assert sorted(self.d_blocks.free) == list(range(64))
        assert self.d.num_open_sessions() == 0
        assert self.gauge("unlanded_reads") == 0
        self.d.check_idle()

    def gauge(self, name: str, *labels: str) -> float:
        return value(getattr(self.d_metrics, name), *labels)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def ask(
    session: KVSessionId, request_id: str = "r0", num_tokens: int = 40, attempt: int = 0
) -> GrantRequest:
    return GrantRequest(
        session=session, request_id=request_id, attempt=attempt, num_tokens=num_tokens
    )


def ready(session: KVSessionId, first_block: int, *block_ids: int, **fields: Any) -> BlocksReady:
    return BlocksReady(session=session, first_block=first_block, block_ids=(block_ids,), **fields)


def done(session: KVSessionId, **changes: Any) -> PrefillDone:
    fields = {"num_tokens": 40, "output_token_ids": (77,), "timeout_s": 30.0} | changes
    return PrefillDone(session=session, **fields)


def ack(session: KVSessionId, through_block: int, *, valid: bool = True) -> ReleaseAck:
    return ReleaseAck(session=session, through_block=through_block, valid=valid)


# ---- the way it is meant to go


def test_chunks_are_read_released_and_confirmed_one_by_one(world: World) -> None:
    request, session = world.granted()
    world.transport.is_holding = True
    for block, block_id in enumerate((5, 9, 2)):
        world.say(ready(session, block, block_id))
        assert world.heard() == [], "nothing is released before it has landed"
        world.transport.land()
        assert world.heard() == [Release(session=session, through_block=block + 1)]
        assert world.told() == [], "nothing is usable before P has confirmed it (K4)"
        world.say(ack(session, block + 1))
        assert world.told() == [BlocksConfirmed(request, min(16 * (block + 1), 40))]
    world.say(done(session))
    landed, finished = world.told()
    assert landed.request is finished.request is request
    assert landed.output_token_ids == (77,)
    assert finished.stats.num_blocks == finished.stats.num_reads == 3
    table = world.d_tables[request][0]
    assert torch.equal(world.d_pool.tensor[table[:3]], world.p_pool.tensor[[5, 9, 2]])
    assert world.gauge("late_messages") == 0
    world.end(request)
    assert world.heard() == [], "the session is over on both sides"


def test_reads_that_land_out_of_order_are_released_without_a_hole(world: World) -> None:
    request, session = world.granted()
    world.say(ready(session, 0, 5), ready(session, 1, 9), ready(session, 2, 2), done(session))
    world.transport.land(2)
    world.transport.land(1)
    assert world.heard() == []
    world.transport.land(0)
    assert world.heard() == [Release(session=session, through_block=3)]
    world.say(ack(session, 3))
    assert [type(n) for n in world.told()] == [BlocksLanded, BlocksConfirmed, PullFinished]
    world.end(request)


def test_a_chunk_that_no_window_needs_is_released_unread() -> None:
    world = World(replace(SPEC, groups=group_layers([16, 16])))
    with contextlib.closing(world):
        request, session = world.granted()
        world.say(ready(session, 0, 5))
        assert not world.transport.held
        assert world.heard() == [Release(session=session, through_block=1)]
        world.say(ready(session, 1, 9, 2), done(session))
        world.transport.land()
        assert world.heard() == [Release(session=session, through_block=3)]
        world.say(ack(session, 3))
        assert world.told(PullFinished)
        world.end(request)


def test_stats_say_what_the_prefill_did_not_hide(world: World) -> None:
    request, session = world.granted()
    world.say(ready(session, 0, 5))  # posted from 1000 to 1002
    world.now += 1
    world.say(ready(session, 1, 9))  # from 1001 to 1003
    world.now += 1
    world.transport.land()
    world.now += 1
    world.transport.land()
    world.now += 1
    world.say(ready(session, 2, 2), done(session))  # from 1004 to 1006
    world.now += 2
    world.transport.land()
    world.now += 0.5
    world.say(ack(session, 3))
    (finished,) = world.told(PullFinished)
    stats = finished.stats
    assert (stats.num_reads, stats.num_blocks) == (3, 3)
    assert stats.num_bytes == 3 * world.p_pool.block_bytes
    assert stats.transport == "local"
    assert stats.transfer_s == 3 + 2, "while at least one READ was posted"
    assert (stats.exposed_s, stats.release_ack_s) == (2, 0.5)
    assert world.gauge("transfer_bytes", "p0", "local") == stats.num_bytes
    for name, seconds in (
        ("transfer_duration", 5),
        ("transfer_exposed", 2),
        ("release_ack_duration", 0.5),
    ):
        assert value(getattr(world.d_metrics, name), "p0", suffix="_sum") == seconds
    world.end(request)


def test_a_transfer_hidden_under_the_prefill_exposes_nothing(world: World) -> None:
    request, session = world.granted(num_tokens=32)
    world.say(ready(session, 0, 5, 9))
    world.transport.land()
    world.now += 1
    world.say(ack(session, 2))
    world.now += 1
    world.say(done(session, num_tokens=32))
    stats = world.told()[-1].stats
    assert (stats.exposed_s, stats.release_ack_s) == (0, 0)
    world.end(request)


# ---- claims and grants


def test_a_claim_outlasts_any_step_of_ds_engine(world: World) -> None:
    """The engine takes tickets between two steps, and a long prompt of its own makes long ones."""
    session = world.session()
    world.say(ask(session))
    asked_time = world.now
    world.pass_time(90)
    assert all(isinstance(message, KVLinkHeartbeat) for message in world.heard())
    request = world.ticket()
    (event,) = world.told()
    assert event == GrantRequested(request, 0.0)
    assert event.requested_time <= asked_time, "it has its turn among those that came meanwhile"
    assert world.reserve(request)
    assert world.heard() == [Granted(session=session, first_block=0)]
    world.end(request)


def test_so_many_early_claims_are_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "MAX_EARLY", 2)
    for i in range(3):
        world.say(ask(world.session(), f"r{i}"))
    assert world.heard() == [CancelRequest(request_id="r2", attempt=0, reason="unwanted")]
    assert world.gauge("sessions", "early") == 2
    world.d.link_lost(world.d_link, "cut")
    assert world.gauge("sessions", "early") == 0


def test_a_claim_for_a_request_that_is_over_is_refused_at_once(world: World) -> None:
    request = world.ticket()
    world.end(request)
    world.heard()
    world.say(ask(world.session()))
    assert world.heard() == [CancelRequest(request_id="r0", attempt=0, reason="unwanted")]
    assert world.told() == []


def test_the_youngest_grant_without_an_announcement_is_taken_back(world: World) -> None:
    first, first_session = world.granted(request_id="r0")
    second, second_session = world.granted(request_id="r1")
    third, third_session = world.granted(request_id="r2")
    world.say(ready(third_session, 0, 5))
    assert world.d.reclaim() is second
    world.give_d(second, frozenset())
    assert world.heard() == [Revoke(session=second_session)]
    assert world.d.reclaim() is first
    world.give_d(first, frozenset())
    assert world.heard() == [Revoke(session=first_session)]
    assert world.d.reclaim() is None, "blocks of the third are announced"
    assert world.reserve(second), "the claims stand"
    assert world.heard() == [Granted(session=second_session, first_block=0)]
    for request in (first, second):
        world.end_d(request)
    world.end(third)


@pytest.mark.parametrize("is_landed", [False, True])
def test_a_request_that_ends_before_it_knows_of_returned_blocks(
    world: World, is_landed: bool
) -> None:
    """Blocks under a READ are freed once, by BlocksFreed."""
    request, session = world.pulling()
    world.say(ended(session, "preempted"))
    if is_landed:
        world.transport.land()
        world.transport.land()
    table = world.d_tables[request][0]
    assert world.end_d(request) == set(table[:2])
    world.end(request)


# ---- how it is lost


def lose_link(world: World, request: Request, session: KVSessionId) -> None:
    world.d.link_lost(world.d_link, "cut")


def lose_dial(world: World, request: Request, session: KVSessionId) -> None:
    """Another one: this one has a link."""
    world.cut()
    world.told()
    world.end_d(request)
    other = world.ticket("r1")
    world.d.link_failed("p0", "refused")
    assert world.lost(other).message == "no link to p0: refused"
    world.end_d(other)


def lose_read(world: World, request: Request, session: KVSessionId) -> None:
    held, world.transport.held = world.transport.held[1:], world.transport.held[:1]
    world.transport.on_lost = {key: lambda reason: None for key in world.transport.on_lost}
    world.transport.fail("remote disconnect")
    world.transport.held = held


def fail_checksum(world: World, request: Request, session: KVSessionId) -> None:
    world.checksum = lambda block_ids: tuple(7 for _ in block_ids)
    world.say(ready(session, 2, 2, checksums=((8,),)))
    world.transport.land(1)
    assert world.gauge("checksum_mismatches") == 1


def let_announcements_stop(world: World, request: Request, session: KVSessionId) -> None:
    world.pass_time(600)


LOSSES: dict[str, Callable[[World, Request, KVSessionId], None]] = {
    "link_lost": lose_link,
    "no_link": lose_dial,
    "session_ended": lambda world, _, session: world.say(ended(session, "error")),
    "not_valid": lambda world, _, session: (
        world.transport.land(),
        world.say(ack(session, 2, valid=False)),
    ),
    "read_error": lose_read,
    "stall": lambda world, *_: world.transport.stall(),
    "checksum": fail_checksum,
    "protocol": lambda world, _, session: world.say(ready(session, 0, 5)),
    "expired": let_announcements_stop,
    "fenced": lambda world, *_: world.d.fence_all("weights"),
}


def test_the_losses_below_are_all() -> None:
    assert {*LOSSES, "aborted"} == set(get_args(LossReason))


@pytest.mark.parametrize("reason", [name for name in LOSSES if name != "no_link"])
def test_a_lost_pull_is_reported_held_and_then_failed(
    world: World, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    request, session = world.confirmed()
    LOSSES[reason](world, request, session)
    lost = world.lost(request)
    (line,) = caplog.messages
    assert line.startswith("request r0, attempt 0: KV session 1.1 with p0 is lost in state PULLING")
    assert f": {reason}: {lost.message}; the router decides how it goes on" in line
    assert lost.reason == reason
    assert lost.message
    assert lost.num_confirmed_tokens == (0 if reason == "fenced" else 16)
    assert world.gauge("transfer_failures", "p0", reason) == 1
    knows_already = reason in ("link_lost", "session_ended", "not_valid")
    cancelled = [m for m in world.heard() if isinstance(m, CancelRequest)]
    assert bool(cancelled) is not knows_already, "P is told, unless it knows"
    world.say(ready(session, 2, 2), done(session), ack(session, 2))
    assert world.told() == []

    world.pass_time(HOLD_S - 1)
    assert world.told() == [], "the router has time to decide"
    world.pass_time(1)
    (failed,) = world.told()
    assert caplog.messages[1:] == [
        "request r0, attempt 0: the router has not decided within 5 s; what is held is free"
    ]
    is_expiry = reason in ("expired", "fenced", "not_valid")
    assert failed.error.code is (
        ErrorCode.KV_EXPIRED if is_expiry else ErrorCode.KV_TRANSFER_FAILED
    )
    assert failed.error.is_retryable
    world.pass_time(HOLD_S)
    assert world.told() == [], "once"
    world.end(request)


def test_a_p_that_cannot_be_reached_loses_the_ticket(world: World) -> None:
    request, session = world.pulling()
    LOSSES["no_link"](world, request, session)
    while world.transport.held:
        world.transport.land()
    assert world.dialed == ["p0"]
    world.ticket("r2")
    assert world.dialed == ["p0", "p0"], "the next one tries again"


@pytest.mark.parametrize("word", ["expired", "fenced: weights"])
def test_p_says_why_it_has_ended_a_session(world: World, word: str) -> None:
    request, session = world.confirmed()
    world.say(ended(session, word))
    lost = world.lost(request)
    assert lost.reason == word.partition(":")[0]
    assert lost.message == f"p0 ended it: {word}"
    assert lost.num_confirmed_tokens == 16, "D's blocks are its own: P's fence does not touch them"
    world.end(request)


@pytest.mark.parametrize("reason", list(SessionEndReason))
def test_what_p_says_to_people_changes_nothing(world: World, reason: SessionEndReason) -> None:
    """Of those reasons that have an effect of their own each has a test of its own."""
    request, session = world.confirmed()
    plain = ended(session, "unspecified")
    world.say(replace(plain, reason=reason, message="preempted: finished: fenced"))
    (event,) = world.told()
    kind = {
        SessionEndReason.PREEMPTED: BlocksReturned,
        SessionEndReason.FINISHED: RequestFailed,
        SessionEndReason.ABORTED: RequestFailed,
        SessionEndReason.SUPERSEDED: RequestFailed,
    }.get(reason, PullLost)
    assert type(event) is kind
    world.end(request)


def test_an_answer_that_came_while_ds_event_loop_hung_counts(world: World) -> None:
    request, session = world.landed()
    world.hang(ACK_TIMEOUT_S + 600)
    world.say(ack(session, 3))
    assert [type(n) for n in world.told()] == [BlocksConfirmed, PullFinished]
    world.end(request)


def test_the_router_has_its_time_though_ds_step_is_long(world: World) -> None:
    request, session = world.confirmed()
    world.say(ended(session, "error"))
    world.pass_time(3 * HOLD_S)
    assert world.lost(request).num_confirmed_tokens == 16, "only now the router hears of it"
    world.pass_time(HOLD_S - 1)
    assert world.told() == []
    world.pass_time(1)
    assert [type(event) for event in world.told()] == [RequestFailed]
    world.end(request)


@pytest.mark.parametrize("is_remote", [True, False])
def test_what_is_held_waits_for_the_attempt_that_the_router_has_sent(
    world: World, is_remote: bool
) -> None:
    request, session = world.confirmed()
    world.say(ended(session, "error"))
    world.lost(request)
    world.pass_time(HOLD_S - 1)
    params = request.kv_transfer_params if is_remote else None
    world.d.on_dispatched(replace(request.core_request, attempt=1, kv_transfer_params=params))
    world.pass_time(3 * HOLD_S)
    assert world.told() == [], "D's scheduler takes it in when its step is over"
    world.end(request)


def test_the_router_has_its_time_though_ds_event_loop_hangs(world: World) -> None:
    request, session = world.confirmed()
    world.say(ended(session, "error"))
    world.lost(request)
    world.hang(HOLD_S + 1)
    assert world.told() == []
    world.pass_time(HOLD_S - 1)
    assert len(world.told()) == 1
    world.end(request)


def test_the_last_word_of_p_says_how_long_it_will_wait(world: World) -> None:
    request, session = world.granted()
    world.say(ready(session, 0, 5, 9, 2), done(session, timeout_s=10.0))
    world.pass_time(9)
    assert world.told() == []
    world.pass_time(1)
    assert world.lost(request).reason == "expired"
    world.end(request)


def test_a_read_that_cannot_be_posted_loses_the_pull(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise KVTransferError("no connection to p0")

    request, session = world.granted()
    monkeypatch.setattr(world.transport, "read", refuse)
    world.say(ready(session, 0, 5))
    assert world.lost(request).message == "no connection to p0"
    assert world.end_d(request) == frozenset(), "nothing was posted"
    world.end(request)


# ---- blocks under a READ (K5)


def test_given_up_reads_keep_their_blocks_until_they_have_landed(world: World) -> None:
    request, session = world.pulling()
    table = world.d_tables[request][0]
    world.say(ready(session, 2, 2))
    world.transport.land(1)
    assert world.end_d(request) == {table[0], table[2]}
    assert CancelRequest(request_id="r0", attempt=0, reason="aborted") in world.heard()
    assert len(world.d_blocks.free) == 62
    assert world.gauge("unlanded_reads") == world.d.num_open_sessions() == 2
    world.transport.land()
    assert world.told() == [BlocksFreed((table[0],))]
    assert world.heard() == [], "it has landed, and is not P's any more"
    assert world.gauge("unlanded_reads") == 1
    assert world.gauge("abandoned_reads") == 2, "also what lands between two scrapes"
    world.end(request)


def test_a_given_up_read_that_fails_gives_its_blocks_back(world: World) -> None:
    """Not if it could still land: then `on_done` is not called."""
    request, _ = world.pulling()
    table = world.d_tables[request][0]
    world.end_d(request)
    lose_read(world, request, world.session())
    assert world.told() == [BlocksFreed((table[0],))]
    world.end(request)


# ---- what P says is checked


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (lambda s: ready(s, 3, 1), "announced block 3 when 2 was the next"),
        (lambda s: ready(s, 0, 5), "announced block 0 when 2 was the next"),
        (lambda s: ready(s, 2, 2, 3), "announced 4 blocks, 40 tokens have 3"),
        (lambda s: ready(s, 2), "announced no blocks"),
        (lambda s: ready(s, 2, 64), "announced block id 64 of a pool of 64"),
        (lambda s: ready(s, 2, -1), "of a pool of 64"),
        (
            lambda s: BlocksReady(session=s, first_block=2, block_ids=((1,), (2,))),
            "announced 2 KV groups, the layout has 1",
        ),
        (lambda s: ready(s, 2, 2, checksums=((1, 2),)), "sent checksums of other blocks"),
        (lambda s: done(s), "announced 2 blocks of 3"),
        (lambda s: done(s, num_tokens=32), "computed 32 tokens, the request has 40"),
    ],
)
def test_announcements_that_make_no_sense_lose_the_pull(
    world: World, message: Callable[[KVSessionId], Any], says: str
) -> None:
    request, session = world.pulling()
    world.say(message(session))
    lost = world.lost(request)
    assert lost.reason == "protocol"
    assert says in lost.message
    assert CancelRequest(request_id="r0", attempt=0, reason="protocol") in world.heard()
    world.end(request)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (lambda s: done(s, output_token_ids=()), "sent no token"),
        (lambda s: done(s, output_token_ids=(1, 100_000)), "sent token 100000 of a vocabulary"),
        (lambda s: done(s, num_tokens=41), "computed 41 tokens, the request has 40"),
    ],
)
def test_a_last_word_that_makes_no_sense_loses_the_pull(
    world: World, message: Callable[[KVSessionId], Any], says: str
) -> None:
    request, session = world.pulling()
    world.say(ready(session, 2, 2), message(session))
    assert says in world.lost(request).message
    world.end(request)


@pytest.mark.parametrize(
    "message", [lambda s: done(s), lambda s: ready(s, 3, 1)], ids=["done", "ready"]
)
def test_nothing_comes_after_the_last_word(
    world: World, message: Callable[[KVSessionId], Any]
) -> None:
    request, session = world.pulling()
    world.say(ready(session, 2, 2), done(session), message(session))
    assert world.lost(request).reason == "protocol"
    world.end(request)


@pytest.mark.parametrize("is_early", [True, False])
def test_a_claim_for_other_tokens_than_the_requests_loses_it(world: World, is_early: bool) -> None:
    message = ask(world.session(), num_tokens=41)
    if is_early:
        world.say(message)
        request = world.ticket()
    else:
        request = world.ticket()
        world.say(message)
    lost = world.lost(request)
    assert lost.message == "p0 asked for 41 tokens, it has 40"
    assert not world.reserve(request)
    world.end(request)


def test_a_claim_counts_the_tokens_that_are_resumed(world: World) -> None:
    request = world.ticket(attempt=1, resume_output_token_ids=(7, 8))
    session = world.session()
    world.say(ask(session, num_tokens=42, attempt=1))
    assert world.told() == [GrantRequested(request, 0.0)]
    world.end(request)


def test_messages_of_another_session_link_or_peer_are_ignored(world: World) -> None:
    request, session = world.pulling()
    strange = [
        replace(session, p_epoch="stale"),
        replace(session, d_epoch="stale"),
        replace(session, link=99),
        replace(session, seq=99),
    ]
    for other in strange:
        world.say(
            ready(other, 2, 2),
            done(other),
            ack(other, 1),
            ended(other, "expired"),
        )
    world.say(
        ask(replace(session, p_epoch="stale"), "r1"),
        ask(session, "r1"),  # it is r0's
        ended(None, "expired"),
        ended(session, "expired", request_id="r1"),
        ended(session, "expired", attempt=1),
        ack(session, 1),  # nothing was released
        ack(session, 0, valid=False),
    )
    assert world.late("d") == 4 * len(strange) + 7
    assert world.told() == world.heard() == []
    world.end(request)


# ---- what the table says, entry by entry

Event = ConsumerEvent
# Of 56 tokens: four blocks.
NUM_TOKENS = 56
# The others are a prefix's: engine/test_prefixes.py.
STATES = [state for state in State if state not in (State.REQUESTED, State.FETCHING)]


def set_up(
    world: World, state: ConsumerState, event: ConsumerEvent
) -> tuple[Request | None, KVSessionId]:
    """Of a pull: block 0 is confirmed, 1 has landed, 2 is being read and 3 not announced, unless
    `event` needs more.
    """
    if (state, event) == (State.GRANTED, Event.PREFILL_DONE):
        return world.granted(num_cached=48, num_tokens=48)
    session = world.session()
    if state is State.EARLY:
        world.say(ask(session, num_tokens=NUM_TOKENS))
        return None, session
    if state is State.TICKET:
        return world.ticket(num_tokens=NUM_TOKENS), session
    if state in (State.AWAITING_GRANT, State.ENDED):
        request, session = world.claimed(num_tokens=NUM_TOKENS)
        if state is State.ENDED:
            world.end_d(request)
        return request, session
    request, session = world.granted(num_tokens=NUM_TOKENS)
    if state is State.GRANTED:
        return request, session
    world.say(ready(session, 0, 5), ready(session, 1, 9), ready(session, 2, 2))
    world.transport.land()
    world.say(ack(session, 1))
    world.transport.land()
    if state is State.LOST:
        world.say(ended(session, "error"))
    elif state is not State.PULLING or event in (Event.PREFILL_DONE, Event.ALL_LANDED):
        world.say(ready(session, 3, 3))
    if event is Event.ALL_LANDED or state in (State.LANDED, State.ACCEPTED):
        world.transport.land()
        world.transport.land()
    if state in (State.LANDED, State.ACCEPTED):
        world.say(done(session, num_tokens=NUM_TOKENS))
    if state is State.ACCEPTED:
        world.say(ack(session, 4))
    return request, session


def ended_of(world: World, session: KVSessionId, message: str) -> SessionEnded:
    """Before P has asked for a request, there is no session."""
    return ended(None if states(world) == [State.TICKET] else session, message)


# What P says.
SAID: dict[ConsumerEvent, Callable[[World, KVSessionId], Any]] = {
    Event.ASKED: lambda world, _: ask(world.session(), num_tokens=NUM_TOKENS),
    Event.ANNOUNCED: lambda world, session: ready(session, 3 if world.transport.held else 0, 3),
    Event.CONFIRMED: lambda _, session: ack(session, 2),
    Event.COMPLETED: lambda _, session: ack(session, 4),
    Event.PREFILL_DONE: lambda world, session: done(
        session, num_tokens=world.num_cached_tokens or NUM_TOKENS
    ),
    Event.SESSION_PREEMPTED: lambda world, session: ended_of(world, session, "preempted"),
    Event.SESSION_VOID: lambda world, session: ended_of(world, session, "finished"),
    Event.SESSION_LOST: lambda world, session: ended_of(world, session, "error"),
}


def say(event: ConsumerEvent) -> Callable[[World, Any, KVSessionId], Any]:
    return lambda world, _, session: world.say(SAID[event](world, session))


def find_no_room(world: World, request: Request, session: KVSessionId) -> None:
    world.has_room = False
    world.reserve(request)


def give_up(world: World, request: Request, session: KVSessionId) -> None:
    """While blocks are read P owes an answer to the release of block 1."""
    before = states(world)
    timeout_s = ACK_TIMEOUT_S if {State.PULLING, State.LANDED} & set(before) else 600
    world.pass_time(timeout_s - 1)
    assert states(world) == before, "it is not overdue yet"
    world.pass_time(1)


def states(world: World) -> list[ConsumerState]:
    """Of pulls that are not over."""
    return [state for state in State if world.gauge("sessions", state.name.lower())]


DRIVERS: dict[ConsumerEvent, Callable[[World, Any, KVSessionId], Any]] = {
    **{event: say(event) for event in SAID},
    Event.ALL_LANDED: say(Event.PREFILL_DONE),
    Event.TICKETED: lambda world, *_: world.ticket(num_tokens=NUM_TOKENS),
    Event.RESERVED: lambda world, request, _: world.reserve(request),
    Event.NO_ROOM: find_no_room,
    Event.RECLAIMED: lambda world, request, _: world.give_d(world.d.reclaim(), frozenset()),
    Event.REQUEST_ENDED: lambda world, request, _: world.end_d(request),
    Event.READ_LANDED: lambda world, *_: world.transport.land(),
    Event.READ_FAILED: lambda world, *_: world.transport.stall(),
    Event.GIVEN_UP: give_up,
    Event.FENCED: lambda world, *_: world.d.fence_all("weights"),
    Event.HOLD_EXPIRED: lambda world, *_: world.pass_time(HOLD_S),
}

# What P and then D's scheduler see of an event, and where a state makes a difference.
SEEN: dict[ConsumerEvent, tuple[type, ...]] = {
    Event.TICKETED: (GrantRequested,),
    Event.ASKED: (GrantRequested,),
    Event.RESERVED: (Granted,),
    Event.NO_ROOM: (Later,),
    Event.RECLAIMED: (Revoke,),
    Event.ANNOUNCED: (),
    Event.READ_LANDED: (Release,),
    Event.READ_FAILED: (CancelRequest, PullLost),
    Event.CONFIRMED: (BlocksConfirmed,),
    Event.PREFILL_DONE: (),
    Event.ALL_LANDED: (BlocksLanded,),
    Event.COMPLETED: (BlocksConfirmed, PullFinished),
    Event.SESSION_PREEMPTED: (BlocksReturned,),
    Event.SESSION_VOID: (RequestFailed,),
    Event.SESSION_LOST: (PullLost,),
    Event.GIVEN_UP: (CancelRequest, PullLost),
    Event.FENCED: (CancelRequest, PullLost),
    Event.HOLD_EXPIRED: (RequestFailed,),
    Event.REQUEST_ENDED: (CancelRequest,),
}
SEEN_IN: dict[tuple[ConsumerState, ConsumerEvent], tuple[type, ...]] = {
    (State.EARLY, Event.SESSION_PREEMPTED): (),
    (State.EARLY, Event.SESSION_VOID): (),
    (State.EARLY, Event.SESSION_LOST): (),
    (State.EARLY, Event.GIVEN_UP): (CancelRequest,),
    (State.EARLY, Event.FENCED): (CancelRequest,),
    # All is cached.
    (State.GRANTED, Event.PREFILL_DONE): (BlocksLanded, PullFinished),
    (State.ACCEPTED, Event.REQUEST_ENDED): (),
    (State.LOST, Event.REQUEST_ENDED): (),
}
REASONS: dict[ConsumerEvent, LossReason] = {
    Event.SESSION_LOST: "session_ended",
    Event.READ_FAILED: "stall",
    Event.GIVEN_UP: "expired",
    Event.FENCED: "fenced",
    Event.REQUEST_ENDED: "aborted",
}
# What is asked for of a request that is over has a test of its own.
ENTRIES = [
    (state, event)
    for state in STATES
    for event in DRIVERS
    if event in CONSUMER[state] or (event in SAID and (state, event) != (State.ENDED, Event.ASKED))
]


def test_each_entry_is_tried() -> None:
    assert sum(len(CONSUMER[state]) for state in STATES) == 51
    assert {(state, event) for state in STATES for event in CONSUMER[state]} <= set(ENTRIES)


@pytest.mark.parametrize(("state", "event"), ENTRIES)
def test_a_pull_does_what_the_table_says(
    world: World, monkeypatch: pytest.MonkeyPatch, state: ConsumerState, event: ConsumerEvent
) -> None:
    request, session = set_up(world, state, event)
    world.told()
    world.heard()
    taken: list[tuple[ConsumerState, ConsumerEvent]] = []
    advance = PullMachine.advance

    def record(machine: PullMachine, pull: Any, event: ConsumerEvent) -> bool:
        taken.append((pull.state, event))
        return advance(machine, pull, event)

    monkeypatch.setattr(PullMachine, "advance", record)
    num_late, num_held = world.late("d"), len(world.transport.held)
    result = DRIVERS[event](world, request, session)

    # One event may bring another one, as the last block the end.
    taken = [(before, event) for before, event in taken if event in CONSUMER[before]]
    steps = [CONSUMER[before][event] for before, event in taken]
    assert ((state, event) in taken) == (event in CONSUMER[state])
    assert world.late("d") - num_late == (event in SAID and not steps)
    messages = [m for m in world.heard() if not isinstance(m, KVLinkHeartbeat)]
    events = world.told()
    seen = SEEN_IN.get((state, event), SEEN[event]) if steps else ()
    assert tuple(map(type, [*messages, *events])) == seen
    reason = REASONS.get(event)
    assert {m.reason for m in messages if isinstance(m, CancelRequest)} <= {reason}
    num_posted = (event is Event.ANNOUNCED and bool(steps)) - (event is Event.READ_LANDED)
    assert len(world.transport.held) - num_held == num_posted

    after = steps[-1].next if steps else state
    assert states(world) == [after] * (after not in (State.ACCEPTED, State.ENDED))
    is_open = after not in (State.EARLY, State.ACCEPTED, State.ENDED)
    assert world.d.num_open_sessions() == is_open + world.gauge("unlanded_reads")
    for item in events:
        match item:
            case BlocksReturned(request=returned, kept=kept):
                world.give_d(returned, kept)
            case GrantRequested(request=claimed):
                request = claimed
            case PullLost():
                num_confirmed = 16 if state in (State.PULLING, State.LANDED) else 0
                is_fenced = event is Event.FENCED
                assert item.lost.num_confirmed_tokens == (0 if is_fenced else num_confirmed)
                assert item.lost.reason == reason
            case RequestFailed() if event is Event.SESSION_VOID:
                assert item.error.code is ErrorCode.CANCELLED
                assert not item.error.is_retryable
                assert item.error.message == "p0 ended it: finished"
                world.pass_time(1000)
                assert world.told() == [], "it is not held"
    if request is not None:
        reading = {i for held in world.transport.held for i in held[2]}
        kept = result if event is Event.REQUEST_ENDED else world.end_d(request)
        assert kept == reading, "READs may still land (K5)"
        assert not reading & set(world.d_blocks.free)
        world.end(request)
    world.d.fence_all("end")
    world.d.check_idle()


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (State.TICKET, Event.ASKED),
        (State.AWAITING_GRANT, Event.NO_ROOM),
        (State.AWAITING_GRANT, Event.RESERVED),
        (State.GRANTED, Event.RECLAIMED),
        (State.PULLING, Event.CONFIRMED),
    ],
)
def test_a_pull_has_its_time_from_its_last_event(
    world: World, state: ConsumerState, event: ConsumerEvent
) -> None:
    request, session = set_up(world, state, event)
    world.pass_time(ACK_TIMEOUT_S - 1 if state is State.PULLING else 590)
    DRIVERS[event](world, request, session)
    world.told()
    world.pass_time(599)
    assert world.told() == []
    world.pass_time(1)
    assert request is not None
    assert world.lost(request).reason == "expired"
    world.end(request)


# ---- attempts, links and peers


def test_another_attempt_supersedes_and_may_be_asked_for_before_its_ticket(world: World) -> None:
    """The router sends the next attempt while the lost one is on hold."""
    first, session = world.confirmed()
    world.say(ended(session, "error"))
    world.lost(first)
    second_session = world.session()
    world.say(ask(second_session, attempt=1))
    kept = world.end_d(first)
    assert len(kept) == 1
    second = world.ticket(attempt=1)
    assert world.told() == [GrantRequested(second, 0.0)]
    world.say(ended(session, "error"))  # of the first
    assert world.reserve(second)
    assert world.told(PullLost) == []
    world.transport.land()
    assert world.told() == [BlocksFreed(tuple(kept))]
    world.end(second)


def test_one_p_cannot_touch_what_another_one_computes(world: World) -> None:
    request, session = world.claimed()
    other_p = make_identity("p1")
    welcome = welcome_of(other_p, world.p_transport, link=1)
    wire = Wire()
    link = world.d.link_up("p1", welcome, wire)
    other = replace(session, p_epoch=other_p.epoch)
    world.d.on_message(link, ended(None, "expired"))
    world.d.on_message(link, replace(ask(other), request_id="r0"))
    assert world.told() == []
    world.d.link_lost(link, "gone")
    assert world.told() == []
    world.end(request)


def test_a_link_is_asked_for_once_and_before_it_is_needed(world: World) -> None:
    world.d.dial("p0", "127.0.0.1", 1)
    assert world.dialed == [], "there is one"
    world.cut()
    world.d.dial("p0", "127.0.0.1", 1)
    request = world.ticket()
    assert world.dialed == ["p0"]
    world.connect()
    world.d.link_failed("p0", "an older dial")
    assert world.told() == []
    world.cut()
    world.lost(request)
    world.end(request)


def test_a_link_is_asked_for_before_the_engine_takes_the_ticket(world: World) -> None:
    """P does not wait for a link for as long as a step of D's engine may take."""
    world.cut()
    core = world.request("d").core_request
    world.d.on_dispatched(core)
    assert world.dialed == ["p0"]
    world.d.on_dispatched(replace(core, kv_transfer_params=None))
    world.d.link_failed("p0", "refused")
    request = world.ticket()
    assert world.dialed == ["p0", "p0"], "once more"
    world.connect()
    assert world.told() == []
    world.end(request)


def test_a_p_without_an_address_cannot_be_reached(world: World) -> None:
    world.cut()
    request = world.ticket()
    world.d.link_failed("p0", "gone")
    world.told()
    world.d.dial("p0", "", 0)
    assert world.dialed == ["p0"]
    world.end(request)


@pytest.mark.parametrize("epoch", ["the same", "another"])
def test_a_new_link_replaces_the_open_one(world: World, epoch: str) -> None:
    request, session = world.confirmed()
    ticket = world.ticket("r1")
    identity = world.p_identity
    if epoch == "another":
        identity = replace(identity, epoch=epoch)
    old_wire, old_link = world.to_p, world.d_link
    welcome = welcome_of(identity, world.p_transport, link=2)
    link = world.d.link_up("p0", welcome, Wire())
    assert old_wire.closed_because == "replaced"
    lost = world.told(PullLost)
    assert [event.request for event in lost] == [request, ticket]
    assert lost[0].lost.message == "link to p0 lost: replaced"
    world.d.link_lost(old_link, "its own reader reports it too")
    assert world.gauge("links") == 1
    world.say(ack(session, 2))
    world.d.on_message(link, ack(session, 2))
    assert world.late("d") == 2, "sessions die with their link"
    world.end_d(ticket)
    world.end(request)


def test_ps_that_are_gone_for_long_have_no_series(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_PEERS_AWAY", 1)
    failures = world.d_metrics.transfer_failures

    def peers() -> set[str]:
        return {peer for _, peer, _ in series(failures.collect())}

    world.d.link_failed("p1", "refused")
    failures.labels("p1", "no_link").inc()
    world.d.link_lost(world.d_link, "cut")
    assert peers() == {"p0"}, "one that was never reached counts as one that is gone"
    world.connect()
    world.d.link_failed("p2", "refused")
    world.d.link_failed("p3", "refused")
    assert peers() == {"p0"}, "it has come back"


def test_a_failed_transport_is_the_workers_failure(world: World) -> None:
    assert world.d.failure() is None
    world.transport.failure = "64 READs have stalled"
    assert world.d.failure() == "64 READs have stalled"
