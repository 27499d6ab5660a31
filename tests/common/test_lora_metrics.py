"""Requests by adapter: names are many, series are few."""

import gc
import weakref

from prometheus_client import CollectorRegistry

from pdserve_common.metrics import lora as lora_metrics
from pdserve_common.metrics.lora import MAX_SHOWN, OTHER, RouterLoraMetrics

NAME = "pdserve_lora_requests_total"


class Name(str):
    """One that can be referred to weakly."""


def series(registry: CollectorRegistry) -> dict[str, float]:
    samples = [s for family in registry.collect() for s in family.samples if s.name == NAME]
    return {sample.labels["adapter"]: sample.value for sample in samples}


def test_the_most_used_have_series_and_none_is_counted_twice() -> None:
    registry = CollectorRegistry()
    requests = RouterLoraMetrics(registry).requests
    assert series(registry) == {OTHER: 0}
    num = 0
    for number in range(MAX_SHOWN + 10):
        for _ in range(2):
            requests.inc(f"adapter {number}")
            num += 1
    shown = series(registry)
    assert len(shown) == MAX_SHOWN + 1
    assert shown["adapter 0"] == 2
    assert shown[OTHER] == 20
    before = shown[OTHER]
    for _ in range(5):
        requests.inc("adapter 55")
        num += 1
    shown = series(registry)
    assert len(shown) == MAX_SHOWN + 1
    assert shown["adapter 55"] == 5
    assert shown[OTHER] >= before
    assert sum(shown.values()) == num


def test_names_that_come_and_go_for_ever_take_no_memory() -> None:
    registry = CollectorRegistry()
    requests = RouterLoraMetrics(registry).requests
    num = 5 * lora_metrics.MAX_COUNTED
    kept: weakref.WeakSet[Name] = weakref.WeakSet()
    for number in range(num):
        name = Name(number)
        kept.add(name)
        requests.inc(name)
        requests.inc("always")
    del name
    gc.collect()
    assert MAX_SHOWN < len(kept) <= lora_metrics.MAX_COUNTED
    shown = series(registry)
    assert len(shown) == MAX_SHOWN + 1
    assert shown["always"] == num
    assert sum(shown.values()) == 2 * num


def test_an_adapter_may_be_called_as_the_others_are() -> None:
    registry = CollectorRegistry()
    requests = RouterLoraMetrics(registry).requests
    requests.begin(OTHER)
    requests.inc(OTHER)
    for number in range(MAX_SHOWN):
        for _ in range(2):
            requests.inc(f"adapter {number}")
    requests.inc("rare")
    shown = series(registry)
    assert shown[OTHER] == 2
    assert sum(shown.values()) == 2 * MAX_SHOWN + 2
