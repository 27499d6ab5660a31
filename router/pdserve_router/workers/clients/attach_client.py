"""One Attach stream from its first message to its end: written, read, and watched for silence."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import engine_core_service_pb2_grpc as service_grpc
from pdserve_common.rpc.channels import end_call
from pdserve_common.rpc.liveness import HEARTBEAT_S, SILENCE_S, AwakeClock, every
from pdserve_common.rpc.send_queue import SendQueue

# Requests that wait to be sent to a worker take at most so much. Their tokens take more than that
# elsewhere here.
MAX_UNSENT_BYTES = 256 * 1024 * 1024
# How long one write may take, as for a worker's.
WRITE_TIMEOUT_S = 10.0
# How long a worker may take to end a stream that we have closed.
_CLOSE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimings:
    """How a link proves that it lives; tests shorten it."""

    heartbeat_s: float = HEARTBEAT_S
    # How long after its last message a worker is waited for, whether its stream stands or broke. It
    # keeps a router's requests as long from when it finds the stream broken, which is not before.
    dead_after_s: float = SILENCE_S
    min_backoff_s: float = 0.1
    max_backoff_s: float = 2.0


class LinkLostError(Exception):
    """The worker is of no use as it is; the message says why."""


class StreamBrokenError(Exception):
    """The stream is over, the worker may live; the message says why."""


class AttachStream:
    """Serves one stream. Everything runs on the event loop's thread."""

    def __init__(
        self,
        timings: LinkTimings,
        *,
        on_response: Callable[[service_pb2.AttachResponse], None],
        next_frame_seq: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timings = timings
        self._awake = AwakeClock(timings.heartbeat_s, clock=clock)
        self._on_response = on_response
        self._next_frame_seq = next_frame_seq
        self._unsent: SendQueue[service_pb2.AttachRequest] = SendQueue(
            MAX_UNSENT_BYTES, service_pb2.AttachRequest.ByteSize
        )
        # When the write under way began.
        self._write_began: float | None = None
        self._is_heartbeat_queued = False
        self._last_heard = self._awake()

    @property
    def silence_s(self) -> float:
        """How long the worker has said nothing while this process was awake."""
        return self._awake() - self._last_heard

    def send(self, message: service_pb2.AttachRequest) -> None:
        """Queue a message. It is lost if the stream breaks before it has left, which it does if too
        much waits.
        """
        self._unsent.put(message)

    async def serve(
        self, stub: service_grpc.EngineCoreServiceStub, hello: service_pb2.AttachHello
    ) -> None:
        """Attach and serve the stream until it ends, always with an exception: LinkLostError of a
        worker that is silent or reads too slowly, StreamBrokenError or AioRpcError of a stream,
        what `on_response` raises. If cancelled it ends the stream in order, which tells the worker
        that nobody comes back.
        """
        self._last_heard = self._awake()
        call = stub.Attach()
        tasks = [
            asyncio.create_task(part)
            for part in (
                self._read(call),
                self._write(call, hello),
                every(self._timings.heartbeat_s, self._tick),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # The reader, first in the list, knows the status; the writer only that it is over.
            for task in sorted(done, key=tasks.index):
                task.result()
        except asyncio.CancelledError:
            self._unsent.finish()
            await asyncio.wait(tasks[:1], timeout=_CLOSE_S)
            raise
        finally:
            for task in tasks:
                task.cancel()
            end_call(call)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, call: Any, hello: service_pb2.AttachHello) -> None:
        try:
            await call.write(service_pb2.AttachRequest(hello=hello))
            while (message := await self._unsent.get()) is not None:
                self._write_began = self._awake()
                await call.write(self._stamped(message))
                self._write_began = None
            await call.done_writing()
            await asyncio.Event().wait()  # The reader sees the end.
        except asyncio.InvalidStateError:
            raise StreamBrokenError("the stream has ended") from None

    def _stamped(self, message: service_pb2.AttachRequest) -> service_pb2.AttachRequest:
        if message.HasField("heartbeat"):
            self._is_heartbeat_queued = False
            message.heartbeat.next_frame_seq = self._next_frame_seq()
        return message

    async def _read(self, call: Any) -> None:
        while True:
            response = await call.read()
            if response is grpc.aio.EOF:
                # Raises unless the worker ended the stream with OK.
                code, details = await call.code(), await call.details()
                raise StreamBrokenError(f"the stream ended: {code.name} {details}".rstrip())
            self._last_heard = self._awake()
            self._on_response(response)

    def _tick(self) -> None:
        """Send a heartbeat; notice silence, and a worker that does not read."""
        self._awake.tick()
        if self.silence_s > self._timings.dead_after_s:
            raise LinkLostError(f"nothing heard for {self.silence_s:.1f} s")
        if self._write_began is not None and self._awake() - self._write_began > WRITE_TIMEOUT_S:
            raise LinkLostError(f"it has read nothing for {WRITE_TIMEOUT_S:g} s")
        if self._unsent.closed_because:
            raise LinkLostError(self._unsent.closed_because)
        if not self._is_heartbeat_queued:
            self._is_heartbeat_queued = True
            self.send(service_pb2.AttachRequest(heartbeat=service_pb2.Heartbeat()))


def is_refused(error: Exception) -> bool:
    """Does nobody listen where the worker was?"""
    # gRPC has one status for all that can be wrong with a connection. If its words change, requests
    # of a worker that is gone wait for dead_after_s.
    return "Connection refused" in reason_of(error)


def reason_of(error: Exception) -> str:
    """Return what a broken stream says."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}".rstrip()
    return str(error)
