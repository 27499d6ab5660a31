"""Tests with a real Prometheus, Alertmanager and browser: `make test-live` installs them."""

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent
# Test modules import prometheus and world of this folder, checks of the faults', monitoring of the
# chart's.
sys.path += [str(Path(__file__).parent), str(TESTS / "faults"), str(TESTS / "helm")]

COMMANDS = ("prometheus", "promtool", "prometheus-alertmanager", "chromium", "chromedriver")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder is `live`."""
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.live)
            if missing:
                reason = f"needs {', '.join(missing)}: make test-live"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def world(
    make_served_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A World, for all tests of this folder."""
    make_world = importlib.import_module("world").make_world
    with make_world(
        make_served_model("LlamaForCausalLM"), tmp_path_factory.mktemp("live")
    ) as world:
        yield world
