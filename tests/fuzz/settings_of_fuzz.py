"""How many inputs a target tries: a few, always the same ones, or as many as `make fuzz` says."""

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings

# Set by `make fuzz`: that many times the examples, and other ones in every run.
FACTOR = int(os.environ.get("FUZZ_FACTOR", "0"))


def examples(count: int) -> Callable[[Any], Any]:
    """Decorate a target that tries `count` inputs in a short run.

    A failure is printed as small as it gets, with what reproduces it. Nothing is kept of former
    runs: a short one is to be the same everywhere.
    """
    return settings(
        max_examples=count * max(1, FACTOR),
        derandomize=FACTOR == 0,
        deadline=None,
        database=None,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
            HealthCheck.filter_too_much,
            HealthCheck.function_scoped_fixture,
        ],
    )
