"""How long a step may take before its worker counts as hung."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.request.sched_output import CachedRequestData, NewRequestData, SchedulerOutput
from pdserve_engine.request.watchdog import (
    KNOWN_BOUND_S,
    LINEAR_CONTEXT,
    MIN_BOUND_S,
    NUM_KNOWN_STEPS,
    RunningStep,
    StepWatch,
    work_of,
)
from support.clock import Clock
from support.engines import Client, launched
from support.steps import exchange_parts, held_steps
from support.waiting import until

TIMEOUT_S = 300.0
# A worker looks so often.
LOOK_S = 0.5


class World:
    """A watch, and what it is told of."""

    def __init__(self, **options: float) -> None:
        self.clock = Clock()
        self.watch = StepWatch(timeout_s=TIMEOUT_S, clock=self.clock, **options)

    def run(self, work: int | None, seconds: float) -> float | None:
        """Run a step for so long, or until the watch says that it has overrun what is returned."""
        step = RunningStep(self.clock.now_s, work)
        end_s = self.clock.now_s + seconds
        while self.clock.now_s < end_s:
            self.clock.now_s += min(LOOK_S, end_s - self.clock.now_s)
            if (bound_s := self.watch.overrun(step)) is not None:
                return bound_s
        self.watch.learn(work or 0, seconds)
        return None

    def bound_s(self, work: int | None) -> float:
        """How long a step runs that never ends."""
        started_s = self.clock.now_s
        bound_s = self.run(work, 10 * TIMEOUT_S)
        assert bound_s is not None
        assert bound_s < self.clock.now_s - started_s <= bound_s + LOOK_S
        return bound_s


def test_the_first_step_may_take_as_long_as_any() -> None:
    assert World().bound_s(work=1000) == TIMEOUT_S


def test_short_steps_make_a_step_hung_soon() -> None:
    world = World()
    world.run(work=1000, seconds=0.01)
    assert world.bound_s(work=1000) == MIN_BOUND_S


def test_a_bound_grows_with_what_a_step_computes() -> None:
    world = World()
    world.run(work=1000, seconds=2.0)
    assert world.bound_s(work=10) == 20.0
    assert world.bound_s(work=4000) == 80.0
    assert world.bound_s(work=100_000) == TIMEOUT_S


def test_the_longest_step_counts() -> None:
    world = World()
    for seconds in (2.0, 0.01, 0.01):
        world.run(work=1000, seconds=seconds)
    assert world.bound_s(work=1000) == 20.0


def test_of_ranks_a_step_is_hung_sooner_once_steps_are_known() -> None:
    """Also beside longer ones that were larger."""
    world = World(known_bound_s=KNOWN_BOUND_S)
    world.run(work=64_000, seconds=3.0)
    for _ in range(NUM_KNOWN_STEPS - 1):
        assert world.bound_s(work=1000) == 30.0
        world.run(work=1000, seconds=0.01)
    assert world.bound_s(work=1000) == world.bound_s(work=500) == KNOWN_BOUND_S
    assert world.bound_s(work=64_000) == 30.0
    world.run(work=1000, seconds=1.0)
    assert world.bound_s(work=1000) == 10.0
    world.watch.forget()
    assert world.bound_s(work=1000) == TIMEOUT_S


def test_of_ranks_the_slow_first_steps_are_forgotten() -> None:
    world = World(known_bound_s=KNOWN_BOUND_S)
    for seconds in (2.0, *[0.01] * NUM_KNOWN_STEPS):
        world.run(work=1000, seconds=seconds)
    assert world.bound_s(work=1000) == 20.0
    for _ in range(NUM_KNOWN_STEPS):
        world.run(work=1000, seconds=0.01)
    assert world.bound_s(work=1000) == KNOWN_BOUND_S
    assert world.bound_s(work=2**20) == 10 * 0.01 * 2**11, "as long as the known ones let expect"


def test_of_ranks_the_bound_grows_with_a_size_that_was_not_seen() -> None:
    world = World(known_bound_s=KNOWN_BOUND_S)
    for number in range(NUM_KNOWN_STEPS):
        world.run(work=1000 + number % 2 * 1000, seconds=0.5)
    assert world.bound_s(work=2000) == 5.0
    assert world.bound_s(work=4000) == 10.0
    assert world.bound_s(work=16_000) == 40.0


def test_what_is_no_step_has_the_whole_timeout() -> None:
    world = World()
    world.run(work=1000, seconds=0.01)
    assert world.bound_s(work=None) == TIMEOUT_S


def test_after_a_wake_up_nothing_is_known() -> None:
    world = World()
    world.run(work=1000, seconds=0.01)
    world.watch.forget()
    assert world.bound_s(work=1000) == TIMEOUT_S


def test_a_process_that_was_stopped_does_not_hang_and_has_learned_nothing() -> None:
    world = World()
    world.run(work=1000, seconds=0.01)
    step = RunningStep(world.clock.now_s, 1000)
    assert world.watch.overrun(step) is None
    world.clock.now_s += 10 * TIMEOUT_S
    assert world.watch.overrun(step) is None
    world.watch.learn(1000, 10 * TIMEOUT_S)
    assert world.bound_s(work=1000) == MIN_BOUND_S


def test_time_between_steps_is_not_the_next_ones() -> None:
    world = World()
    world.run(work=1000, seconds=0.01)
    world.clock.now_s += 2 * MIN_BOUND_S
    assert world.watch.overrun(None) is None
    assert world.run(work=1000, seconds=MIN_BOUND_S - 1) is None


def test_work_grows_with_tokens_and_with_what_they_look_back_on() -> None:
    new = NewRequestData(
        request_id="new",
        all_token_ids=(1,) * 40,
        num_prompt_tokens=40,
        sampling_params=SamplingParams(),
        seed=0,
        eos_token_id=None,
        block_ids=([],),
        num_computed_tokens=8,
    )
    cached = CachedRequestData(
        request_ids=["old"], new_block_ids=[None], num_computed_tokens=[5000]
    )
    scheduled = SchedulerOutput(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"new": 32, "old": 1},
        total_num_scheduled_tokens=33,
        finished_req_ids=frozenset(),
        preempted_req_ids=frozenset(),
    )
    assert work_of(scheduled) == 32 * (LINEAR_CONTEXT + 8) + LINEAR_CONTEXT + 5000


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_engine_learns_from_its_steps(
    make_model: Callable[..., Path], is_async: bool
) -> None:
    settings = {"engine_process": "inproc", "async_scheduling": is_async}
    async with launched(make_model(), kv_cache_memory_mib=8, **settings) as engine:
        client = Client(engine)
        await client.run("a", 1)  # what is slow once is over then
        exchange_parts(engine, step_watch=StepWatch(timeout_s=TIMEOUT_S, min_bound_s=0.1))
        await client.run("b", 1)
        with held_steps():
            client.add("c", 1)
            await until(engine.problem)
            assert "a step has taken more than" in (engine.problem() or "")
