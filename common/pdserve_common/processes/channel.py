"""Messages between the event loops of two processes."""

import asyncio
import copy
import itertools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, cast

from pdserve_common.errors import DeadlineExceededError, PdserveError
from pdserve_common.processes.calls import (
    Answer,
    Call,
    CallT,
    CancelCall,
    Failed,
    ProtocolError,
    ResultT,
)
from pdserve_common.processes.frames import FrameCodec, MessageT
from pdserve_common.rpc.liveness import HEARTBEAT_S, AwakeClock

# Above this an end that does not read counts as stalled ...
STALL_BYTES = 1024 * 1024
# ... and the connection ends when it has been for this long, or this much waits for it.
STALL_TIMEOUT_S = 10.0
MAX_UNSENT_BYTES = 64 * 1024 * 1024


class Channel(asyncio.Protocol, Generic[MessageT]):
    """Sends and receives messages, and asks the other end. Its codec has to have Answer, Failed and
    CancelCall, of which `on_message` is not told.

    `on_message(message, ref)` and, once, `on_lost(reason)` run on the event loop's thread; an
    exception of `on_message` ends the connection.
    """

    _transport: asyncio.Transport

    def __init__(
        self,
        codec: FrameCodec[MessageT],
        on_message: Callable[[MessageT, int], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Must run inside the event loop."""
        self._loop = asyncio.get_running_loop()
        self._codec = codec
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader = codec.reader()
        self._lock = threading.Lock()
        self._unsent: list[bytes] = []  # guarded by _lock
        self._stall: asyncio.TimerHandle | None = None
        self._end = ""
        self._is_lost = False
        self._refs = itertools.count(1)
        # What was asked, and what the other end has asked, by what they refer to.
        self._asked: dict[int, asyncio.Future[Answer | Failed]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._awake = AwakeClock(HEARTBEAT_S)
        self._last_heard = self._awake()

    @property
    def unsent_bytes(self) -> int:
        """What waits for the other end. On the event loop's thread."""
        with self._lock:
            num_queued = sum(map(len, self._unsent))
        return num_queued + self._transport.get_write_buffer_size()

    @property
    def silence_s(self) -> float:
        """For how long the other end has said nothing, as far as this one was awake."""
        return self._awake() - self._last_heard

    def tick(self) -> None:
        """Call it every HEARTBEAT_S where `silence_s` is asked for."""
        self._awake.tick()

    def send(self, message: MessageT, ref: int = 0) -> None:
        """Queue a message, in the order of the calls. Any thread; forgotten if the connection has
        ended. Raises ProtocolError if it is too large.
        """
        frame = self._codec.encode(message, ref)
        with self._lock:
            self._unsent.append(frame)
            is_first = len(self._unsent) == 1
        if is_first:
            self._loop.call_soon_threadsafe(self._flush)

    async def call(self, call: Call[ResultT], timeout_s: float | None) -> ResultT:
        """Ask the other end and return the result. Raises what the call raises there, what
        `fail_calls` is given, or DeadlineExceededError.
        """
        ref = next(self._refs)
        future: asyncio.Future[Answer | Failed] = self._loop.create_future()
        self._asked[ref] = future
        self.send(cast(MessageT, call), ref)
        try:
            answer = await asyncio.wait_for(future, timeout_s)
        except asyncio.TimeoutError:
            name = type(call).__name__
            raise DeadlineExceededError(f"{name} got no answer within {timeout_s:g} s") from None
        finally:
            del self._asked[ref]
            if future.cancelled():
                self.send(cast(MessageT, CancelCall()), ref)
        return answer.result_of(call)

    def fail_calls(self, error: Exception) -> None:
        """Nothing that was asked is answered any more: whoever waits gets a copy of this."""
        for future in self._asked.values():
            if not future.done():
                future.set_exception(copy.copy(error))

    def answer(
        self, call: CallT, ref: int, handle: Callable[[CallT], Coroutine[Any, Any, object]]
    ) -> None:
        """Have a task handle a call of the other end, and answer with the result or the
        PdserveError; it is cancelled if nobody waits for it any more.
        """
        task = self._tasks[ref] = self._loop.create_task(self._answer(call, ref, handle))
        task.add_done_callback(lambda _: self._tasks.pop(ref))

    async def _answer(
        self, call: CallT, ref: int, handle: Callable[[CallT], Coroutine[Any, Any, object]]
    ) -> None:
        try:
            answer: Answer | Failed = Answer.of(await handle(call))
        except PdserveError as error:
            answer = Failed.of(error)
        self.send(cast(MessageT, answer), ref)

    def close(self) -> None:
        """End the connection when all is sent."""
        self._flush()
        self._transport.close()

    def abort(self, reason: str) -> None:
        """End the connection now."""
        self._end = self._end or reason
        if not self._is_lost:
            self._transport.abort()

    def _flush(self) -> None:
        with self._lock:
            frames, self._unsent = self._unsent, []
        if frames and not self._transport.is_closing():
            self._transport.write(b"".join(frames))
            num_bytes = self._transport.get_write_buffer_size()
            if num_bytes > MAX_UNSENT_BYTES:
                self.abort(f"the other end is {num_bytes} bytes behind")

    def _take(self, message: Any, ref: int) -> None:
        self._last_heard = self._awake()
        if isinstance(message, Answer | Failed):
            future = self._asked.get(ref)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, CancelCall):
            if ref in self._tasks:
                self._tasks[ref].cancel()
        else:
            self._on_message(message, ref)

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=STALL_BYTES)

    def data_received(self, data: bytes) -> None:
        try:
            for message, ref in self._reader.feed(data):
                self._take(message, ref)
        except ProtocolError as error:
            self.abort(str(error))

    def pause_writing(self) -> None:
        reason = f"the other end has read nothing for {STALL_TIMEOUT_S:g} s"
        self._stall = self._loop.call_later(STALL_TIMEOUT_S, self.abort, reason)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self.resume_writing()
        self._on_lost(self._end or (str(exc) if exc is not None else "the connection ended"))
