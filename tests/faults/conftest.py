"""Fixtures of the fault suites."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Test modules import checks, cases, ...
FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER))
# And pdserve_faults, the workers' plugin. Its folder must not stay: for the engines of other tests
# in this process it would be installed.
sys.path.append(str(FOLDER / "plugin"))
importlib.import_module("pdserve_faults")
sys.path.remove(str(FOLDER / "plugin"))


def pytest_report_header() -> str:
    """Say which cases are run, so that others can be run next time."""
    return f"fault matrix: PDSERVE_FAULTS={os.environ.get('PDSERVE_FAULTS', '0')}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly what this machine has not tested."""
    skipped = [
        report.longrepr[2]
        for report in terminalreporter.stats.get("skipped", ())
        if "tests/faults/" in report.nodeid and "needs " in report.longrepr[2]
    ]
    if skipped:
        reasons = "; ".join(sorted(set(skipped)))
        terminalreporter.section("faults that were not tested", red=True)
        terminalreporter.write_line(f"{len(skipped)} tests: {reasons}")


@pytest.fixture(scope="session")
def model(make_served_model: Callable[..., Path]) -> Path:
    """A model of which a worker is up in seconds and a prompt's block has a few KiB."""
    return make_served_model("LlamaForCausalLM")
