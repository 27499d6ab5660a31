"""D's half of the handoff against a P that the test plays: what D answers, reads, releases and
accepts, that it checks what P says, and how a pull is lost.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from pdserve_common import metrics
from pdserve_common.engine_types import ErrorCode
from pdserve_common.errors import KVTransferError
from pdserve_common.kv_types import (
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
from pdserve_engine.kv_transfer import consumer
from pdserve_engine.kv_transfer.ports import (
    BlocksClaimed,
    BlocksConfirmed,
    BlocksFreed,
    BlocksLanded,
    BlocksReturned,
    PullFinished,
    PullLost,
    RequestFailed,
)
from pdserve_engine.kv_transfer.protocol import (
    CONSUMER,
    ConsumerEvent,
    ConsumerState,
)
from pdserve_engine.kv_transfer.pull import LossReason
from pdserve_engine.kv_transfer.pull_machine import ACK_TIMEOUT_S, HOLD_S
from pdserve_engine.request.request import Request
from support.handoff import SPEC, Pair, Wire, make_identity, welcome_of
from support.metrics import series, value

State = ConsumerState


class World:
    """A D with a link to a P whose messages are the test's. READs are held until they are let go.

    A prompt is of 40 tokens: three blocks, the last one partial.
    """

    def __init__(self, spec: KVCacheSpec = SPEC) -> None:
        self.pair = Pair("local", spec)
        self.d = self.pair.d
        self.transport = self.pair.transport
        self.transport.is_holding = True
        self.pair.connect()
        self.seq = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pair, name)

    @property
    def now(self) -> float:
        return float(self.pair.now)

    @now.setter
    def now(self, now: float) -> None:
        self.pair.now = now

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
            p_epoch=self.pair.p_identity.epoch,
            d_epoch=self.d.identity.epoch,
            link=self.pair.d_link.number,
            seq=self.seq,
        )

    def say(self, *messages: Any) -> None:
        """P sends."""
        for message in messages:
            self.d.on_message(self.pair.d_link, message)

    def heard(self) -> list[Any]:
        """What D has sent since."""
        messages = list(self.pair.to_p.messages)
        self.pair.to_p.messages.clear()
        return messages

    def told(self, *kinds: type) -> list[Any]:
        """What D's scheduler is told of these kinds; it answers nothing."""
        events = self.d.take_events()
        for item in events:
            if isinstance(item, BlocksFreed):
                self.pair.d_blocks.give(item.block_ids)
        return [item for item in events if isinstance(item, kinds)] if kinds else events

    def claimed(self, request_id: str = "r0", **fields: Any) -> tuple[Request, KVSessionId]:
        request = self.pair.ticket(request_id, **fields)
        session = self.session()
        self.say(ask(session, request_id, request.num_tokens, request.core_request.attempt))
        assert self.told() == [BlocksClaimed(request, 0.0)]
        return request, session

    def granted(self, num_cached: int = 0, **fields: Any) -> tuple[Request, KVSessionId]:
        request, session = self.claimed(**fields)
        self.pair.num_cached_tokens = num_cached
        assert self.pair.reserve(request)
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
        self.pair.end_d(request)
        while self.transport.held:
            self.transport.land()
        self.told()
        assert sorted(self.pair.d_blocks.free) == list(range(64))
        assert self.d.num_open_sessions() == 0
        assert self.gauge("zombie_reads") == 0
        self.d.check_idle()

    def gauge(self, name: str, *labels: str) -> float:
        return value(getattr(self.pair.d_metrics, name), *labels)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.pair.close()


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


def ended(
    session: KVSessionId | None, message: str, request_id: str = "r0", attempt: int = 0
) -> SessionEnded:
    """The message begins with the reason, as P's do."""
    return SessionEnded(
        session=session,
        request_id=request_id,
        attempt=attempt,
        reason=SessionEndReason[message.partition(":")[0].upper()],
        message=message,
    )


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


def test_what_is_cached_is_not_read(world: World) -> None:
    request, session = world.granted(num_cached=32)
    world.say(ready(session, 2, 7), done(session))
    table = world.d_tables[request][0]
    ((_, remote, local, *_),) = world.transport.held
    assert (remote, local) == ((7,), (table[2],))
    world.transport.land()
    world.say(ack(session, 3))
    assert world.told()[-1].stats.num_blocks == 1
    world.end(request)


def test_a_prompt_that_is_cached_whole_needs_no_read_and_no_release(world: World) -> None:
    request, session = world.granted(num_cached=32, num_tokens=32)
    world.say(done(session, num_tokens=32))
    landed, finished = world.told()
    assert finished.stats.num_reads == 0
    assert landed.output_token_ids == (77,)
    assert world.heard() == []
    world.end(request)


def test_a_chunk_that_no_window_needs_is_released_unread() -> None:
    world = World(replace(SPEC, groups=group_layers([16, 16])))
    with contextlib.closing(world.pair):
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


def test_a_release_may_be_confirmed_in_parts(world: World) -> None:
    request, session = world.pulling()
    world.transport.land(1)
    world.transport.land(0)
    world.say(ack(session, 1))
    world.pass_time(ACK_TIMEOUT_S - 1)
    world.say(ack(session, 2))
    assert world.told() == [BlocksConfirmed(request, 16), BlocksConfirmed(request, 32)]
    world.pass_time(2 * ACK_TIMEOUT_S)
    assert world.told() == [], "no answer is owed"
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


def test_a_claim_may_come_before_its_ticket(world: World) -> None:
    session = world.session()
    world.say(ask(session))
    assert world.told() == []
    assert world.d.num_open_sessions() == 0, "a claim alone is no work of D's"
    request = world.pair.ticket()
    assert world.told() == [BlocksClaimed(request, 0.0)]
    assert world.pair.reserve(request)
    assert world.heard() == [Granted(session=session, first_block=0)]
    world.end(request)


def test_a_claim_outlasts_any_step_of_ds_engine(world: World) -> None:
    """The engine takes tickets between two steps, and a long prompt of its own makes long ones."""
    session = world.session()
    world.say(ask(session))
    asked_time = world.now
    world.pass_time(90)
    assert all(isinstance(message, KVLinkHeartbeat) for message in world.heard())
    request = world.pair.ticket()
    (event,) = world.told()
    assert event == BlocksClaimed(request, 0.0)
    assert event.claimed_time <= asked_time, "it has its turn among those that came meanwhile"
    assert world.pair.reserve(request)
    assert world.heard() == [Granted(session=session, first_block=0)]
    world.end(request)


def test_a_claim_whose_ticket_never_comes_is_refused_in_the_end(world: World) -> None:
    world.say(ask(world.session()))
    world.pass_time(599)
    cancel = CancelRequest(request_id="r0", attempt=0, reason="expired")
    assert cancel not in world.heard(), "it is kept for as long as a ticket is"
    world.pass_time(1)
    assert cancel in world.heard()
    request = world.pair.ticket()
    assert world.told() == []
    world.say(ask(world.session()))  # P may ask again: the ticket is here now
    assert world.told() == [BlocksClaimed(request, 0.0)]
    world.end(request)


def test_so_many_early_claims_are_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "MAX_EARLY", 2)
    for i in range(3):
        world.say(ask(world.session(), f"r{i}"))
    assert world.heard() == [CancelRequest(request_id="r2", attempt=0, reason="unwanted")]
    assert world.gauge("sessions", "early") == 2
    world.d.link_lost(world.pair.d_link, "cut")
    assert world.gauge("sessions", "early") == 0


@pytest.mark.parametrize("reason", ["preempted", "aborted", "error"])
def test_an_early_claim_that_p_ends_is_forgotten(world: World, reason: str) -> None:
    session = world.session()
    world.say(ask(session), ended(session, reason))
    world.d.check_idle()
    request = world.pair.ticket()
    assert world.told() == []
    world.say(ask(world.session()))
    assert world.told() == [BlocksClaimed(request, 0.0)]
    world.end(request)


def test_a_claim_for_a_request_that_is_over_is_refused_at_once(world: World) -> None:
    request = world.pair.ticket()
    world.end(request)
    world.heard()
    world.say(ask(world.session()))
    assert world.heard() == [CancelRequest(request_id="r0", attempt=0, reason="unwanted")]
    assert world.told() == []


def test_a_claim_that_must_wait_is_granted_unasked(world: World) -> None:
    request, session = world.claimed()
    world.pair.has_room = False
    assert not world.pair.reserve(request)
    assert world.heard() == [Later(session=session)]
    world.pair.has_room = True
    assert world.pair.reserve(request)
    assert world.heard() == [Granted(session=session, first_block=0)]
    world.end(request)


def test_the_youngest_grant_without_an_announcement_is_taken_back(world: World) -> None:
    first, first_session = world.granted(request_id="r0")
    second, second_session = world.granted(request_id="r1")
    third, third_session = world.granted(request_id="r2")
    world.say(ready(third_session, 0, 5))
    assert world.d.reclaim() is second
    world.pair.give_d(second, frozenset())
    assert world.heard() == [Revoke(session=second_session)]
    assert world.d.reclaim() is first
    world.pair.give_d(first, frozenset())
    assert world.heard() == [Revoke(session=first_session)]
    assert world.d.reclaim() is None, "blocks of the third are announced"
    assert world.pair.reserve(second), "the claims stand"
    assert world.heard() == [Granted(session=second_session, first_block=0)]
    for request in (first, second):
        world.pair.end_d(request)
    world.end(third)


def test_blocks_announced_for_a_grant_that_was_taken_back_are_not_read(world: World) -> None:
    """P's announcement and D's revocation have crossed; P gives the request up."""
    request, session = world.granted()
    assert world.d.reclaim() is request
    world.pair.give_d(request, frozenset())
    world.say(ready(session, 0, 5))
    assert world.transport.held == []
    assert world.gauge("late_messages") == 1
    world.say(ended(session, "revoked"))
    assert world.lost(request).reason == "session_ended"
    world.end(request)


@pytest.mark.parametrize("stage", ["claimed", "granted", "pulling"])
def test_a_request_that_p_preempts_is_claimed_again(world: World, stage: str) -> None:
    request, session = getattr(world, stage)()
    world.say(ended(session, "preempted"))
    (returned,) = world.told()
    table = world.d_tables.get(request, ([],))[0]
    assert returned == BlocksReturned(request, frozenset(table[:2] if stage == "pulling" else []))
    world.pair.give_d(request, returned.kept)
    assert world.gauge("zombie_reads") == (2 if stage == "pulling" else 0)
    assert not world.pair.reserve(request), "P does not want them now"
    while world.transport.held:
        world.transport.land()
    freed = [i for event in world.told(BlocksFreed) for i in event.block_ids]
    assert set(freed) == returned.kept
    assert len(world.d_blocks.free) == 64
    assert world.heard() == [], "landed, but not P's any more"

    second = world.session()
    world.say(ask(second))
    assert world.told() == [BlocksClaimed(request, 0.0)]
    assert world.pair.reserve(request)
    assert world.heard() == [Granted(session=second, first_block=0)]
    world.say(ready(session, 0, 5))
    assert world.gauge("late_messages") == 1, "of the session before"
    world.end(request)


def test_a_grant_answers_only_a_claim_that_the_scheduler_knows(world: World) -> None:
    """The claim it has in hand was withdrawn, another one is on its way to it."""
    request, session = world.claimed()
    world.say(ended(session, "preempted"), ask(world.session()))
    assert not world.pair.reserve(request)
    assert world.told() == [BlocksReturned(request, frozenset()), BlocksClaimed(request, 0.0)]
    assert world.pair.reserve(request)
    world.end(request)


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
    assert world.pair.end_d(request) == set(table[:2])
    world.end(request)


# ---- how it is lost


def lose_link(world: World, request: Request, session: KVSessionId) -> None:
    world.d.link_lost(world.d_link, "cut")


def lose_dial(world: World, request: Request, session: KVSessionId) -> None:
    """Another one: this one has a link."""
    world.pair.cut()
    world.told()
    world.pair.end_d(request)
    other = world.pair.ticket("r1")
    world.d.link_failed("p0", "refused")
    assert world.lost(other).message == "no link to p0: refused"
    world.pair.end_d(other)


def lose_read(world: World, request: Request, session: KVSessionId) -> None:
    held, world.transport.held = world.transport.held[1:], world.transport.held[:1]
    world.transport.on_lost = {key: lambda reason: None for key in world.transport.on_lost}
    world.transport.fail("remote disconnect")
    world.transport.held = held


def fail_checksum(world: World, request: Request, session: KVSessionId) -> None:
    world.pair.checksum = lambda block_ids: tuple(7 for _ in block_ids)
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


def let_the_answer_stay_out(world: World, request: Request, session: KVSessionId) -> None:
    world.pass_time(ACK_TIMEOUT_S)


# When all has landed nothing of the transport can go wrong, but P may not answer.
LATE_LOSSES: dict[str, Callable[[World, Request, KVSessionId], None]] = {
    **{name: LOSSES[name] for name in ("link_lost", "session_ended", "fenced")},
    "not_valid": lambda world, _, session: world.say(ack(session, 3, valid=False)),
    "expired": let_the_answer_stay_out,
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


@pytest.mark.parametrize("reason", LATE_LOSSES)
def test_what_has_landed_is_lost_without_an_ack(world: World, reason: str) -> None:
    request, session = world.landed()
    assert world.heard() == [Release(session=session, through_block=3)]
    LATE_LOSSES[reason](world, request, session)
    lost = world.lost(request)
    assert (lost.reason, lost.num_confirmed_tokens) == (reason, 0)
    world.say(ack(session, 3))
    assert world.told() == [], "it comes too late"
    world.end(request)


def test_all_that_landed_is_accepted_with_ps_last_word(world: World) -> None:
    request, session = world.landed()
    world.say(ack(session, 2))
    assert world.told() == [BlocksConfirmed(request, 32)]
    world.say(ready(session, 0, 5), done(session))
    assert world.gauge("late_messages") == 2
    world.say(ack(session, 3))
    assert [type(n) for n in world.told()] == [BlocksConfirmed, PullFinished]
    assert world.gauge("sessions", "landed") == 0
    assert world.gauge("release_acks", "true") == 0, "P counts them"
    world.end(request)


def test_a_p_that_cannot_be_reached_loses_the_ticket(world: World) -> None:
    request, session = world.pulling()
    LOSSES["no_link"](world, request, session)
    while world.transport.held:
        world.transport.land()
    assert world.dialed == ["p0"]
    world.pair.ticket("r2")
    assert world.dialed == ["p0", "p0"], "the next one tries again"


@pytest.mark.parametrize("stage", ["ticket", "claimed", "granted", "pulling", "landed"])
@pytest.mark.parametrize("reason", ["finished", "aborted", "superseded"])
def test_a_request_that_p_ends_is_void_at_once(world: World, stage: str, reason: str) -> None:
    if stage == "ticket":
        request, session = world.pair.ticket(), None
    else:
        request, session = getattr(world, stage)()
    world.say(ended(session, reason))
    (failed,) = world.told()
    assert failed.error.code is ErrorCode.CANCELLED
    assert not failed.error.is_retryable
    assert failed.error.message == f"P p0 ended it: {reason}"
    world.pass_time(1000)
    assert world.told() == [], "it is not held"
    kept = world.pair.end_d(request)
    assert len(kept) == len(world.transport.held), "READs may still land (K5)"
    world.end(request)


@pytest.mark.parametrize("word", ["expired", "fenced: weights"])
def test_p_says_why_it_has_ended_a_session(world: World, word: str) -> None:
    request, session = world.confirmed()
    world.say(ended(session, word))
    lost = world.lost(request)
    assert lost.reason == word.partition(":")[0]
    assert lost.message == f"P p0 ended it: {word}"
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


@pytest.mark.parametrize("stage", ["ticket", "claimed", "granted", "confirmed"])
def test_every_state_has_a_deadline(world: World, stage: str) -> None:
    if stage == "ticket":
        request = world.pair.ticket()
    else:
        request, _ = getattr(world, stage)()
    world.pass_time(599)
    assert world.told() == []
    world.pass_time(1)
    lost = world.lost(request)
    assert lost.reason == "expired"
    assert world.gauge("sessions", "lost") == 1
    world.end(request)


def asked(world: World) -> None:
    world.say(ask(world.session()))


def deferred(world: World) -> None:
    asked(world)
    (claim,) = world.told()
    world.d.defer(claim.request)


def granted(world: World) -> None:
    asked(world)
    (claim,) = world.told()
    assert world.pair.reserve(claim.request)


def revoked(world: World) -> None:
    granted(world)
    assert world.d.reclaim() is not None


def confirmed(world: World) -> None:
    granted(world)
    session = next(m.session for m in world.heard() if isinstance(m, Granted))
    world.say(ready(session, 0, 5))
    world.transport.land()
    world.pass_time(ACK_TIMEOUT_S - 1)
    world.say(ack(session, 1))
    world.told()


@pytest.mark.parametrize("event", [asked, deferred, granted, revoked, confirmed])
def test_a_pull_has_its_time_from_its_last_event(
    world: World, event: Callable[[World], None]
) -> None:
    request = world.pair.ticket()
    world.pass_time(590)
    event(world)
    world.told()
    world.pass_time(599)
    assert world.told() == []
    world.pass_time(1)
    assert world.lost(request).reason == "expired"
    world.end(request)


def test_p_has_to_answer_a_release_in_time(world: World) -> None:
    request, _ = world.pulling()
    world.transport.land()
    world.pass_time(ACK_TIMEOUT_S)
    assert world.lost(request).reason == "expired"
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
    assert world.pair.end_d(request) == frozenset(), "nothing was posted"
    world.end(request)


def test_checksums_that_agree_change_nothing(world: World) -> None:
    request, session = world.granted()
    sums = world.p_pool.block_checksums([5, 9, 2])
    world.say(ready(session, 0, 5, 9, 2, checksums=(sums,)), done(session))
    world.transport.land()
    world.say(ack(session, 3))
    assert world.told(PullFinished)
    assert world.gauge("checksum_mismatches") == 0
    world.end(request)


# ---- blocks under a READ (K5)


def test_zombies_keep_their_blocks_until_they_have_landed(world: World) -> None:
    request, session = world.pulling()
    table = world.d_tables[request][0]
    world.say(ready(session, 2, 2))
    world.transport.land(1)
    assert world.pair.end_d(request) == {table[0], table[2]}
    assert CancelRequest(request_id="r0", attempt=0, reason="aborted") in world.heard()
    assert len(world.d_blocks.free) == 62
    assert world.gauge("zombie_reads") == world.d.num_open_sessions() == 2
    world.transport.land()
    assert world.told() == [BlocksFreed((table[0],))]
    assert world.gauge("zombie_reads") == 1
    assert world.gauge("abandoned_reads") == 2, "also what lands between two scrapes"
    world.end(request)


def test_a_zombie_that_fails_gives_its_blocks_back(world: World) -> None:
    """Not if it could still land: then `on_done` is not called."""
    request, _ = world.pulling()
    table = world.d_tables[request][0]
    world.pair.end_d(request)
    lose_read(world, request, world.session())
    assert world.told() == [BlocksFreed((table[0],))]
    world.end(request)


def test_what_has_landed_comes_back_at_once(world: World) -> None:
    request, _ = world.landed()
    assert world.pair.end_d(request) == frozenset()
    assert CancelRequest(request_id="r0", attempt=0, reason="aborted") in world.heard()
    world.end(request)


@pytest.mark.parametrize("reason", [name for name in LOSSES if name != "no_link"])
def test_no_block_comes_back_while_a_read_is_posted(world: World, reason: str) -> None:
    request, session = world.confirmed()
    world.say(ready(session, 2, 2))
    LOSSES[reason](world, request, session) if reason != "checksum" else None
    reading = {i for held in world.transport.held for i in held[2]}
    assert world.pair.end_d(request) == reading
    assert not reading & set(world.d_blocks.free)
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
        request = world.pair.ticket()
    else:
        request = world.pair.ticket()
        world.say(message)
    lost = world.lost(request)
    assert lost.message == "P p0 asked for 41 tokens, it has 40"
    assert not world.pair.reserve(request)
    world.end(request)


def test_a_claim_counts_the_tokens_that_are_resumed(world: World) -> None:
    request = world.pair.ticket(attempt=1, resume_output_token_ids=(7, 8))
    session = world.session()
    world.say(ask(session, num_tokens=42, attempt=1))
    assert world.told() == [BlocksClaimed(request, 0.0)]
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


LATE: dict[ConsumerEvent, Callable[[World, KVSessionId], Any]] = {
    ConsumerEvent.ASKED: lambda world, _: ask(world.session()),
    ConsumerEvent.ANNOUNCED: lambda _, session: ready(session, 2, 2),
    ConsumerEvent.CONFIRMED: lambda _, session: ack(session, 1),
    ConsumerEvent.PREFILL_DONE: lambda _, session: done(session),
}


@pytest.mark.parametrize("state", [State.CLAIMED, State.GRANTED, State.PULLING, State.LOST])
def test_a_state_ignores_what_its_row_of_the_table_does_not_have(
    world: World, state: ConsumerState
) -> None:
    make = world.confirmed if state is State.LOST else getattr(world, state.name.lower())
    request, session = make()
    if state is State.LOST:
        world.d.fence_all("weights")
        world.told()
    late = [LATE[event](world, session) for event in LATE if event not in CONSUMER[state]]
    assert late
    world.heard()
    world.say(*late)
    assert world.told() == world.heard() == []
    assert world.late("d") == len(late)
    assert world.gauge("sessions", state.name.lower()) == 1
    world.end(request)


# ---- attempts, links and peers


def test_another_attempt_supersedes_and_may_be_asked_for_before_its_ticket(world: World) -> None:
    """The router sends the next attempt while the lost one is on hold."""
    first, session = world.confirmed()
    world.say(ended(session, "error"))
    world.lost(first)
    second_session = world.session()
    world.say(ask(second_session, attempt=1))
    kept = world.pair.end_d(first)
    assert len(kept) == 1
    second = world.pair.ticket(attempt=1)
    assert world.told() == [BlocksClaimed(second, 0.0)]
    world.say(ended(session, "error"))  # of the first
    assert world.pair.reserve(second)
    assert world.told(PullLost) == []
    world.transport.land()
    assert world.told() == [BlocksFreed(tuple(kept))]
    world.end(second)


def test_one_p_cannot_touch_what_another_one_computes(world: World) -> None:
    request, session = world.claimed()
    other_p = make_identity("p1")
    welcome = welcome_of(other_p, world.pair.p_transport, link=1)
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
    world.pair.cut()
    world.d.dial("p0", "127.0.0.1", 1)
    request = world.pair.ticket()
    assert world.dialed == ["p0"]
    world.pair.connect()
    world.d.link_failed("p0", "an older dial")
    assert world.told() == []
    world.pair.cut()
    world.lost(request)
    world.end(request)


def test_a_link_is_asked_for_before_the_engine_takes_the_ticket(world: World) -> None:
    """P does not wait for a link for as long as a step of D's engine may take."""
    world.pair.cut()
    core = world.pair.request("d").core_request
    world.d.on_dispatched(core)
    assert world.dialed == ["p0"]
    world.d.on_dispatched(replace(core, kv_transfer_params=None))
    world.d.link_failed("p0", "refused")
    request = world.pair.ticket()
    assert world.dialed == ["p0", "p0"], "once more"
    world.pair.connect()
    assert world.told() == []
    world.end(request)


def test_a_p_without_an_address_cannot_be_reached(world: World) -> None:
    world.pair.cut()
    request = world.pair.ticket()
    world.d.link_failed("p0", "gone")
    world.told()
    world.d.dial("p0", "", 0)
    assert world.dialed == ["p0"]
    world.end(request)


@pytest.mark.parametrize("epoch", ["the same", "another"])
def test_a_new_link_replaces_the_open_one(world: World, epoch: str) -> None:
    request, session = world.confirmed()
    ticket = world.pair.ticket("r1")
    identity = world.p_identity
    if epoch == "another":
        identity = replace(identity, epoch=epoch)
    old_wire, old_link = world.to_p, world.d_link
    welcome = welcome_of(identity, world.pair.p_transport, link=2)
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
    world.pair.end_d(ticket)
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
