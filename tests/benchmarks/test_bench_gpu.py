"""The benchmark of a GPU runs all its parts, whatever becomes of one, and says so on one page."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# Sections import torch.

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400.0

# A script with parts of its own, which are sections but for the last one.
SCRIPT = """
import sys
from pathlib import Path
sys.path.append({benchmarks!r})
import bench_gpu
bench_gpu.PARTS = {{
    "passes": bench_gpu.Part(120),
    "raises": bench_gpu.Part(120),
    "hangs": bench_gpu.Part(6),
    "tests": bench_gpu.Part(240, ({tests!r},)),
}}
bench_gpu.main()
"""
SECTIONS = {
    "passes": "bench.record('limits', gb_s=1.0)",
    "raises": "bench.record('first', us=1.0); bench.attempt(lambda b: 1 / 0); raise OSError('x')",
    "hangs": "__import__('time').sleep(600)",
}
TESTS = """
import ctypes, time
import pytest
pytestmark = pytest.mark.gpu

def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip(reason="needs two")
def test_skips(): pass
def test_crashes(): ctypes.string_at(0)
def test_is_behind_it(): pass
def test_hangs(): time.sleep(600)
@pytest.mark.parametrize("n", range(12))
def test_many(n): pass
"""


class Run(NamedTuple):
    status: int
    output: str
    results: dict[str, Any]


def start(script: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(script), "--device", "cpu", "--tiny", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(script: Path, *arguments: str) -> Run:
    output = script.with_name("results.json")
    process = start(script, "--output", str(output), *arguments)
    text, _ = process.communicate(timeout=TIMEOUT_S)
    return Run(process.returncode, text, json.loads(output.read_text()))


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, filter(None, sys.path))))
    tests = tmp_path / "test_parts.py"
    tests.write_text(TESTS)
    (tmp_path / "gpu").mkdir()
    for name, body in SECTIONS.items():
        text = f'"""About {name}."""\ndef run(bench):\n    {body}\n'
        (tmp_path / "gpu" / f"{name}.py").write_text(text)
    script = tmp_path / "parts.py"
    script.write_text(SCRIPT.format(benchmarks=str(ROOT / "benchmarks"), tests=str(tests)))
    return script


def named(records: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [record for record in records if record["name"] == name]


@pytest.mark.soak
def test_sections_that_fail_or_hang_cost_no_other_its_result(script: Path) -> None:
    status, output, results = run(script, "--only", "raises,hangs,passes")
    assert status == 1
    assert {name: result["status"] for name, result in results.items()} == {
        "raises": "failed",
        "hangs": "took more than 6 s",
        "passes": "ok",
    }
    assert named(results["raises"]["records"], "first")
    assert len(named(results["raises"]["records"], "failed")) == 2
    page = output[output.index("=" * 100) :]
    assert re.search(r"^passes +ok", page, re.MULTILINE)
    assert re.search(r"^hangs +took more than 6 s", page, re.MULTILINE)
    assert "raises: failed : OSError: x" in page


def test_tests_behind_one_that_crashes_or_hangs_run_all_the_same(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_GPU_TEST_LIMIT_S", "15")
    status, output, results = run(script, "--only", "tests")
    assert status == 1
    (result,) = results.values()
    (counts,) = named(result["records"], "tests")
    assert counts["passed"] == 14
    assert {name: counts[name] for name in ("failed", "skipped", "crashed", "hung")} == {
        "failed": 1,
        "skipped": 1,
        "crashed": 1,
        "hung": 1,
    }
    assert counts["reasons"] == {"needs two": 1}
    (hung,) = named(result["records"], "hung")
    assert hung["case"].endswith("::test_hangs")
    assert any("in test_hangs" in line for line in hung["error"])
    (failed,) = named(result["records"], "failed")
    assert any("assert 1 == 2" in line for line in failed["error"])
    assert "14 passed, 1 failed" in output
    assert "not run" not in counts


@pytest.mark.soak
def test_parts_that_no_time_is_left_for_are_named(script: Path) -> None:
    status, output, results = run(script, "--only", "hangs,passes", "--total-s", "4")
    assert status == 1
    assert results["passes"]["status"] == "not run: no time left"
    assert re.search(r"^passes +not run: no time left", output, re.MULTILINE)


def test_a_run_that_is_ended_has_its_results_and_its_page_so_far(script: Path) -> None:
    output = script.with_name("partial.json")
    process = start(script, "--output", str(output), "--only", "passes,hangs", "--limit-s", "120")
    assert process.stdout is not None
    while "hangs: About hangs" not in (line := process.stdout.readline()):
        assert line, "it has ended"
    process.terminate()
    page, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert re.search(r"^passes +ok", page, re.MULTILINE)
    assert json.loads(output.read_text())["passes"]["status"] == "ok"


def test_a_process_is_ended_whose_start_a_signal_disturbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from gpu.suites import run_group

    started: list[subprocess.Popen[bytes]] = []

    class Disturbed(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Disturbed)
    old = signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    try:
        with pytest.raises(SystemExit, match="7"):
            run_group([sys.executable, "-c", "import time; time.sleep(600)"], 60)
    finally:
        signal.signal(signal.SIGTERM, old)
        (process,) = started
        was_killed = process.poll() == -signal.SIGKILL
        process.kill()
        process.wait()
    assert was_killed


MARK = r"^((@|    |needs_it.*|)pytest\.mark\.gpu\b|pytestmark = \[?\*?ON_GPU_OR_INTERPRETED\b)"


def test_every_file_with_tests_for_gpus_is_in_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from bench_gpu import PARTS

    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(MARK, path.read_text(), re.MULTILINE)
    }
    found.discard(str(Path(__file__).relative_to(ROOT)))
    assert found == {file for part in PARTS.values() for file in part.tests}


def test_a_machine_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from gpu import requirements

    names = requirements.required(ROOT)
    assert {"torch", "msgspec", "nixl-cu13", "xgrammar", "pytest-asyncio", "grpcio"} <= set(names)
    versions = dict.fromkeys(names, "1.0") | {"msgspec": None}
    monkeypatch.setattr(requirements, "_version", versions.get)
    _, missing = requirements.describe_machine(ROOT)
    assert missing.startswith("missing, so that parts may fail: msgspec (")
