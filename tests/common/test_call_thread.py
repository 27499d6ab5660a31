"""Calls on a thread of their own: whatever becomes of one, those behind it are made."""

import os
import threading
from collections.abc import Callable

import pytest

from pdserve_common.observability.defects import DEFECTS
from pdserve_common.processes.call_thread import CallThread
from support.metrics import value

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


@pytest.mark.parametrize("call", [fail, end_thread])
def test_a_defect_that_nobody_waits_for_is_counted_and_told(call: Callable[[], None]) -> None:
    thread, told = CallThread("test"), []
    num_defects = value(DEFECTS, "model")
    thread.post(call, "model", costs="nothing", on_defect=told.append)
    assert thread.submit(lambda: 5).result(TIMEOUT_S) == 5
    assert len(told) == 1
    assert value(DEFECTS, "model") == num_defects + 1
    assert thread.close(TIMEOUT_S)


def test_whoever_hears_of_a_calls_end_does_not_end_the_thread() -> None:
    thread, gate = CallThread("test"), threading.Event()
    waited = thread.submit(gate.wait)
    waited.add_done_callback(lambda _: end_thread())
    gate.set()
    assert thread.submit(lambda: 5).result(TIMEOUT_S) == 5
    assert thread.close(TIMEOUT_S)


def test_a_thread_whose_priority_cannot_be_lowered_makes_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbid(niceness: int) -> None:
        raise PermissionError("a sandbox forbids it")

    monkeypatch.setattr(os, "nice", forbid)
    thread = CallThread("test", niceness=5)
    assert thread.submit(lambda: 5).result(TIMEOUT_S) == 5
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
