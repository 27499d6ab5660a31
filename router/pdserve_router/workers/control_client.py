"""What a router has workers do beside serving: their ControlService."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from pdserve.v1 import control_service_pb2 as control_pb2
from pdserve.v1 import control_service_pb2_grpc as control_grpc
from pdserve_common.errors import FailedPreconditionError, InvalidRequestError, NoWorkerError
from pdserve_common.lora_types import LoRAAdapter, LoRARequest
from pdserve_common.rpc import open_channel
from pdserve_common.tls import Tls
from pdserve_common.verbs import AddLora, RemoveLora
from pdserve_common.wire import from_proto, to_proto

# Of reading an adapter from slow storage.
LOAD_TIMEOUT_S = 300.0
REMOVE_TIMEOUT_S = 30.0


class ControlClient:
    """Each call is to one worker, by its host:port. They raise InvalidRequestError or
    FailedPreconditionError as the worker does, NoWorkerError for one that does not answer.
    """

    def __init__(self, tls: Tls | None) -> None:
        self._tls = tls

    async def add_lora(
        self, address: str, lora: LoRARequest, *, keep_others: bool = False
    ) -> LoRAAdapter:
        verb = AddLora(lora_request=lora, keep_others=keep_others)
        request: control_pb2.AddLoraRequest = to_proto(verb)
        async with self._stub(address) as stub:
            response = await stub.AddLora(request, timeout=LOAD_TIMEOUT_S)
        return from_proto(LoRAAdapter, response.adapter)

    async def remove_lora(self, address: str, name: str, digest: str = "") -> None:
        request: control_pb2.RemoveLoraRequest = to_proto(RemoveLora(lora_name=name, digest=digest))
        async with self._stub(address) as stub:
            await stub.RemoveLora(request, timeout=REMOVE_TIMEOUT_S)

    @asynccontextmanager
    async def _stub(self, address: str) -> AsyncIterator[Any]:
        async with open_channel(address, self._tls) as channel:
            try:
                yield control_grpc.ControlServiceStub(channel)
            except grpc.aio.AioRpcError as error:
                message = f"worker {address}: {error.details()}"
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise InvalidRequestError(message) from error
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    raise FailedPreconditionError(message) from error
                raise NoWorkerError(f"{message} ({error.code().name})") from error
