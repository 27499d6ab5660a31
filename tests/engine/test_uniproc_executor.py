"""One rank behind the executor's calls, on the caller's thread and on one of its own."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve_engine.executor.uniproc import UniprocExecutor
from support.call_sites import CallSite, UnexpectedError, call_sites, each_site, fault_at

TIMEOUT_S = 30.0


class Output:
    """The step and the thread it was launched on, once the device has finished."""

    def __init__(self, step: object, device: "Device") -> None:
        self.step, self.where = step, threading.current_thread().name
        self._device = device

    def get_output(self) -> Any:
        assert self._device.may_finish.wait(TIMEOUT_S)
        if self.step in self._device.loses:
            raise RuntimeError(f"{self.step} is lost")
        return self.step, self.where


class Device:
    """Finishes what was launched when it may; loses what it is told to."""

    def __init__(self) -> None:
        self.loses: set[object] = set()
        self.may_finish = threading.Event()
        self.may_finish.set()


class Rank:
    """Launches steps; fails to where it is told to."""

    def __init__(self) -> None:
        self.fails: set[object] = set()
        self.computed: list[object] = []
        self.device = Device()
        self.has_launched = threading.Semaphore(0)

    def execute_model(self, step: object) -> Any:
        if step in self.fails:
            raise RuntimeError(f"{step} fails")
        self.computed.append(step)
        self.has_launched.release()
        return Output(step, self.device)


@pytest.fixture(params=[False, True])
def executor(request: pytest.FixtureRequest) -> Iterator[Any]:
    executor = UniprocExecutor(Rank(), async_scheduling=request.param)  # type: ignore[arg-type]
    yield executor
    assert executor.stop()


def test_steps_run_in_order_and_say_how_long_they_took(executor: Any) -> None:
    futures = [executor.submit(step) for step in range(5)]
    executed = [future.result() for future in futures]
    is_async = executor.max_concurrent_batches == 2
    where = "model" if is_async else threading.current_thread().name
    assert [step.output for step in executed] == [(step, where) for step in range(5)]
    assert all(step.duration_s >= 0 for step in executed)


def test_nothing_runs_behind_a_step_that_failed_until_it_recovers(executor: Any) -> None:
    executor.rank.fails = {"bad"}
    futures = [executor.submit(step) for step in ("good", "bad", "behind")]
    assert str(futures[1].exception()) == "bad fails"
    assert str(futures[2].exception()) == "the step before this one failed"
    assert executor.rank.computed == ["good"]
    executor.recover()
    assert executor.submit("next").result().output[0] == "next"


def test_a_step_is_launched_while_the_device_computes_the_one_before() -> None:
    rank = Rank()
    executor = UniprocExecutor(rank, async_scheduling=True)  # type: ignore[arg-type]
    rank.device.may_finish.clear()
    futures = [executor.submit(step) for step in ("first", "second")]
    assert all(rank.has_launched.acquire(timeout=TIMEOUT_S) for _ in futures)
    assert not any(future.done() for future in futures)
    rank.device.may_finish.set()
    assert [future.result(TIMEOUT_S).output[0] for future in futures] == ["first", "second"]
    assert executor.stop()


def test_nothing_is_launched_behind_a_step_that_the_device_lost(executor: Any) -> None:
    executor.rank.device.loses = {"lost"}
    assert str(executor.submit("lost").exception(TIMEOUT_S)) == "lost is lost"
    assert executor.submit("behind").exception(TIMEOUT_S) is not None
    executor.recover()
    assert executor.submit("next").result(TIMEOUT_S).output[0] == "next"


def test_an_executor_that_never_ran_anything_has_no_thread() -> None:
    before = set(threading.enumerate())
    executor = UniprocExecutor(Rank(), async_scheduling=True)  # type: ignore[arg-type]
    assert set(threading.enumerate()) == before
    assert executor.stop()


STEP = call_sites(UniprocExecutor, "_launch_for", "_launch", "_finish_for", "_finish")


@pytest.mark.parametrize("executor", [True], indirect=True)
@each_site(STEP)
def test_a_defect_at_any_call_is_the_end_of_its_step_alone(site: CallSite, executor: Any) -> None:
    with fault_at(site) as fault:
        error = executor.submit(1).exception(TIMEOUT_S)
        executor.recover()
    assert isinstance(error, UnexpectedError) == fault.has_raised
    assert executor.submit(2).result(TIMEOUT_S).output[0] == 2
    assert executor.failure() is None


@pytest.mark.parametrize("executor", [True, False], indirect=True)
def test_a_defect_behind_steps_is_the_executors(executor: Any) -> None:
    """An adapter that a runner has not taken, of which nobody would hear."""
    executor.rank.adapter_store = lambda behind_steps: behind_steps
    executor.rank.make_pool = lambda num_blocks, max_model_len: None
    executor.make_pool(1, max_model_len=1)
    executor.adapters([].pop)
    assert executor.submit(1).result(TIMEOUT_S).output[0] == 1
    assert "pop from empty list" in executor.failure()
    executor.adapters = None
