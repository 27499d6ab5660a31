"""One Attach stream to one worker: requests go up, each engine step's outputs come down."""

import asyncio
import enum
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import engine_core_service_pb2_grpc as service_grpc
from pdserve_common import wire
from pdserve_common.engine_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineError,
    EngineInfo,
    ErrorCode,
    FinishReason,
    SchedulerStats,
    WorkerRole,
)
from pdserve_common.errors import InvalidRequestError, NoWorkerError
from pdserve_common.rpc import channel_options

logger = logging.getLogger(__name__)

OutputCallback = Callable[[EngineCoreOutput], None]


class WorkerState(enum.Enum):
    """What a worker can be used for."""

    CONNECTING = "connecting"
    READY = "ready"
    # Its operator has paused it: requests would wait. It may become ready again.
    PAUSED = "paused"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimings:
    """How a link proves that it lives; tests shorten it."""

    heartbeat_s: float = 1.0
    dead_after_s: float = 5.0
    min_backoff_s: float = 0.1
    max_backoff_s: float = 2.0


class _LinkLostError(Exception):
    """The stream to the worker is over; the message says why."""


class _Listener(NamedTuple):
    attempt: int
    on_output: OutputCallback
    on_defect: Callable[[], None]


class WorkerClient:
    """Keeps one worker attached. Everything runs on the event loop's thread; nothing blocks."""

    def __init__(
        self,
        address: str,
        *,
        role: WorkerRole,
        router_id: str,
        router_epoch: str,
        on_change: Callable[[], None],
        timings: LinkTimings | None = None,
    ) -> None:
        self.address = address
        self.role = role
        self.state = WorkerState.CONNECTING
        self.info: EngineInfo | None = None
        self.stats: SchedulerStats | None = None
        self._hello = service_pb2.AttachHello(router_id=router_id, router_epoch=router_epoch)
        self._on_change = on_change
        self._timings = timings or LinkTimings()
        self._listeners: dict[str, _Listener] = {}
        self._outbox: asyncio.Queue[service_pb2.AttachRequest] = asyncio.Queue()
        self._is_heartbeat_queued = False
        self._last_heard = 0.0
        self._last_problem = ""
        self._backoff_s = self._timings.min_backoff_s
        self._task: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    @property
    def engine_id(self) -> str:
        """The worker's name for itself; empty until it was attached once."""
        return self.info.engine_id if self.info is not None else ""

    @property
    def num_in_flight(self) -> int:
        return len(self._listeners)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"attach {self.address}")
        self._task.add_done_callback(self._on_run_ended)

    async def close(self) -> None:
        """End the stream; requests still on it get their error."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all("the router is closing")

    def add_request(
        self,
        request: EngineCoreRequest,
        on_output: OutputCallback,
        on_defect: Callable[[], None] = lambda: None,
    ) -> None:
        """Send a request. `on_output` gets its outputs, the last one has a finish_reason, also when
        the worker is lost; `on_defect` is called instead once `on_output` has raised. A paused
        worker keeps it until it goes on. Raises NoWorkerError if the worker takes nothing.
        """
        if self.state not in (WorkerState.READY, WorkerState.PAUSED):
            raise NoWorkerError(f"worker {self.address} is {self.state.value}")
        message = wire.engine_core_request_to_proto(request)
        self._listeners[request.request_id] = _Listener(request.attempt, on_output, on_defect)
        self._outbox.put_nowait(service_pb2.AttachRequest(add_request=message))

    def abort(self, request_id: str) -> None:
        """End a request; its callback is not called any more. Workers ignore ids they do not know,
        so it may also be called after the last output.
        """
        self._listeners.pop(request_id, None)
        # A lost stream has aborted its requests already.
        if self.state not in (WorkerState.CONNECTING, WorkerState.DOWN):
            abort = service_pb2.AbortRequests(request_ids=[request_id])
            self._outbox.put_nowait(service_pb2.AttachRequest(abort_requests=abort))

    async def _run(self) -> None:
        async with grpc.aio.insecure_channel(self.address, options=channel_options()) as channel:
            stub = service_grpc.EngineCoreServiceStub(channel)
            while True:
                try:
                    await self._attach_once(stub)
                except (_LinkLostError, grpc.aio.AioRpcError, InvalidRequestError) as error:
                    self._lost(_reason(error))
                # Jitter: routers that lost the same worker do not return all at once.
                await asyncio.sleep(self._backoff_s * random.uniform(0.5, 1.0))
                self._backoff_s = min(self._backoff_s * 2, self._timings.max_backoff_s)

    def _on_run_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # A defect of this process; its requests must not hang.
            logger.error("the link to worker %s failed", self.address, exc_info=error)
            self._lost("internal error of the router")

    async def _attach_once(self, stub: service_grpc.EngineCoreServiceStub) -> None:
        """Attach and serve the stream until it ends, always with an exception."""
        self._outbox = asyncio.Queue()
        self._is_heartbeat_queued = False
        self._last_heard = time.monotonic()
        self._outbox.put_nowait(service_pb2.AttachRequest(hello=self._hello))
        call = stub.Attach()
        tasks = [
            asyncio.create_task(part)
            for part in (self._write(call), self._read(call), self._watch())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # The reader knows the status; the writer only that the stream is over.
            for task in sorted(done, key=lambda task: task is not tasks[1]):
                task.result()
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        while True:
            message = await self._outbox.get()
            if message.HasField("heartbeat"):
                self._is_heartbeat_queued = False
            try:
                await call.write(message)
            except asyncio.InvalidStateError:
                raise _LinkLostError("the stream has ended") from None

    async def _read(self, call: Any) -> None:
        while True:
            response = await call.read()
            if response is grpc.aio.EOF:
                # Raises unless the worker ended the stream with OK.
                code, details = await call.code(), await call.details()
                raise _LinkLostError(f"the stream ended: {code.name} {details}".rstrip())
            self._last_heard = time.monotonic()
            kind = response.WhichOneof("message")
            if kind == "outputs":
                self._on_outputs(wire.engine_core_outputs_from_proto(response.outputs))
            elif kind == "heartbeat":
                self._on_heartbeat(response.heartbeat)
            elif kind == "welcome":
                self._on_welcome(wire.engine_info_from_proto(response.welcome.info))

    async def _watch(self) -> None:
        """Send heartbeats and notice silence: gRPC answers pings also for a hung event loop."""
        interval = self._timings.heartbeat_s
        while True:
            before = time.monotonic()
            await asyncio.sleep(interval)
            now = time.monotonic()
            if not self._is_heartbeat_queued:
                self._is_heartbeat_queued = True
                self._outbox.put_nowait(
                    service_pb2.AttachRequest(heartbeat=service_pb2.Heartbeat())
                )
            if now - before > 2 * interval:
                # It was this process that hung: what the worker sent is still to be read.
                self._last_heard = max(self._last_heard, now - interval)
            silence = now - self._last_heard
            if silence > self._timings.dead_after_s:
                raise _LinkLostError(f"nothing heard for {silence:.1f} s")

    def _on_welcome(self, info: EngineInfo) -> None:
        if info.role is not self.role:
            raise _LinkLostError(
                f"it is a {info.role.name.lower()} worker, listed under {self.role.name.lower()}"
            )
        self.info = info
        self.state = WorkerState.READY
        self._backoff_s = self._timings.min_backoff_s
        self._last_problem = ""
        logger.info(
            "%s worker %s at %s is ready, epoch %s",
            info.role.name.lower(),
            info.engine_id,
            self.address,
            info.epoch[:8],
        )
        self._on_change()

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        if outputs.scheduler_stats is not None:
            self.stats = outputs.scheduler_stats
        for output in outputs.outputs:
            if output.error is not None and output.error.code is ErrorCode.DRAINING:
                self._on_draining()
            self._dispatch(output)
        for request_id in outputs.finished_requests:
            self._end_with(
                request_id,
                EngineError(
                    code=ErrorCode.CANCELLED,
                    message=f"worker {self.address} ended the request without an output",
                ),
            )
        if outputs.engine_dead is not None:
            raise _LinkLostError(f"its engine died: {outputs.engine_dead.message}")

    def _dispatch(self, output: EngineCoreOutput) -> None:
        # Unknown ids are outputs that were under way when the request was aborted.
        listener = self._listeners.get(output.request_id)
        if listener is not None:
            if output.finished:
                del self._listeners[output.request_id]
            try:
                listener.on_output(output)
            except Exception:
                # A defect while taking one request's output must not end the others' stream.
                logger.exception("request %s: cannot take an output", output.request_id)
                self._listeners.pop(output.request_id, None)
                listener.on_defect()

    def _on_heartbeat(self, heartbeat: service_pb2.Heartbeat) -> None:
        if heartbeat.draining:
            self._on_draining()
        elif self.state in (WorkerState.READY, WorkerState.PAUSED):
            self._set_state(WorkerState.PAUSED if heartbeat.paused else WorkerState.READY)

    def _on_draining(self) -> None:
        if self.state in (WorkerState.READY, WorkerState.PAUSED):
            self._set_state(WorkerState.DRAINING)

    def _set_state(self, state: WorkerState) -> None:
        if state is not self.state:
            logger.info("worker %s is %s", self.address, state.value)
            self.state = state
            self._on_change()

    def _lost(self, reason: str) -> None:
        if reason != self._last_problem:
            logger.warning("worker %s is down: %s", self.address, reason)
            self._last_problem = reason
        self.stats = None
        if self.state is not WorkerState.DOWN:
            self.state = WorkerState.DOWN
            self._on_change()
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        error = EngineError(
            code=ErrorCode.ENGINE_DEAD,
            message=f"worker {self.address} was lost: {reason}",
            is_retryable=True,
        )
        for request_id in list(self._listeners):
            self._end_with(request_id, error)

    def _end_with(self, request_id: str, error: EngineError) -> None:
        listener = self._listeners.get(request_id)
        if listener is not None:
            self._dispatch(
                EngineCoreOutput(
                    request_id=request_id,
                    attempt=listener.attempt,
                    finish_reason=FinishReason.ERROR,
                    error=error,
                )
            )


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}".rstrip()
    return str(error)
