"""`pdserve bench` against a running stack, and the figures it makes of what it saw."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.bench import RequestResult, percentile, summarize

pytestmark = pytest.mark.slow


def bench(stack: Any, *args: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pdserve_client", "bench", "--address", stack.grpc_address]
    command += ["--num-requests", "6", "--vocab-size", "200", "--timeout-s", "60", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_load_is_generated_and_measured(stack: Any) -> None:
    model = f'{{model="{Path(stack.config.model).name}"}}'
    counted = {
        f"pdserve_prompt_tokens_total{model}": 6 * 30,
        f"pdserve_generation_tokens_total{model}": 6 * 5,
        'pdserve_handoffs_total{outcome="completed"}': 6,
    }
    before = stack.metrics("router")
    result = bench(stack, "--input-len", "30", "--output-len", "5", "--rate", "50", "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert (figures["num_requests"], figures["num_failed"]) == (6, 0)
    assert figures["requests_per_s"] > 0
    assert figures["num_recovered"] == 0
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "first_itl_ms"):
        assert 0 < figures[f"{name}_p50"] <= figures[f"{name}_p90"] <= figures[f"{name}_p99"]
    assert 0 <= figures["kv_exposed_ms_p50"] < figures["first_itl_ms_p99"]
    after = stack.metrics("router")
    assert {name: after[name] - before.get(name, 0) for name in counted} == counted


def test_failures_are_counted_and_end_with_status_1(stack: Any) -> None:
    result = bench(stack, "--input-len", "9000")
    assert result.returncode == 1
    assert "num_failed              6" in result.stdout
    assert "prompt has 9000 tokens, at most 8191 fit" in result.stdout


def test_figures_of_known_times() -> None:
    handed_over = pb2.RequestMetrics(
        prefill_engine_id="p",
        first_itl_ns=8_000_000,
        kv_transfer_exposed_ns=500_000,
        num_redrives=1,
    )
    local = pb2.RequestMetrics(first_itl_ns=70_000_000)
    results = [
        RequestResult(start=0.0, token_times=[0.1, 0.2, 0.4], num_tokens=3, metrics=handed_over),
        RequestResult(start=1.0, token_times=[3.0, 3.1], num_tokens=3, metrics=local),
        RequestResult(start=1.0, error="refused"),
    ]
    limits = argparse.Namespace(goodput_ttft_ms=1000.0, goodput_tpot_ms=200.0)
    figures = summarize(results, 2.0, limits)
    assert figures["num_failed"] == 1
    assert figures["first_error"] == "refused"
    assert figures["requests_per_s"] == 1.0
    assert figures["goodput_requests_per_s"] == 0.5, "the second one's first token came too late"
    assert figures["output_tokens_per_s"] == 3.0
    assert figures["ttft_ms_p50"] == pytest.approx(100.0)
    assert figures["ttft_ms_p99"] == pytest.approx(2000.0)
    # Two tokens that come together: of the request's three, two came after the first message.
    assert figures["tpot_ms_p99"] == pytest.approx(150.0)
    assert figures["itl_ms_p50"] == pytest.approx(100.0)
    assert figures["num_recovered"] == 1
    # Only of requests with a handoff.
    assert figures["first_itl_ms_p99"] == pytest.approx(8.0)
    assert figures["kv_exposed_ms_p50"] == pytest.approx(0.5)


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(value) for value in range(1, 11)]
    assert [percentile(values, percent) for percent in (50, 90, 99)] == [5.0, 9.0, 10.0]
    assert percentile([], 50) == 0.0
