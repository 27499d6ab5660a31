"""Calls on a thread of their own: whatever becomes of one, those behind it are made."""

import threading
from collections.abc import Callable

import pytest

from pdserve_common.call_thread import CallThread

TIMEOUT_S = 60


def fail() -> None:
    raise KeyError("a defect")


def end_thread() -> None:
    raise SystemExit


@pytest.mark.parametrize("call", [fail, end_thread])
def test_a_defect_is_its_callers_alone(call: Callable[[], None]) -> None:
    thread = CallThread("test")
    failed = thread.submit(call)
    assert thread.submit(lambda: 5).result(TIMEOUT_S) == 5
    assert failed.exception(TIMEOUT_S) is not None
    assert thread.close(TIMEOUT_S)


def test_a_call_that_was_given_up_is_not_made() -> None:
    thread, gate, calls = CallThread("test"), threading.Event(), []
    thread.submit(gate.wait)
    given_up = thread.submit(lambda: calls.append(1))
    assert given_up.cancel()
    gate.set()
    assert thread.submit(lambda: 5).result(TIMEOUT_S) == 5
    assert not calls
    assert thread.close(TIMEOUT_S)
