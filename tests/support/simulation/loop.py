"""An event loop whose time is virtual, and the processes that share it.

Nothing waits: when no callback is ready, time jumps to the next timer. All callbacks of a process
run in its context, so that it can be frozen, and so that a dead one's tasks are known.
"""

import asyncio
import contextlib
import contextvars
import random
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar
from unittest import mock

START_S = 1000.0
T = TypeVar("T")

_process: "contextvars.ContextVar[Process | None]" = contextvars.ContextVar("process", default=None)


def current_name(default: str) -> str:
    """Return the name of the process that runs."""
    process = _process.get()
    return default if process is None else process.name


class Deadlock(Exception):
    """Nothing is ready and no timer runs: what is waited for never comes."""


class _Numbered:
    """Hashes by its number, not by its address: sets of tasks have the same order in every run."""

    _number: int

    def __hash__(self) -> int:
        return self._number


class _Task(_Numbered, asyncio.Task):  # type: ignore[type-arg]
    pass


class _Future(_Numbered, asyncio.Future):  # type: ignore[type-arg]
    pass


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop that all processes of a simulation share."""

    def __init__(self) -> None:
        self.now_s = START_S
        super().__init__()
        self._num_made = 0
        # asyncio's loop asks it what is ready; only timers ever are.
        self._selector = self
        self.set_task_factory(_make_task)  # type: ignore[arg-type]

    def time(self) -> float:
        return self.now_s

    def next_number(self) -> int:
        self._num_made += 1
        return self._num_made

    def create_future(self) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = _numbered(_Future(loop=self), self)
        return future

    # ---- what asyncio's loop calls

    def select(self, timeout: float | None) -> list[Any]:
        """Let the time pass until the next timer."""
        if timeout is None:
            raise Deadlock("no callback is ready and no timer runs")
        if timeout > 0:
            self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody waits in a system call."""

    def close(self) -> None:
        super().close()

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return super().call_soon(*self._of_process(callback, args, context), context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return self.call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return super().call_at(when, *self._of_process(callback, args, context), context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> Any:
        raise AssertionError(f"{func} would run on a thread: its order would be chance")

    def _of_process(
        self, callback: Any, args: tuple[Any, ...], context: contextvars.Context | None
    ) -> tuple[Any, ...]:
        process = _process.get() if context is None else context.get(_process)
        return (callback, *args) if process is None else (process.enter, callback, args)


def _numbered(item: Any, loop: VirtualLoop) -> Any:
    item._number = loop.next_number()
    return item


def _make_task(loop: VirtualLoop, coro: Coroutine[Any, Any, T], **options: Any) -> Any:
    # Its constructor puts it into a set.
    task = _Task.__new__(_Task)
    _numbered(task, loop)
    task.__init__(coro, loop=loop, **options)  # type: ignore[misc]
    process = _process.get()
    if process is not None:
        process.take(task)
    return task


class Process:
    """What runs on one machine of a simulation."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.loop, self.name = loop, name
        self.is_dead = self.is_frozen = False
        self._held: list[tuple[Any, tuple[Any, ...], contextvars.Context]] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._context = contextvars.copy_context()
        self._context.run(_process.set, self)

    def __str__(self) -> str:
        return self.name

    def run(self, call: Callable[..., T], *args: Any) -> T:
        """Call from elsewhere, at once, as this process."""
        return self._context.copy().run(call, *args)

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Call as this process when its turn comes; never if it is dead by then."""
        if not self.is_dead:
            self.loop.call_soon(self._unless_dead, call, args, context=self._context.copy())

    def create_task(self, coro: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        return self.run(self.loop.create_task, coro)

    def freeze(self) -> None:
        """SIGSTOP: nothing of it runs. What comes meanwhile waits, its timers as well."""
        self.is_frozen = True

    def thaw(self) -> None:
        """SIGCONT."""
        self.is_frozen = False
        held, self._held = self._held, []
        for callback, args, context in held:
            self.loop.call_soon(callback, *args, context=context)

    def kill(self) -> None:
        """SIGKILL: its tasks end. What they do while they end reaches nobody any more."""
        self.is_dead = True
        self.thaw()
        for task in list(self._tasks):
            task.cancel()

    # ---- what the loop calls

    def enter(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Run a callback of this process, or hold it while frozen."""
        if self.is_frozen:
            self._held.append((callback, args, contextvars.copy_context()))
        else:
            callback(*args)

    def take(self, task: "asyncio.Task[Any]") -> None:
        """One of its tasks begins."""
        self._tasks[task] = None
        task.add_done_callback(lambda _: self._tasks.pop(task, None))
        if self.is_dead:
            task.cancel()

    def _unless_dead(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        if not self.is_dead:
            call(*args)


@contextlib.contextmanager
def virtual_machine(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """While inside, what reads the machine's clock (ages on the wire) reads the loop's, and secrets
    are drawn from the seed.
    """
    drawn = random.Random(seed)
    with (
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(time, "monotonic_ns", _in_ns(loop.time)),
        mock.patch.object(secrets, "token_hex", _in_hex(drawn)),
        mock.patch.object(secrets, "randbits", drawn.getrandbits),
    ):
        yield


def _in_ns(clock: Callable[[], float]) -> Callable[[], int]:
    return lambda: round(clock() * 1e9)


def _in_hex(drawn: random.Random) -> Callable[[int], str]:
    return lambda num_bytes: drawn.getrandbits(8 * num_bytes).to_bytes(num_bytes, "big").hex()


def run(loop: VirtualLoop, main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end, and close the loop. Raises AssertionError if it leaves tasks."""
    try:
        result = loop.run_until_complete(main)
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks are left: {left}"
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        with contextlib.suppress(Deadlock):
            loop.run_until_complete(asyncio.sleep(60.0))
        loop.close()
