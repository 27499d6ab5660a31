"""What is sent to a peer in order, and how much may wait."""

import asyncio

import pytest

from pdserve_common.rpc.send_queue import SendQueue


async def test_what_does_not_fit_closes_the_queue_and_says_so() -> None:
    queue = SendQueue[bytes](10, len)
    for message in (b"12345", b"6", b"7890"):
        queue.put(message)
    assert await queue.get() == b"12345"
    queue.put(b"abcde")
    assert not queue.closed_because, "there was room again"
    queue.put(b"f")
    assert await asyncio.wait_for(queue.wait_closed(), 10) == "too slow: 10 behind, at most 10"
    queue.put(b"late")
    queue.abort("later")
    assert await queue.get() is None
    assert queue.closed_because == "too slow: 10 behind, at most 10"


async def test_messages_are_counted_if_nobody_says_their_size() -> None:
    queue = SendQueue[str](2)
    for _ in range(2):
        queue.put("x" * 100)
    assert not queue.closed_because
    queue.put("")
    assert queue.closed_because


@pytest.mark.parametrize("waits", [False, True])
async def test_a_queue_that_is_finished_gives_what_it_has_first(waits: bool) -> None:
    queue = SendQueue[int](2)
    reading = asyncio.create_task(queue.get())
    if waits:
        await asyncio.sleep(0)
    queue.put(1)
    queue.finish()
    assert [await reading, await queue.get()] == [1, None]


async def test_whoever_waits_for_a_message_hears_of_the_end() -> None:
    queue = SendQueue[int](2)
    reading = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.abort("over")
    assert await asyncio.wait_for(reading, 10) is None
