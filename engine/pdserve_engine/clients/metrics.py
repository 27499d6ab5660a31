"""Carries the engine process's metrics to the worker's /metrics."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pdserve_common.errors import PdserveError
from pdserve_engine.clients.messages import MetricFamily, MetricSample, MetricsSnapshot

# How long a scrape waits for the engine process; then it shows what it saw last.
FETCH_TIMEOUT_S = 1.0
# Up to Python 3.10 the two kinds of TimeoutError are unrelated.
_GIVEN_UP = (
    asyncio.TimeoutError,
    concurrent.futures.TimeoutError,
    concurrent.futures.CancelledError,
)


def take_snapshot(registry: CollectorRegistry) -> MetricsSnapshot:
    """Return what the registry holds."""
    return MetricsSnapshot(tuple(_family(metric) for metric in registry.collect()))


def _family(metric: Metric) -> MetricFamily:
    samples = tuple(MetricSample(s.name, s.labels, s.value) for s in metric.samples)
    return MetricFamily(metric.name, metric.documentation, metric.type, samples)


def _metric(family: MetricFamily) -> Metric:
    metric = Metric(family.name, family.documentation, family.type)
    for sample in family.samples:
        metric.add_sample(sample.name, dict(sample.labels), sample.value)
    return metric


class EngineProcessCollector(Collector):
    """Asks the engine process at every scrape."""

    def __init__(
        self, first: MetricsSnapshot, fetch: Callable[[], Awaitable[MetricsSnapshot]]
    ) -> None:
        """Must run inside the event loop, on which `fetch` will run."""
        self._last = first
        self._fetch = fetch
        self._loop = asyncio.get_running_loop()

    def describe(self) -> Iterator[Metric]:
        """The families' names, for the registry; on the event loop's thread."""
        yield from map(_metric, self._last.families)

    def collect(self) -> Iterator[Metric]:
        """On any thread but the event loop's."""
        # The engine process may be busy or gone, the loop closed: then show what there was.
        with contextlib.suppress(PdserveError, RuntimeError, *_GIVEN_UP):
            asked = asyncio.run_coroutine_threadsafe(self._ask(), self._loop)
            self._last = asked.result(2 * FETCH_TIMEOUT_S)
        yield from map(_metric, self._last.families)

    async def _ask(self) -> MetricsSnapshot:
        return await asyncio.wait_for(self._fetch(), FETCH_TIMEOUT_S)
