"""What calls functions one after the other: a thread for them, or whichever asks for it."""

import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class CallThread:
    """Calls functions one after the other; begins with the first. A daemon: a call that hangs does
    not keep the process from exiting, as an executor of the standard library would.
    """

    def __init__(self, name: str, *, niceness: int = 0) -> None:
        """`niceness` is what the thread adds to the process's, where threads have their own."""
        self._niceness = niceness
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._start_lock = threading.Lock()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Call after what was submitted before; the future holds the result or the exception."""
        future: Future[T] = Future()
        self._calls.put(partial(_call, function, future))
        with self._start_lock:
            if self._thread.ident is None:
                self._thread.start()
        return future

    def close(self, timeout_s: float) -> bool:
        """End after the calls under way; False if one of them hangs."""
        if self._thread.ident is None:
            return True
        self._calls.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._niceness and sys.platform == "linux":
            os.nice(self._niceness)
        while (call := self._calls.get()) is not None:
            call()


class CallerThread:
    """In place of a CallThread: the thread that submits a function calls it at once."""

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """See CallThread.submit."""
        future: Future[T] = Future()
        _call(function, future)
        return future

    def close(self, timeout_s: float) -> bool:
        """See CallThread.close: nothing is left to be called."""
        return True


def _call(function: Callable[[], T], future: "Future[T]") -> None:
    if not future.set_running_or_notify_cancel():
        return  # nobody waits; a result would raise, and end the thread of all that follow
    try:
        future.set_result(function())
    except BaseException as error:  # whoever waits gets it
        future.set_exception(error)
