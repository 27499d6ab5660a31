"""The operator's verbs from the event loop's side: one at a time, carried out on the engine thread,
awaited with a bound.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

from pdserve_common.engine_types import PauseMode
from pdserve_common.errors import (
    DeadlineExceededError,
    EngineDeadError,
    FailedPreconditionError,
    PdserveError,
)
from pdserve_engine.core.scheduler import PauseState
from pdserve_engine.runner.control import EngineControl, check_level, check_tags

# Reading large weights again takes minutes; so may the requests that a pause waits for.
CONTROL_TIMEOUT_S = 600.0
# After the last request, how long KV sessions may take to end before sleep and reset refuse.
SETTLE_TIMEOUT_S = 10.0

T = TypeVar("T")
Future = asyncio.Future[object]


class _Wait(NamedTuple):
    """Looked at after every step until it holds."""

    condition: Callable[[], bool]
    future: Future


class ControlClient:
    """EngineClient's control verbs. Used on the event loop's thread unless said otherwise."""

    def __init__(
        self,
        control: EngineControl,
        *,
        post: Callable[[Callable[[], object]], None],
        call_soon: Callable[..., None],
    ) -> None:
        """`post` has the engine thread call a function between two steps, in order; `call_soon`
        the event loop's thread. Must run inside the event loop.
        """
        self._control = control
        self._post = post
        self._call_soon = call_soon
        self._loop = asyncio.get_running_loop()
        self._waits: list[_Wait] = []  # the engine thread's
        self._pending: set[Future] = set()
        self._verb: str | None = None
        # Why there are no verbs any more.
        self._end: PdserveError | None = None

    # ---- the verbs

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        async with self._exclusively("pause"), self._paused(mode):
            if clear_cache:
                await self._settle(mode)
                await self._call(self._control.reset_prefix_cache)

    async def resume(self) -> None:
        async with self._exclusively("resume"):
            await self._call(self._control.resume)

    async def sleep(self, level: int, mode: PauseMode) -> int:
        check_level(level)
        async with self._exclusively("sleep"), self._paused(mode):
            if level > 0:
                if mode is PauseMode.ABORT:
                    await self._call(self._control.end_sessions)
                await self._settle(mode)
            return await self._call(functools.partial(self._control.sleep, level))

    async def wake_up(self, tags: Sequence[str]) -> None:
        check_tags(tags)
        async with self._exclusively("wake up"):
            await self._call(functools.partial(self._control.wake_up, tags))

    async def reset_prefix_cache(self) -> int:
        async with self._exclusively("reset the prefix cache"):
            return await self._call(self._control.reset_prefix_cache)

    async def profile(self, start: bool) -> str:
        async with self._exclusively("profile"):
            if not start:
                return await self._call(self._control.stop_profile)
            await self._call(self._control.start_profile)
            return ""

    # ---- their end

    def begin_drain(self) -> None:
        """Refuse verbs from now on, give up those that wait, and let what was accepted finish."""
        self._end = self._end or FailedPreconditionError("the worker is draining")
        self._post(self._end_for_drain)

    def close(self, reason: str) -> None:
        """The engine has ended: fail what is under way, refuse the rest."""
        self._end = EngineDeadError(reason)
        for future in list(self._pending):
            _fail(future, self._end)

    # ---- on the engine thread

    def after_step(self) -> None:
        """Call it after every step: verbs may wait for what it brought."""
        self._control.end_full_profile()
        waits, self._waits = self._waits, []
        for wait in waits:
            if wait.future.done():  # cancelled or too late
                continue
            if wait.condition():
                self._call_soon(_resolve, wait.future, None)
            else:
                self._waits.append(wait)

    def _end_for_drain(self) -> None:
        for wait in self._waits:
            error = FailedPreconditionError("the worker is draining")
            self._call_soon(_fail, wait.future, error)
        self._waits = []
        self._control.end_for_drain()

    def _run(self, function: Callable[[], object], future: Future) -> None:
        """What a verb refuses goes to its caller; other exceptions are defects and end the
        engine.
        """
        if future.done():  # cancelled or too late
            return
        try:
            result = function()
        except PdserveError as error:
            self._call_soon(_fail, future, error)
        else:
            self._call_soon(_resolve, future, result)

    # ---- how verbs are carried out

    @asynccontextmanager
    async def _exclusively(self, verb: str) -> AsyncIterator[None]:
        """One at a time: they would pull the engine in different directions."""
        if self._end is None and self._verb is not None:
            raise FailedPreconditionError(f"cannot {verb}: {self._verb} is under way")
        self._check_open()
        self._verb = verb
        try:
            yield
        finally:
            self._verb = None

    @asynccontextmanager
    async def _paused(self, mode: PauseMode) -> AsyncIterator[None]:
        """Pause, wait for what `mode` waits for, and go on as before if the block fails."""
        before: list[PauseState] = []  # filled on the engine thread, even if nobody waits any more

        def pause() -> None:
            before.append(self._control.pause(mode))

        try:
            await self._call(pause)
            if mode is not PauseMode.KEEP:
                await self._until(self._control.is_quiet, CONTROL_TIMEOUT_S)
            yield
        except BaseException:  # cancelled, too
            await self._undo_pause(before)
            raise

    async def _undo_pause(self, before: list[PauseState]) -> None:
        """Return when it is done: whoever asked may look at the state next."""
        if isinstance(self._end, EngineDeadError):
            return

        def undo() -> None:  # comes after `pause` in the engine's queue
            if before:
                self._control.undo_pause(before[0])

        future = self._new_future()
        self._post(functools.partial(self._run, undo, future))
        await asyncio.wait([future], timeout=CONTROL_TIMEOUT_S)

    async def _settle(self, mode: PauseMode) -> None:
        """Leave sessions and READs the time to end. What needs them to be over says itself if they
        are not.
        """
        if mode is not PauseMode.KEEP:
            with contextlib.suppress(DeadlineExceededError):
                await self._until(self._control.is_empty, SETTLE_TIMEOUT_S)

    async def _call(self, function: Callable[[], T]) -> T:
        """Run on the engine thread, between steps."""
        self._check_open()
        future = self._new_future()
        self._post(functools.partial(self._run, function, future))
        result = await self._bounded(future, CONTROL_TIMEOUT_S)
        return result  # type: ignore[return-value]  # what `function` returned

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        self._check_open()
        future = self._new_future()
        self._post(functools.partial(self._add_wait, _Wait(condition, future)))
        await self._bounded(future, timeout_s)

    def _add_wait(self, wait: _Wait) -> None:
        self._waits.append(wait)

    def _new_future(self) -> Future:
        future: Future = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future) -> None:
        self._pending.discard(future)
        if not future.cancelled():
            future.exception()  # seen, also if nobody waits any more

    async def _bounded(self, future: Future, timeout_s: float) -> object:
        try:
            # Not wait_for: up to Python 3.11 a cancellation that meets a result is lost in it.
            await asyncio.wait([future], timeout=timeout_s)
            if not future.done():
                raise DeadlineExceededError(f"{self._verb} was not done within {timeout_s:g} s")
            return future.result()
        finally:
            future.cancel()

    def _check_open(self) -> None:
        if self._end is not None:
            raise type(self._end)(self._end.message)


def _resolve(future: Future, result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: Future, error: PdserveError) -> None:
    if not future.done():
        future.set_exception(error)
