"""Defects: exceptions that nobody expected where many are served. One costs the job that it comes
from, is logged and counted, and those behind the job are served.

Where an invariant may be broken behind it, the process ends instead: `record` it, and have whatever
is asked for the process's health (`Executor.failure`, `Transport.failure`) say so.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter

logger = logging.getLogger(__name__)

# Where a defect has come from: the values of the label.
Loop = Literal[
    "adapters",
    "attach",
    "discovery",
    "engine",
    "event_loop",
    "grammar",
    "kv_events",
    "kv_link",
    "kv_offload",
    "kv_transfer",
    "metrics",
    "model",
    "profiler",
    "ranks",
    "requests",
    "tracing",
    "worker_link",
    "workers",
]
LOOPS: tuple[Loop, ...] = get_args(Loop)

# The counter is the process's, as its log is: a thread may serve several registries' owners, or
# none.
DEFECTS = Counter(
    "pdserve_defects_total",
    "Exceptions that nobody expected, by where they came from; each is in the log",
    ["loop"],
    registry=None,
)
for _loop in LOOPS:
    DEFECTS.labels(loop=_loop)

OnDefect = Callable[[BaseException], None]


def nothing_more(error: BaseException) -> None:
    """The OnDefect of what is logged and counted, and no more."""


# These end what they are raised in by intention.
_INTENDED = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)

_tell_parent: list[Callable[[Loop], None]] = []


def export(registry: CollectorRegistry) -> None:
    """Show this process's count in a registry."""
    registry.register(DEFECTS)


def tell_parent(tell: Callable[[Loop], None]) -> None:
    """Have another process, which shows the count, hear of each defect here, on any thread; it
    calls `count`.
    """
    _tell_parent[:] = [tell]


def count(loop: Loop) -> None:
    """Count a defect that another process has logged."""
    DEFECTS.labels(loop=loop).inc()


def record(loop: Loop, error: BaseException, costs: str) -> None:
    """Log a defect with what it `costs`, and count it. Any thread."""
    logger.error("a defect costs %s: %r", costs, error, exc_info=error)
    count(loop)
    with contextlib.suppress(Exception):  # of a parent that is gone
        for tell in _tell_parent:
            tell(loop)


@contextlib.contextmanager
def contained(loop: Loop, costs: str) -> Iterator[None]:
    """Have what is raised here cost no more than it says, but for cancellations."""
    try:
        yield
    except _INTENDED:
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        record(loop, error, costs)


def spawn(
    loop: Loop,
    coroutine: Coroutine[Any, Any, None],
    *,
    costs: str,
    name: str | None = None,
    on_defect: OnDefect = nothing_more,
) -> "asyncio.Task[None]":
    """Start a task that nobody waits for: what it raises is a defect, of which `on_defect` is
    told.
    """
    task = asyncio.create_task(coroutine, name=name)

    def on_end(ended: "asyncio.Task[None]") -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            record(loop, error, costs)
            on_defect(error)

    task.add_done_callback(on_end)
    return task


def keep_running(
    loop: Loop,
    run: Callable[[], Coroutine[Any, Any, None]],
    *,
    costs: str,
    pause_s: float,
    name: str | None = None,
    on_defect: OnDefect = nothing_more,
) -> "asyncio.Task[None]":
    """Start a task that runs what has no end, until it is cancelled: `pause_s` after each defect,
    of which `on_defect` is told, anew.
    """

    def told(running: "asyncio.Task[None]") -> None:
        error = None if running.cancelled() else running.exception()
        if error is not None:
            record(loop, error, costs)
            with contained(loop, f"word of a defect that costs {costs}"):
                on_defect(error)

    async def keep() -> None:
        while True:
            # A task of its own: a defect in the place of its cancellation must not keep this one.
            running = asyncio.create_task(run(), name=name)
            running.add_done_callback(told)
            try:
                await asyncio.wait([running])
            finally:
                running.cancel()
                await asyncio.wait([running])
            await asyncio.sleep(pause_s)

    return asyncio.create_task(keep(), name=name)


def watch_event_loop(event_loop: asyncio.AbstractEventLoop) -> None:
    """Count what callbacks raise, and tasks that nobody waited for. Connections that break are not
    defects.
    """

    def on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None or isinstance(error, OSError):
            loop.default_exception_handler(context)
        else:
            record("event_loop", error, f"one callback or task ({context['message']})")

    event_loop.set_exception_handler(on_exception)
