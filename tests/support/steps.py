"""What happens in the steps of this process's engines: they hang, take long, or fail."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdserve_engine.assemble import LoadedEngine
from pdserve_engine.executor.uniproc import UniprocExecutor
from pdserve_engine.request.sched_output import AsyncModelRunnerOutput, SchedulerOutput
from pdserve_engine.runner.rank import Rank
from pdserve_engine.runner.run.input_batch import InputBatch

TIMEOUT_S = 120.0


@contextlib.contextmanager
def before_steps(act: Callable[[SchedulerOutput], object]) -> Iterator[None]:
    """Within it `act` is called in the midst of each step, before it is computed; it may raise."""
    execute = Rank.execute_model

    def execute_after(rank: Rank, scheduled: SchedulerOutput) -> AsyncModelRunnerOutput:
        act(scheduled)
        return execute(rank, scheduled)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rank, "execute_model", execute_after)
        yield


def batch_of(executor: UniprocExecutor) -> InputBatch:
    """Return the rows that its model runner keeps."""
    return executor.rank.runner.input_batch


def exchange_parts(engine: Any, **parts: Any) -> None:
    """Give an engine of this process other parts (LoadedEngine's fields) than it has."""
    engine._loaded = dataclasses.replace(loaded_part(engine), **parts)


def loaded_part(engine: Any) -> LoadedEngine:
    """Return what an engine client of this process has loaded."""
    loaded: LoadedEngine = engine._loaded
    return loaded


class HeldStep:
    """A step that begins and does not end."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, scheduled: SchedulerOutput) -> None:
        self.has_begun.set()
        assert self.may_end.wait(TIMEOUT_S)


@contextlib.contextmanager
def held_steps() -> Iterator[HeldStep]:
    """Within it steps hang, until `may_end` is set; then they go on."""
    held = HeldStep()
    with before_steps(held):
        try:
            yield held
        finally:
            held.may_end.set()


@contextlib.contextmanager
def slowed_steps(seconds: float = 0.02) -> Iterator[None]:
    """Dozens of tokens take far longer than anything else, also on a busy machine."""
    with before_steps(lambda scheduled: time.sleep(seconds)):
        yield
