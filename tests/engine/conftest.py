"""Fixtures of the engine's suites."""

import sys
from pathlib import Path

import pytest
import torch

from support.clock import Clock

sys.path.append(str(Path(__file__).parent))  # test modules import sampling_reference


@pytest.fixture
def clock() -> Clock:
    """For an Engine, in place of time.monotonic."""
    return Clock()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Small tensors gain nothing from threads, and lose much on a busy machine."""
    torch.set_num_threads(1)
