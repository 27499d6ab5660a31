"""Fixtures of the fault suites."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Test modules import cluster, checks, ...
FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER))
# And pdserve_faults, the workers' plugin. Its folder must not stay: for the engines of other tests
# in this process it would be installed.
sys.path.append(str(FOLDER / "plugin"))
importlib.import_module("pdserve_faults")
sys.path.remove(str(FOLDER / "plugin"))


@pytest.fixture(scope="session")
def model(make_served_model: Callable[..., Path]) -> Path:
    """A model of which a worker is up in seconds and a prompt's block has a few KiB."""
    return make_served_model("LlamaForCausalLM")
