"""Fixtures of the fault suites."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Test modules import cluster, checks, ...; pdserve_faults is the plugin of the workers.
FOLDER = Path(__file__).parent
sys.path += [str(FOLDER), str(FOLDER / "plugin")]


@pytest.fixture(scope="session")
def model(make_served_model: Callable[..., Path]) -> Path:
    """A model of which a worker is up in seconds and a prompt's block has a few KiB."""
    return make_served_model("LlamaForCausalLM")
