"""Turns of tenants on generated arrivals, and what fairness promises of them."""

import asyncio
import gc
import weakref
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_common.errors import DeadlineExceededError
from pdserve_common.runtime import Runtime
from pdserve_router.requests.tenants.fair_queue import FairQueue

SHARES = {"a": 1.0, "b": 1.0, "c": 3.0}
ARRIVALS = st.lists(
    st.tuples(st.sampled_from([*SHARES]), st.integers(1, 50), st.integers(0, 2)), max_size=40
)


class Tenant(str):
    """One that can be referred to weakly."""


@dataclass
class Arrival:
    """Some work of a tenant, and how many others had begun when it came and when it began."""

    tenant: str
    work: int
    came: int
    began: int = -1
    task: "asyncio.Task[None] | None" = None


@dataclass
class Bench:
    """A queue, what has come to it and what has begun."""

    window: float
    arrivals: list[Arrival] = field(default_factory=list)
    begun: list[Arrival] = field(default_factory=list)
    under_way: list[Arrival] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = FairQueue(lambda: self.window, Runtime())

    async def come(self, tenant: str, work: int) -> None:
        arrival = Arrival(tenant, work, came=len(self.begun))
        self.arrivals.append(arrival)
        arrival.task = asyncio.create_task(self._begin(arrival))
        await settle()

    async def _begin(self, arrival: Arrival) -> None:
        await self.queue.begin(arrival.tenant, arrival.work, share=SHARES[arrival.tenant])
        arrival.began = len(self.begun)
        self.begun.append(arrival)
        self.under_way.append(arrival)

    async def end(self) -> None:
        if self.under_way:
            self.queue.end(self.under_way.pop(0).work)
            await settle()

    def assert_busy(self) -> None:
        """Nobody waits while there is room."""
        waiting = [each for each in self.arrivals if each.began < 0]
        work = sum(each.work for each in self.under_way)
        assert not waiting or work >= self.window > 0


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def play(window: int, arrivals: Sequence[tuple[str, int, int]]) -> Bench:
    bench = Bench(window)
    for tenant, work, num_ended in arrivals:
        await bench.come(tenant, work)
        bench.assert_busy()
        for _ in range(num_ended):
            await bench.end()
            bench.assert_busy()
    while bench.under_way:
        await bench.end()
        bench.assert_busy()
    assert len(bench.begun) == len(bench.arrivals)
    return bench


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 100), ARRIVALS)
def test_nobody_waits_for_want_of_room_and_tenants_keep_their_order(
    window: int, arrivals: Sequence[tuple[str, int, int]]
) -> None:
    bench = asyncio.run(play(window, arrivals))
    for tenant in SHARES:
        own = [each.began for each in bench.arrivals if each.tenant == tenant]
        assert own == sorted(own)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 100), ARRIVALS)
def test_a_tenants_first_is_behind_one_of_each_other_tenant_at_most(
    window: int, arrivals: Sequence[tuple[str, int, int]]
) -> None:
    bench = asyncio.run(play(window, arrivals))
    firsts = {each.tenant: each for each in reversed(bench.arrivals)}
    for first in firsts.values():
        between = [each.tenant for each in bench.begun[first.came : first.began]]
        assert len(between) == len(set(between))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 50), min_size=5, max_size=20),
    st.lists(st.integers(1, 50), min_size=5, max_size=20),
    st.lists(st.integers(1, 50), min_size=5, max_size=20),
)
def test_while_all_wait_each_gets_its_share(a: list[int], b: list[int], c: list[int]) -> None:
    async def run() -> Bench:
        bench = Bench(window=1)
        for tenant, works in (("a", a), ("b", b), ("c", c)):
            for work in works:
                await bench.come(tenant, work)
        while bench.under_way:
            await bench.end()
        return bench

    bench = asyncio.run(run())
    left = {tenant: len(works) for tenant, works in (("a", a), ("b", b), ("c", c))}
    got: defaultdict[str, float] = defaultdict(float)
    # The first one found nobody there.
    left["a"] -= 1
    for each in bench.begun[1:]:
        left[each.tenant] -= 1
        got[each.tenant] += each.work / SHARES[each.tenant]
        if not all(left.values()):
            break
        # The theorem: no two differ by more than their largest pieces.
        for one in SHARES:
            for other in SHARES:
                bound = 50 / SHARES[one] + 50 / SHARES[other]
                assert abs(got[one] - got[other]) <= bound


# Tenant, work, how many ends follow it, and after how many more arrivals it leaves if it waits yet.
LEAVERS = st.lists(
    st.tuples(
        st.sampled_from([*SHARES]),
        st.integers(1, 50),
        st.integers(0, 2),
        st.none() | st.integers(0, 5),
    ),
    max_size=40,
)


async def assert_like_new(queue: FairQueue) -> None:
    """Nothing is under way, and nobody is remembered for what it had: tenants with as much work
    have their turns as they come, which they would not behind the tags of the past.
    """
    order: list[str] = []

    async def begin(tenant: str) -> None:
        await queue.begin(tenant, 1)
        order.append(tenant)

    tasks = []
    for tenant in ("a", "a", "b", "c"):
        tasks.append(asyncio.create_task(begin(tenant)))
        await settle()
    assert order == ["a"]
    for _ in SHARES:
        queue.end(1)
        await settle()
    assert order == ["a", "a", "b", "c"]
    queue.end(1)


async def play_with_leavers(
    arrivals: Sequence[tuple[str, int, int, int | None]], gone: Collection[int]
) -> tuple[list[int], set[int]]:
    """Play without the `gone`, while somebody always waits; return in which order the others have
    begun, and who has left.
    """
    bench = Bench(window=1)
    for _ in range(2 * len(arrivals) + 2):
        await bench.come("a", 1)
    came: dict[int, Arrival] = {}
    left: set[int] = set()
    for number, (tenant, work, num_ended, _) in enumerate(arrivals):
        if number not in gone:
            await bench.come(tenant, work)
            came[number] = bench.arrivals[-1]
        for each, arrival in came.items():
            leaves = arrivals[each][3]
            if leaves is not None and each + leaves == number and arrival.began < 0:
                assert arrival.task is not None
                arrival.task.cancel()
                left.add(each)
        await settle()
        for _ in range(num_ended):
            await bench.end()
    gone_again = {id(came[number]) for number in left}
    waiting = [a for a in bench.arrivals if a.began < 0 and id(a) not in gone_again]
    assert bench.queue.waiting == sum(each.work for each in waiting)
    bench.arrivals = [each for n, each in came.items() if n not in left]
    while bench.under_way:
        await bench.end()
    assert bench.queue.waiting == 0
    await assert_like_new(bench.queue)
    numbers = {id(arrival): number for number, arrival in came.items()}
    return [numbers.get(id(each), -1) for each in bench.begun], left


@settings(deadline=None, max_examples=100)
@given(LEAVERS)
def test_who_leaves_is_as_if_it_had_not_come(
    arrivals: Sequence[tuple[str, int, int, int | None]],
) -> None:
    with_leavers, left = asyncio.run(play_with_leavers(arrivals, ()))
    without, left_too = asyncio.run(play_with_leavers(arrivals, left))
    assert with_leavers == without
    assert not left_too


async def test_a_tenant_of_short_deadlines_gets_its_share() -> None:
    queue = FairQueue(lambda: 1.0, Runtime())
    await queue.begin("a", 5)
    order: list[str] = []

    async def begin(tenant: str) -> None:
        await queue.begin(tenant, 5)
        order.append(tenant)

    patient = [asyncio.create_task(begin("a")) for _ in range(10)]
    for _ in range(10):
        leaving = [asyncio.create_task(begin("b")) for _ in range(50)]
        await settle()
        for task in leaving:
            task.cancel()
        await settle()
        assert queue.waiting == 5 * len(patient)
    stays = asyncio.create_task(begin("b"))
    await settle()
    queue.end(5)
    queue.end(5)
    await stays
    assert sorted(order) == ["a", "b"]
    for _ in range(10):
        queue.end(5)
        await settle()
    assert len(order) == 11


async def test_who_is_cancelled_or_late_takes_nothing() -> None:
    queue = FairQueue(lambda: 1.0, Runtime())
    await queue.begin("a", 5)
    waiting = [asyncio.create_task(queue.begin("a", 5)) for _ in range(3)]
    await settle()
    waiting[0].cancel()
    with pytest.raises(DeadlineExceededError):
        await queue.begin("b", 1, timeout_s=0.01)
    queue.end(5)
    # It has its turn and is cancelled before it knows.
    waiting[1].cancel()
    await settle()
    assert [task.cancelled() for task in waiting] == [True, True, False]
    assert waiting[2].done()
    queue.end(5)
    await queue.begin("b", 1, timeout_s=0.0)
    # That alone is under way.
    last = asyncio.create_task(queue.begin("c", 1))
    await settle()
    assert not last.done()
    queue.end(1)
    await asyncio.wait_for(last, 20)


async def test_a_tenant_is_not_remembered_when_nobody_waits() -> None:
    queue = FairQueue(lambda: 1.0, Runtime())
    await queue.begin("a", 1)
    tenant = Tenant("b")
    kept = weakref.ref(tenant)
    waiting = asyncio.create_task(queue.begin(tenant, 1))
    del tenant
    await settle()
    assert kept() is not None
    queue.end(1)
    await waiting
    del waiting
    gc.collect()
    assert kept() is None


async def test_without_a_window_one_is_let_through_at_a_time() -> None:
    queue = FairQueue(lambda: 0.0, Runtime())
    await queue.begin("a", 5)
    other = asyncio.create_task(queue.begin("b", 5))
    await settle()
    assert not other.done()
    queue.end(5)
    await other
