"""One rank behind the executor's calls, on the caller's thread and on one of its own."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pdserve_engine.executor.uniproc import UniprocExecutor


class Rank:
    """Answers with the step and the thread it runs on; fails what it is told to."""

    def __init__(self) -> None:
        self.fails: set[object] = set()
        self.computed: list[object] = []

    def execute_model(self, step: object) -> Any:
        if step in self.fails:
            raise RuntimeError(f"{step} fails")
        self.computed.append(step)
        return step, threading.current_thread().name


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


def test_an_executor_that_never_ran_anything_has_no_thread() -> None:
    before = set(threading.enumerate())
    executor = UniprocExecutor(Rank(), async_scheduling=True)  # type: ignore[arg-type]
    assert set(threading.enumerate()) == before
    assert executor.stop()
