"""Fixtures of the engine's suites."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Small tensors gain nothing from threads, and lose much on a busy machine."""
    torch.set_num_threads(1)
