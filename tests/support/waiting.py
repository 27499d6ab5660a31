"""Waiting for what is about to be so, on a machine however busy."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

TIMEOUT_S = 120.0

T = TypeVar("T")


def busyness() -> float:
    """Return how many times as long work takes here now as on an idle machine, at least 1."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def wait_until(condition: Callable[[], T], what: str = "", *, timeout_s: float = TIMEOUT_S) -> T:
    """Wait until a condition is true, and return its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what or condition}"
        time.sleep(0.002)
    return value


async def until(condition: Callable[[], T], what: str = "", *, timeout_s: float = TIMEOUT_S) -> T:
    """The same on an event loop."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what or condition}"
        await asyncio.sleep(0.002)
    return value


def stop_process(pid: int) -> None:
    """Send SIGSTOP, and wait until it has stopped: on a busy machine its other threads go on until
    the one that takes the signal runs.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until_stopped(pid)


def wait_until_stopped(pid: int) -> None:
    """Wait until no thread of a process runs that has been sent SIGSTOP."""
    wait_until(lambda: _is_stopped(pid), f"process {pid} stops")


def _is_stopped(pid: int) -> bool:
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            state = path.read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if state not in "TtZX":
            return False
    return True
