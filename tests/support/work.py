"""How much a function computes, whatever the machine and whatever traces it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Work:
    """What one thread has done."""

    def __init__(self) -> None:
        # Functions called, in Python and in C.
        self.num_calls = 0
        # The lengths of all strings whose methods were called: what these may have looked at.
        self.num_chars = 0


@contextmanager
def counted_work() -> Iterator[Work]:
    """Count what this thread does."""
    work = Work()

    def count(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            work.num_calls += 1
        elif event == "c_call":
            work.num_calls += 1
            text = getattr(called, "__self__", None)
            if isinstance(text, str):
                work.num_chars += len(text)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield work
    finally:
        sys.setprofile(before)


def work_of(function: Callable[[], object]) -> Work:
    """Return what a call of the function does."""
    with counted_work() as work:
        function()
    return work
