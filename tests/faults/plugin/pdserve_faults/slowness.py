"""A worker whose steps take longer, as those of a larger model would."""

import functools
import time
from typing import Any

from pdserve_engine.core.scheduler import Scheduler


class Slowness:
    """How much longer a step takes."""

    def __init__(self) -> None:
        self.step_s = 0.0

    def down(self, step_s: float) -> None:
        """Let every step take so much longer from now on."""
        self.step_s = step_s


def install() -> Slowness:
    """Wrap the production code; return what tells it how slow it is."""
    slowness, schedule = Slowness(), Scheduler.schedule

    @functools.wraps(schedule)
    def schedule_late(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        time.sleep(slowness.step_s)
        return schedule(self, *args, **kwargs)

    Scheduler.schedule = schedule_late  # type: ignore[method-assign]
    return slowness
