"""Processes in which large requests are parsed, checked and tokenized, so that the router's event
loop goes on meanwhile: threads would share its GIL.
"""

import asyncio
import contextlib
import dataclasses
import io
import json
import logging
import os
import pickle
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar, cast

from pdserve_common.errors import DeadlineExceededError, OverloadedError, PdserveError
from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.processes.child import ChildProcess, fork, start
from pdserve_common.processes.connection import receive_one
from pdserve_router.api.large_requests.child import CODEC, READY, be_template
from pdserve_router.api.large_requests.fair_slots import FairSlots
from pdserve_router.api.large_requests.held_bytes import RETRY_AFTER_MS, Held, HeldBytes
from pdserve_router.config import RouterConfig
from pdserve_router.requests.input.input_processor import InputProcessor, ProcessedInput
from pdserve_router.requests.input.request_limits import NotSmallError

logger = logging.getLogger(__name__)

# Requests that are worked on at a time, of all clients and of each.
NUM_PROCESSES = 4
NUM_PER_CLIENT = 2
# What a process may take besides the tokenizer; a million tokens of text take 200 MB.
MAX_MEMORY_BYTES = 256 << 20
# For the work itself: a prompt of a million tokens takes 5 s.
JOB_TIMEOUT_S = 30.0
# For its turn.
QUEUE_TIMEOUT_S = 30.0
START_TIMEOUT_S = 60.0
# After a process that could not start.
RESTART_AFTER_S = 5.0
# How long taking over an answer may hold the event loop at once, if its pieces are small.
_SLICE_S = 0.001
# For the system to end a process whose time is over.
_GRACE_S = 2.0
# Requests that wait or are worked on take at most so much: what arrives above is refused.
MAX_HELD_BYTES = 96 << 20
MAX_CLIENT_BYTES = 48 << 20
# Requests up to here are done at once; above they take turns, one in each round of the event loop.
_AT_ONCE_BYTES = 4096

R = TypeVar("R")
# Takes the input processor, the request's bytes and what else is known of it. A function of a
# module, so that another process finds it.
Job = Callable[..., Awaitable[R]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """What such a process needs to know."""

    model: str
    router_id: str
    log_level: str
    model_name: str
    default_deadline_s: float
    max_deadline_s: float
    chat_format: str
    share_prefixes: bool
    max_images_per_prompt: int

    @classmethod
    def from_config(cls, config: RouterConfig) -> "EdgeSettings":
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(cls)})

    def to_json(self) -> str:
        processor = (
            "model_name",
            "default_deadline_s",
            "max_deadline_s",
            "chat_format",
            "share_prefixes",
        )
        values = dataclasses.asdict(self)
        values["input_processor"] = {name: values.pop(name) for name in processor}
        limits = {"max_memory_bytes": MAX_MEMORY_BYTES, "timeout_s": JOB_TIMEOUT_S}
        return json.dumps({**values, **limits})


class EdgeProcesses:
    """Runs jobs: small requests here and now, large ones in a process each, some at a time."""

    def __init__(
        self,
        processor: InputProcessor,
        settings: EdgeSettings,
        metrics: RouterMetrics,
        *,
        restart_after_s: float = RESTART_AFTER_S,
    ) -> None:
        self._restart_after_s = restart_after_s
        self._processor = processor
        self._settings = settings
        self._slots = FairSlots(NUM_PROCESSES, num_per_client=NUM_PER_CLIENT)
        self._held = HeldBytes(max_bytes=MAX_HELD_BYTES, max_client_bytes=MAX_CLIENT_BYTES)
        self._turn = asyncio.Lock()
        self._template: _Template | None = None
        self._may_start = 0.0
        self._leaving: set[asyncio.Task[None]] = set()
        self._outcomes = metrics.large_requests
        metrics.large_requests_waiting.set_function(lambda: self._slots.num_waiting)
        metrics.large_request_bytes.set_function(lambda: self._held.num_bytes)

    def start(self, template: ChildProcess) -> None:
        """Copy this one for large requests. Without it, and after its end, the next large request
        starts one.
        """
        self._template = _Template(template)

    async def close(self) -> None:
        """End all of them."""
        if self._template is not None:
            await self._template.close()
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    def hold(self, client: str) -> AbstractContextManager[Held]:
        """Count the bytes of a large request of `client`, from when they begin to arrive."""
        return self._held.hold(client)

    async def run(self, job: Job[R], raw: bytes, *args: object, client: str, is_small: bool) -> R:
        """Return what `job` makes of a request's bytes; a small one may turn out to be work for a
        process. Raises what it raises; OverloadedError if
        a large one gets no turn, DeadlineExceededError if it takes too long, PdserveError if its
        process ended.
        """
        if is_small:
            if len(raw) > _AT_ONCE_BYTES:
                async with self._turn:
                    await asyncio.sleep(0)
            with contextlib.suppress(NotSmallError):
                return await job(self._processor, raw, *args)
        await self._take_slot(client)
        with contextlib.ExitStack() as stack:
            stack.callback(self._slots.release, client)
            connection = stack.enter_context(await self._connect())
            try:
                value, error = await self._exchange(connection, job, raw, args)
            except asyncio.CancelledError:
                self._abandon(connection, stack.pop_all())
                raise
        try:
            if isinstance(error, PdserveError):
                raise error
            if error is not None:
                raise RuntimeError(f"in the process of a large request: {error}")
        finally:
            # Its traceback holds this frame, and those above with the request's megabytes.
            del error
        return cast(R, value)

    def remember(self, processed: Iterable[ProcessedInput]) -> None:
        """Do here what a process has checked without checking it again."""
        self._processor.remember(processed)

    async def _take_slot(self, client: str) -> None:
        try:
            await asyncio.wait_for(self._slots.acquire(client), QUEUE_TIMEOUT_S)
        except asyncio.TimeoutError:
            self._count("refused")
            raise OverloadedError(
                f"a large request waited {QUEUE_TIMEOUT_S:g} s to be tokenized, behind others",
                retry_after_ms=RETRY_AFTER_MS,
            ) from None

    async def _connect(self) -> socket.socket:
        """Return the connection to a new process."""
        template = self._started_template()
        try:
            if await asyncio.wait_for(asyncio.shield(template.is_ready), START_TIMEOUT_S):
                return template.fork()
        except (asyncio.TimeoutError, OSError):
            pass
        self._count("crashed")
        raise OverloadedError(
            "no process can be started for a large request", retry_after_ms=RETRY_AFTER_MS
        )

    def _started_template(self) -> "_Template":
        if self._template is None or self._template.has_ended:
            if time.monotonic() < self._may_start:
                raise OverloadedError(
                    "the processes for large requests are being restarted",
                    retry_after_ms=round(1000 * self._restart_after_s),
                )
            self._may_start = time.monotonic() + self._restart_after_s
            self._template = _Template(_start_template(self._settings))
        return self._template

    async def _exchange(
        self, connection: socket.socket, job: Job[R], raw: bytes, args: object
    ) -> tuple[object, PdserveError | str | None]:
        began = time.monotonic()
        try:
            answer = await asyncio.wait_for(
                _ask(connection, job, raw, args), JOB_TIMEOUT_S + _GRACE_S
            )
        except (OSError, asyncio.TimeoutError):
            if time.monotonic() - began < JOB_TIMEOUT_S:
                self._count("crashed")
                logger.error("the process of a large request (%d bytes) ended early", len(raw))
                raise PdserveError("the process that parses and tokenizes it ended early") from None
            self._count("timeout")
            raise DeadlineExceededError(
                f"parsing and tokenizing it takes more than {JOB_TIMEOUT_S:g} s"
            ) from None
        self._count("done")
        return answer

    def _abandon(self, connection: socket.socket, stack: contextlib.ExitStack) -> None:
        """Nobody waits for it any more: tell the process, and close `stack` when that has ended."""

        async def wait() -> None:
            with stack, contextlib.suppress(OSError, asyncio.TimeoutError):
                connection.shutdown(socket.SHUT_WR)
                await asyncio.wait_for(_read_to_end(connection), JOB_TIMEOUT_S + _GRACE_S)

        task = asyncio.create_task(wait())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        self._count("abandoned")

    def _count(self, outcome: str) -> None:
        self._outcomes.labels(outcome=outcome).inc()


_TEMPLATE = "the process for large requests"
# Threads of a library would not be there in a copy.
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def fork_template(settings: EdgeSettings) -> ChildProcess:
    """Fork it off this process, which spares it the imports. Must be called before there are
    threads, connections, or ports that are listened on.
    """

    def run(control: socket.socket) -> None:
        os.environ.update(_ENVIRONMENT)
        be_template(control, json.loads(settings.to_json()))

    return ChildProcess(_TEMPLATE, *fork(run))


def _start_template(settings: EdgeSettings) -> ChildProcess:
    module, env = "pdserve_router.api.large_requests.child", {**os.environ, **_ENVIRONMENT}
    return ChildProcess(_TEMPLATE, *start(module, [settings.to_json()], env=env))


class _Template:
    """What watches the process of which all others are copies."""

    def __init__(self, template: ChildProcess) -> None:
        self._process, self._control = template, template.sockets[0]
        self._control.setblocking(False)
        with contextlib.suppress(OSError):  # it has ended, which is seen below
            self._control.send(READY)
        self.has_ended = False
        # False if it ended first.
        self.is_ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._watch())

    def fork(self) -> socket.socket:
        """Return the connection to a new copy. Raises OSError if it has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [READY], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        return ours

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while await loop.sock_recv(self._control, 1):
                self.is_ready.set_result(True)
            logger.error("%s has ended, the next one starts another", _TEMPLATE)
        finally:
            self.has_ended = True
            if not self.is_ready.done():
                self.is_ready.set_result(False)
            self._process.close()


async def _ask(
    connection: socket.socket, job: Job[R], raw: bytes, args: object
) -> tuple[object, PdserveError | str | None]:
    """Raises ConnectionError if the process ends before it has answered."""
    loop = asyncio.get_running_loop()
    call = pickle.dumps((job, args), pickle.HIGHEST_PROTOCOL)
    await loop.sock_sendall(connection, CODEC.encode(call) + CODEC.header(bytes, len(raw)))
    await loop.sock_sendall(connection, raw)
    return await _unpickle(*await receive_one(connection, CODEC))


async def _unpickle(data: bytes, num_pieces: int) -> tuple[object, PdserveError | str | None]:
    """Return an answer, which is the last of its pieces. Others' events come between them."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    until = time.monotonic() + _SLICE_S
    for _ in range(num_pieces - 1):
        unpickler.load()
        if time.monotonic() >= until:
            await asyncio.sleep(0)
            until = time.monotonic() + _SLICE_S
    answer: tuple[object, PdserveError | str | None] = unpickler.load()
    return answer


async def _read_to_end(connection: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(connection, 65536):
        pass
