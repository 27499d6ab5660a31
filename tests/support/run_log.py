"""A plugin of pytest for `tools/run_tests.py`: what becomes of tests, and their order."""

import json
import os
import random
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

# Seconds of each file on an idle machine of two cores. `tools/run_tests.py --record` writes it.
DURATIONS = Path(__file__).parents[1] / "durations.json"


TURN_POLL_S = 0.1
# The plugin's name.
RUN_LOG = "run-log"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tools/run_tests.py")
    group.addoption("--run-log", type=Path, metavar="FILE", help="write what becomes of each test")
    group.addoption("--turn", type=Path, metavar="FILE", help="run tests when this file is there")
    group.addoption("--shuffle", type=int, metavar="SEED", help="run in the order of a seed")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--run-log")
    if path is not None:
        config.pluginmanager.register(RunLog(path), RUN_LOG)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, bool | None, bool | None]:
    turn = session.config.getoption("--turn")
    parent = os.getppid()
    while turn is not None and not turn.exists():
        if os.getppid() != parent:
            pytest.exit("whoever would give the turn is gone")
        time.sleep(TURN_POLL_S)
    return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is None:
        put_longest_first(items)
    else:
        shuffle(items, seed)


class RunLog:
    """Write a line of JSON for each report of a test."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(ids=[item.nodeid for item in session.items])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(id=report.nodeid, outcome="failed", seconds=0.0, text=report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        line: dict[str, Any] = {"id": report.nodeid, "seconds": report.duration}
        if report.failed:
            sections = "".join(f"\n--- {name}\n{text}" for name, text in report.sections)
            line |= {"outcome": "failed", "text": report.longreprtext + sections}
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "xfail"
            line |= {"outcome": "skipped", "text": reason.removeprefix("Skipped: ")}
        elif report.when == "call":
            line["outcome"] = "passed"
        self._write(is_last=report.when == "teardown", **line)


def recorded_durations() -> dict[str, float]:
    """Return the recorded seconds of files, by their path from the project's root."""
    if not DURATIONS.exists():
        return {}
    return {name: file["seconds"] for name, file in json.loads(DURATIONS.read_text()).items()}


def put_longest_first(items: list[pytest.Item]) -> None:
    """Sort by file, so that no process of tests is left alone with a long one at the end.

    A file of which nothing is recorded may be long.
    """
    recorded = recorded_durations()
    items.sort(key=lambda item: -recorded.get(item.nodeid.partition("::")[0], 1e9))


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Put files, and the tests within each, in an order that the seed gives."""
    drawn = random.Random(seed)
    of_files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        of_files.setdefault(item.path, []).append(item)
    files = list(of_files.values())
    drawn.shuffle(files)
    for tests in files:
        drawn.shuffle(tests)
    items[:] = [item for tests in files for item in tests]
