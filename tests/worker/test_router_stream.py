"""How a worker notices a router that is gone, and that it is not when the worker itself hung."""

import asyncio
from typing import Any

import pytest

from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve_common.errors import ClientTooSlowError, DeadlineExceededError
from pdserve_worker.router_stream import RouterStream


class StuckContext:
    """Of a call whose other end does not read."""

    async def write(self, message: object) -> None:
        await asyncio.Event().wait()


class AttachedRouter:
    def open_stream(self) -> int:
        return 1


class World:
    """A stream on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        attachment: Any = AttachedRouter()
        context: Any = StuckContext()
        self.stream = RouterStream(attachment, context, clock=lambda: self.now)

    def tick_after(self, *seconds: float) -> None:
        for passed_s in seconds:
            self.now += passed_s
            self.stream.tick()


@pytest.fixture
def world() -> World:
    return World()


def test_a_silent_router_is_gone(world: World) -> None:
    world.tick_after(*[1.0] * 4)
    world.stream.note_heard()
    world.tick_after(*[1.0] * 5)
    with pytest.raises(DeadlineExceededError, match="router has been silent for 5 s"):
        world.tick_after(1.0)


def test_a_router_that_was_silent_while_the_worker_hung_is_not(world: World) -> None:
    world.tick_after(1.0, 60.0, 1.0, 60.0, 1.0)
    world.stream.note_heard()
    world.tick_after(60.0)


@pytest.mark.parametrize("hangs_s", [0.0, 60.0])
async def test_a_router_that_reads_nothing_is_too_slow_if_the_worker_could_write(
    world: World, hangs_s: float
) -> None:
    writing = asyncio.create_task(world.stream.write(service_pb2.AttachResponse()))
    await asyncio.sleep(0)
    for _ in range(10):
        world.stream.note_heard()
        world.tick_after(1.0 + hangs_s)
    world.stream.note_heard()
    with pytest.raises(ClientTooSlowError, match="router has read nothing for 10 s"):
        world.tick_after(1.0)
    writing.cancel()
