"""docs/metrics.md and what is declared say the same."""

import asyncio
import dataclasses
import logging
import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from pdserve_common.limits.names import LIMITS
from pdserve_common.metrics import services as metrics
from pdserve_common.metrics.kv_offload import KVOffloadMetrics
from pdserve_common.metrics.port import MetricsServer
from pdserve_common.metrics.stats_fields import figures_of
from pdserve_common.metrics.tensors import TensorMetrics
from pdserve_common.metrics.tracing import TracingMetrics
from pdserve_common.observability import defects
from pdserve_common.types.engine import DraftStats, EngineCoreOutput, SchedulerStats
from pdserve_engine.clients.stats import EngineStatsRecorder

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"\| `(?P<name>pdserve_\w+)` \|(?P<labels>[^|]*)\| [^|]+ \|")


class Recorder(CollectorRegistry):
    """Keeps what is registered: prometheus_client tells labels only once there are values."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[str, list[str]] = {}

    def register(self, collector: Collector) -> None:
        super().register(collector)
        if not isinstance(collector, MetricWrapperBase):
            return  # process_*, of the library
        (family,) = collector.describe()
        name = f"{family.name}_total" if family.type == "counter" else family.name
        self.labels[name] = list(collector._labelnames)


@pytest.fixture(scope="module")
def declared() -> dict[str, list[str]]:
    registry = Recorder()
    metrics.BuildMetrics(registry, role="router", version="0", model="m")
    metrics.LimitMetrics(registry)
    metrics.RouterMetrics(registry)
    metrics.EngineMetrics(registry)
    metrics.KVTransferMetrics(registry)
    metrics.GrammarMetrics(registry)
    KVOffloadMetrics(registry)
    defects.export(registry)
    TensorMetrics(registry)
    TracingMetrics(registry)
    return registry.labels


def test_every_metric_is_documented_with_its_labels_and_no_other(
    declared: dict[str, list[str]],
) -> None:
    rows = [match for line in DOCS.read_text().splitlines() if (match := ROW.fullmatch(line))]
    documented = {row["name"]: re.findall(r"`(\w+)`", row["labels"]) for row in rows}
    assert len(documented) == len(rows), "a metric has two rows"
    assert documented == declared


def test_the_text_names_only_metrics_that_exist(declared: dict[str, list[str]]) -> None:
    assert set(re.findall(r"`(pdserve_\w+)", DOCS.read_text())) <= declared.keys()


def test_what_the_library_exports_is_documented() -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    exported = {sample.name for family in registry.collect() for sample in family.samples}
    assert set(re.findall(r"`(process_\w+)`", DOCS.read_text())) == exported


def test_a_process_says_when_it_was_started_before_it_has_anything_else_to_say() -> None:
    server = MetricsServer("127.0.0.1", 0, CollectorRegistry(), probes={})
    try:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as response:
            assert "\nprocess_start_time_seconds " in response.read().decode()
    finally:
        server.close()


def test_the_waterfalls_stages_are_documented() -> None:
    from pdserve_router.requests.records.request_metrics import FIRST_ITL_STAGES, TTFT_STAGES

    text = DOCS.read_text()
    assert " + ".join(TTFT_STAGES) in text
    assert " + ".join(FIRST_ITL_STAGES) in text
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \| [^|]*\|$", text, re.MULTILINE)
    stages = [name for name in rows if not name.startswith("pdserve_")]
    assert sorted(stages) == sorted([*TTFT_STAGES, *FIRST_ITL_STAGES, "kv_transfer"])


def test_names_say_unit_and_kind(declared: dict[str, list[str]]) -> None:
    for name in declared:
        assert re.fullmatch(r"pdserve_[a-z]+(_[a-z]+)*", name)
        assert not name.endswith(("_ms", "_ns", "_count", "_sum"))


def test_a_pools_blocks_are_each_in_one_state() -> None:
    registry = CollectorRegistry()
    record = EngineStatsRecorder(metrics.EngineMetrics(registry))
    stats = SchedulerStats(num_total_blocks=10, num_free_blocks=6, num_cached_blocks=2)
    record(stats, (), has_computed=False)
    states = ("used", "cached", "free")
    values = [registry.get_sample_value("pdserve_kv_blocks", {"state": state}) for state in states]
    assert values == [4, 2, 4]


def test_each_figure_of_the_scheduler_has_its_metric() -> None:
    registry = CollectorRegistry()
    stats_metrics = metrics.StatsMetrics(SchedulerStats, registry)
    shown = {
        name: (figure, {"state": figure.state} if figure.state else {})
        for name, figure in figures_of(SchedulerStats).items()
    }

    def values() -> dict[str, float | None]:
        suffix = {"gauge": "", "counter": "", "histogram": "_sum"}
        return {
            name: registry.get_sample_value(figure.metric + suffix[figure.kind], labels)
            for name, (figure, labels) in shown.items()
        }

    assert set(values().values()) == {0}
    numbers = {field.name: 2 * n for n, field in enumerate(dataclasses.fields(SchedulerStats), 1)}
    numbers |= {"num_slots": 10, "num_running_reqs": 4, "num_total_blocks": 100}
    for stats in (SchedulerStats(num_preemptions=1), SchedulerStats(**numbers)):
        stats_metrics.record(stats, has_computed=False)
    expected = {name: getattr(stats, name) for name in shown}
    of_steps = {name: 0 for name, (figure, _) in shown.items() if figure.kind == "histogram"}
    assert values() == expected | of_steps
    stats_metrics.record(stats, has_computed=True)
    assert values() == expected


def test_every_limit_is_documented() -> None:
    text = DOCS.read_text()
    documented = set(re.findall(r"^\| `(\w+)` \| [^|]+ \|$", text, re.MULTILINE))
    assert {limit for limits in LIMITS.values() for limit in limits} <= documented


def test_slots_are_used_or_free() -> None:
    registry = CollectorRegistry()
    record = EngineStatsRecorder(metrics.EngineMetrics(registry))
    stats = SchedulerStats(num_slots=8, num_running_reqs=6, num_waiting_for_decode_reqs=3)
    record(stats, (), has_computed=False)
    states = [registry.get_sample_value("pdserve_slots", {"state": s}) for s in ("used", "free")]
    assert states == [6, 2]
    assert registry.get_sample_value("pdserve_slot_usage_ratio") == 0.75
    assert registry.get_sample_value("pdserve_requests_waiting_for_decode") == 3
    record(dataclasses.replace(stats, num_running_reqs=9), (), has_computed=False)
    states = [registry.get_sample_value("pdserve_slots", {"state": s}) for s in ("used", "free")]
    assert states == [8, 0], "a probe runs beside a full batch"
    assert registry.get_sample_value("pdserve_slot_usage_ratio") == 1


def test_drafts_are_counted_by_source_and_place() -> None:
    registry = CollectorRegistry()
    record = EngineStatsRecorder(metrics.EngineMetrics(registry))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"pdserve_spec_decode_num_{name}_total", labels)

    assert value("drafts", source="suffix") == 0
    assert value("accepted_tokens_per_pos", position="0") == 0
    for source, num_accepted in (("suffix", 2), ("suffix", 0), ("prediction", 1)):
        stats = DraftStats(source=source, num_draft_tokens=3, num_accepted_tokens=num_accepted)
        output = EngineCoreOutput(request_id="r", draft_stats=(stats,))
        record(SchedulerStats(), (output,), has_computed=False)
    assert value("drafts", source="suffix") == 2
    assert value("draft_tokens", source="suffix") == 6
    assert value("accepted_tokens", source="suffix") == 2
    assert value("accepted_tokens", source="prediction") == 1
    places = [value("accepted_tokens_per_pos", position=str(place)) for place in range(3)]
    assert places == [2, 1, 0]


async def test_a_worker_logs_its_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdserve_common.observability.load_log.INTERVAL_S", 0.05)
    caplog.set_level(logging.INFO)
    record = EngineStatsRecorder(metrics.EngineMetrics(CollectorRegistry()))
    stats = SchedulerStats(
        num_running_reqs=2,
        num_waiting_reqs=1,
        num_total_blocks=8,
        num_free_blocks=6,
        prefix_cache_queries=40,
        prefix_cache_hits=10,
        step_num_tokens=32,
    )
    outputs = [EngineCoreOutput(request_id="r", new_token_ids=(5, 6))]
    record(stats, outputs, has_computed=True)
    await asyncio.sleep(0.1)
    line = caplog.records[0]
    assert isinstance(line.args, dict)
    fields = dict(line.args)
    prompt, generated = (fields.pop(f"{kind}_tokens_per_s") for kind in ("prompt", "generation"))
    assert prompt / generated == pytest.approx(15, rel=1e-3)
    assert fields == {
        "num_running": 2,
        "num_waiting": 1,
        "kv_cache_usage_percent": 25.0,
        "prefix_cache_hit_percent": 25.0,
    }
    assert line.getMessage().startswith("load: 2 running, 1 waiting, KV usage 25.0%; per second ")
