"""Processes of a stack end with the process that started it, however that ends."""

import os
import signal
import subprocess
import sys
import time

from pdserve_client import die_with_parent

PARENT = f"""
import os, subprocess, sys
sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
watched = [sys.executable, {die_with_parent.__file__!r}, str(os.getpid()), *sleeper]
print(subprocess.Popen(watched, stdin=subprocess.DEVNULL).pid, flush=True)
input()
"""


def command_of(pid: int) -> str:
    """Empty once it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""


def test_a_child_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until(lambda: "time.sleep" in command_of(pid) and "die_with" not in command_of(pid))
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not command_of(pid))


def test_a_child_of_a_parent_that_is_gone_does_not_begin() -> None:
    no_parent = str(os.getpid() + 1)
    child = [sys.executable, die_with_parent.__file__, no_parent, sys.executable, "-c", "print(1)"]
    done = subprocess.run(child, stdout=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, b"")


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
