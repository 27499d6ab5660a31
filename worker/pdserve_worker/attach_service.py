"""EngineCoreService over an EngineClient: what routers and stub users call on a worker."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING

import grpc

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import engine_core_service_pb2_grpc as service_grpc
from pdserve_common.errors import (
    EngineDeadError,
    FailedPreconditionError,
    InvalidRequestError,
    PdserveError,
    RequestFailedError,
)
from pdserve_common.limits.request_validation import validate_engine_core_request
from pdserve_common.observability import defects
from pdserve_common.rpc import attach_protocol
from pdserve_common.rpc.channels import rpc_errors
from pdserve_common.rpc.liveness import HEARTBEAT_S, every
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from pdserve_common.types.engine_client import NO_TENSORS, EngineClient, Tensors
from pdserve_common.types.lora import LoRAAdapters
from pdserve_common.version import VERSION
from pdserve_common.wire import (
    engine_core_output_to_proto,
    engine_core_outputs_to_proto,
    from_proto,
    to_proto,
)
from pdserve_worker.attached_router import (
    AttachedRouter,
    AttachedRouters,
    Frame,
    RequestAttempt,
    Resume,
)
from pdserve_worker.kv_cache_feed import CachedBlocks
from pdserve_worker.outbox import Outbox
from pdserve_worker.router_stream import RouterStream
from pdserve_worker.tensor_service import receive_tensor
from pdserve_worker.tensor_store import TensorStore, tensor_not_held

if TYPE_CHECKING:
    from pdserve_common.observability.tracing import Tracing

logger = logging.getLogger(__name__)

SERVICE_NAME = "pdserve.v1.EngineCoreService"
# How long a router may take to say who it is.
HELLO_TIMEOUT_S = 5.0

# A worker's state: draining, paused, the version of its adapters.
_Told = tuple[bool, bool, int]


class EngineCoreServicer(service_grpc.EngineCoreServiceServicer):
    """One worker's engine, served."""

    def __init__(
        self,
        engine: EngineClient,
        *,
        tensors: TensorStore | None = None,
        tracing: "Tracing | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tensors` holds what requests name, of an engine that takes any. With `tracing` requests
        of attached routers have spans.
        """
        self._engine = engine
        self._tensors = tensors
        self._clock = clock
        self._attachments = AttachedRouters(engine, tracing, clock=clock)
        self._cached_blocks = CachedBlocks()
        engine.record_kv_cache_events(self._cached_blocks.apply)
        self._is_draining = False
        self._is_stopping = False

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def announce_drain(self) -> None:
        """Tell every router to send its requests elsewhere."""
        self._is_draining = True
        self.wake_all()

    def stop(self) -> None:
        """End all Attach streams once they have sent what they have, and wait for no router to
        come back; call after draining.
        """
        self._is_stopping = True
        self._attachments.end_broken()
        self.wake_all()

    def wake_all(self) -> None:
        """Tell routers at once what has changed about this worker."""
        self._attachments.wake_all()

    async def GetInfo(
        self, request: service_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.GetInfoResponse:
        return service_pb2.GetInfoResponse(info=to_proto(self._engine.info))

    async def Generate(
        self,
        request: service_pb2.EngineCoreServiceGenerateRequest,
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[service_pb2.EngineCoreServiceGenerateResponse]:
        async with rpc_errors(context):
            outbox = Outbox(lambda request_id: None)  # it ends with the call
            client_index = self._engine.register_client(outbox.put)
            try:
                if request.request.sampling_params.stop:
                    raise InvalidRequestError(
                        "stop is set: workers know no text, stop strings are the router's",
                        field="stop",
                    )
                valid = self._validated(request.request, context.time_remaining())
                own = dataclasses.replace(valid, client_index=client_index)
                self._engine.add_request(own, self._tensors_of(valid))
                is_finished = False
                while not is_finished:
                    for outputs in await outbox.get(HEARTBEAT_S):
                        for output in outputs.outputs:
                            is_finished = is_finished or output.finished
                            yield service_pb2.EngineCoreServiceGenerateResponse(
                                output=engine_core_output_to_proto(output)
                            )
                        if outputs.engine_dead is not None and not is_finished:
                            raise EngineDeadError(outputs.engine_dead.message)
            finally:
                self._engine.unregister_client(client_index)

    async def PutTensor(
        self,
        requests: AsyncIterator[service_pb2.PutTensorRequest],
        context: grpc.aio.ServicerContext,
    ) -> service_pb2.PutTensorResponse:
        async with rpc_errors(context):
            if self._tensors is None or not self._engine.info.modalities:
                raise FailedPreconditionError("the model takes no tensors: it knows only text")
            ttl_s = await receive_tensor(requests, self._tensors, client=context.peer())
            return service_pb2.PutTensorResponse(ttl_ms=round(1000 * ttl_s))

    async def Attach(
        self, requests: AsyncIterator[service_pb2.AttachRequest], context: grpc.aio.ServicerContext
    ) -> None:
        async with rpc_errors(context):
            stream, welcome = self._open(await _read_hello(requests), context)
            is_over = False
            try:
                await self._carry(requests, stream, welcome)
                is_over = True
            except InvalidRequestError:
                is_over = True
                raise
            finally:
                self._detach(stream, is_over=is_over)

    def _open(
        self, hello: service_pb2.AttachHello, context: grpc.aio.ServicerContext
    ) -> tuple[RouterStream, service_pb2.AttachWelcome]:
        version = _agreed_version(hello)
        router = (hello.router_id, hello.router_epoch)
        attachment, adopted = self._attachments.attach(router, _resume_of(hello))
        logger.info(
            "router %s attached as client %d, %d requests adopted",
            hello.router_id,
            attachment.client_index,
            len(adopted),
        )
        welcome = service_pb2.AttachWelcome(
            info=to_proto(self._engine.info),
            client_index=attachment.client_index,
            adopted=[service_pb2.RequestAttempt(request_id=r, attempt=a) for r, a in adopted],
            protocol_version=version,
        )
        kv_cache = None
        if hello.wants_kv_cache_events:
            kv_cache = self._cached_blocks.open_feed(attachment.outbox.wake)
        return RouterStream(attachment, context, kv_cache=kv_cache, clock=self._clock), welcome

    async def _carry(
        self,
        requests: AsyncIterator[service_pb2.AttachRequest],
        stream: RouterStream,
        welcome: service_pb2.AttachWelcome,
    ) -> None:
        """Read and write until the stream is over, and watch it."""
        reader = asyncio.create_task(self._read(requests, stream))
        reader.add_done_callback(lambda _: stream.attachment.outbox.wake())
        writer = asyncio.create_task(self._write(stream, welcome, reader))
        watch = asyncio.create_task(every(HEARTBEAT_S, stream.tick))
        try:
            done, _ = await asyncio.wait([writer, watch], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (reader, writer, watch):
                task.cancel()
            await asyncio.gather(reader, writer, watch, return_exceptions=True)

    def _detach(self, stream: RouterStream, *, is_over: bool) -> None:
        """A stream has ended. What runs for its router ends if the stream `is_over` for good, and
        is kept if it broke.
        """
        attachment = stream.attachment
        if stream.kv_cache is not None:
            self._cached_blocks.close_feed(stream.kv_cache)
        if not stream.is_current:
            logger.info("router %s has a newer stream", attachment.router_id)
        elif is_over or attachment.outbox.has_lost_any:
            logger.info("router %s detached", attachment.router_id)
            self._attachments.end(attachment)
        else:
            logger.warning("the stream of router %s broke", attachment.router_id)
            self._attachments.keep(attachment)

    async def _write(
        self,
        stream: RouterStream,
        welcome: service_pb2.AttachWelcome,
        reader: "asyncio.Task[None]",
    ) -> None:
        """Send outputs as they come, and at least a heartbeat each second, until the router ends
        the stream, another one takes over, or we stop.
        """
        await stream.write(service_pb2.AttachResponse(welcome=welcome))
        told: _Told = (False, False, welcome.info.adapters_version)
        outbox = stream.attachment.outbox
        while stream.is_current and not reader.done():
            is_last = self._is_stopping
            is_behind = stream.kv_cache is not None and stream.kv_cache.is_behind
            must_not_wait = is_last or is_behind or self._to_tell() != told
            outputs = await outbox.get(0.0 if must_not_wait else HEARTBEAT_S)
            try:
                step_seq = self._engine.step_seq()
                frames = stream.attachment.next_frames(stream.number, outputs, step_seq)
            except Exception:
                # What was taken is in no frame: a router that resumed would have a hole.
                outbox.fail(RequestFailedError("outputs were lost, see the worker's log"))
                raise
            handles = stream.attachment.handles
            messages = [_to_message(frame, handles) for frame in frames]
            if not messages or self._to_tell() != told:
                messages.append(self._heartbeat(told))
                told = self._to_tell()
            _add_kv_cache_events(messages[-1], stream)
            for message in messages:
                await stream.write(message)
            if is_last:
                return
        if not stream.is_current:
            raise FailedPreconditionError("the router has attached anew")
        reader.result()
        # A stream that broke looks half-closed at first, but carries nothing any more.
        await stream.write(self._heartbeat(told))

    def _to_tell(self) -> _Told:
        info = self._engine.info
        return self._is_draining, self._engine.state().is_paused, info.adapters_version

    def _heartbeat(self, told: _Told) -> service_pb2.AttachResponse:
        """`told` is what the stream knows."""
        draining, paused, version = self._to_tell()
        heartbeat = service_pb2.Heartbeat(
            step_seq=self._engine.step_seq(),
            draining=draining,
            paused=paused,
            num_routers=len(self._attachments),
        )
        if version != told[-1]:
            adapters = LoRAAdapters(version=version, adapters=self._engine.info.adapters)
            heartbeat.adapters.CopyFrom(to_proto(adapters))
        return service_pb2.AttachResponse(heartbeat=heartbeat)

    async def _read(
        self, requests: AsyncIterator[service_pb2.AttachRequest], stream: RouterStream
    ) -> None:
        """Take the router's messages until it half-closes."""
        attachment = stream.attachment
        async for message in requests:
            stream.note_heard()
            if not stream.is_current:
                return
            kind = message.WhichOneof("message")
            if kind == "add_request":
                self._add_attached(attachment, message)
            elif kind == "abort_requests":
                attachment.abort_requests(message.abort_requests.request_ids)
            elif kind == "heartbeat":
                attachment.acknowledge(message.heartbeat.next_frame_seq)
            elif kind == "resync_kv_cache_events" and stream.kv_cache is not None:
                stream.kv_cache.restart()
                attachment.outbox.wake()
            else:
                raise InvalidRequestError(f"unexpected message {kind!r}", field="message")

    def _add_attached(self, attachment: AttachedRouter, added: service_pb2.AttachRequest) -> None:
        message = added.add_request
        if attachment.is_running(message.request_id, message.attempt):
            # A refusal under this id would end the one that is running.
            logger.warning("request %s came twice", message.request_id)
            return
        try:
            valid = self._validated(message, None)
            attachment.add_request(valid, self._tensors_of(valid), handle=added.handle)
        except PdserveError as error:
            attachment.outbox.put(_refusal(message, error, now=self._clock()))
        except Exception as error:  # the stream's other requests go on
            defects.record("attach", error, f"request {message.request_id}")
            refusal = RequestFailedError(f"it was not taken: {error!r}")
            attachment.outbox.put(_refusal(message, refusal, now=self._clock()))

    def _tensors_of(self, request: EngineCoreRequest) -> Tensors:
        """Return the bytes of what a valid request names. Raises TensorNotHeldError."""
        if not request.mm_features:
            return NO_TENSORS
        refs = [feature.data for feature in request.mm_features if feature.data is not None]
        if self._tensors is None:
            raise tensor_not_held(refs[0])
        return self._tensors.get_all(refs)

    def _validated(
        self, message: core_pb2.EngineCoreRequest, remaining_s: float | None
    ) -> EngineCoreRequest:
        """Return what the engine may get. Raises a PdserveError."""
        request = from_proto(EngineCoreRequest, message)
        validate_engine_core_request(request, self._engine.info)
        if remaining_s is None:
            return request
        deadline = self._clock() + remaining_s
        if request.deadline is not None:
            deadline = min(deadline, request.deadline)
        return dataclasses.replace(request, deadline=deadline)


async def _read_hello(
    requests: AsyncIterator[service_pb2.AttachRequest],
) -> service_pb2.AttachHello:
    try:
        first = await asyncio.wait_for(requests.__aiter__().__anext__(), HELLO_TIMEOUT_S)
    except (StopAsyncIteration, asyncio.TimeoutError):
        raise InvalidRequestError("no hello", field="hello") from None
    if first.WhichOneof("message") != "hello":
        raise InvalidRequestError("the first message must be a hello", field="hello")
    return first.hello


def _agreed_version(hello: service_pb2.AttachHello) -> int:
    """Return the protocol version to speak. Raises FailedPreconditionError if there is none."""
    lowest, highest = hello.min_protocol_version, hello.max_protocol_version
    version = attach_protocol.agreed_version(lowest, highest)
    if version is None:
        raise FailedPreconditionError(
            f"protocol versions of Attach differ: this worker (pdserve {VERSION}) speaks "
            f"{attach_protocol.supported_versions()}, "
            f"router {hello.router_id} {lowest} to {highest}"
        )
    return version


def _resume_of(hello: service_pb2.AttachHello) -> Resume | None:
    if not hello.HasField("resume"):
        return None
    resume = hello.resume
    listed = dict.fromkeys(RequestAttempt(r.request_id, r.attempt) for r in resume.requests)
    return Resume(resume.worker_epoch, resume.next_frame_seq, listed)


def _add_kv_cache_events(message: service_pb2.AttachResponse, stream: RouterStream) -> None:
    events = stream.kv_cache.take() if stream.kv_cache is not None else None
    if events is not None:
        message.kv_cache_events.CopyFrom(to_proto(events))


def _to_message(frame: Frame, handles: Mapping[tuple[str, int], int]) -> service_pb2.AttachResponse:
    outputs = engine_core_outputs_to_proto(frame.outputs, step_seq=frame.step_seq, handles=handles)
    outputs.more = frame.has_more
    return service_pb2.AttachResponse(outputs=outputs, frame_seq=frame.seq)


def _refusal(
    message: core_pb2.EngineCoreRequest, error: PdserveError, *, now: float
) -> EngineCoreOutputs:
    output = EngineCoreOutput(
        request_id=message.request_id,
        attempt=message.attempt,
        finish_reason=FinishReason.ERROR,
        error=error.to_engine_error(),
    )
    return EngineCoreOutputs(outputs=(output,), timestamp=now)
