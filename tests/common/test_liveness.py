"""Time that a process was awake, by which it measures the silence of others."""

import asyncio

import pytest

from pdserve_common.rpc.liveness import AwakeClock, sleep_awake


class World:
    """A clock that ticks of the test are told of."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.awake = AwakeClock(1.0, clock=lambda: self.now)

    def tick_after(self, seconds: float) -> float:
        self.now += seconds
        return self.awake.tick()


@pytest.fixture
def world() -> World:
    return World()


def test_between_ticks_that_are_in_time_it_is_the_clock(world: World) -> None:
    for _ in range(4):
        assert world.tick_after(0.5) == 0.0
        world.now += 0.25
        assert world.tick_after(0.5) == 0.0
    assert world.awake() == 5.0


def test_what_a_tick_is_late_does_not_count(world: World) -> None:
    assert world.tick_after(61.0) == 60.0
    assert world.awake() == 1.0


def test_before_a_late_tick_it_stands_still(world: World) -> None:
    heard = []
    for _ in range(3):
        world.now += 20
        heard.append(world.awake())
    assert world.awake.tick() == 59.0
    assert heard == [1.0, 1.0, 1.0]
    assert world.awake() == 1.0, "nothing was heard later than now"


@pytest.mark.parametrize(("hangs_s", "num_sleeps"), [(0.0, 5), (60.0, 5)])
async def test_a_sleep_is_not_over_because_the_process_hung(
    world: World, monkeypatch: pytest.MonkeyPatch, hangs_s: float, num_sleeps: int
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        world.now += seconds + hangs_s

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await sleep_awake(4.5, clock=lambda: world.now)
    assert len(slept) == num_sleeps
    assert max(slept) == 1.0
