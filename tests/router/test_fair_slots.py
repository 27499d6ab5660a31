"""Slots that clients share: in turn, and never all of them for one."""

import asyncio
import random

import pytest

from pdserve_router.api.large_requests.fair_slots import FairSlots
from support.waiting import until


async def test_one_client_leaves_a_slot_to_others() -> None:
    slots = FairSlots(3, num_per_client=2)
    flood = [asyncio.create_task(slots.acquire("a")) for _ in range(5)]
    await until(lambda: sum(task.done() for task in flood) == 2)
    await asyncio.wait_for(slots.acquire("b"), 20)
    assert slots.num_waiting == 3
    slots.release("b")
    await asyncio.sleep(0)
    assert slots.num_waiting == 3, "the slot that is free is not for the one that has two"
    for _ in range(5):
        slots.release("a")
    await asyncio.gather(*flood)
    assert slots.num_waiting == 0


async def test_clients_that_wait_take_turns() -> None:
    slots = FairSlots(1, num_per_client=1)
    await slots.acquire("x")
    order: list[str] = []

    async def work(client: str) -> None:
        await slots.acquire(client)
        order.append(client)
        slots.release(client)

    tasks = [asyncio.create_task(work(client)) for client in "aaaabbc"]
    await until(lambda: slots.num_waiting == 7)
    slots.release("x")
    await asyncio.gather(*tasks)
    assert order == list("abcabaa")


@pytest.mark.parametrize("seed", range(5))
async def test_no_slot_is_lost_whoever_gives_up_when(seed) -> None:
    rng = random.Random(seed)
    slots = FairSlots(3, num_per_client=2)

    async def work() -> None:
        client = rng.choice("abc")
        await slots.acquire(client)
        try:
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
        finally:
            slots.release(client)

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.create_task(work()))
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
    await asyncio.wait(tasks, timeout=60)
    assert all(task.done() for task in tasks)
    for client in "aabb"[:3]:
        await asyncio.wait_for(slots.acquire(client), 20)
