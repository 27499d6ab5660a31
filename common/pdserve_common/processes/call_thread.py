"""What calls functions one after the other: a thread for them, or whichever asks for it."""

import contextlib
import os
import queue
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from pdserve_common.observability import defects
from pdserve_common.observability.defects import Loop, OnDefect, nothing_more

T = TypeVar("T")


class Calls(ABC):
    """Makes calls one after the other, whatever becomes of one."""

    @abstractmethod
    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """Call after what was submitted before; the future holds the result or the exception."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """End after the calls under way; False if one of them hangs."""

    def post(
        self,
        function: Callable[[], object],
        loop: Loop,
        *,
        costs: str,
        on_defect: OnDefect = nothing_more,
    ) -> None:
        """Call as `submit` does, for nobody who waits: what is raised is a defect, of which
        `on_defect` is told on the same thread.
        """

        def call() -> None:
            try:
                function()
            except BaseException as error:  # nobody else would hear of it
                defects.record(loop, error, costs)
                on_defect(error)

        self.submit(call)


class CallThread(Calls):
    """A thread that begins with the first call. A daemon: a call that hangs does not keep the
    process from exiting, as an executor of the standard library would.
    """

    def __init__(self, name: str, *, niceness: int = 0) -> None:
        """`niceness` is what the thread adds to the process's, where threads have their own."""
        self._niceness = niceness
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._start_lock = threading.Lock()

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """See Calls."""
        future: Future[T] = Future()
        self._calls.put(partial(_call, function, future))
        with self._start_lock:
            if self._thread.ident is None:
                self._thread.start()
        return future

    def close(self, timeout_s: float) -> bool:
        """See Calls."""
        if self._thread.ident is None:
            return True
        self._calls.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._niceness and sys.platform == "linux":
            with contextlib.suppress(OSError):  # a sandbox may forbid it: then as it is
                os.nice(self._niceness)
        while (call := self._calls.get()) is not None:
            call()


class CallerThread(Calls):
    """The thread that submits a function calls it at once."""

    def submit(self, function: Callable[[], T]) -> "Future[T]":
        """See Calls."""
        future: Future[T] = Future()
        _call(function, future)
        return future

    def close(self, timeout_s: float) -> bool:
        """See Calls: nothing is left to be called."""
        return True


def _call(function: Callable[[], T], future: "Future[T]") -> None:
    if not future.set_running_or_notify_cancel():
        return  # nobody waits; a result would raise, and end the thread of all that follow
    try:
        try:
            result = function()
        except BaseException as error:  # whoever waits gets it
            future.set_exception(error)
        else:
            future.set_result(result)
    except BaseException as error:  # of a callback: futures keep only Exceptions of those
        defects.record("event_loop", error, "what was to hear of a call's end")
