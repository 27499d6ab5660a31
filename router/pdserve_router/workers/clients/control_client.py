"""What a router has workers do beside serving: their ControlService."""

import asyncio
import logging
from typing import Any

import grpc
from google.protobuf.message import Message

from pdserve.v1 import control_service_pb2 as control_pb2
from pdserve.v1 import control_service_pb2_grpc as control_grpc
from pdserve_common.errors import (
    FailedPreconditionError,
    InvalidRequestError,
    NoWorkerError,
    PdserveError,
)
from pdserve_common.rpc.channels import open_channel, retry_after_ms_of
from pdserve_common.rpc.tls import Tls
from pdserve_common.types.lora import LoRAAdapter, LoRARequest
from pdserve_common.types.verbs import AddLora, RemoveLora
from pdserve_common.wire import from_proto, to_proto

logger = logging.getLogger(__name__)

# Reading an adapter from slow storage may take so long.
LOAD_TIMEOUT_S = 300.0
REMOVE_TIMEOUT_S = 30.0
# A worker does one thing at a time, and ends what its caller has given up between two steps.
BUSY_TIMEOUT_S = 5.0


class ControlClient:
    """Each call is to one worker, by its host:port. They raise InvalidRequestError or
    FailedPreconditionError as the worker does, NoWorkerError for one that does not answer. If a
    worker is busy they try again before they raise, for BUSY_TIMEOUT_S.
    """

    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls

    async def add_lora(
        self, address: str, lora: LoRARequest, *, keep_others: bool = False
    ) -> LoRAAdapter:
        verb = AddLora(lora_request=lora, keep_others=keep_others)
        request: control_pb2.AddLoraRequest = to_proto(verb)
        response = await self._call(address, "AddLora", request, LOAD_TIMEOUT_S)
        return from_proto(LoRAAdapter, response.adapter)

    async def remove_lora(self, address: str, name: str, digest: str = "") -> None:
        request: control_pb2.RemoveLoraRequest = to_proto(RemoveLora(lora_name=name, digest=digest))
        await self._call(address, "RemoveLora", request, REMOVE_TIMEOUT_S)

    async def _call(self, address: str, method: str, request: Message, timeout_s: float) -> Any:
        waited_s = 0.0
        async with open_channel(address, self._tls) as channel:
            call = getattr(control_grpc.ControlServiceStub(channel), method)
            while True:
                try:
                    return await call(request, timeout=timeout_s)
                except grpc.aio.AioRpcError as error:
                    refusal = _refusal_of(address, error)
                    if refusal.retry_after_ms is None or waited_s >= BUSY_TIMEOUT_S:
                        raise refusal from error
                wait_s = min(refusal.retry_after_ms / 1000, BUSY_TIMEOUT_S)
                await asyncio.sleep(wait_s)
                waited_s += wait_s


def _refusal_of(address: str, error: grpc.aio.AioRpcError) -> PdserveError:
    """Clients get to read it: it has a refusal's own words, and does not say where workers are."""
    message = f"a worker says: {error.details()}"
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError(message)
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return FailedPreconditionError(message, retry_after_ms=retry_after_ms_of(error))
    logger.warning("worker %s: %s (%s)", address, error.details(), error.code().name)
    return NoWorkerError(f"a worker does not do what it is asked for ({error.code().name})")
