"""A router's calls to workers' ControlService, over gRPC."""

from collections.abc import AsyncIterator

import grpc
import pytest

from pdserve.v1 import control_service_pb2 as control_pb2
from pdserve.v1 import control_service_pb2_grpc as control_grpc
from pdserve_common.errors import (
    FailedPreconditionError,
    InvalidRequestError,
    NoWorkerError,
    PdserveError,
)
from pdserve_common.rpc.channels import rpc_errors
from pdserve_router.workers.clients import control_client
from pdserve_router.workers.clients.control_client import ControlClient


class Servicer(control_grpc.ControlServiceServicer):
    """Refuses as often as it is told."""

    def __init__(self) -> None:
        self.refusals: list[PdserveError] = []
        self.num_calls = 0

    async def RemoveLora(
        self, request: control_pb2.RemoveLoraRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.RemoveLoraResponse:
        self.num_calls += 1
        async with rpc_errors(context):
            if self.refusals:
                raise self.refusals.pop(0)
        return control_pb2.RemoveLoraResponse()


@pytest.fixture
async def worker() -> AsyncIterator[tuple[Servicer, str]]:
    servicer, server = Servicer(), grpc.aio.server()
    control_grpc.add_ControlServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


def busy() -> FailedPreconditionError:
    return FailedPreconditionError("add lora is under way", retry_after_ms=20)


async def test_a_busy_worker_is_asked_again(worker: tuple[Servicer, str]) -> None:
    servicer, address = worker
    servicer.refusals = [busy(), busy()]
    await ControlClient(None).remove_lora(address, "a")
    assert servicer.num_calls == 3
    servicer.refusals = [busy(), FailedPreconditionError("there is no adapter 'a'")]
    with pytest.raises(FailedPreconditionError, match="there is no adapter 'a'") as refusal:
        await ControlClient(None).remove_lora(address, "a")
    assert refusal.value.retry_after_ms is None
    assert servicer.num_calls == 5


async def test_errors_do_not_say_where_workers_are(
    worker: tuple[Servicer, str], caplog: pytest.LogCaptureFixture
) -> None:
    servicer, address = worker
    servicer.refusals = [InvalidRequestError("adapter x: there is no such folder")]
    for server, error_type in ((address, InvalidRequestError), ("127.0.0.1:1", NoWorkerError)):
        with pytest.raises(error_type) as refusal:
            await ControlClient(None).remove_lora(server, "a")
        assert "127.0.0.1" not in str(refusal.value)
    assert "worker 127.0.0.1:1: " in caplog.text


async def test_one_that_stays_busy_is_not_asked_for_ever(
    worker: tuple[Servicer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "BUSY_TIMEOUT_S", 0.1)
    servicer, address = worker
    servicer.refusals = [busy() for _ in range(100)]
    with pytest.raises(FailedPreconditionError, match="is under way") as refusal:
        await ControlClient(None).remove_lora(address, "a")
    assert refusal.value.retry_after_ms == 20
    assert servicer.num_calls == 6
