"""When a process says what it has to do."""

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdserve_common.metrics.services import total
from pdserve_common.observability.load_log import LoadLog


class Process:
    """Its time stands still but for `pass_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.num_tokens = 7.0
        self.is_busy = False
        self.rates: list[float] = []
        self.timers: list[Callable[[], None]] = []
        self.log = LoadLog(lambda: {"tokens": self.num_tokens}, self.report)
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("pdserve_common.observability.load_log.time", clock)
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", self.call_later)

    def call_later(self, delay_s: float, then: Callable[[], None]) -> object:
        self.timers.append(then)
        return then

    def report(self, per_s: Mapping[str, float]) -> bool:
        self.rates.append(per_s["tokens"])
        return self.is_busy

    def pass_s(self, seconds: float) -> None:
        """The timer comes when it comes."""
        self.now += seconds
        timers, self.timers = self.timers, []
        for then in timers:
            then()


async def test_lines_come_while_something_happens_and_one_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process(monkeypatch)
    process.pass_s(10)
    assert process.rates == []
    process.log.note()
    process.log.note()
    process.num_tokens += 30
    process.pass_s(10)
    assert process.rates == [3.0]
    process.pass_s(10)
    assert process.rates == [3.0, 0.0]
    process.pass_s(10)
    assert process.rates == [3.0, 0.0]
    process.log.note()
    process.num_tokens += 30
    process.pass_s(15)
    assert process.rates == [3.0, 0.0, 2.0]


async def test_a_process_that_hangs_with_work_goes_on_saying_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process(monkeypatch)
    process.is_busy = True
    process.log.note()
    for _ in range(3):
        process.pass_s(10)
    assert process.rates == [0.0, 0.0, 0.0]
    process.is_busy = False
    for _ in range(3):
        process.pass_s(10)
    assert len(process.rates) == 4


def test_totals_of_metrics() -> None:
    registry = CollectorRegistry()
    counter = Counter("c_total", "", ["a", "b"], registry=registry)
    counter.labels(a="1", b="1").inc(2)
    counter.labels(a="1", b="2").inc(3)
    counter.labels(a="2", b="2").inc(4)
    assert total(counter) == 9
    assert total(counter, a="1") == 5
    assert total(counter, a="3") == 0
    gauge = Gauge("g", "", registry=registry)
    gauge.set(1.5)
    assert total(gauge) == 1.5
    histogram = Histogram("h", "", registry=registry)
    histogram.observe(3)
    histogram.observe(4)
    assert total(histogram) == 7
