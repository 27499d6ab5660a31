"""Spans on their way to a collector that answers, is away or hangs, and what turns them on."""

import re
import subprocess
import sys
import time

import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.observability.tracing import Tracing
from pdserve_common.observability.tracing_config import check_endpoint, open_tracing
from support.otlp import Collector
from support.waiting import wait_until

ABSENT = "http://127.0.0.1:1"
SPANS = "pdserve_trace_spans_total"
# So much more than its timeouts may a close take on a busy machine.
MARGIN_S = 10.0


def num_spans(registry: CollectorRegistry, outcome: str) -> float:
    return registry.get_sample_value(SPANS, {"outcome": outcome}) or 0.0


def open_at(endpoint: str, registry: CollectorRegistry) -> Tracing:
    tracing = open_tracing(endpoint, registry, service="pdserve-test", instance="test-0")
    assert tracing is not None
    return tracing


def make_spans(tracing: Tracing, number: int) -> None:
    for _ in range(number):
        now_ns = time.monotonic_ns()
        tracing.begin("span", {}, now_ns).end(now_ns + 1)


def test_spans_are_exported_with_the_environments_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=pod,service.name=from-attributes")
    registry = CollectorRegistry()
    with Collector() as collector:
        tracing = open_at(collector.endpoint, registry)
        make_spans(tracing, 10)
        tracing.close()
        assert len(collector.spans) == 10
    resource = collector.spans[0].resource
    assert resource["service.name"] == "from-attributes"
    assert resource["service.instance.id"] == "test-0"
    assert resource["k8s.pod.name"] == "pod"
    assert num_spans(registry, "exported") == 10


def test_times_are_those_of_the_wall_clock_and_last_as_they_did() -> None:
    with Collector() as collector:
        tracing = open_at(collector.endpoint, CollectorRegistry())
        before = time.time_ns()
        now_ns = time.monotonic_ns()
        tracing.begin("span", {}, now_ns).end(now_ns + 123_456_789)
        after = time.time_ns()
        tracing.close()
    (span,) = collector.spans
    assert span.duration_ns == 123_456_789
    assert before - 1_000_000 <= span.start_ns <= after + 1_000_000


@pytest.mark.parametrize("holds", [False, True])
def test_without_an_answer_spans_are_dropped_and_counted_and_the_end_comes(
    monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "50")
    registry = CollectorRegistry()
    with Collector(holds=True) as collector:
        tracing = open_at(collector.endpoint if holds else ABSENT, registry)
        make_spans(tracing, 1000)
        # No more than the queue has room for wait, those that are being exported among them.
        assert num_spans(registry, "queue_full") >= 900 - num_spans(registry, "export_failed")
        began = time.monotonic()
        tracing.close(0.5)
        assert time.monotonic() - began < 1.0 + MARGIN_S

    def num_ended() -> float:
        return sum(num_spans(registry, outcome) for outcome in ("queue_full", "export_failed"))

    wait_until(lambda: num_ended() == 1000, "each span is counted")
    assert num_spans(registry, "exported") == 0


def test_a_queue_without_a_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "none")
    with pytest.raises(ValueError, match="OTEL_BSP_MAX_QUEUE_SIZE is 'none', must be a number"):
        open_at(ABSENT, CollectorRegistry())


def test_another_protocol_is_refused() -> None:
    environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'http/protobuf', must be"):
        open_tracing(ABSENT, CollectorRegistry(), service="s", instance="i", environ=environ)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "collector",
        "collector:4317",
        "ftp://c:1",
        "http://:1",
        "http://c",
        "http://c:0",
        "http://[c:1",
    ],
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    expected = f"otlp_traces_endpoint is {endpoint!r}, must be http://HOST:PORT"
    with pytest.raises(ValueError, match=re.escape(expected)):
        check_endpoint(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "part"),
    [
        ("http://user:secret@c:4317", "a user or password"),
        ("http://secret@c:4317", "a user or password"),
        ("https://user:secret@c", "a user or password"),
        ("http://user:se/cret@c:4317", "a user or password"),
        ("http://c:4317/secret", "a path"),
        ("http://c:4317?key=secret", "a query"),
        ("http://c:4317#secret", "a fragment"),
    ],
)
def test_an_endpoint_with_more_than_host_and_port_is_refused_and_not_repeated(
    endpoint: str, part: str
) -> None:
    with pytest.raises(ValueError, match="otlp_traces_endpoint") as raised:
        check_endpoint(endpoint)
    message = str(raised.value)
    assert message.startswith(f"otlp_traces_endpoint has {part}")
    assert "must be http://HOST:PORT" in message
    assert "cret" not in message


def test_endpoints() -> None:
    for endpoint in (
        None,
        "http://c:4317",
        "https://c.example:443",
        "grpc://c:1",
        "http://[::1]:1",
    ):
        check_endpoint(endpoint)


def run(script: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout


def test_processes_without_an_endpoint_do_not_import_the_libraries() -> None:
    script = """
import sys
import pdserve_router.server, pdserve_worker.process, pdserve_client.config
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    assert run(script) == "[]\n"


def test_an_endpoint_without_the_libraries_names_the_extra() -> None:
    script = """
import sys
from prometheus_client import CollectorRegistry
from pdserve_common.observability.tracing_config import open_tracing
sys.modules["opentelemetry"] = None
try:
    open_tracing("http://c:4317", CollectorRegistry(), service="s", instance="i")
except ValueError as error:
    print(error)
"""
    assert "needs the extra `tracing`: pip install 'pdserve[tracing]'" in run(script)
