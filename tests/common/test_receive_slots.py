"""Places to receive messages in: never too many, never idle while somebody waits, fair."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_common.errors import OverloadedError
from pdserve_common.limits.names import MADE_ROOM, TOO_MANY_MESSAGES
from pdserve_common.limits.receive_slots import ReceiveLimits, ReceiveSlot, ReceiveSlots

LIMITS = ReceiveLimits(
    num_slots=4,
    num_per_address=3,
    num_per_connection=2,
    num_waiting=8,
    timeout_s=3600,
    grace_s=3600,
)
CONNECTIONS = [f"ipv4:10.0.0.{host}:{port}" for host in (1, 2) for port in (1, 2, 3)]


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


class Walk:
    """Takes, gives back and gives up, and looks at who has what."""

    def __init__(self) -> None:
        self.limits_hit: list[str] = []
        self.slots = ReceiveSlots(LIMITS, self.limits_hit.append)
        self.taken: list[ReceiveSlot] = []
        self.waiting: dict[asyncio.Task[ReceiveSlot], str] = {}

    async def take(self, connection: str) -> None:
        task = asyncio.ensure_future(self.slots.take(connection))
        self.waiting[task] = connection
        await self.look()

    async def give_back(self, index: int) -> None:
        if self.taken:
            self.taken.pop(index % len(self.taken)).give_back()
        await self.look()

    async def give_up(self, index: int, *, has_slot: bool) -> None:
        """Cancel one that waits; with `has_slot` in the very moment in which it gets a slot."""
        if not self.waiting:
            return
        if has_slot and self.taken:
            self.taken.pop(index % len(self.taken)).give_back()
        list(self.waiting)[index % len(self.waiting)].cancel()
        await self.look()

    async def look(self) -> None:
        await settle()
        for task in [task for task in self.waiting if task.done()]:
            del self.waiting[task]
            if not task.cancelled() and task.exception() is None:
                self.taken.append(task.result())
        self.check()

    def check(self) -> None:
        connections = Counter(slot.connection for slot in self.taken)
        addresses = Counter(slot.connection.rpartition(":")[0] for slot in self.taken)
        assert self.slots.num_taken == len(self.taken) <= LIMITS.num_slots
        assert max(connections.values(), default=0) <= LIMITS.num_per_connection
        assert max(addresses.values(), default=0) <= LIMITS.num_per_address
        assert len(self.waiting) <= LIMITS.num_waiting
        for connection in self.waiting.values():
            assert (
                len(self.taken) == LIMITS.num_slots
                or connections[connection] == LIMITS.num_per_connection
                or addresses[connection.rpartition(":")[0]] == LIMITS.num_per_address
            ), f"{connection} waits for nothing"

    async def end(self) -> None:
        while self.waiting or self.taken:
            await self.give_back(0)
        assert self.slots.num_taken == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from(CONNECTIONS)),
        st.tuples(st.sampled_from(["give back", "give up", "too late"]), st.integers(0, 20)),
    ),
    max_size=60,
)


@given(steps=STEPS)
def test_any_walk_keeps_to_the_limits_and_leaves_no_slot_idle(steps: list) -> None:
    async def run() -> None:
        walk = Walk()
        for step, what in steps:
            if step == "take":
                await walk.take(what)
            elif step == "give back":
                await walk.give_back(what)
            else:
                await walk.give_up(what, has_slot=step == "too late")
        await walk.end()

    asyncio.run(run())


async def test_slots_go_round_among_connections() -> None:
    walk = Walk()
    greedy, modest = CONNECTIONS[0], CONNECTIONS[1]
    for _ in range(7):
        await walk.take(greedy)
    await walk.take(CONNECTIONS[2])  # the last one of this address
    await walk.take(modest)
    walk.taken.pop(0).give_back()
    await walk.look()
    assert walk.taken[-1].connection == greedy
    walk.taken.pop(0).give_back()
    await walk.look()
    assert walk.taken[-1].connection == modest, "behind one of the greedy one's five"
    await walk.end()


async def test_one_too_many_is_refused_with_a_time_to_come_back() -> None:
    walk = Walk()
    for _ in range(LIMITS.num_per_connection + LIMITS.num_waiting):
        await walk.take(CONNECTIONS[0])
    with pytest.raises(OverloadedError, match="at most 4 and 8") as error:
        await walk.slots.take(CONNECTIONS[0])
    assert error.value.retry_after_ms == 1000
    assert walk.limits_hit == [TOO_MANY_MESSAGES]
    await walk.end()


async def test_one_that_gets_no_slot_in_time_is_refused() -> None:
    limits = ReceiveLimits(num_slots=1, timeout_s=0.01)
    hits: list[str] = []
    slots = ReceiveSlots(limits, hits.append)
    slot = await slots.take("a:1")
    with pytest.raises(OverloadedError):
        await slots.take("b:1")
    slot.give_back()
    (await slots.take("c:1")).give_back()
    assert hits == [TOO_MANY_MESSAGES]


@pytest.mark.parametrize("num_per_address", [2, 1], ids=["all taken", "those of the address"])
async def test_the_oldest_makes_room_for_one_that_waits(num_per_address: int) -> None:
    hits: list[str] = []
    limits = ReceiveLimits(num_slots=2, num_per_address=num_per_address, grace_s=0.01)
    slots = ReceiveSlots(limits, hits.append)
    other = await slots.take("b:1") if num_per_address == 1 else None
    oldest = await slots.take("a:1")
    newest = await slots.take("a:2") if num_per_address == 2 else None
    waiting = asyncio.create_task(slots.take("a:3"))
    await oldest.revoked
    oldest.give_back()
    slot = await waiting
    assert MADE_ROOM in hits
    for taken in (other, newest, slot):
        if taken is not None:
            taken.give_back()
    assert slots.num_taken == 0


async def test_nobody_makes_room_for_a_connection_that_is_in_its_own_way() -> None:
    limits = ReceiveLimits(num_slots=9, num_per_connection=1, grace_s=0, timeout_s=0.1)
    slots = ReceiveSlots(limits, lambda limit: None)
    own, other = await slots.take("a:1"), await slots.take("b:1")
    with pytest.raises(OverloadedError):
        await slots.take("a:1")
    assert not own.revoked.done()
    assert not other.revoked.done()
