"""The highest rate at which a split of workers meets its objectives."""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from pdserve_client.advisor.simulator import Outcome, Split

# The search halves or doubles the rate at most so often.
MAX_DOUBLINGS = 12


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of ascending values, 0 for no values."""
    return ordered[math.ceil(len(ordered) * percent / 100) - 1] if ordered else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Upper limits in milliseconds; None: none."""

    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = 2000.0
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = 100.0

    def __post_init__(self) -> None:
        limits = [getattr(self, each.name) for each in fields(self)]
        if all(limit is None for limit in limits):
            raise ValueError("there is no objective: any rate would meet it")
        for each, limit in zip(fields(self), limits, strict=True):
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise ValueError(f"{each.name} is {limit}, must be a number above 0")

    def missed(self, latencies: dict[str, float]) -> list[str]:
        """Return the names of the objectives that these do not meet."""
        names = [each.name for each in fields(self)]
        limits = {name: getattr(self, name) for name in names}
        return [
            name for name, limit in limits.items() if limit is not None and latencies[name] > limit
        ]


def latencies_of(outcome: Outcome) -> dict[str, float]:
    """Return the percentiles that objectives limit, in milliseconds, by their names."""
    ttft, itl = sorted(outcome.ttft), sorted(outcome.itl)
    return {
        f"{name}_p{percent}_ms": percentile(values, percent) * 1e3
        for name, values in (("ttft", ttft), ("itl", itl))
        for percent in (50, 99)
    }


@dataclass(frozen=True, slots=True)
class RateResult:
    """A split at one rate."""

    rate: float
    outcome: Outcome
    latencies: dict[str, float]
    missed: list[str]

    @property
    def is_met(self) -> bool:
        return not self.missed


@dataclass(frozen=True, slots=True)
class Goodput:
    """The best of a split: `best` met the objectives, `above` is the lowest rate that did not.

    No `best`: not even the lowest rate that was tried. No `above`: even the highest.
    """

    split: Split
    best: RateResult | None
    above: RateResult | None

    @property
    def rate(self) -> float:
        """Requests a second; 0 if no rate met the objectives."""
        return 0.0 if self.best is None else self.best.rate


def at_rate(
    split: Split, rate: float, simulate: Callable[[float], Outcome], objectives: Objectives
) -> RateResult:
    """Run one rate."""
    outcome = simulate(rate)
    latencies = latencies_of(outcome)
    # One for each token: of many splits they would fill the memory.
    outcome.itl = array("d")
    return RateResult(rate, outcome, latencies, objectives.missed(latencies))


def find_goodput(
    split: Split,
    simulate: Callable[[float], Outcome],
    objectives: Objectives,
    *,
    start_rate: float,
    precision: float,
) -> Goodput:
    """Search from `start_rate` on, until the rates that meet and miss the objectives are within
    `precision` (a share) of each other.
    """

    def run(rate: float) -> RateResult:
        return at_rate(split, rate, simulate, objectives)

    result = run(start_rate)
    best, above = (result, None) if result.is_met else (None, result)
    for _ in range(MAX_DOUBLINGS):
        if best is not None and above is not None:
            break
        result = run(result.rate * (2 if above is None else 0.5))
        best, above = (result, above) if result.is_met else (best, result)
    while best is not None and above is not None and above.rate > best.rate * (1 + precision):
        result = run(math.sqrt(best.rate * above.rate))
        best, above = (result, above) if result.is_met else (best, result)
    return Goodput(split, best, above)
