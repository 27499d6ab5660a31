"""`tools/run_tests.py` on suites of a few tests: what it counts as a failure, and what it says."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import run_tests
from run_tests import Part

TESTS = Path(__file__).parent
# They take seconds to start.
LEFT_OUT = "-p no:cacheprovider -p no:anyio -p no:asyncio -p no:hypothesispytest"
CONFTEST = 'pytest_plugins = ["support.run_log", "support.forks"]\n'
PASSES = "def test_it(): pass\n"
FAILS = "def test_it(): assert 1 == 2\n"
# Fails when it runs first.
ONCE = """
from pathlib import Path
def test_it():
    seen = Path(__file__).with_suffix(".seen")
    was_seen = seen.exists()
    seen.touch()
    assert was_seen
"""
SKIPS = """
import pytest
@pytest.mark.skip(reason="not here")
def test_it(): pass
"""
SLEEPS = "import time\ndef test_it(): time.sleep({})\n"
DIES = "import os\ndef test_it(): os._exit(3)\n"
# OpenMP has threads when the file has been read.
COMPUTES = """
import torch
def compute():
    torch.set_num_threads(2)
    torch.ones(1 << 20).exp()
compute()
def test_it(): compute()
"""
# Two parts: the first one's test waits until the second one's files are read.
WAITS = """
import time
from pathlib import Path
def test_it():
    deadline = time.monotonic() + 60
    while not Path(__file__).parents[1].joinpath("read").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
"""
IS_READ = """
from pathlib import Path
Path(__file__).parents[1].joinpath("read").touch()
def test_it(): assert Path(__file__).parents[1].joinpath("a", "test_a.seen").exists()
"""
BROKEN = "import nothing_of_this_name\n"

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """run(files, *flags) -> the exit status, of a part for each folder that the files are in."""
    for name, value in {
        "ROOT": tmp_path,
        "LOGS": tmp_path / ".tests",
        "DURATIONS": tmp_path / "durations.json",
        "FLAKY": tmp_path / "flaky.txt",
    }.items():
        monkeypatch.setattr(run_tests, name, value)
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    marks = "\n".join(
        f"    {each}" for each in ("soak", "images", "clients", "live", "interpreted")
    )
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\naddopts = --import-mode=importlib {LEFT_OUT}\nmarkers =\n{marks}\n"
    )

    def run_files(files: dict[str, str], *flags: str, num_processes: int = 0) -> int:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        folders = sorted({name.partition("/")[0] for name in files})
        parts = tuple(Part(folder, (folder,), num_processes) for folder in folders)
        monkeypatch.setattr(run_tests, "PARTS", parts)
        monkeypatch.setattr("sys.argv", ["run_tests.py", *flags])
        return run_tests.main()

    return run_files


def test_all_parts_run_and_all_failures_are_told_at_the_end(run: Run, capsys) -> None:
    files = {"a/test_a.py": FAILS, "b/test_b.py": BROKEN, "c/test_c.py": SKIPS, "d/test_d.py": "\n"}
    assert run(files | {"c/test_d.py": PASSES}) == 1
    *_, summary = capsys.readouterr().out.partition("Skipped:")
    assert "    1  not here" in summary
    assert "FAILED a/test_a.py::test_it - " in summary
    assert "FAILED b/test_b.py - " in summary
    assert summary.splitlines()[-1].startswith("1 passed, 2 failed, 1 skipped, 2 parts with")


def test_a_part_that_collects_no_test_fails(run: Run, capsys) -> None:
    assert run({"a/test_a.py": PASSES, "b/test_b.py": "\n"}) == 1
    assert "b: no test was collected" in capsys.readouterr().out


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_process_of_tests_that_dies_is_a_failure(run: Run, num_processes: int, capsys) -> None:
    files = {"a/test_a.py": DIES, "a/test_b.py": PASSES}
    assert run(files, "--retry", num_processes=num_processes) == 1
    out = capsys.readouterr().out
    assert re.search(r"process \d of tests died with status 3 in a/test_a.py::test_it", out)
    assert "1 passed, 1 failed" in out
    assert run({"a/test_a.py": DIES}) == 1
    assert "a: pytest ended with status 3" in capsys.readouterr().out


def test_a_part_collects_while_the_one_before_it_runs(run: Run) -> None:
    waits = f"{WAITS}    Path(__file__).with_suffix('.seen').touch()\n"
    assert run({"a/test_a.py": waits, "b/test_b.py": IS_READ}) == 0


def test_processes_compute_after_their_parent_has(run: Run) -> None:
    assert run({"a/test_a.py": COMPUTES}, num_processes=1) == 0


def test_little_that_failed_is_tried_once_more(run: Run, capsys) -> None:
    files = {f"a/test_{number}.py": ONCE for number in range(3)} | {"b/test_b.py": PASSES}
    assert run(files, "--retry", num_processes=2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("FLAKY a/test_") for line in lines) == 3
    assert lines[-1].startswith("1 passed, 0 failed, 3 flaky, 0 skipped")


def test_what_fails_twice_fails(run: Run) -> None:
    assert run({"a/test_a.py": FAILS, "a/test_b.py": ONCE}, "--retry") == 1


def test_much_that_failed_is_not_tried_again(run: Run) -> None:
    assert run({f"a/test_{number}.py": ONCE for number in range(4)}, "--retry") == 1


def test_what_is_known_to_be_flaky_is_not_tried_again(run: Run, tmp_path: Path) -> None:
    (tmp_path / "flaky.txt").write_text("# Why.\na/test_a.py::test_it # looks back\n")
    assert run({"a/test_a.py": ONCE}, "--retry") == 1


def test_what_fails_in_one_of_several_runs_is_listed(run: Run, capsys) -> None:
    assert run({"a/test_a.py": ONCE, "a/test_b.py": PASSES}, "--flaky", "2") == 1
    out = capsys.readouterr().out
    assert out.endswith("Failed at least once in 2 runs: 1\n   1  a/test_a.py::test_it\n")


def test_files_that_were_recorded_to_take_long_are_not_fast(
    run: Run, tmp_path: Path, capsys
) -> None:
    durations = {"a/test_a.py": 6.0, "a/test_b.py": 4.0}
    recorded = {path: {"seconds": s, "count": 1, "tests": {}} for path, s in durations.items()}
    (tmp_path / "durations.json").write_text(json.dumps(recorded))
    assert run({"a/test_a.py": FAILS, "a/test_b.py": PASSES, "a/test_c.py": PASSES}, "--fast") == 0
    assert "2 passed, 0 failed" in capsys.readouterr().out


def test_durations_are_recorded_and_what_takes_much_longer_is_listed_and_passes(
    run: Run, tmp_path: Path, capsys
) -> None:
    files = {"a/test_a.py": PASSES, "a/test_b.py": SLEEPS.format(1.1)}
    assert run(files, "--record") == 0
    recorded = run_tests.Recorded()
    listed_s = recorded.listed("a/test_b.py::test_it")
    assert listed_s is not None
    assert listed_s >= 1.1
    assert recorded.seconds("a/test_a.py::test_it") < 1
    # So that the other one's seconds are few of all.
    recorded_files = json.loads(run_tests.DURATIONS.read_text())
    recorded_files["a/test_b.py"] = {"seconds": 99, "count": 1, "tests": {"test_it": 99}}
    run_tests.DURATIONS.write_text(json.dumps(recorded_files))
    assert run({"a/test_a.py": SLEEPS.format(2.2)}) == 0
    out = capsys.readouterr().out
    assert re.search(r"\n +2\.\d s, not 1\.0  a/test_a.py::test_it\n", out)


def test_each_test_is_in_one_part() -> None:
    """Whatever folders come, but for the suites that have commands of their own."""
    services = next(part for part in run_tests.PARTS if "tests" in part.paths)
    others = {path for part in run_tests.PARTS if part is not services for path in part.paths}
    assert set(services.ignored) == others
    for part in run_tests.PARTS:
        for path in (*part.paths, *part.ignored):
            assert (run_tests.ROOT / path).is_dir()
    assert run_tests.flaky_names() == set() or run_tests.FLAKY.exists()
