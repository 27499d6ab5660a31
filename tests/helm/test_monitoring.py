"""Dashboards, alerts and autoscaling ask only for what is exported, and say what to do."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import CHART, ROOT, of_kind, render
from monitoring import ALERTS as ALERTS_FILE
from monitoring import (
    DASHBOARDS,
    TARGET_LABELS,
    Query,
    autoscaling_queries,
    exported,
    panel_queries,
    panels,
    rule_name,
    rule_queries,
    rules,
    selectors,
    variable_queries,
)

import update_chart
import update_dashboards

OPERATIONS = ROOT / "docs" / "operations"
RUNBOOKS = OPERATIONS / "runbooks.md"
ALERTS = [rule for rule in rules() if "alert" in rule]
RECORDED = {rule["record"] for rule in rules() if "record" in rule}
# Of Prometheus itself.
BUILT_IN = {
    "up": TARGET_LABELS,
    "ALERTS": TARGET_LABELS | {"alertname", "alertstate", "severity"},
}
MAX_WIDTH = 24
# Grafana's own variables.
GRAFANAS = {"__rate_interval", "__all"}


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    recorded = {name: {"namespace", "release", "model"} for name in RECORDED}
    return exported() | recorded | BUILT_IN


def test_the_dashboards_are_what_the_generator_writes() -> None:
    assert {path.name: path.read_text() for path in DASHBOARDS} == update_dashboards.rendered()


@pytest.mark.parametrize(
    "query",
    [*panel_queries(), *rule_queries()],
    ids=lambda query: query.owner,
)
def test_queries_ask_for_series_and_labels_that_exist(
    query: Query, series: dict[str, set[str]]
) -> None:
    assert_known(query, series)


def test_autoscaling_asks_for_series_and_labels_that_exist(series: dict[str, set[str]]) -> None:
    queries = autoscaling_queries()
    assert len(queries) == 7
    for query in queries:
        assert_known(query, series)


def test_variables_are_filled_from_series_and_labels_that_exist(
    series: dict[str, set[str]],
) -> None:
    asked = list(variable_queries())
    assert len(asked) == 3 * len(DASHBOARDS)
    for query, label in asked:
        assert_known(query, series)
        assert all(label in series[str(selector.name)] for selector in selectors(query.expr))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_use_no_variable_that_they_do_not_have(path: Path) -> None:
    text = path.read_text()
    declared = {variable["name"] for variable in json.loads(text)["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", text)) <= declared | GRAFANAS


def assert_known(query: Query, series: dict[str, set[str]]) -> None:
    found = list(selectors(query.expr))
    assert found
    for selector in found:
        assert selector.name in series, f"{query.owner}: {selector.name} is not exported"
        used = {matcher.name for matcher in selector.matchers.matchers}
        assert used <= series[selector.name], f"{query.owner}: {selector.name} has no such label"


@pytest.mark.parametrize(
    ("expr", "problem"),
    [
        ("rate(pdserve_request_total[1m])", "is not exported"),
        ('pdserve_workers{stage="ready"}', "has no such label"),
    ],
)
def test_what_does_not_exist_is_found(expr: str, problem: str, series: dict[str, set[str]]) -> None:
    with pytest.raises(AssertionError, match=problem):
        assert_known(Query("a panel", expr), series)


def test_every_metric_is_on_a_dashboard(series: dict[str, set[str]]) -> None:
    """But for those of the process, of which a few are."""
    shown = {selector.name for query in panel_queries() for selector in selectors(query.expr)}
    families = {re.sub("_(bucket|sum|count)$", "", str(name)) for name in shown}
    declared = {re.sub("_(bucket|sum|count)$", "", name) for name in exported()}
    assert {name for name in declared - families if name.startswith("pdserve_")} == set()


def test_the_budget_of_every_objective_is_on_a_dashboard() -> None:
    shown = {str(selector.name) for query in panel_queries() for selector in selectors(query.expr)}
    ratios = {name for name in RECORDED if "_over_target:" in name}
    assert {of_objective(name) for name in ratios & shown} == {of_objective(n) for n in ratios}


def of_objective(recorded: str) -> str:
    return recorded.split(":")[1]


@pytest.mark.parametrize(("title", "panel"), list(panels()), ids=lambda value: str(value)[:40])
def test_panels_say_what_they_show_and_what_to_do(title: str, panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > 40
    assert panel["fieldConfig"]["defaults"]["unit"]
    place = panel["gridPos"]
    assert place["x"] + place["w"] <= MAX_WIDTH
    assert all("legendFormat" in target for target in panel["targets"])


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap(path: Path) -> None:
    places = [panel["gridPos"] for panel in json.loads(path.read_text())["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))


@pytest.mark.parametrize("alert", ALERTS, ids=rule_name)
def test_alerts_have_a_severity_and_a_runbook(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("page", "ticket")
    annotations = alert["annotations"]
    assert annotations.keys() == {"summary", "description", "runbook"}
    page, anchor = annotations["runbook"].split("#")
    assert ROOT / page == RUNBOOKS
    assert anchor == rule_name(alert).lower()


def test_runbooks_are_of_the_alerts_there_are() -> None:
    sections = re.findall(r"^## (Pdserve\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert sorted(sections) == sorted({rule_name(alert) for alert in ALERTS})


def test_objectives_are_boundaries_of_buckets() -> None:
    from pdserve_common.metrics.buckets import TOKEN_BUCKETS, TTFT_BUCKETS

    limits = {
        (str(selector.name), float(matcher.value))
        for query in rule_queries()
        for selector in selectors(query.expr)
        for matcher in selector.matchers.matchers
        if matcher.name == "le"
    }
    assert limits == {
        ("pdserve_time_to_first_token_seconds_bucket", 2.5),
        ("pdserve_first_inter_token_seconds_bucket", 0.5),
        ("pdserve_time_per_output_token_seconds_bucket", 0.1),
    }
    assert 2.5 in TTFT_BUCKETS
    assert {0.5, 0.1} <= set(TOKEN_BUCKETS)


def test_the_operators_pages_name_only_what_exists(series: dict[str, set[str]]) -> None:
    names = {rule_name(rule) for rule in rules()} | series.keys()
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in names}
    for page in OPERATIONS.glob("*.md"):
        text = page.read_text()
        named = set(re.findall(r"\b(?:pdserve_[a-z_]+|Pdserve\w+)\b(?!/|\.\w)", text))
        unknown = named - families - names
        assert not unknown, f"{page.name}: {unknown}"


def test_the_operators_pages_quote_what_processes_say() -> None:
    """Plain words between backticks, a number or N for what differs."""
    code = "\n".join(path.read_text() for path in ROOT.glob("*/pdserve_*/**/*.py"))
    text = "\n".join(page.read_text() for page in OPERATIONS.glob("*.md"))
    quoted = set(re.findall(r"`(?:\.\.\. )?([a-z]+(?: [a-z]+| \d+| N){2,})`", text))
    assert len(quoted) >= 3
    for words in quoted:
        said = re.sub(r"\b(\d+|N)\b", r"(%\\w+|\\{[^}]+\\})", words)
        assert re.search(said, code), f"nobody says {words!r}"


def test_the_chart_ships_one_file_of_rules() -> None:
    assert [path.name for path in (CHART / "alerts").iterdir()] == ["pdserve.yaml"]


def test_alerts_have_the_charts_numbers_and_no_others() -> None:
    """One source: what Compose mounts, what the chart installs, and what its values say."""
    assert ALERTS_FILE.read_text() == update_chart.plain_rules(), "run tools/update_chart.py"
    assert "<<" not in str(rules())
    assert rendered_rules({}) == rules()


def test_every_number_of_an_alert_is_a_value() -> None:
    """Each of them changes its own alert, or the rules of its objective, and nothing else."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())["prometheusRule"]
    for name, own in values["alerts"].items():
        if "minCount" in own:
            changed = changed_rules({"alerts": {name: {"minCount": 12345}}})
            assert {rule_name(rule) for rule in changed} == {name}
            assert all("12345" in rule["expr"] for rule in changed)
    objectives = {"ttftSeconds": "ttft", "firstItlSeconds": "first", "itlSeconds": "itl"}
    for objective, of in objectives.items():
        changed = changed_rules({"objectives": {objective: 1}})
        assert len(changed) == 6
        assert all(of in rule_name(rule).lower() and "1.0" in str(rule) for rule in changed)
    changed = changed_rules({"objectives": {"missedRatio": 0.02}})
    assert len(changed) == 6
    assert all("14.4 * 0.02" in r["expr"] or "6 * 0.02" in r["expr"] for r in changed)


@pytest.mark.parametrize("name", sorted({rule_name(alert) for alert in ALERTS}))
def test_an_alert_that_is_not_enabled_is_not_there(name: str) -> None:
    left = rendered_rules({"alerts": {name: {"enabled": False}}})
    assert left == [rule for rule in rules() if rule_name(rule) != name]


def rendered_rules(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rules of the chart's only PrometheusRule with these values of its section."""
    (manifest,) = of_kind(render({"prometheusRule": {"enabled": True, **values}}), "PrometheusRule")
    return [rule for group in manifest["spec"]["groups"] for rule in group["rules"]]


def changed_rules(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for rule in rendered_rules(values) if rule not in rules()]
