"""P's half of the handoff against a D that the test plays: what P asks, announces, keeps and frees,
and that every way a session can end fences it first.
"""

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pdserve_common.errors import (
    DeadlineExceededError,
    DrainingError,
    PdserveError,
    RequestFailedError,
)
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
)
from pdserve_engine.kv.kv_groups import group_layers
from pdserve_engine.kv_transfer.connectors.links import make_hello
from pdserve_engine.kv_transfer.ports import (
    BlocksFreed,
    RequestFailed,
    StartAllowed,
    StartDeferred,
    StartForbidden,
)
from pdserve_engine.kv_transfer.protocol.machine import check_carried_out
from pdserve_engine.kv_transfer.protocol.session_machine import LINK_WAIT_S
from pdserve_engine.kv_transfer.protocol.transitions import (
    PRODUCER,
    ProducerAction,
    ProducerEvent,
    ProducerState,
)
from pdserve_engine.request.request import Request, RequestStatus
from support.handoff import SPEC, PSide, Wire, ended, make_identity
from support.metrics import series, value

State, Event, Action = ProducerState, ProducerEvent, ProducerAction


class World(PSide):
    """A P whose D is the test."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.d_identity = make_identity("d0", layout=self.layout)

    def pass_time(self, seconds: float) -> None:
        """D's heartbeats come, and P's ticks, when they should: every second."""
        for _ in range(int(seconds)):
            self.now += 1
            if self.p_link is not None:
                self.say(KVLinkHeartbeat(step_seq=1))
            self.p.on_tick()

    def hang(self, seconds: float) -> None:
        """P's event loop does nothing; then it ticks before it reads what D has said meanwhile."""
        self.now += seconds
        self.p.on_tick()

    def connect(self, engine_id: str = "d0") -> tuple[Any, Any]:
        """A D dials; returns the wire to it, after the welcome, and P's link."""
        wire = Wire()
        identity = replace(self.d_identity, engine_id=engine_id)
        link = self.p.accept_link(make_hello(identity, "local"), wire)
        wire.messages.popleft()
        if engine_id == "d0":
            self.to_d, self.p_link = wire, link
        return wire, link

    def say(self, message: Any, link: Any = None) -> None:
        """D sends."""
        self.p.on_message(link or self.p_link, message)

    def heard(self) -> list[Any]:
        """What P has sent since."""
        messages = list(self.to_d.messages)
        self.to_d.messages.clear()
        return messages

    def asked(self, request_id: str = "r0", **fields: Any) -> tuple[Request, KVSessionId]:
        """A session in the state ASKING, over a link."""
        if self.p_link is None:
            self.connect()
        request = self.ask(request_id, **fields)
        (message,) = self.heard()
        assert isinstance(message, GrantRequest)
        return request, message.session

    def granted(self, *, first_block: int = 0, **fields: Any) -> tuple[Request, KVSessionId]:
        request, session = self.asked(**fields)
        self.say(Granted(session=session, first_block=first_block))
        assert self.take_p_events() == [StartAllowed(request, 0.0)]
        return request, session

    def sending(self, **fields: Any) -> tuple[Request, KVSessionId]:
        """Two blocks are announced, of three by default."""
        request, session = self.granted(**fields)
        assert self.start(request)
        self.compute(request, 32)
        return request, session

    def handed_off(
        self, *, is_released: bool = False, **fields: Any
    ) -> tuple[Request, KVSessionId]:
        request, session = self.sending(**fields)
        self.end_p(request)
        if is_released:
            self.say(Release(session=session, through_block=-(-request.num_prompt_tokens // 16)))
            self.take_p_events()
        self.heard()
        return request, session

    def num_sessions(self, state: State) -> float:
        return value(self.p_metrics.sessions, state.name.lower())

    def num_ended(self, reason: str) -> float:
        return value(self.p_metrics.sessions_ended, reason)

    def num_acks(self, valid: str) -> float:
        return value(self.p_metrics.release_acks, valid)

    def check_baseline(self) -> None:
        """Every block is free, once, and nothing else is left of any session."""
        self.take_p_events()
        assert sorted(self.p_blocks.free) == list(range(64))
        assert self.p.num_open_sessions() == 0
        self.p.check_idle()
        assert not any(self.num_sessions(state) for state in State)


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**options: Any) -> World:
        worlds.append(World(**options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.p.shutdown()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


def acks(messages: list[Any]) -> list[bool]:
    return [message.valid for message in messages if isinstance(message, ReleaseAck)]


# ---- the way of a request


def test_p_asks_starts_announces_and_hands_off(world: World) -> None:
    request, session = world.asked()
    assert world.num_sessions(State.ASKING) == 1
    world.now += 0.25
    world.say(Granted(session=session, first_block=0))
    assert world.take_p_events() == [StartAllowed(request, 0.0)]
    assert value(world.p_metrics.grant_wait, suffix="_sum") == 0.25
    assert world.start(request)
    (table,) = world.p_tables[request]
    world.compute(request, 20)
    assert world.heard() == [
        BlocksReady(session=session, first_block=0, block_ids=((table[0],),)),
    ]
    world.compute(request, 20)
    assert world.heard() == [], "nothing twice"
    world.compute(request, 36)
    assert world.num_sessions(State.SENDING) == 1
    kept = world.end_p(request)
    assert world.heard() == [
        BlocksReady(session=session, first_block=1, block_ids=((table[1],),)),
        BlocksReady(session=session, first_block=2, block_ids=((table[2],),)),
        PrefillDone(session=session, num_tokens=40, output_token_ids=(77,), timeout_s=30.0),
    ]
    assert kept == set(table[:3])
    world.say(Release(session=session, through_block=2))
    assert world.take_p_events() == [BlocksFreed(tuple(table[:2]))]
    world.say(Release(session=session, through_block=3))
    assert acks(world.heard()) == [True, True]
    assert world.num_ended("released") == 1
    world.check_baseline()


def test_the_last_chunk_is_announced_with_the_tail(world: World) -> None:
    """That is one READ of what is exposed, and none if the first token ends the request."""
    for request_id in ("r0", "r1"):
        request, _ = world.granted(request_id=request_id)
        assert world.start(request)
        world.compute(request, 16)
        world.heard()
        world.compute(request, 40)
        assert world.heard() == []
        if request_id == "r0":
            world.end_p(request)
            ready, _ = world.heard()
            assert (ready.first_block, len(ready.block_ids[0])) == (1, 2)
        else:
            world.end_p(request, RequestStatus.FINISHED_STOPPED)
            (ended,) = world.heard()
            assert isinstance(ended, SessionEnded)


def test_of_a_sliding_group_only_the_last_window_is_kept(make_world: Callable[..., World]) -> None:
    groups = group_layers([20, 20, None, 20, 20, None])
    world = make_world(spec=replace(SPEC, groups=groups))
    request, session = world.granted(num_tokens=100)
    assert world.start(request)
    full, *sliding = world.p_tables[request]
    dropped = [ids[:3] for ids in sliding]
    for ids in sliding:  # P's scheduler drops what no later token sees
        world.p_blocks.give(ids[:3])
        ids[:3] = [-1] * 3
    world.compute(request, 70)
    kept = world.end_p(request)
    first, last, _ = world.heard()
    assert first.block_ids == (tuple(full[:4]), (0,) * 4, (0,) * 4)
    assert last.block_ids == (tuple(full[4:7]), *((0, *ids[5:7]) for ids in sliding))
    assert kept == {*full[:7], *sliding[0][5:7], *sliding[1][5:7]}
    assert not kept & {i for ids in dropped for i in ids}
    world.say(Release(session=session, through_block=7))
    world.check_baseline()


def test_blocks_carry_their_checksums(make_world: Callable[..., World]) -> None:
    def checksum(block_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(zlib.crc32(str(i).encode()) for i in block_ids)

    groups = group_layers([20, None])
    world = make_world(spec=replace(SPEC, groups=groups), checksum=checksum)
    request, _ = world.granted(num_tokens=100)
    assert world.start(request)
    full, sliding = world.p_tables[request]
    world.compute(request, 96)
    (ready,) = world.heard()
    assert ready.checksums == (checksum(full[:6]), (0,) * 5 + checksum(sliding[5:6]))
    world.end_p(request)


# ---- asking


def test_a_request_is_asked_for_when_d_has_dialed(world: World) -> None:
    request = world.ask()
    wire, _ = world.connect()
    (message,) = wire.messages
    assert (message.request_id, message.attempt, message.num_tokens) == ("r0", 0, 40)
    world.pass_time(LINK_WAIT_S + 1)
    assert world.take_p_events() == [], "a D that is merely full is waited for"
    world.say(Granted(session=message.session, first_block=0))
    assert world.take_p_events() == [StartAllowed(request, 0.0)]


def test_a_d_that_dials_while_ps_event_loop_hangs_is_in_time(world: World) -> None:
    world.ask()
    world.hang(LINK_WAIT_S + 60)
    assert world.take_p_events() == []
    wire, _ = world.connect()
    assert [type(message) for message in wire.messages] == [GrantRequest]


def test_a_d_that_never_dials_fails_the_request(world: World) -> None:
    request = world.ask()
    world.pass_time(LINK_WAIT_S)
    (failed,) = world.take_p_events()
    assert failed.request is request
    assert failed.error.code is ErrorCode.KV_TRANSFER_FAILED
    assert failed.error.is_retryable
    world.end_p(request, RequestStatus.FINISHED_ERROR)
    wire, _ = world.connect()
    assert [message.message for message in wire.messages] == ["expired"], "once, when it dials"
    world.check_baseline()


def test_a_revoked_grant_is_waited_for_again(world: World) -> None:
    request, session = world.granted(first_block=2)
    world.say(Revoke(session=session))
    assert not world.start(request), "the event of it is not taken yet"
    world.say(Granted(session=session, first_block=0))
    assert world.take_p_events() == [StartForbidden(request), StartAllowed(request, 0.0)]
    assert world.start(request)
    world.compute(request, 16)
    assert world.heard()[0].first_block == 0, "D's cache has changed meanwhile"


def test_a_request_that_d_has_given_up_before_is_not_asked_for(world: World) -> None:
    world.connect()
    world.say(CancelRequest(request_id="r0", attempt=1, reason="aborted"))
    stale, session = world.asked()  # attempt 0
    world.say(CancelRequest(request_id="r0", attempt=1, reason="aborted"))
    assert world.take_p_events() == []
    request = world.ask(attempt=1)
    assert world.heard() == [ended(session, "superseded")]
    (failed,) = world.take_p_events()
    assert failed.request is request
    assert world.num_ended("cancelled") == 1
    assert world.end_p(request, RequestStatus.FINISHED_ERROR) == frozenset()
    assert world.end_p(stale, RequestStatus.FINISHED_ABORTED) == frozenset()


@pytest.mark.parametrize(
    ("status", "error", "reason"),
    [
        (RequestStatus.FINISHED_STOPPED, None, "finished"),
        (RequestStatus.FINISHED_ABORTED, None, "aborted"),
        (RequestStatus.FINISHED_ERROR, None, "error"),
        (RequestStatus.FINISHED_ERROR, DrainingError("shutdown"), "error"),
        # Of what is the request's own doing the router blames no pair.
        (RequestStatus.FINISHED_ERROR, RequestFailedError("NaN"), "aborted"),
        (RequestStatus.FINISHED_ERROR, DeadlineExceededError("late"), "aborted"),
    ],
)
@pytest.mark.parametrize("stage", ["linked", "unlinked", "sending"])
def test_d_hears_why_a_request_has_ended(
    world: World, status: RequestStatus, error: PdserveError | None, reason: str, stage: str
) -> None:
    request, session = world.sending() if stage == "sending" else (world.request("p"), None)
    if stage == "linked":
        world.connect()
    elif session is not None:
        world.heard()
    request.error = error.to_engine_error() if error is not None else None
    world.end_p(request, status)
    if stage == "unlinked":
        world.connect()
    assert world.heard() == [ended(session, reason)]


def test_an_end_that_cannot_be_told_is_forgotten(world: World) -> None:
    world.end_p(world.request("p"), RequestStatus.FINISHED_STOPPED)
    world.pass_time(31)
    wire, _ = world.connect()
    assert not wire.messages


def test_a_d_that_is_gone_for_long_has_no_series(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_PEERS_AWAY", 1)
    world.granted()
    for engine_id, is_left in [("d0", True), ("d1", False)]:
        _, link = world.connect(engine_id)
        world.p.link_lost(link, "cut")
        peers = {peer for _, peer in series(world.p_metrics.grant_wait.collect())}
        assert ("d0" in peers) is is_left


# ---- messages of D that come late or make no sense


def test_a_session_obeys_its_own_link_only(world: World) -> None:
    _, session = world.handed_off()
    wire, other_link = world.connect("d1")
    world.say(Release(session=session, through_block=3), other_link)
    world.say(CancelRequest(request_id="r0", attempt=0, reason=""), other_link)
    assert acks(list(wire.messages)) == [False]
    assert world.p.num_open_sessions() == 1
    assert world.late("p") == 2


def test_a_release_before_anything_is_announced_counts_for_nothing(world: World) -> None:
    request, session = world.granted(first_block=1)
    world.say(Release(session=session, through_block=1))
    assert acks(world.heard()) == [False]
    world.say(Revoke(session=session))
    world.say(Granted(session=session, first_block=0))
    assert world.start(request)
    assert len(world.end_p(request)) == 3


def test_a_repeated_release_is_answered_again_and_frees_nothing(world: World) -> None:
    _, session = world.handed_off()
    for through_block in (2, 1, 2):
        world.say(Release(session=session, through_block=through_block))
    assert acks(world.heard()) == [True] * 3
    assert world.num_acks("true") == 3
    (freed,) = world.take_p_events()
    assert len(freed.block_ids) == 2


# ---- time


def test_progress_puts_the_deadline_off(world: World) -> None:
    request, session = world.granted()
    world.pass_time(20)
    assert world.start(request)
    world.pass_time(20)
    world.compute(request, 32)
    world.pass_time(20)
    world.say(Release(session=session, through_block=1))
    world.pass_time(20)
    world.end_p(request)
    world.pass_time(20)
    world.say(Release(session=session, through_block=2))
    world.pass_time(29)
    assert world.p.num_open_sessions() == 1
    world.pass_time(1)
    assert world.num_ended("expired") == 1
    world.check_baseline()


def test_p_exports_while_something_is_announced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(world.p_transport, "set_exporting", calls.append)
    monkeypatch.setattr(world.p_transport, "poll_soon", lambda: calls.append("poll_soon"))
    request, session = world.asked()
    world.say(KVLinkHeartbeat(step_seq=1))
    assert calls == []
    world.say(Granted(session=session, first_block=0))
    assert calls == ["poll_soon"]
    assert world.start(request)
    world.compute(request, 32)
    assert calls == ["poll_soon", True, "poll_soon"]
    world.end_p(request)
    world.p.ask(world.request("p", "r1"))
    world.say(Release(session=session, through_block=3))
    assert calls == ["poll_soon", True, "poll_soon", "poll_soon", "poll_soon", False]


# ---- what the table says, entry by entry: K3 and K8

Driver = Callable[[World, Request, KVSessionId], Any]

SETUPS: dict[State, Callable[..., tuple[Request, KVSessionId]]] = {
    State.ASKING: World.asked,
    State.GRANTED: World.granted,
    State.SENDING: World.sending,
    State.HANDED_OFF: World.handed_off,
    State.ENDED: lambda world, **fields: world.handed_off(**fields, is_released=True),
}


def set_up(world: World, state: State, event: Event) -> tuple[Request, KVSessionId]:
    """Of four blocks two are announced, or all if it is handed off."""
    if event is not Event.PREFILLED_ALL_CACHED:
        return SETUPS[state](world, num_tokens=56)
    request, session = world.granted(num_tokens=32, first_block=2)
    assert world.start(request)
    return request, session


def finish(world: World, request: Request, session: KVSessionId) -> None:
    if request.is_handed_off:
        world.p.abort_session(request.request_id)
    else:
        world.end_p(request, RequestStatus.FINISHED_ABORTED)


# What D says.
SAID: dict[Event, Callable[[KVSessionId], Any]] = {
    Event.GRANTED: lambda session: Granted(session=session, first_block=0),
    Event.LATER: lambda session: Later(session=session),
    Event.REVOKED: lambda session: Revoke(session=session),
    Event.RELEASED: lambda session: Release(session=session, through_block=1),
    Event.RELEASED_ALL: lambda session: Release(session=session, through_block=4),
    Event.CANCELLED: lambda _: CancelRequest(request_id="r0", attempt=0, reason="aborted"),
}
DRIVERS: dict[Event, Driver] = {
    event: lambda world, _, session, say=say: world.say(say(session)) for event, say in SAID.items()
} | {
    Event.LINK_LOST: lambda world, request, session: world.p.link_lost(world.p_link, "cut"),
    Event.STARTED: lambda world, request, session: world.start(request),
    Event.COMPUTED: lambda world, request, session: world.compute(request, 48),
    Event.PREFILLED: lambda world, request, session: world.end_p(request),
    Event.PREFILLED_ALL_CACHED: lambda world, request, session: world.end_p(request),
    Event.PREEMPTED: lambda world, request, session: world.preempt(request),
    Event.FINISHED: finish,
    Event.EXPIRED: lambda world, request, session: world.pass_time(31),
    Event.FENCED: lambda world, request, session: world.p.fence_all("cache_reset"),
}

# What D and then P's scheduler see of an event, and where a state makes a difference.
SEEN: dict[Event, tuple[type, ...]] = {
    Event.GRANTED: (StartAllowed,),
    Event.LATER: (StartDeferred,),
    Event.REVOKED: (StartForbidden,),
    Event.STARTED: (),
    Event.COMPUTED: (BlocksReady,),
    Event.PREFILLED: (BlocksReady, PrefillDone),
    Event.PREFILLED_ALL_CACHED: (PrefillDone,),
    Event.RELEASED: (ReleaseAck,),
    Event.RELEASED_ALL: (ReleaseAck, BlocksFreed),
    Event.CANCELLED: (RequestFailed,),
    Event.LINK_LOST: (RequestFailed,),
    Event.EXPIRED: (SessionEnded, RequestFailed),
    Event.FENCED: (SessionEnded, RequestFailed),
    Event.FINISHED: (SessionEnded,),
    Event.PREEMPTED: (SessionEnded,),
}
SEEN_IN: dict[tuple[State, Event], tuple[type, ...]] = {
    (State.SENDING, Event.REVOKED): (SessionEnded, RequestFailed),
    (State.HANDED_OFF, Event.RELEASED): (ReleaseAck, BlocksFreed),
    (State.HANDED_OFF, Event.CANCELLED): (BlocksFreed,),
    (State.HANDED_OFF, Event.LINK_LOST): (BlocksFreed,),
    **{
        (State.HANDED_OFF, event): (SessionEnded, BlocksFreed)
        for event in (Event.REVOKED, Event.FINISHED, Event.EXPIRED, Event.FENCED)
    },
}
# Why it is over; other events give their names.
REASONS = {
    Event.FINISHED: "aborted",
    Event.RELEASED_ALL: "released",
    Event.PREFILLED_ALL_CACHED: "released",
}
# What is looked up is a prefix: test_prefixes.py.
ENTRIES = [
    (state, event)
    for state in SETUPS
    for event in DRIVERS
    # What D says has an effect in any state, be it that it is counted. A CancelRequest names the
    # request, not the session.
    if event in PRODUCER[state] or event in set(SAID) - {Event.CANCELLED}
]
ENDINGS = [
    (state, event)
    for state, event in ENTRIES
    if event in PRODUCER[state] and PRODUCER[state][event].next is State.ENDED is not state
]


def counters(world: World) -> set[tuple[str, ...]]:
    """All series of P that count: the metric and its labels' values."""
    return {
        (metric.name, *sample.labels.values())
        for name, counter in vars(world.p_metrics).items()
        if not name.startswith("_")
        for metric in counter.collect()
        if metric.type == "counter"
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


def test_each_entry_is_tried() -> None:
    assert sum(len(PRODUCER[state]) for state in SETUPS) == 36
    assert {(state, event) for state in SETUPS for event in PRODUCER[state]} <= set(ENTRIES)


@pytest.mark.parametrize(("state", "event"), ENTRIES)
def test_a_session_does_what_the_table_says(
    world: World, caplog: pytest.LogCaptureFixture, state: State, event: Event
) -> None:
    caplog.set_level(logging.WARNING)
    request, session = set_up(world, state, event)
    world.heard()
    known, num_late, num_wakeups = counters(world), world.late("p"), world.num_wakeups
    grants = world.p_metrics.grants
    before = {answer: value(grants, answer) for answer in ("granted", "later", "revoked")}
    DRIVERS[event](world, request, session)

    step = PRODUCER[state].get(event)
    is_late = step is None or state is State.ENDED
    # D hears of the link's end, and of nothing else by then.
    messages = world.heard() if event is not Event.LINK_LOST else []
    messages = [message for message in messages if not isinstance(message, KVLinkHeartbeat)]
    events = world.take_p_events()  # a block that is freed twice fails here
    seen = tuple(map(type, [*messages, *events]))
    is_release = event in (Event.RELEASED, Event.RELEASED_ALL)
    if is_late:
        assert seen == ((ReleaseAck,) if is_release else ())
    else:
        assert seen == SEEN_IN.get((state, event), SEEN[event])
    assert acks(messages) == [not is_late] * is_release
    assert world.num_wakeups - num_wakeups == len(events)
    assert world.late("p") - num_late == is_late
    answered = event.name.lower() if step else ""
    assert {a: value(grants, a) - n for a, n in before.items()} == {
        answer: answer == answered for answer in before
    }
    is_loss = state is not State.ENDED and event in (Event.EXPIRED, Event.FENCED, Event.LINK_LOST)
    assert len(caplog.messages) == is_loss

    after = step.next if step else state
    assert [s for s in State if world.num_sessions(s)] == [s for s in [after] if s is not s.ENDED]
    assert world.p.num_open_sessions() == (after is not State.ENDED)
    if (state, event) in ENDINGS:
        reason = REASONS.get(event, event.name.lower())
        assert world.num_ended(reason) == 1
        assert {m.reason.name.lower() for m in messages if isinstance(m, SessionEnded)} <= {reason}
        if event is Event.LINK_LOST:
            world.connect()
        world.say(Release(session=session, through_block=1))
        assert acks(world.heard()) == [False], "it is fenced"
    world.p.fence_all("test")
    world.heard()
    if not request.status.is_finished:
        world.end_p(request, RequestStatus.FINISHED_ERROR)
        is_told = event is Event.PREEMPTED
        assert len(world.heard()) == is_told, "D knows, unless P was to ask again"
    world.check_baseline()
    assert counters(world) == known, "rates miss the first sample of a series: `begin` it"


@pytest.mark.parametrize("stage", ["asked", "granted", "sending", "handed_off"])
def test_messages_that_make_no_sense_are_counted_and_ignored(world: World, stage: str) -> None:
    _, session = getattr(world, stage)()
    world.heard()
    other = replace(session, seq=99)
    wrong = [
        make_hello(world.d_identity, "local"),
        Release(session=session, through_block=1000),
        Release(session=replace(session, p_epoch="stale"), through_block=1),
        Granted(session=session, first_block=4),
        *(say(other) for event, say in SAID.items() if event is not Event.CANCELLED),
        CancelRequest(request_id="r0", attempt=-1, reason="an older attempt"),
    ]
    for message in wrong:
        world.say(message)
    assert world.late("p") == len(wrong)
    assert acks(world.heard()) == [False] * 4
    assert world.num_acks("false") == 4
    assert world.take_p_events() == []
    assert world.p.num_open_sessions() == 1
    world.say(KVLinkHeartbeat(step_seq=1))
    assert world.late("p") == len(wrong)


@pytest.mark.parametrize(("state", "event"), ENDINGS)
def test_the_fence_comes_first(state: State, event: Event) -> None:
    actions = list(PRODUCER[state][event].actions)
    if event is Event.RELEASED_ALL:
        assert actions.pop(0) is Action.SEND_VALID_ACK
    assert actions.index(Action.FENCE) == 0


def test_only_ends_fence_and_give_everything_back() -> None:
    for state, steps in PRODUCER.items():
        for event, step in steps.items():
            if step.next is not State.ENDED:
                assert not {Action.FENCE, Action.FREE} & set(step.actions), (state, event)


def test_no_action_of_a_table_is_left_out() -> None:
    check_carried_out({Action.FREE: "done"}, [Action.FREE])
    for actions in ({}, {Action.FREE: "done", Action.FENCE: "done"}):
        with pytest.raises(AssertionError):
            check_carried_out(actions, [Action.FREE])


def test_what_is_left_of_a_session_is_told(world: World) -> None:
    request, _ = world.sending()
    with pytest.raises(AssertionError, match="not over:"):
        world.p.check_idle()
    world.p.fence_all("test")
    with pytest.raises(AssertionError, match="waiting for their end"):
        world.p.check_idle()
    world.end_p(request, RequestStatus.FINISHED_ERROR)
    world.check_baseline()


def test_a_fence_says_why(world: World) -> None:
    request, session = world.sending()
    world.heard()
    world.p.fence_all("sleep")
    assert world.heard() == [ended(session, "fenced: sleep")]
    assert world.num_ended("fenced") == 1, "metrics know one word for all"
    (failed,) = world.take_p_events()
    assert failed.error.message == "handing KV over to d0 failed: fenced: sleep"
    world.end_p(request, RequestStatus.FINISHED_ERROR)


@pytest.mark.parametrize(
    ("state", "what_next"),
    [
        (State.ASKING, "the router decides how it goes on"),
        (State.HANDED_OFF, "its blocks are free"),
    ],
)
def test_an_operator_reads_of_a_session_that_has_expired(
    world: World, caplog: pytest.LogCaptureFixture, state: State, what_next: str
) -> None:
    request, session = SETUPS[state](world)
    world.pass_time(30)
    (line,) = caplog.messages
    assert line == (
        f"request r0, attempt 0: KV session {session.link}.{session.seq} with d0 is lost in state "
        f"{state.name} after 30.0 s: expired; {what_next}"
    )
    world.take_p_events()
    if not request.status.is_finished:
        world.end_p(request, RequestStatus.FINISHED_ERROR)


def test_a_new_link_ends_the_sessions_of_the_old_one(world: World) -> None:
    request, session = world.sending()
    old_wire, old_link = world.to_d, world.p_link
    world.connect()
    assert old_wire.closed_because == "replaced"
    (failed,) = world.take_p_events()
    assert failed.request is request
    world.say(Release(session=session, through_block=1), old_link)
    assert world.late("p") == 1
    world.p.link_lost(old_link, "closed")  # its own reader reports it too
    assert value(world.p_metrics.links) == 1
    world.end_p(request, RequestStatus.FINISHED_ERROR)
    world.check_baseline()
