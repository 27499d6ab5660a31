"""Fixtures of the handoff's suites."""

import threading
from collections.abc import Iterator

import pytest

from support.handoff import Pair
from support.waiting import wait_until


@pytest.fixture(params=["local", "nixl"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def leaks_nothing() -> Iterator[None]:
    """No test leaves a thread behind."""
    before = transfer_threads()
    yield
    wait_until(lambda: transfer_threads() <= before)


def transfer_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kv-transfer"}


@pytest.fixture
def pair(kind: str) -> Iterator[Pair]:
    pair = Pair(kind)
    yield pair
    pair.close()
