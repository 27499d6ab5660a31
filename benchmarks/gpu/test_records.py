"""A pytest plugin: what becomes of each test, as JSON lines in a file, as it happens.

Tests that the file has already are left out. One that takes too long ends the process, as does one
after which the GPU answers no call any more: those behind it need another process.
"""

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

# The file, and the seconds that a test may take.
FILE, LIMIT_S = "PDSERVE_TEST_RECORDS", "PDSERVE_TEST_LIMIT_S"
MAX_ERROR_LINES = 12


class Recorder:
    """Its hooks are pytest's."""

    def __init__(self, path: Path, limit_s: float) -> None:
        self._path, self._limit_s = path, limit_s
        lines = path.read_text().splitlines() if path.exists() else []
        self._done = {json.loads(line).get("test") for line in lines}
        self._stacks = path.with_suffix(".stacks").open("w")
        self._started = 0.0
        self._has_failed = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._done]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(test=report.nodeid, outcome="failed", error=_last_lines(report))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(num_left=len(session.items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._started, self._has_failed = time.monotonic(), False
        self._write(test=nodeid, outcome="started")
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=self._stacks)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        fields: dict[str, Any] = {"s": round(time.monotonic() - self._started, 2)}
        if report.failed:
            fields["error"] = _last_lines(report)
            self._has_failed = True
        elif report.skipped and isinstance(report.longrepr, tuple):
            fields["reason"] = report.longrepr[2].removeprefix("Skipped: ")
        self._write(test=report.nodeid, outcome=report.outcome, **fields)

    def pytest_runtest_logfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._has_failed and not _gpu_answers():
            os._exit(1)

    def pytest_sessionfinish(self) -> None:
        self._write(finished=True)

    def _write(self, **record: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def _gpu_answers() -> bool:
    """Return whether CUDA goes on: what reads where nothing is ends all that come after it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _last_lines(report: pytest.CollectReport | pytest.TestReport) -> list[str]:
    return [line[:200] for line in report.longreprtext.splitlines()[-MAX_ERROR_LINES:]]


def pytest_configure(config: pytest.Config) -> None:
    recorder = Recorder(Path(os.environ[FILE]), float(os.environ[LIMIT_S]))
    config.pluginmanager.register(recorder)
