"""Limits of processes that do what strangers ask for."""

import ctypes
import resource
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
_OOM_SCORE = 1000


def die_with_parent() -> None:
    """Have this process killed when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def confine(max_memory_bytes: int) -> None:
    """Of a fork: let it take so much memory besides what it has, and end with its parent."""
    die_with_parent()
    limit = _data_bytes() + max_memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        # If memory is short all the same, rather this one than its parent.
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))


def _data_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmData:"))
