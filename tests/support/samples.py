"""What `make test` runs of many cases; `make soak` runs the others."""

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def sampled(cases: Iterable[Any], *kept: Any) -> list[ParameterSet]:
    """Return the cases as parameters, all marked `soak` but those that are kept. A tuple is a case
    of several parameters.
    """
    cases = list(cases)
    assert all(case in cases for case in kept), f"{kept} are not all among {cases}"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in kept else pytest.mark.soak,
        )
        for case in cases
    ]


NUM_SEEDS = 10


def seeds(count: int, *, kept: int = NUM_SEEDS) -> list[ParameterSet]:
    """Return so many seeds of random cases, of which the first ones are not marked `soak`."""
    return sampled(range(count), *range(min(count, kept)))
