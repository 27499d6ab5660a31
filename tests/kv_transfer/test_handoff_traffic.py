"""Many handoffs at once, with everything that may happen to them in any order: no block is lost or
freed twice, and what D accepts is what P has computed for that very request.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve_engine.kv_transfer.ports import (
    BlocksClaimed,
    BlocksConfirmed,
    BlocksFreed,
    BlocksReturned,
    PullFinished,
    PullLost,
    RequestFailed,
    StartAllowed,
    StartForbidden,
)
from pdserve_engine.kv_transfer.protocol import ConsumerAction
from pdserve_engine.kv_transfer.pull import Pull, Reservation
from pdserve_engine.request.request import Request, RequestStatus
from support.metrics import value

# Few, so that a block that changes hands too early is somebody else's soon.
NUM_BLOCKS = 20
MAX_LEGS = 5


class Traffic:
    """The test is both schedulers and the router. P writes a request's number into its blocks."""

    def __init__(self, pair: Any, seed: int) -> None:
        self.pair = pair
        self.random = random.Random(seed)
        self.legs: dict[str, SimpleNamespace] = {}
        self.num_requests = self.num_finished = self.num_lost = 0
        pair.transport.is_holding = True
        pair.p_blocks.free = list(range(NUM_BLOCKS))
        pair.d_blocks.free = list(range(NUM_BLOCKS))
        pair.connect()
        self.steps = [
            *[self.add] * 6,
            *[self.start] * 12,
            *[self.compute] * 16,
            *[self.land] * 7,
            *[self.deliver] * 24,
            *[self.retry_claims] * 6,
            self.preempt,
            self.fail,
            self.abort,
            self.reclaim,
        ]

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.random.choice(self.steps)()
            if self.random.random() < 0.002:
                self.pair.cut()
                self.pair.connect()

    def drain(self) -> None:
        """Everything ends, late READs land."""
        for leg in list(self.legs.values()):
            self.end(leg)
        self.pair.pump()
        while self.pair.transport.held:
            self.pair.transport.land()
        self.take_events()

    # ---- what may happen

    def add(self) -> None:
        if len(self.legs) == MAX_LEGS:
            return
        number, self.num_requests = self.num_requests, self.num_requests + 1
        fields = {"request_id": f"r{number}", "num_tokens": self.random.choice([20, 40, 64])}
        leg = SimpleNamespace(number=number, p="asked", num_tokens=0, is_claimed=False)
        if self.random.random() < 0.5:
            leg.request = self.pair.ticket(**fields)
            leg.prefill = self.pair.ask(**fields)
        else:
            leg.prefill = self.pair.ask(**fields)
            self.pair.pump()
            leg.request = self.pair.ticket(**fields)
        self.legs[fields["request_id"]] = leg

    def start(self) -> None:
        leg = self.pick("allowed")
        if leg is None or len(self.pair.p_blocks.free) < 5 or not self.pair.start(leg.prefill):
            return
        leg.p, leg.num_tokens = "running", 0
        self.pair.p_pool.tensor[self.pair.p_tables[leg.prefill][0]] = float(leg.number)

    def compute(self) -> None:
        leg = self.pick("running")
        if leg is None:
            return
        leg.num_tokens += 16
        if leg.num_tokens < leg.prefill.num_tokens:
            self.pair.compute(leg.prefill, leg.num_tokens)
        else:
            self.pair.end_p(leg.prefill)
            leg.p = "over"

    def preempt(self) -> None:
        leg = self.pick("running")
        if leg is not None:
            self.pair.preempt(leg.prefill)
            self.pair.p.ask(leg.prefill)
            leg.p = "asked"

    def fail(self) -> None:
        leg = self.pick(self.random.choice(["asked", "allowed", "running"]))
        if leg is not None:
            self.end_p(leg)

    def abort(self) -> None:
        leg = self.pick()
        if leg is not None:
            self.end(leg)

    def reclaim(self) -> None:
        request = self.pair.d.reclaim()
        if request is not None:
            self.pair.give_d(request, frozenset())
            self.legs[request.request_id].is_claimed = True

    def retry_claims(self) -> None:
        for leg in self.legs.values():
            if leg.is_claimed:
                leg.is_claimed = not self.reserve(leg.request)

    def land(self) -> None:
        held = self.pair.transport.held
        if held:
            self.pair.transport.land(self.random.randrange(len(held)))

    def deliver(self) -> None:
        """Some messages of one side; the other's wait."""
        wire, link, connector = self.random.choice(
            [
                (self.pair.to_d, self.pair.d_link, self.pair.d),
                (self.pair.to_p, self.pair.p_link, self.pair.p),
            ]
        )
        for _ in range(min(len(wire.messages), self.random.randrange(1, 4))):
            connector.on_message(link, wire.messages.popleft())
        if self.random.random() < 0.7:
            self.take_events()

    # ---- the schedulers

    def pick(self, p: str | None = None) -> SimpleNamespace | None:
        legs = [leg for leg in self.legs.values() if p in (None, leg.p)]
        return self.random.choice(legs) if legs else None

    def reserve(self, request: Request) -> bool:
        """True: the claim is answered, or withdrawn."""
        self.pair.has_room = len(self.pair.d_blocks.free) >= 5
        return bool(self.pair.reserve(request)) or self.pair.has_room

    def end_p(self, leg: SimpleNamespace) -> None:
        if leg.p != "over":
            self.pair.end_p(leg.prefill, RequestStatus.FINISHED_ERROR)
            leg.p = "over"

    def end(self, leg: SimpleNamespace) -> None:
        """D's leg is over; the router ends P's."""
        self.pair.end_d(leg.request)
        self.end_p(leg)
        del self.legs[leg.request.request_id]

    def take_events(self) -> None:
        for event in self.pair.take_p_events():
            self.take_p(event)
        for event in self.pair.d.take_events():
            self.take_d(event)

    def take_p(self, event: Any) -> None:
        if isinstance(event, BlocksFreed):
            return
        leg = self.legs.get(event.request.request_id)
        if leg is None or leg.p == "over":
            return
        match event:
            case StartAllowed():
                leg.p = "allowed"
            case StartForbidden() if leg.p == "allowed":
                leg.p = "asked"
            case RequestFailed():
                self.end_p(leg)

    def take_d(self, event: Any) -> None:
        if isinstance(event, BlocksFreed):
            self.pair.d_blocks.give(event.block_ids)
            return
        leg = self.legs.get(event.request.request_id)
        if leg is None:
            return
        match event:
            case BlocksClaimed():
                leg.is_claimed = not self.reserve(leg.request)
            case BlocksReturned(kept=kept):
                self.pair.give_d(leg.request, kept)
                leg.is_claimed = False
            case BlocksConfirmed(num_tokens=num_tokens):
                self.check(leg, num_tokens)
            case PullFinished():
                self.check(leg, leg.request.num_tokens)
                self.num_finished += 1
                self.end(leg)
            case PullLost() | RequestFailed():
                self.num_lost += 1
                self.end(leg)

    def check(self, leg: SimpleNamespace, num_tokens: int) -> None:
        """What D may use is what P has written for this request."""
        block_ids = self.pair.d_tables[leg.request][0][: -(-num_tokens // 16)]
        assert (self.pair.d_pool.tensor[block_ids] == float(leg.number)).all()


pytestmark = pytest.mark.parametrize("kind", ["local"])


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_every_block_comes_back_and_is_right(pair: Any, seed: int) -> None:
    traffic = Traffic(pair, seed)
    traffic.run(6000)
    traffic.drain()
    assert traffic.num_finished > 10
    assert traffic.num_lost > 10
    assert sorted(pair.p_blocks.free) == sorted(pair.d_blocks.free) == list(range(NUM_BLOCKS))
    assert pair.p.num_open_sessions() == pair.d.num_open_sessions() == 0
    assert value(pair.d_metrics.zombie_reads) == 0


def trust_every_read(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without K4: what has landed is used before P says that it is right."""
    actions = pair.d._machine._actions
    release, confirm = actions[ConsumerAction.SEND_RELEASE], actions[ConsumerAction.CONFIRM]

    def trust(pull: Any) -> None:
        release(pull)
        confirm(pull)

    monkeypatch.setitem(actions, ConsumerAction.SEND_RELEASE, trust)
    monkeypatch.setattr(
        Pull, "num_confirmed_tokens", lambda pull, size: pull.granted.num_landed // 2 * size
    )


def free_blocks_under_reads(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without K5."""
    monkeypatch.setattr(Reservation, "drop_reads", lambda reservation: [])


def announce_what_is_not_written(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without K2: the step that writes the next block is not over."""
    compute = pair.compute

    def too_early(prefill: Request, num_tokens: int) -> None:
        block_id = pair.p_tables[prefill][0][num_tokens // 16 - 1]
        pair.p_pool.tensor[block_id] = -1.0
        compute(prefill, num_tokens)

    monkeypatch.setattr(pair, "compute", too_early)


@pytest.mark.parametrize(
    "fault", [trust_every_read, free_blocks_under_reads, announce_what_is_not_written]
)
def test_the_traffic_shows_what_breaks_a_rule(
    pair: Any, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    fault(pair, monkeypatch)
    traffic = Traffic(pair, seed=1)
    with pytest.raises(AssertionError):
        traffic.run(20_000)
