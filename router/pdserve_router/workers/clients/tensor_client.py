"""Puts tensors on one worker before the requests that name them are sent there."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve_common.errors import (
    EngineDeadError,
    FailedPreconditionError,
    InvalidRequestError,
    OverloadedError,
    PdserveError,
)
from pdserve_common.observability import defects
from pdserve_common.rpc.channels import retry_after_ms_of
from pdserve_common.types.engine import EngineCoreRequest, TensorRef
from pdserve_common.types.tensors import CHUNK_BYTES
from pdserve_common.wire import to_proto
from pdserve_router.workers.clients.held_tensors import HeldTensors

# A worker gives an upload as long.
PUT_TIMEOUT_S = 10.0
# At a time; the rest waits, as requests wait for their turn.
MAX_PUTS = 4

_ERRORS: dict[grpc.StatusCode, type[PdserveError]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: OverloadedError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.UNIMPLEMENTED: FailedPreconditionError,
}


class TensorClient:
    """Of one stream to a worker: a new one knows nothing of what the process has that is behind
    it now. Everything runs on the event loop's thread.
    """

    def __init__(
        self,
        stub: Any,
        tensors: HeldTensors,
        *,
        is_wanted: Callable[[EngineCoreRequest], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_wanted`: a request has not ended, and has no later attempt."""
        self._stub = stub
        self._tensors = tensors
        self._is_wanted = is_wanted
        self._clock = clock
        # Until when the worker surely holds it.
        self._held_until: dict[bytes, float] = {}
        self._puts: dict[bytes, asyncio.Task[None]] = {}
        self._waiting: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_PUTS)

    def then(
        self,
        request: EngineCoreRequest,
        send: Callable[[], None],
        fail: Callable[[PdserveError], None],
    ) -> None:
        """Call `send` once the worker holds all that the request names, at once if it does; or
        `fail`. Neither is called for one that is not wanted any more, nor after `close`.
        """
        refs = [feature.data for feature in request.mm_features if feature.data is not None]
        missing = [ref for ref in refs if not self._is_held(ref)]
        if not missing:
            send()
            return
        task = asyncio.create_task(self._put_all(request, missing, send, fail))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def close(self) -> None:
        """End what is under way."""
        tasks = [*self._waiting, *self._puts.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_held(self, ref: TensorRef) -> bool:
        now = self._clock()
        return self._held_until.get(ref.content_hash, now) > now

    async def _put_all(
        self,
        request: EngineCoreRequest,
        refs: Sequence[TensorRef],
        send: Callable[[], None],
        fail: Callable[[PdserveError], None],
    ) -> None:
        try:
            # Others may wait for the same picture: it goes on if one of them does not.
            await asyncio.gather(*(asyncio.shield(self._putting(ref)) for ref in refs))
        except PdserveError as error:
            if self._is_wanted(request):
                fail(error)
        except Exception as error:  # a defect: the request must not wait for its deadline
            defects.record("worker_link", error, f"request {request.request_id}")
            if self._is_wanted(request):
                fail(EngineDeadError("a tensor could not be put, see the router's log"))
        else:
            if self._is_wanted(request):
                send()

    def _putting(self, ref: TensorRef) -> "asyncio.Task[None]":
        name = ref.content_hash
        task = self._puts.get(name)
        if task is None or task.done():
            task = self._puts[name] = asyncio.create_task(self._put(ref))
            task.add_done_callback(lambda done: self._on_put(name, done))
        return task

    def _on_put(self, name: bytes, task: "asyncio.Task[None]") -> None:
        if self._puts.get(name) is task:
            del self._puts[name]
        if not task.cancelled():
            task.exception()  # nobody may be left to look at it

    async def _put(self, ref: TensorRef) -> None:
        async with self._slots:
            if (data := self._tensors.get(ref.content_hash)) is None:
                raise EngineDeadError("the request of a tensor ended before that was put")
            began = self._clock()
            try:
                answer = await self._stub.PutTensor(_messages(ref, data), timeout=PUT_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise _error_of(error) from None
        self._forget_old()
        # Half of it is left for the request's own way there, and for clocks that differ.
        self._held_until[ref.content_hash] = began + answer.ttl_ms / 2000

    def _forget_old(self) -> None:
        now = self._clock()
        self._held_until = {n: until for n, until in self._held_until.items() if until > now}


async def _messages(ref: TensorRef, data: bytes) -> AsyncIterator[service_pb2.PutTensorRequest]:
    yield service_pb2.PutTensorRequest(ref=to_proto(ref))
    view = memoryview(data)
    for start in range(0, len(data), CHUNK_BYTES):
        yield service_pb2.PutTensorRequest(chunk=bytes(view[start : start + CHUNK_BYTES]))


def _error_of(error: grpc.aio.AioRpcError) -> PdserveError:
    kind = _ERRORS.get(error.code(), EngineDeadError)
    told = kind(f"a tensor could not be put: {error.code().name} {error.details()}")
    told.retry_after_ms = retry_after_ms_of(error)
    return told
