"""Clients as their users install them, against a stack as `pdserve up` starts it."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pdserve_client.config import StackConfig
from pdserve_client.stack import Stack

sys.path.append(str(Path(__file__).parent))

from environments import FOLDER, INSTALLED, MODEL, command_of

CLIENT_TIMEOUT_S = 300.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder is `clients`."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.clients)
            if not (INSTALLED / ".installed").exists():
                item.add_marker(pytest.mark.skip(reason="needs clients: make clients"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of clients."""
    terminalreporter.section("clients")
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for client, version_and_checks in report.user_properties:
                cells = (client, *version_and_checks, outcome)
                terminalreporter.write_line("".join(cell.ljust(24) for cell in cells).rstrip())


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    ports = dict.fromkeys(("grpc_port", "http_port", "metrics_port", "worker_port"), 0)
    config = StackConfig(
        model=str(MODEL),
        kv_cache_memory_mib=64,
        num_threads=1,
        log_dir=str(tmp_path_factory.mktemp("logs")),
        **ports,  # type: ignore[arg-type]
    )
    with Stack(config) as stack:
        for _ in stack.wait_until_ready():
            pass
        yield stack


RunClient = Callable[..., str]


@pytest.fixture
def run_client(tmp_path: Path, record_property: Callable[[str, object], None]) -> RunClient:
    """run_client("litellm", [command, ...]) -> its output. Fails if it fails; either way the
    client gets a row of the table, with the version that it prints or that pip knows.
    """

    def run(name: str, command: Sequence[str | Path], **variables: str) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=tmp_path,
            env=_environment(tmp_path) | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=CLIENT_TIMEOUT_S,
            check=False,
        )
        record_property(name, (_version(name, done.stdout), _checks(done.stdout)))
        assert done.returncode == 0, done.stdout[-20_000:]
        return done.stdout

    return run


def _environment(home: Path) -> dict[str, str]:
    """Nothing is looked for on a hub, and nothing is left in the user's folders."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "NODE_PATH": str(INSTALLED / "npm" / "node_modules"),
    }


def _checks(output: str) -> str:
    """Return how many of its checks a script has passed; nothing of a command."""
    passed, failed = (len(re.findall(rf"^{word} \w+", output, re.M)) for word in ("ok", "FAILED"))
    return f"{passed} of {passed + failed} checks" if passed + failed else ""


def _version(name: str, output: str) -> str:
    printed = re.search(r"^version (.+)$", output, re.MULTILINE)
    if printed is not None:
        return printed[1]
    code = f"from importlib.metadata import version; print(version({name!r}))"
    command = [str(command_of(name)), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
