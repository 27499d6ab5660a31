"""How a process begins that another one has started, what it may take, and how it ends."""

import ctypes
import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
_OOM_SCORE = 1000


def be_child() -> None:
    """Leave it to the parent when this process ends, also when a signal goes to the whole group,
    and end with it. To be called first: the sockets tell as well, but not during an import.
    """
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent()


def die_with_parent() -> None:
    """Have this process killed when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def fork(run: Callable[[], object]) -> int:
    """Run a function in a copy of this process, which ends with it, and return the copy's id. This
    process must have one thread.
    """
    if pid := os.fork():
        return pid
    status = 1
    try:
        run()
        status = 0
    except BaseException:  # whatever it is: a copy must not go on with what its parent does
        traceback.print_exc()
    finally:
        os._exit(status)


def confine(max_memory_bytes: int) -> None:
    """Of a fork: let it take so much memory besides what it has, and end with its parent."""
    die_with_parent()
    limit = _data_bytes() + max_memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        # If memory is short all the same, rather this one than its parent.
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))


def end_now(status: int) -> NoReturn:
    """End this process without what an interpreter does at its end: that waits for threads, which
    may hang, and takes a second of CPU with torch. The system releases all that is left.
    """
    logging.shutdown()
    os._exit(status)


def _data_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmData:"))
