"""Python loads this in every process of the fuzzed stack: on SIGUSR1 a service writes which asyncio
tasks it has, one a line, to a file that is named after its process id.
"""

import asyncio
import gc
import os
import signal
from pathlib import Path
from types import FrameType

FOLDER = "PDSERVE_FUZZ_TASKS"


def report(signum: int, frame: FrameType | None) -> None:
    gc.collect()  # a task that failed and that nobody asked is logged when it goes
    names = sorted(_name_of(task) for task in asyncio.all_tasks())
    path = Path(os.environ[FOLDER], str(os.getpid()))
    unfinished = path.with_suffix(".new")
    unfinished.write_text("\n".join(names))
    unfinished.rename(path)


def _name_of(task: "asyncio.Task[object]") -> str:
    coroutine = task.get_coro()
    return getattr(coroutine, "__qualname__", type(coroutine).__name__)  # gRPC's are of Cython


if FOLDER in os.environ:
    signal.signal(signal.SIGUSR1, report)
