"""A P that reads the start of a prompt from a D's prefix cache: real schedulers, block pools and
connectors of both, a link made of two queues, and blocks that hold what their hash says.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.types.engine import KVPrefixSource, KVTransferParams
from pdserve_common.types.kv import KVLinkWelcome, PrefixReady, PrefixRequest, Release
from pdserve_engine.kv.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.kv.kv_groups import group_layers
from pdserve_engine.kv_transfer.base import ConnectorContext
from pdserve_engine.kv_transfer.connectors.links import KVLink
from pdserve_engine.kv_transfer.connectors.prefix_consumer import PrefixConsumer
from pdserve_engine.kv_transfer.connectors.prefix_producer import MAX_PREFIXES, PrefixProducer
from support.handoff import FaultTransport, Wire, make_identity, make_transport
from support.local_transport import LocalRegistry
from support.metrics import value
from support.scripted_engine import (
    BLOCK_SIZE,
    Engine,
    ScriptedProducer,
    cached_blocks,
    expected,
    next_token,
)
from support.waiting import wait_until

NUM_BLOCKS = 64
SOURCE = KVPrefixSource(engine_id="d0", host="127.0.0.1", port=1, num_tokens=0)
ON_P = KVTransferParams(do_remote_decode=True, remote_engine_id="d1")
# 8 blocks, and 3 tokens.
PROMPT = list(range(100, 135))


class Pair:
    """A D that has prompts cached, and a P that needs them."""

    def __init__(self, windows: tuple[int | None, ...] = (None,)) -> None:
        self.now = 1000.0
        layers = [windows[0] or None, windows[-1] or None]
        spec = KVCacheSpec(
            groups=group_layers(layers),
            num_kv_heads=1,
            head_dim=32,
            block_size=BLOCK_SIZE,
            dtype=torch.float32,
        )
        registry = LocalRegistry()
        self.d_pool, self.p_pool = (
            KVCache(spec, num_blocks=NUM_BLOCKS, device=torch.device("cpu")) for _ in "dp"
        )
        d_identity, p_identity = (
            make_identity(name, layout=spec.layout()) for name in ("d0", "p0")
        )
        d_transport = make_transport("local", d_identity, registry, self.d_pool)
        self.transport = FaultTransport(make_transport("local", p_identity, registry, self.p_pool))
        self.metrics = KVTransferMetrics(CollectorRegistry())
        self.d_metrics = KVTransferMetrics(CollectorRegistry())

        def clock() -> float:
            return self.now

        lending, borrowing = (
            ConnectorContext(
                transport=transport,
                identity=identity,
                metrics=metrics,
                wakeup=lambda: None,
                step_seq=lambda: 0,
                clock=clock,
            )
            for transport, identity, metrics in (
                (d_transport, d_identity, self.d_metrics),
                (self.transport, p_identity, self.metrics),
            )
        )
        self.lender = PrefixProducer(lending, num_blocks=NUM_BLOCKS)
        self.borrower = PrefixConsumer(borrowing)
        self.borrower.bind_link_pool(lambda *address: None)
        common = {"num_blocks": NUM_BLOCKS, "windows": windows, "clock": clock}
        self.d = Engine(prefix_producer=self.lender, **common)  # type: ignore[arg-type]
        self.producer = ScriptedProducer()
        self.p = Engine(
            producer=self.producer,
            prefix_consumer=self.borrower,
            **common,  # type: ignore[arg-type]
        )
        self.to_d, self.to_p = Wire(), Wire()
        self.d_link: KVLink | None = None
        self.p_link: KVLink | None = None

    # ---- what happens

    def connect(self) -> None:
        self.to_d, self.to_p = Wire(), Wire()
        self.d_link = self.lender.accept_link(self.borrower.hello(), self.to_p)
        welcome = self.to_p.messages.popleft()
        assert isinstance(welcome, KVLinkWelcome)
        self.p_link = self.borrower.link_up("d0", welcome, self.to_d)

    def cut(self) -> None:
        assert self.d_link is not None
        assert self.p_link is not None
        for wire in (self.to_d, self.to_p):
            wire.close("cut")
            wire.messages.clear()
        self.lender.link_lost(self.d_link, "cut")
        self.borrower.link_lost(self.p_link, "cut")

    def cache(self, prompt: list[int]) -> None:
        """D computes a prompt and keeps it."""
        self.d.add(f"cached{len(self.d.outputs)}", prompt, max_tokens=1)
        self.d.run()
        self.write()

    def write(self) -> None:
        """D's cached blocks hold what their hashes say."""
        for block_hash, block in cached_blocks(self.d.pool):
            self.d_pool.tensor[block.block_id] = _content(block_hash)

    def ask(self, request_id: str, prompt: list[int], num_tokens: int | None = None) -> None:
        """A request comes to P, whose router knows that D has so many tokens of it."""
        source = replace(SOURCE, num_tokens=len(prompt) if num_tokens is None else num_tokens)
        params = replace(ON_P, prefix_source=source)
        self.p.add(request_id, prompt, kv_transfer_params=params)

    def turn(self) -> None:
        """Everybody does what is there to do."""
        self.d.step()
        self.p.step()
        self.deliver()

    def deliver(self, num_messages: int = 1000) -> None:
        for _ in range(num_messages):
            if self.to_d.messages and self.d_link is not None:
                self.lender.on_message(self.d_link, self.to_d.messages.popleft())
            elif self.to_p.messages and self.p_link is not None:
                self.borrower.on_message(self.p_link, self.to_p.messages.popleft())
            else:
                return

    def settle(self) -> None:
        """Until P's requests have been handed off, and D lends nothing."""

        def is_over() -> bool:
            self.turn()
            is_lent = self.lender.num_open_sessions() or self.borrower.num_open_sessions()
            return not (is_lent or self.p.scheduler.has_requests())

        wait_until(is_over)
        for request_id in list(self.producer.held):
            self.producer.release(request_id)
        self.p.run()
        self.d.run()

    # ---- what came of it

    def num_computed(self, request_id: str) -> int:
        return sum(step.num_scheduled_tokens.get(request_id, 0) for step in self.p.rank.steps)

    def outcomes(self) -> dict[str, float]:
        """Blocks by outcome."""
        counter = self.metrics.prefix_tokens
        found = {
            outcome: value(counter.labels(outcome)) / BLOCK_SIZE
            for outcome in ("pulled", "not_cached", "failed", "given_up")
        }
        return {outcome: number for outcome, number in found.items() if number}

    def check(self) -> None:
        """Nobody holds anything, and P has cached nothing else than D had."""
        self.d.assert_idle()
        self.p.assert_idle()
        for block_hash, block in cached_blocks(self.p.pool):
            found = self.p_pool.tensor[block.block_id]
            # What P has computed is not in this pool: it stays as it was.
            is_pulled = bool((found == _content(block_hash)).all())
            assert is_pulled or block.block_id in self.computed(), block

    def computed(self) -> set[int]:
        """P's blocks that a step has written into."""
        found: set[int] = set()
        for step in self.p.rank.steps:
            for new in step.scheduled_new_reqs:
                first = new.num_computed_tokens // BLOCK_SIZE
                found.update(i for ids in new.block_ids for i in ids[first:])
            for ids in step.scheduled_cached_reqs.new_block_ids:
                found.update(i for group in ids or () for i in group)
        return found

    def close(self) -> None:
        self.transport.is_holding = False
        self.transport.let_go()
        self.borrower.shutdown()
        self.lender.shutdown()


def _content(block_hash: bytes) -> float:
    return float(int.from_bytes(block_hash[:3], "big") + 1)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    pair.connect()
    yield pair
    pair.close()


def test_p_computes_only_what_d_has_not(pair: Pair) -> None:
    pair.cache(PROMPT)
    pair.ask("r0", [*PROMPT, 1, 2, 3])
    pair.settle()
    assert pair.num_computed("r0") == len(PROMPT) + 3 - 8 * BLOCK_SIZE
    assert pair.p.tokens("r0") == [next_token([*PROMPT, 1, 2, 3])]
    assert pair.outcomes() == {"pulled": 8}
    pair.check()


def test_a_chat_is_never_computed_twice(pair: Pair) -> None:
    """D has the answers, P learns them from D with each turn, and no whole block twice."""
    chat = list(PROMPT)
    for turn in range(3):
        pair.cache([*chat])
        num_new = len(chat) % BLOCK_SIZE + 5
        chat += expected(chat, 5)
        pair.ask(f"r{turn}", chat)
        pair.settle()
        assert pair.num_computed(f"r{turn}") <= num_new + BLOCK_SIZE
    pair.check()


def test_what_p_has_cached_is_not_read(pair: Pair) -> None:
    pair.cache(PROMPT)
    pair.p.add("first", PROMPT[: 4 * BLOCK_SIZE], kv_transfer_params=ON_P)
    pair.settle()
    pair.ask("r0", PROMPT)
    pair.settle()
    assert pair.outcomes() == {"pulled": 4}
    assert pair.num_computed("r0") == 3
    pair.check()


@pytest.mark.parametrize(("num_cached", "outcomes"), [(5, {"pulled": 5}), (0, {"not_cached": 8})])
def test_d_sends_what_it_still_has(pair: Pair, num_cached: int, outcomes: dict[str, float]) -> None:
    if num_cached:
        pair.cache(PROMPT[: num_cached * BLOCK_SIZE])
    pair.ask("r0", PROMPT)
    pair.settle()
    assert pair.num_computed("r0") == len(PROMPT) - num_cached * BLOCK_SIZE
    assert pair.outcomes() == outcomes
    assert value(pair.d_metrics.sessions_ended.labels("fenced")) == 0
    pair.check()


def test_a_link_may_come_up_later(pair: Pair) -> None:
    pair.cache(PROMPT)
    pair.cut()
    pair.ask("r0", PROMPT)
    pair.turn()
    pair.connect()
    pair.settle()
    assert pair.outcomes() == {"pulled": 8}
    pair.check()


def test_p_waits_for_a_bounded_time(pair: Pair) -> None:
    """D says nothing; its answer comes when P computes already."""
    pair.cache(PROMPT)
    pair.ask("r0", PROMPT)
    pair.p.step()
    assert pair.p.scheduler.next_deadline() == pytest.approx(1000.25)
    assert not pair.p.rank.steps
    pair.now += 0.3
    pair.p.run()
    assert pair.p.tokens("r0") == [next_token(PROMPT)]
    assert pair.outcomes() == {"given_up": 8}
    pair.settle()
    pair.check()


def test_a_request_keeps_its_place_in_the_queue(pair: Pair) -> None:
    """Of those that wait for their turn to be asked for it is the first again."""
    pair.producer.grants_at_once = False
    pair.ask("first", PROMPT)
    pair.now += 0.01
    for n, request_id in enumerate(("second", "third", "fourth")):
        pair.p.add(request_id, [n, *PROMPT], kv_transfer_params=ON_P)
    pair.p.step()
    assert set(pair.producer.asked) == {"second", "third"}
    pair.now += 0.3
    pair.p.step()
    pair.producer.allow("second")
    pair.p.run()
    assert set(pair.producer.asked) == {"second", "third", "first"}


# ---- what may go wrong, and when

Fault = Callable[[Pair], None]


def fence_d(pair: Pair) -> None:
    pair.d.scheduler.fence_all("weights")


def fence_p(pair: Pair) -> None:
    pair.p.scheduler.fence_all("weights")


def expire(pair: Pair) -> None:
    pair.now += 1.0


def abort(pair: Pair) -> None:
    pair.p.core.abort_requests(["r0"])


def lose_messages(pair: Pair) -> None:
    pair.to_d.messages.clear()
    pair.to_p.messages.clear()
    expire(pair)
    # D hears nothing of it: its own deadline ends it.
    pair.p.step()
    pair.to_d.messages.clear()
    for _ in range(40):
        pair.now += 1.0
        pair.lender.on_tick()


FAULTS: dict[str, Fault] = {
    "the link breaks": Pair.cut,
    "D needs its blocks": fence_d,
    "P needs its blocks": fence_p,
    "it takes too long": expire,
    "messages are lost": lose_messages,
    "the request is aborted": abort,
}
# How many messages have arrived, of PrefixRequest, PrefixReady and Release.
STAGES = range(4)


@pytest.mark.parametrize("num_messages", STAGES)
@pytest.mark.parametrize("fault", FAULTS)
def test_p_computes_what_does_not_come(pair: Pair, fault: str, num_messages: int) -> None:
    """Whatever happens, and whenever: the token is right, a block that is not confirmed is nobody's
    until its READ has landed, and nobody holds anything in the end.
    """
    pair.cache(PROMPT)
    pair.transport.is_holding = num_messages < 3
    pair.ask("r0", PROMPT)
    for number in range(num_messages):
        pair.p.step()
        pair.d.step()
        if number == 2:
            wait_until(lambda: any(isinstance(m, Release) for m in pair.to_d.messages))
        pair.deliver(1)
    FAULTS[fault](pair)
    if fault == "D needs its blocks" and num_messages:
        # It has them for others at once.
        pair.d_pool.tensor.fill_(-1.0)
    num_held = len(pair.transport.held)
    pair.p.run()
    for _ in range(4):
        pair.turn()
    if num_held and pair.borrower.num_open_sessions():
        unlanded = {i for args in pair.transport.held for i in args[2]}
        free = {block.block_id for block in pair.p.pool.blocks if block.ref_cnt == 0}
        assert not unlanded & free, "a READ may land in a free block"
    pair.transport.is_holding = False
    pair.transport.let_go()
    pair.settle()
    if fault != "the request is aborted":
        assert pair.p.tokens("r0") == [next_token(PROMPT)]
    pair.check()


def test_a_d_that_breaks_the_protocol_is_not_believed(pair: Pair) -> None:
    pair.cache(PROMPT)
    pair.ask("r0", PROMPT)
    pair.p.step()
    pair.deliver(1)
    pair.d.step()
    (message,) = pair.to_p.messages
    assert isinstance(message, PrefixReady)
    ids = message.blocks.block_ids[0]
    wrong = replace(message.blocks, block_ids=((*ids, 1),))
    pair.to_p.messages[0] = replace(message, blocks=wrong)
    pair.settle()
    assert pair.outcomes() == {"failed": 8}
    assert pair.num_computed("r0") == len(PROMPT)
    pair.check()


def test_d_lends_a_quarter_of_its_pool_at_most(pair: Pair) -> None:
    prompts = [[n, *PROMPT] for n in range(3)]
    for prompt in prompts:
        pair.cache(prompt)
    pair.transport.is_holding = True
    for n, prompt in enumerate(prompts):
        pair.ask(f"r{n}", prompt)
    pair.turn()
    pair.turn()
    # P reads as much as fits into a quarter of its own.
    assert pair.d.pool.num_blocks - pair.d.pool.num_free_blocks == 16
    pair.transport.is_holding = False
    pair.transport.let_go()
    pair.settle()
    pair.check()


def test_d_is_asked_for_a_bounded_number_of_prefixes(pair: Pair) -> None:
    pair.cache(PROMPT)
    hashes = tuple(block_hash for block_hash, _ in cached_blocks(pair.d.pool))[:2]
    for n in range(MAX_PREFIXES + 5):
        pair.to_d.send(
            PrefixRequest(request_id=f"r{n}", attempt=0, first_block=0, block_hashes=hashes)
        )
    pair.deliver()
    assert pair.lender.num_open_sessions() == MAX_PREFIXES
    senseless = [
        PrefixRequest(request_id="x", attempt=0, first_block=0, block_hashes=()),
        PrefixRequest(request_id="x", attempt=0, first_block=0, block_hashes=(b"short",)),
        PrefixRequest(request_id="x", attempt=0, first_block=NUM_BLOCKS, block_hashes=hashes),
    ]
    pair.to_d.messages.extend(senseless)
    pair.deliver()
    assert value(pair.d_metrics.late_messages) == len(senseless)
    pair.cut()
    pair.d.run()
    pair.d.assert_idle()


@pytest.mark.parametrize("num_cached", [7, 8])
def test_windows_are_read_whole_or_not_at_all(num_cached: int) -> None:
    pair = Pair(windows=(None, 3 * BLOCK_SIZE))
    pair.connect()
    pair.cache(PROMPT[: num_cached * BLOCK_SIZE])
    pair.ask("r0", PROMPT)
    pair.settle()
    expected_blocks = {"pulled": 8} if num_cached == 8 else {"not_cached": 8}
    assert pair.outcomes() == expected_blocks
    assert pair.p.tokens("r0") == [next_token(PROMPT)]
    pair.check()
    pair.close()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_in_any_order(pair: Pair, seed: int) -> None:
    """Small pools, many chats, faults at random: tokens are right, contents too, nothing leaks."""
    rng = random.Random(seed)
    chats = [[n, *PROMPT[: rng.randrange(8, 35)]] for n in range(4)]
    asked: dict[str, list[int]] = {}
    for _ in range(150):
        pair.transport.is_holding = rng.random() < 0.3
        chat = rng.choice(chats)
        match rng.randrange(12):
            case 0 | 1:
                pair.cache(chat)
            case 2 | 3 | 4:
                request_id = f"r{len(asked)}"
                asked[request_id] = [*chat, *range(rng.randrange(1, 9))]
                pair.ask(request_id, asked[request_id])
            case 5:
                pair.now += rng.choice([0.1, 0.3])
            case 6 if rng.random() < 0.3:
                pair.transport.is_holding = True  # what is held needs its peer
                pair.cut()
                pair.connect()
            case 7 if rng.random() < 0.3:
                rng.choice([fence_d, fence_p])(pair)
            case 8:
                pair.transport.let_go()
            case _:
                pair.p.step()
                pair.d.step()
                pair.deliver(rng.randrange(3))
        for request_id in list(pair.producer.held):
            pair.producer.release(request_id)
    pair.transport.is_holding = False
    pair.transport.let_go()
    pair.settle()
    for request_id, prompt in asked.items():
        assert pair.p.tokens(request_id) == [next_token(prompt)]
    pair.check()
