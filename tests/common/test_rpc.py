"""The health that every server of pdserve tells."""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve_common.rpc import LIVENESS_SERVICE, RpcServer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(port: int, service: str) -> Any:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(check, timeout=5)).status


async def test_a_server_is_alive_whether_it_is_ready_or_not_until_it_says_otherwise() -> None:
    server = RpcServer("127.0.0.1", 0)
    await server.start(["a.Service"])
    try:
        for is_serving in (False, True, False):
            await server.set_serving(is_serving)
            expected = SERVING if is_serving else NOT_SERVING
            assert {await health(server.port, name) for name in ("", "a.Service")} == {expected}
            assert await health(server.port, LIVENESS_SERVICE) == SERVING
        await server.set_alive(False)
        assert await health(server.port, LIVENESS_SERVICE) == NOT_SERVING
    finally:
        await server.stop(0)
