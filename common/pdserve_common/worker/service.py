"""EngineCoreService over an EngineClient: what routers and stub users call on a worker."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator

import grpc

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import engine_core_service_pb2_grpc as service_grpc
from pdserve_common.engine_client import EngineClient
from pdserve_common.engine_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from pdserve_common.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    PdserveError,
)
from pdserve_common.rpc import rpc_errors
from pdserve_common.validation import validate_engine_core_request
from pdserve_common.wire import (
    engine_core_output_to_proto,
    engine_core_outputs_to_proto,
    engine_core_request_from_proto,
    engine_info_to_proto,
)
from pdserve_common.worker.outbox import Outbox

logger = logging.getLogger(__name__)

SERVICE_NAME = "pdserve.v1.EngineCoreService"
HEARTBEAT_S = 1.0
# Silence after which a router is taken for dead, and how long one write to it may take.
ROUTER_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 10.0


class EngineCoreServicer(service_grpc.EngineCoreServiceServicer):
    """One worker's engine, served."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._outboxes: set[Outbox] = set()
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
        """End all Attach streams once they have sent what they have; call after draining."""
        self._is_stopping = True
        self.wake_all()

    def wake_all(self) -> None:
        """Tell routers at once what has changed about this worker."""
        for outbox in self._outboxes:
            outbox.wake()

    async def GetInfo(
        self, request: service_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.GetInfoResponse:
        return service_pb2.GetInfoResponse(info=engine_info_to_proto(self._engine.info))

    async def Generate(
        self,
        request: service_pb2.EngineCoreServiceGenerateRequest,
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[service_pb2.EngineCoreServiceGenerateResponse]:
        async with rpc_errors(context):
            outbox = Outbox()
            client_index = self._engine.register_client(outbox.put)
            try:
                if request.request.sampling_params.stop:
                    raise InvalidRequestError(
                        "stop is set: workers know no text, stop strings are the router's",
                        field="stop",
                    )
                self._add(request.request, client_index, context.time_remaining())
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

    async def Attach(
        self, requests: AsyncIterator[service_pb2.AttachRequest], context: grpc.aio.ServicerContext
    ) -> None:
        async with rpc_errors(context):
            hello = await _read_hello(requests)
            outbox = Outbox()
            client_index = self._engine.register_client(outbox.put)
            self._outboxes.add(outbox)
            logger.info("router %s attached as client %d", hello.router_id, client_index)
            reader = asyncio.create_task(self._read(requests, client_index, outbox))
            try:
                welcome = service_pb2.AttachWelcome(
                    info=engine_info_to_proto(self._engine.info), client_index=client_index
                )
                await context.write(service_pb2.AttachResponse(welcome=welcome))
                await self._write(context, outbox, reader)
            finally:
                self._outboxes.discard(outbox)
                self._engine.unregister_client(client_index)
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
                logger.info("router %s detached", hello.router_id)

    async def _write(
        self, context: grpc.aio.ServicerContext, outbox: Outbox, reader: "asyncio.Task[None]"
    ) -> None:
        """Send outputs as they come, and at least a heartbeat each second, until the router is gone
        or we stop.
        """
        told = (False, False)
        while not reader.done():
            is_last = self._is_stopping
            must_not_wait = is_last or self._availability() != told
            messages = self._to_messages(await outbox.get(0.0 if must_not_wait else HEARTBEAT_S))
            if not messages or self._availability() != told:
                told = self._availability()
                messages.append(self._heartbeat())
            for message in messages:
                await _write_in_time(context, message)
            if is_last:
                return
        reader.result()

    def _to_messages(self, frames: list[EngineCoreOutputs]) -> list[service_pb2.AttachResponse]:
        step_seq = self._engine.step_seq()
        messages = [
            service_pb2.AttachResponse(
                outputs=engine_core_outputs_to_proto(frame, step_seq=step_seq)
            )
            for frame in frames
        ]
        for message in messages[:-1]:
            message.outputs.more = True
        return messages

    def _availability(self) -> tuple[bool, bool]:
        """Return (draining, paused)."""
        return self._is_draining, self._engine.state().is_paused

    def _heartbeat(self) -> service_pb2.AttachResponse:
        draining, paused = self._availability()
        heartbeat = service_pb2.Heartbeat(
            step_seq=self._engine.step_seq(), draining=draining, paused=paused
        )
        return service_pb2.AttachResponse(heartbeat=heartbeat)

    async def _read(
        self,
        requests: AsyncIterator[service_pb2.AttachRequest],
        client_index: int,
        outbox: Outbox,
    ) -> None:
        """Take the router's messages. Returns when it half-closes, raises OverloadedError on
        silence.
        """
        iterator = requests.__aiter__()
        while True:
            try:
                message = await asyncio.wait_for(iterator.__anext__(), ROUTER_TIMEOUT_S)
            except StopAsyncIteration:
                return
            except asyncio.TimeoutError:
                raise OverloadedError(
                    f"router has been silent for {ROUTER_TIMEOUT_S:g} s"
                ) from None
            kind = message.WhichOneof("message")
            if kind == "add_request":
                if self._engine.owner_of(message.add_request.request_id) == client_index:
                    # A refusal under this id would end the one that is running.
                    logger.warning("request %s came twice", message.add_request.request_id)
                    continue
                try:
                    self._add(message.add_request, client_index, None)
                except PdserveError as error:
                    outbox.put(_refusal(message.add_request, error))
            elif kind == "abort_requests":
                self._engine.abort_requests(client_index, message.abort_requests.request_ids)
            elif kind != "heartbeat":
                raise InvalidRequestError(f"unexpected message {kind!r}", field="message")

    def _add(
        self, message: core_pb2.EngineCoreRequest, client_index: int, remaining_s: float | None
    ) -> None:
        """Validate and queue. Raises a PdserveError."""
        request = engine_core_request_from_proto(message)
        validate_engine_core_request(request, self._engine.info)
        deadline = request.deadline
        if remaining_s is not None:
            own = time.monotonic() + remaining_s
            deadline = own if deadline is None else min(deadline, own)
        request = dataclasses.replace(request, client_index=client_index, deadline=deadline)
        self._engine.add_request(request)


async def _write_in_time(
    context: grpc.aio.ServicerContext, message: service_pb2.AttachResponse
) -> None:
    try:
        await asyncio.wait_for(context.write(message), WRITE_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise OverloadedError(f"router has read nothing for {WRITE_TIMEOUT_S:g} s") from None


async def _read_hello(
    requests: AsyncIterator[service_pb2.AttachRequest],
) -> service_pb2.AttachHello:
    try:
        first = await asyncio.wait_for(requests.__aiter__().__anext__(), ROUTER_TIMEOUT_S)
    except (StopAsyncIteration, asyncio.TimeoutError):
        raise InvalidRequestError("no hello", field="hello") from None
    if first.WhichOneof("message") != "hello":
        raise InvalidRequestError("the first message must be a hello", field="hello")
    return first.hello


def _refusal(message: core_pb2.EngineCoreRequest, error: PdserveError) -> EngineCoreOutputs:
    output = EngineCoreOutput(
        request_id=message.request_id,
        attempt=message.attempt,
        finish_reason=FinishReason.ERROR,
        error=error.to_engine_error(),
    )
    return EngineCoreOutputs(outputs=(output,))
