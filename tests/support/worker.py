"""One worker in the test's process, around a real engine, and what calls it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.v1 import control_service_pb2 as control_pb2
from pdserve.v1 import control_service_pb2_grpc as control_grpc
from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import engine_core_service_pb2_grpc as service_grpc
from pdserve_common.rpc.attach_protocol import PROTOCOL_VERSION
from pdserve_common.rpc.channels import LIVENESS_SERVICE, RpcServer
from pdserve_engine.clients.inproc import InprocEngineClient
from pdserve_worker import control_service, process
from pdserve_worker.attach_service import SERVICE_NAME, EngineCoreServicer
from pdserve_worker.tensor_store import TensorStore
from support.waiting import until

# So many tokens take seconds.
LONG = 8000
# Of waiting for what has to come.
TIMEOUT_S = 120.0


class Worker:
    """Stubs that call the worker, and its parts."""

    def __init__(self, engine: InprocEngineClient, channel: grpc.aio.Channel, port: int) -> None:
        self.engine = engine
        self.port = port
        self.core: Any = service_grpc.EngineCoreServiceStub(channel)
        self.control: Any = control_grpc.ControlServiceStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    async def health(self) -> set[int]:
        names = ("", SERVICE_NAME, control_service.SERVICE_NAME)
        checks = [health_pb2.HealthCheckRequest(service=name) for name in names]
        return {(await self._health.Check(check, timeout=TIMEOUT_S)).status for check in checks}

    async def is_alive(self) -> bool:
        check = health_pb2.HealthCheckRequest(service=LIVENESS_SERVICE)
        status = (await self._health.Check(check, timeout=TIMEOUT_S)).status
        return bool(status == health_pb2.HealthCheckResponse.SERVING)

    async def load(self) -> Any:
        return await self.control.GetLoad(control_pb2.GetLoadRequest(), timeout=TIMEOUT_S)

    @contextlib.asynccontextmanager
    async def attach(self, name: str, **hello_fields: Any) -> AsyncIterator[Any]:
        call = self.core.Attach(timeout=2 * TIMEOUT_S)
        hello = service_pb2.AttachHello(
            router_id=name,
            router_epoch="0" * 32,
            max_protocol_version=PROTOCOL_VERSION,
            **hello_fields,
        )
        await call.write(service_pb2.AttachRequest(hello=hello))
        assert (await call.read()).WhichOneof("message") == "welcome"
        beating = asyncio.create_task(beat(call))
        yield call
        beating.cancel()
        call.cancel()


@contextlib.asynccontextmanager
async def serve(
    engine: InprocEngineClient, tensors: TensorStore | None = None
) -> AsyncIterator[Worker]:
    """Serve what a worker process serves, and watch as it does."""
    server = RpcServer("127.0.0.1", 0)
    servicer = EngineCoreServicer(engine, tensors=tensors)
    service_grpc.add_EngineCoreServiceServicer_to_server(servicer, server.server)
    readiness = control_service.Readiness(engine, server, servicer)
    controls = control_service.ControlServicer(engine, readiness, drain_timeout_s=10.0)
    controls.add_to_server(server.server)
    await server.start([SERVICE_NAME, control_service.SERVICE_NAME])
    await readiness.tell()
    stop = asyncio.Event()
    watch = asyncio.create_task(process.wait_for_the_end(stop, engine, readiness))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield Worker(engine, channel, server.port)
    stop.set()
    await watch
    servicer.stop()
    await server.stop(1.0)


async def until_idle(worker: Worker) -> None:
    stats = worker.engine.stats
    await until(lambda: stats().num_free_blocks == stats().num_total_blocks)
    assert stats().num_running_reqs == 0


async def beat(call: Any) -> None:
    while True:
        await asyncio.sleep(1.0)
        await call.write(service_pb2.AttachRequest(heartbeat=service_pb2.Heartbeat()))


def add(request_id: str, max_tokens: int) -> service_pb2.AttachRequest:
    request = core_pb2.EngineCoreRequest(request_id=request_id, prompt_token_ids=[5, 6, 7])
    request.sampling_params.temperature = 0.0
    request.sampling_params.max_tokens = max_tokens
    request.sampling_params.ignore_eos = True
    return service_pb2.AttachRequest(add_request=request)


async def read_until(call: Any, condition: Callable[[Any], bool]) -> list[Any]:
    """Return the messages up to the first that fulfils `condition`."""
    messages = []
    while True:
        message = await asyncio.wait_for(call.read(), TIMEOUT_S)
        assert message is not grpc.aio.EOF, "the stream ended"
        messages.append(message)
        if condition(message):
            return messages


async def collect(call: Any) -> list[Any]:
    return [message async for message in call]


def ends(message: Any) -> bool:
    return any(output.finish_reason for output in message.outputs.outputs)


def has_started(message: Any) -> bool:
    return bool(message.outputs.outputs)
