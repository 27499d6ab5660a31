"""A worker's cache, told over a stream that loses, doubles and reorders, and the router's index."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_common.runtime import Runtime
from pdserve_common.types.kv import KVCacheEvents
from pdserve_router.workers.routing.kv_cache_follower import KVCacheFollower
from pdserve_router.workers.routing.prefix_index import PrefixIndex
from pdserve_worker import kv_cache_feed
from pdserve_worker.kv_cache_feed import CachedBlocks
from support import metrics
from support.prefix_lengths import num_cached

BLOCKS = range(40)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_feed, "MAX_BLOCKS", 4)
    monkeypatch.setattr(kv_cache_feed, "MAX_PENDING", 8)


class World:
    """A pool, the worker's feed of one stream, and a router that follows it."""

    def __init__(self) -> None:
        self.pool: set[int] = set()
        self.index = PrefixIndex[str](runtime=Runtime(), num_shards=4)
        self.cached = CachedBlocks()
        self.feed = self.cached.open_feed(lambda: None)
        self.follower = KVCacheFollower(self.index, "w", self._resync)
        self.sent: list[KVCacheEvents] = []

    def _resync(self) -> None:
        self.feed.restart()

    def step(self, removed: set[int], stored: set[int], *, is_cleared: bool = False) -> None:
        removed &= self.pool - stored
        self.pool = (set() if is_cleared else self.pool - removed) | stored
        self.cached.apply(
            KVCacheEvents(
                all_blocks_cleared=is_cleared,
                blocks_removed=tuple(removed),
                blocks_stored=tuple(stored),
            )
        )

    def send(self) -> None:
        events = self.feed.take()
        if events is not None:
            assert len(events.blocks_removed) + len(events.blocks_stored) <= 4 + len(BLOCKS)
            self.sent.append(events)

    def reattach(self) -> None:
        self.cached.close_feed(self.feed)
        self.feed = self.cached.open_feed(lambda: None)
        self.follower.on_stream()
        self.sent.clear()

    def deliver_all(self) -> None:
        while True:
            while self.sent:
                self.follower.apply(self.sent.pop(0))
            self.send()
            if not self.sent:
                return

    def indexed(self) -> set[int]:
        return {block for block in BLOCKS if num_cached(self.index, [block])}


some_blocks = st.sets(st.sampled_from(BLOCKS), max_size=6)
moves = st.lists(
    st.one_of(
        st.tuples(st.just("step"), some_blocks, some_blocks),
        st.tuples(st.just("clear"), some_blocks),
        st.tuples(
            st.sampled_from(["send", "deliver", "lose", "double", "swap", "reattach", "lost"])
        ),
    ),
    max_size=50,
)


def play(world: World, move: tuple[object, ...]) -> None:
    match move:
        case ("step", set() as removed, set() as stored):
            world.step(removed, set(stored))
        case ("clear", set() as stored):
            world.step(set(), set(stored), is_cleared=True)
        case ("send",):
            world.send()
        case ("deliver",) if world.sent:
            world.follower.apply(world.sent.pop(0))
        case ("lose",) if world.sent:
            world.sent.pop(0)
        case ("double",) if world.sent:
            world.follower.apply(world.sent[0])
        case ("swap",):
            world.sent[:2] = world.sent[:2][::-1]
        case ("reattach",):
            world.reattach()
        case ("lost",):
            world.follower.on_lost()
            assert not world.indexed()
            world.reattach()


@settings(max_examples=300, deadline=None)
@given(moves=moves)
def test_whatever_a_stream_does_to_events_the_index_heals(
    moves: list[tuple[object, ...]],
) -> None:
    async def run() -> None:
        world = World()
        for move in moves:
            play(world, move)
        world.deliver_all()
        # A loss shows when the next one comes; each gap is answered by all again.
        for block in (0, 1):
            world.step({block}, {block + 2})
            world.deliver_all()
        assert world.indexed() == world.pool
        assert not world.feed.is_behind
        world.cached.close_feed(world.feed)

    asyncio.run(run())


async def test_without_faults_nothing_is_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.step(set(), set(range(6)))
    world.deliver_all()
    world.step({0, 1}, {7})
    world.deliver_all()
    assert world.indexed() == {2, 3, 4, 5, 7}
    assert value(world.index, "resyncs") == 0
    assert not caplog.records
    world.step(set(), {8})
    world.send()
    world.sent.clear()
    world.step(set(), {9})
    world.send()
    world.follower.apply(world.sent.pop())
    assert not world.indexed(), "nothing is believed behind a gap"
    assert value(world.index, "resyncs") == 1
    assert "asking for all again" in caplog.text
    world.deliver_all()
    assert world.indexed() == {2, 3, 4, 5, 7, 8, 9}
    world.cached.close_feed(world.feed)


async def test_a_router_that_is_too_slow_is_told_all_again_in_bounded_memory() -> None:
    world = World()
    world.deliver_all()
    for start in range(0, 36, 4):
        world.step(set(range(start - 4, start)) & world.pool, set(range(start, start + 4)))
    assert world.feed.is_behind
    world.deliver_all()
    assert world.indexed() == world.pool == set(range(32, 36))
    assert value(world.index, "resyncs") == 0, "the worker knows itself"
    world.cached.close_feed(world.feed)


async def test_changes_that_nothing_carries_have_the_stream_woken() -> None:
    woken = asyncio.Event()
    cached = CachedBlocks()
    feed = cached.open_feed(woken.set)
    seq = 0
    while (told := feed.take()) is not None:
        seq = told.seq
    cached.apply(KVCacheEvents(blocks_stored=(1,)))
    await asyncio.wait_for(woken.wait(), 20)
    assert feed.take() == KVCacheEvents(seq=seq + 1, blocks_stored=(1,))
    cached.close_feed(feed)
    cached.apply(KVCacheEvents(blocks_stored=(2,)))
    assert feed.take() is None, "closed"


def value(index: PrefixIndex[str], name: str) -> float:
    return metrics.value(getattr(index.metrics, name))
