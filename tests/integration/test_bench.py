"""`pdserve bench` against a running stack, and the figures it makes of what it saw."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.advisor.cost_profile import load_profile
from pdserve_client.advisor.trace import read_trace
from pdserve_client.bench import RequestResult, percentile, summarize


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


def test_a_trace_is_replayed_and_saved_as_one(stack: Any, tmp_path: Path) -> None:
    trace, saved = tmp_path / "trace", tmp_path / "saved"
    rows = [
        {"timestamp": 100 * i, "input_length": 20 + i, "output_length": 30 + i, "hash_ids": []}
        for i in range(4)
    ]
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = bench(stack, "--trace", str(trace), "--save-requests", str(saved), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["num_requests"] == 4
    again = read_trace(saved)
    for i, request in enumerate(again.requests):
        assert (request.num_prompt_tokens, request.num_output_tokens) == (20 + i, 30 + i)
        assert request.arrival_s >= 0.1 * i - 0.05
    saved_rows = [json.loads(row) for row in saved.read_text().splitlines()]
    assert all(row["ttft_ms"] > 0 for row in saved_rows)
    # Tokens that come in one message have no time between them.
    assert sum(sum(row["itl_ms"]) for row in saved_rows) > 0


def test_workers_are_measured_and_advised_about(stack: Any, tmp_path: Path) -> None:
    """`pdserve advise` from its measurement to its answer."""
    path = tmp_path / "profile.json"
    prefill, decode = (f"127.0.0.1:{worker.port}" for worker in stack.workers)
    command = [sys.executable, "-m", "pdserve_client", "advise"]

    def advise(*args: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*command, *args], capture_output=True, text=True, timeout=180, check=False
        )

    flags = ["--max-prompt-tokens=400", "--max-batch=4", "--repeats=2", f"--out={path}"]
    both = [f"--prefill-worker={prefill}", f"--decode-worker={decode}"]
    result = advise("profile", stack.grpc_address, *both, *flags)
    assert result.returncode == 0, result.stderr
    profile = load_profile(path)
    assert profile.handoff is not None
    # Keys and values of each layer, in whole blocks.
    assert profile.handoff.bytes_per_token > 0
    assert profile.decode_worker.max_num_seqs == stack.config.max_num_seqs
    assert set(profile.residuals) == {"prefill", "decode", "transfer"}
    assert profile.step.decode_base_s + profile.step.row_s > 0
    result = advise(f"--profile={path}", "--workers=2", "--num-requests=50", "--precision=0.5")
    assert result.returncode == 0, result.stderr
    assert "| 1P + 1D |" in result.stdout
    # Requests that go elsewhere are no measurement of these.
    result = advise("profile", stack.grpc_address, both[1], *flags)
    assert result.returncode == 1
    assert "the router must have no prefill worker" in result.stderr
    result = advise("profile", stack.grpc_address, f"--decode-worker={prefill}", *flags)
    assert "is a prefill worker" in result.stderr


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
