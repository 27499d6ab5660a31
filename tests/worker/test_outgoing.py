"""What is to be sent on one stream of a KvLink."""

import asyncio
import threading

import pytest

from pdserve_worker.kv_link import outgoing as outgoing_module
from pdserve_worker.kv_link.outgoing import Outgoing


async def test_messages_of_any_thread_come_in_order() -> None:
    outgoing: Outgoing[int] = Outgoing()
    outgoing.send(1)
    thread = threading.Thread(target=outgoing.send, args=(2,))
    thread.start()
    thread.join()
    assert [await outgoing.get(), await outgoing.get()] == [1, 2]


async def test_a_closed_stream_drops_what_is_not_sent_and_says_why_it_ended_first() -> None:
    outgoing: Outgoing[int] = Outgoing()
    outgoing.send(1)
    outgoing.close("first")
    outgoing.close("second")
    assert await asyncio.wait_for(outgoing.wait_closed(), 10) == "first"
    outgoing.send(2)
    await asyncio.sleep(0)
    assert await outgoing.get() is None
    assert outgoing.closed_because == "first"


async def test_who_waits_for_a_message_hears_of_the_end() -> None:
    outgoing: Outgoing[int] = Outgoing()
    waiting = asyncio.create_task(outgoing.get())
    await asyncio.sleep(0)
    outgoing.close("over")
    assert await asyncio.wait_for(waiting, 10) is None


async def test_a_peer_that_reads_too_slowly_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing_module, "MAX_UNSENT", 2)
    outgoing: Outgoing[int] = Outgoing()
    for message in range(3):
        outgoing.send(message)
    assert await asyncio.wait_for(outgoing.wait_closed(), 10) == "too slow: 2 behind, at most 2"
    assert await outgoing.get() is None


def test_what_comes_after_the_loop_is_nobodys() -> None:
    async def make() -> Outgoing[int]:
        return Outgoing()

    outgoing = asyncio.run(make())
    outgoing.send(1)
    outgoing.close("shutdown")
