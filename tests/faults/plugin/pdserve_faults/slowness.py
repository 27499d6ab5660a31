"""A worker whose steps take longer, as those of a larger model would, or do not end."""

import functools
import threading
import time
from typing import Any

from pdserve_engine.core.scheduler import Scheduler
from pdserve_engine.runner.run.model_runner import ModelRunner

# Longer than any test looks on.
MAX_HANG_S = 120.0


class Slowness:
    """How much longer a step takes, and whether it ends at all."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.may_end = threading.Event()
        self.reset()

    def down(self, step_s: float) -> None:
        """Let every step take so much longer from now on."""
        self.step_s = step_s

    def hang(self) -> None:
        """Let the next step hang until `reset`; other threads go on."""
        self.may_end.clear()

    def reset(self) -> None:
        """Be as fast as one is."""
        self.step_s = 0.0
        self.may_end.set()


def install() -> Slowness:
    """Wrap the production code; return what tells it how slow it is."""
    slowness, schedule, execute = Slowness(), Scheduler.schedule, ModelRunner.execute_model

    @functools.wraps(schedule)
    def schedule_late(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        time.sleep(slowness.step_s)
        return schedule(self, *args, **kwargs)

    @functools.wraps(execute)
    def execute_or_hang(self: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        slowness.may_end.wait(MAX_HANG_S)
        return execute(self, *args, **kwargs)

    Scheduler.schedule = schedule_late  # type: ignore[method-assign]
    ModelRunner.execute_model = execute_or_hang  # type: ignore[method-assign]
    return slowness
