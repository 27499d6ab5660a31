"""A plugin of workers under a benchmark: no step takes less than $STEP_MS, as on a device.

The time is slept, so that the CPU is free for router, client and the other worker, which a larger
model on an accelerator would leave free as well.
"""

import functools
import os
import time
from typing import Any

from pdserve_engine.runner.run.model_runner import ModelRunner


def install() -> None:
    """Wrap the production code."""
    step_s = float(os.environ.get("STEP_MS", "0")) / 1e3
    execute = ModelRunner.execute_model

    @functools.wraps(execute)
    def execute_model(self: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        end = time.monotonic() + step_s
        output = execute(self, *args, **kwargs)
        time.sleep(max(0.0, end - time.monotonic()))
        return output

    ModelRunner.execute_model = execute_model  # type: ignore[method-assign]
