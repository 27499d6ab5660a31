"""What the chart asks Prometheus: the queries of panels, rules and autoscaling, and their names."""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import promql_parser
import yaml
from helm_chart import CHART, EVERYTHING, of_kind, render
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics import Histogram, MetricWrapperBase
from prometheus_client.registry import Collector

from pdserve_common.metrics import services as metrics
from pdserve_common.metrics.kv_offload import KVOffloadMetrics
from pdserve_common.metrics.tensors import TensorMetrics
from pdserve_common.metrics.tracing import TracingMetrics
from pdserve_common.observability import defects

DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
ALERTS = CHART / "alerts" / "pdserve.yaml"
# Grafana's variables as the dashboards have them by default. The chart's scrape interval is 15 s.
VARIABLES = {
    "$namespace": ".*",
    "$release": ".*",
    "$model": ".*",
    "$__rate_interval": "1m",
}
# The values of the variable $pool, which has no value for all.
POOLS = ("prefill", "decode")
# What Prometheus or whoever configures it adds to each series.
TARGET_LABELS = {"namespace", "release", "component", "pod"}


class Query(NamedTuple):
    """An expression, and whose it is, for people."""

    owner: str
    expr: str


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every panel but the rows, with the title of its dashboard."""
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            if panel["type"] != "row":
                yield dashboard["title"], panel


def variable_queries() -> Iterator[tuple[Query, str]]:
    """Yield for each variable that Prometheus fills the selector it asks, and the label."""
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
                assert asked is not None
                expr = _put_in(asked[1], VARIABLES)
                yield Query(f"{dashboard['title']}: {variable['name']}", expr), asked[2]


def panel_queries(**variables: str) -> list[Query]:
    """Return the queries of all panels with VARIABLES, or others of the same names, put in; those
    of one pool for each.
    """
    values = VARIABLES | {f"${name}": value for name, value in variables.items()}
    return [
        Query(
            f"{title}{f' ({pool})' if pool else ''}: {panel['title']} {target['refId']}",
            _put_in(target["expr"], values | {"$pool": pool}),
        )
        for title, panel in panels()
        for target in panel["targets"]
        for pool in (POOLS if "$pool" in target["expr"] else ("",))
    ]


def _put_in(expr: str, values: dict[str, str]) -> str:
    for variable, value in values.items():
        expr = expr.replace(variable, value)
    return expr


@functools.cache
def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def rule_name(rule: dict[str, Any]) -> str:
    return str(rule.get("alert") or rule["record"])


def rule_queries() -> list[Query]:
    return [Query(rule_name(rule), rule["expr"]) for rule in rules()]


def autoscaling_queries() -> list[Query]:
    """Return what KEDA asks, in the release `demo` in `serving`."""
    return [
        Query(f"{scaled['metadata']['name']} of KEDA", trigger["metadata"]["query"])
        for scaled in of_kind(render(EVERYTHING), "ScaledObject")
        for trigger in scaled["spec"]["triggers"]
    ]


def autoscaling_targets() -> list[tuple[str, str, float]]:
    """Return what KEDA asks: the pool, the query and its target for each Pod."""
    return [
        (
            scaled["metadata"]["labels"]["app.kubernetes.io/component"],
            trigger["metadata"]["query"],
            float(trigger["metadata"]["threshold"]),
        )
        for scaled in of_kind(render(EVERYTHING), "ScaledObject")
        for trigger in scaled["spec"]["triggers"]
    ]


def selectors(expr: str) -> Iterator[promql_parser.VectorSelector]:
    """Yield the selectors of an expression. Raises ValueError if it does not parse."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(expr), visit)
    yield from found


class _Recorder(CollectorRegistry):
    """Keeps the series that will be exported: there are none before there are values."""

    def __init__(self) -> None:
        super().__init__()
        self.series: dict[str, set[str]] = {}

    def register(self, collector: Collector) -> None:
        super().register(collector)
        if not isinstance(collector, MetricWrapperBase):
            return
        labels = set(collector._labelnames)
        (family,) = collector.describe()
        if isinstance(collector, Histogram):
            self.series[f"{family.name}_bucket"] = labels | {"le"}
            self.series[f"{family.name}_sum"] = self.series[f"{family.name}_count"] = labels
        else:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            self.series[name] = labels


def exported() -> dict[str, set[str]]:
    """Return the labels of all series that our processes export, those of targets included."""
    registry = _Recorder()
    metrics.BuildMetrics(registry, role="router", version="0", model="m")
    metrics.LimitMetrics(registry, "grpc", "http", "metrics")
    metrics.RouterMetrics(registry)
    metrics.EngineMetrics(registry)
    metrics.KVTransferMetrics(registry)
    metrics.GrammarMetrics(registry)
    defects.export(registry)
    TensorMetrics(registry)
    TracingMetrics(registry)
    KVOffloadMetrics(registry)
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    ProcessCollector(namespace="engine", registry=process)
    for family in process.collect():
        registry.series |= {sample.name: set() for sample in family.samples}
    return {name: labels | TARGET_LABELS for name, labels in registry.series.items()}
