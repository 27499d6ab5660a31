"""Figures of stats: a field says with itself which metric shows it.

`num_preemptions: int = counter("pdserve_preemptions_total", "...")` is all that a figure needs
besides its line in the .proto and its value: `wire/codec.py` converts it by its name, and
`metrics.StatsMetrics` registers and records its metric.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

_KEY = "figure"


@dataclass(frozen=True, slots=True)
class Figure:
    """The metric of a field, or the series of one with the label `state`."""

    kind: Literal["gauge", "counter", "histogram"]
    metric: str
    help: str
    state: str = ""
    buckets: Sequence[float] = ()


def gauge(metric: str, help: str, *, state: str = "") -> Any:
    """A field that is as it is now."""
    return _field(Figure("gauge", metric, help, state))


def counter(metric: str, help: str) -> Any:
    """A field that counts from the engine's start on."""
    return _field(Figure("counter", metric, help))


def histogram(metric: str, help: str, *, buckets: Sequence[float]) -> Any:
    """A field of a step: observed after each that ran the model."""
    return _field(Figure("histogram", metric, help, buckets=buckets))


def _field(figure: Figure) -> Any:
    return dataclasses.field(default=0, metadata={_KEY: figure})


def figures_of(stats: type) -> Mapping[str, Figure]:
    """Return a dataclass's figures by the attribute that has the value: of its fields, and of the
    properties in its `DERIVED`.
    """
    fields = {field.name: field.metadata.get(_KEY) for field in dataclasses.fields(stats)}
    declared = {name: figure for name, figure in fields.items() if figure is not None}
    return declared | dict(getattr(stats, "DERIVED", ()))
