"""The operator's verbs from the event loop's side: one at a time, but for those that only read;
carried out on the engine thread, awaited with a bound.
"""

import asyncio
import dataclasses
import functools
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from pdserve_common.errors import (
    DeadlineExceededError,
    EngineDeadError,
    FailedPreconditionError,
    PdserveError,
    RequestFailedError,
)
from pdserve_common.observability import defects
from pdserve_common.processes.calls import Call, ResultT
from pdserve_common.runtime import Runtime
from pdserve_common.types.verbs import READING_VERBS
from pdserve_engine.runner.operate.control import HANDLERS, EngineControl, Wait

# Reading large weights again takes minutes; so may the requests that a pause waits for.
CONTROL_TIMEOUT_S = 600.0
# When to ask again for a verb that is refused because another one is under way.
BUSY_RETRY_MS = 100

Future = asyncio.Future[Any]


@dataclasses.dataclass(slots=True)
class _Running:
    """A verb that has begun, and what it waits for."""

    verb: Call[Any]
    handler: Coroutine[Wait, None, object]
    future: Future
    condition: Callable[[], bool] = lambda: False
    deadline: float = math.inf


class ControlClient:
    """Carries out EngineClient's verbs. Used on the event loop's thread unless said otherwise."""

    def __init__(
        self,
        control: EngineControl,
        *,
        post: Callable[[Callable[[], object]], None],
        call_soon: Callable[..., None],
        runtime: Runtime,
    ) -> None:
        """`post` has the engine thread call a function between two steps, in order; `call_soon`
        the event loop's thread. Must run inside the event loop.
        """
        self._control = control
        self._post = post
        self._call_soon = call_soon
        self._runtime = runtime
        self._clock = runtime.now
        self._loop = asyncio.get_running_loop()
        self._running: _Running | None = None  # the engine thread's
        # What is under way, or has been given up and not ended yet.
        self._pending: tuple[str, Future] | None = None
        self._reads: set[Future] = set()
        # Why there are no verbs any more.
        self._end: PdserveError | None = None

    async def call(self, verb: Call[ResultT]) -> ResultT:
        """As EngineClient.call."""
        if type(verb) in READING_VERBS:
            return await self._read(verb)
        with self._exclusively(verb.title()) as future:
            self._post(functools.partial(self._start, verb, future))
            try:
                # Not wait_for: up to Python 3.11 a cancellation that meets a result is lost in it.
                await self._runtime.wait(future, CONTROL_TIMEOUT_S)
            finally:
                if not future.done():
                    await self._give_up(future)
            result: ResultT = future.result()
            return result

    async def _read(self, verb: Call[ResultT]) -> ResultT:
        self._check_open()
        future: Future = self._loop.create_future()
        self._reads.add(future)
        self._post(functools.partial(self._answer, verb, future))
        try:
            await self._runtime.wait(future, CONTROL_TIMEOUT_S)
        finally:
            self._reads.discard(future)
            _fail(future, _overdue(verb.title()))
            future.exception()  # seen, also if nobody waits any more
        result: ResultT = future.result()
        return result

    def begin_drain(self) -> None:
        """Refuse verbs from now on, give up one that waits, and let what was accepted finish."""
        self._end = self._end or FailedPreconditionError("the worker is draining")
        self._post(self._end_for_drain)

    def close(self, reason: str) -> None:
        """The engine has ended: fail what is under way, refuse the rest."""
        self._end = EngineDeadError(reason)
        for future in self._reads:
            _fail(future, self._end)
        if self._pending is not None:
            _fail(self._pending[1], self._end)

    @contextmanager
    def _exclusively(self, verb: str) -> Iterator[Future]:
        """One at a time: they would pull the engine in different directions."""
        self._check_open()
        if self._pending is not None:
            raise FailedPreconditionError(
                f"cannot {verb}: {self._pending[0]} is under way", retry_after_ms=BUSY_RETRY_MS
            )
        future: Future = self._loop.create_future()
        self._pending = verb, future
        try:
            yield future
        finally:
            self._pending = None
            if future.done():
                future.exception()  # seen, also if nobody waits any more

    def _check_open(self) -> None:
        if self._end is not None:
            raise type(self._end)(self._end.message)

    async def _give_up(self, future: Future) -> None:
        """Return when the verb is undone: whoever asked may look at the state next."""
        assert self._pending is not None
        error = _overdue(self._pending[0])
        self._post(functools.partial(self._stop, error))
        await self._runtime.wait(future, CONTROL_TIMEOUT_S)
        _fail(future, error)  # of an engine thread that hangs

    # ---- on the engine thread

    def after_step(self) -> None:
        """Call it after every step: a verb may wait for what it brought."""
        self._control.end_full_profile()
        running = self._running
        if running is not None and (running.condition() or self._clock() >= running.deadline):
            self._advance(running)
            self._post(_nothing)  # what it has changed may be a reason to step

    def _start(self, verb: Call[Any], future: Future) -> None:
        if not future.done():  # cancelled or too late
            self._running = _Running(verb, HANDLERS[type(verb)](self._control, verb), future)
            self._advance(self._running)

    def _answer(self, verb: Call[Any], future: Future) -> None:
        """Carry out a verb that waits for nothing, beside the one under way."""
        try:
            HANDLERS[type(verb)](self._control, verb).send(None)
        except StopIteration as end:
            self._call_soon(_resolve, future, end.value)
        except PdserveError as error:
            self._call_soon(_fail, future, error)
        except Exception as error:
            self._call_soon(_fail, future, _contained(verb, error))

    def _advance(self, running: _Running) -> None:
        """Run the handler up to what it waits for next. What it refuses goes to the caller; other
        exceptions are defects, and end the engine if the verb may have left it half changed.
        """
        try:
            wait = running.handler.send(None)
        except StopIteration as end:
            self._finish(_resolve, end.value)
        except PdserveError as error:
            self._finish(_fail, error)
        except Exception as error:
            self._finish(_fail, _contained(running.verb, error))
        else:
            running.condition = wait.condition
            running.deadline = self._clock() + wait.timeout_s
            if wait.timeout_s < CONTROL_TIMEOUT_S:  # an idle engine has to be told
                self._call_soon(self._runtime.call_later, wait.timeout_s, self._post, _nothing)

    def _stop(self, error: PdserveError) -> None:
        """Have the verb under way, if there is one, undo what it has done."""
        if self._running is not None:
            self._running.handler.close()
            self._finish(_fail, error)

    def _finish(self, settle: Callable[[Future, Any], None], outcome: object) -> None:
        assert self._running is not None
        self._call_soon(settle, self._running.future, outcome)
        self._running = None

    def _end_for_drain(self) -> None:
        self._stop(FailedPreconditionError("the worker is draining"))
        self._control.end_for_drain()


def _overdue(verb: str) -> PdserveError:
    return DeadlineExceededError(f"{verb} was not done within {CONTROL_TIMEOUT_S:g} s")


def _contained(verb: Call[Any], error: Exception) -> PdserveError:
    """Return what the caller of a verb gets for a defect. Raises it where the engine has to end."""
    if not verb.IS_CONTAINED:
        raise error
    defects.record("engine", error, verb.title())
    return RequestFailedError(f"{verb.title()} has failed: {type(error).__name__}: {error}")


def _nothing() -> None:
    pass


def _resolve(future: Future, result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: Future, error: PdserveError) -> None:
    if not future.done():
        future.set_exception(error)
