"""Runs test files that need a GPU, whatever their tests do, and says what became of each test."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
# Of one test.
TEST_LIMIT_S = float(os.environ.get("PDSERVE_GPU_TEST_LIMIT_S", "90"))
MAX_OUTPUT_LINES = 15


class SuiteResult(NamedTuple):
    """`status` is ok, failed, that no test ran, or that they took too long."""

    status: str
    records: list[dict[str, Any]]


def run_suite(files: Sequence[str], limit_s: float) -> SuiteResult:
    """Run the tests for GPUs in these files. A process that ends before they do is followed by
    another one, for those that are left.
    """
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder:
        suite = _Suite(Path(folder) / "tests.jsonl")
        while not suite.is_finished and (left_s := deadline - time.monotonic()) > 0:
            num_before = len(suite.outcomes)
            output = suite.run([*files, "-m", "gpu"], left_s, min(TEST_LIMIT_S, left_s))
            if not suite.is_finished and len(suite.outcomes) == num_before:
                suite.add_failure("pytest", output)  # it does not even start
                break
        return suite.result(limit_s)


class _Suite:
    def __init__(self, records: Path) -> None:
        self._path = records
        # By test.
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.is_finished = False
        self._num_collected = 0

    def run(self, arguments: list[str], limit_s: float, test_limit_s: float) -> list[str]:
        """Run one process; return the last lines that it printed."""
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "gpu.test_records"]
        # Not the project's own options, which name plugins that may be missing here.
        command += ["-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
        command += ["--continue-on-collection-errors", *arguments]
        environment = os.environ | {
            "PDSERVE_TEST_RECORDS": str(self._path),
            "PDSERVE_TEST_LIMIT_S": str(test_limit_s),
        }
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            streams = {"stdout": output, "stderr": output}
            status = run_group(command, limit_s, cwd=ROOT, env=environment, **streams)
            output.seek(0)
            lines = [line[:200] for line in output.read().splitlines()[-MAX_OUTPUT_LINES:]]
        self._read(lines, is_cut_off=status is None)
        return lines

    def _read(self, output: list[str], *, is_cut_off: bool) -> None:
        num_left = 0
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            record = json.loads(line)
            if name := record.pop("test", None):
                self.outcomes[name] = record
            num_left = record.get("num_left", num_left)
            self.is_finished = record.get("finished", False)
        if not self._num_collected:
            self._num_collected = num_left
        stacks = self._path.with_suffix(".stacks")
        for name, record in self.outcomes.items():
            if record["outcome"] == "started":  # the process ended in it
                hung = stacks.exists() and stacks.read_text().splitlines()[:MAX_OUTPUT_LINES]
                outcome = "cut off" if is_cut_off else "hung" if hung else "crashed"
                record |= {"outcome": outcome, "error": hung or output}
                self._append({"test": name} | record)

    def add_failure(self, name: str, error: list[str]) -> None:
        self.outcomes[name] = {"outcome": "failed", "error": error}

    def result(self, limit_s: float) -> SuiteResult:
        counts = Counter(record["outcome"] for record in self.outcomes.values())
        num_left = max(0, self._num_collected - len(self.outcomes))
        summary = {"name": "tests"} | dict(counts) | ({"not run": num_left} if num_left else {})
        reasons = Counter(
            record["reason"] for record in self.outcomes.values() if record.get("reason")
        )
        if reasons:
            summary["reasons"] = dict(reasons)
        bad = [
            {"name": record["outcome"], "case": name, "error": record["error"]}
            for name, record in self.outcomes.items()
            if record["outcome"] not in ("passed", "skipped")
        ]
        status = "failed" if bad else "ok" if counts["passed"] else "no test ran"
        if num_left:
            status = f"took more than {limit_s:.0f} s"
        return SuiteResult(status, [summary, *bad])

    def _append(self, record: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def run_group(command: Sequence[str], limit_s: float, **options: Any) -> int | None:
    """Run a command; return its exit status, or None if it took longer. All that it has started is
    killed with it.
    """
    with _group(command, options) as process:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None


@contextlib.contextmanager
def _group(command: Sequence[str], options: dict[str, Any]) -> Iterator["subprocess.Popen[bytes]"]:
    process = None
    try:
        with _signals_wait():
            process = subprocess.Popen(command, start_new_session=True, **options)
        yield process
    finally:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Run handlers of SIGINT and SIGTERM behind the block. One that raised within Popen would leave
    a process that nobody knows, and that holds the pipe of whoever reads the page.
    """
    came: list[int] = []
    old = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)
