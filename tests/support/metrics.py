"""What metrics say, by what prometheus_client makes of them for a scrape."""

import urllib.request
from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase

ANSWER_TIMEOUT_S = 60.0


def value(metric: MetricWrapperBase, *labels: str, suffix: str = "") -> float:
    """Return a gauge, a counter, or with `suffix` (_sum, _count) a part of a histogram, summed over
    what labels are left.
    """
    of = metric.labels(*labels) if labels else metric
    return sum(
        sample.value
        for family in of.collect()
        for sample in family.samples
        if sample.name.removeprefix(family.name) in ((suffix,) if suffix else ("", "_total"))
    )


def series(metrics: Iterable[Metric]) -> set[tuple[str, ...]]:
    """Return the names of metrics with the values of their labels, of each series there is."""
    return {
        (metric.name, *sample.labels.values())
        for metric in metrics
        for sample in metric.samples
        if not sample.name.endswith(("_created", "_bucket"))
    }


def scrape(url: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, float]:
    """Return a process's samples, by name with labels as Prometheus prints them. Raises OSError if
    it does not answer.
    """
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        return samples_of(response.read().decode())


def total(samples: dict[str, float], name: str) -> float:
    """Return a sample of a scrape, or the sum over the labels it has."""
    if name in samples:
        return samples[name]
    return sum(value for sample, value in samples.items() if sample.startswith(name + "{"))


def samples_of(text: str) -> dict[str, float]:
    """Return the samples of a scrape's text, by name with labels."""
    # Labels may have what Python takes for other ends of lines.
    lines = (line.rsplit(" ", 1) for line in text.split("\n") if line and line[0] != "#")
    return {sample: float(number) for sample, number in lines}
