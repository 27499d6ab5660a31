"""ControlService over an EngineClient, and how a worker's state reaches those who send it work."""

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from pdserve.v1 import control_service_pb2 as control_pb2
from pdserve.v1 import control_service_pb2_grpc as control_grpc
from pdserve_common.errors import EngineDeadError, InvalidRequestError
from pdserve_common.processes.calls import Call
from pdserve_common.rpc.channels import RpcServer, rpc_errors
from pdserve_common.types.engine_client import EngineClient
from pdserve_common.types.verbs import VERBS
from pdserve_common.wire import from_proto, to_proto, verb_result_to_proto
from pdserve_worker.attach_service import EngineCoreServicer

logger = logging.getLogger(__name__)

SERVICE_NAME = "pdserve.v1.ControlService"
MAX_DRAIN_TIMEOUT_MS = 24 * 3600 * 1000
# Between two reports of a drain.
PROGRESS_S = 0.5


class Readiness:
    """Whether a worker takes work: says so to health checks and routers, and drains it once."""

    def __init__(
        self, engine: EngineClient, server: RpcServer, servicer: EngineCoreServicer
    ) -> None:
        self._engine = engine
        self._server = server
        self._servicer = servicer
        self._drain: asyncio.Task[int] | None = None
        self._told: tuple[bool, bool, int] | None = None

    @property
    def is_draining(self) -> bool:
        return self._servicer.is_draining

    async def tell(self) -> None:
        """Say what has changed. Call it after every verb and now and then: one whose caller has
        given up may end later.
        """
        availability = (self._engine.state().is_paused, self.is_draining)
        told = (*availability, self._engine.info.adapters_version)
        if told != self._told:
            self._told = told
            await self._server.set_serving(not any(availability))
            self._servicer.wake_all()

    async def withdraw(self) -> None:
        """Take no more work, for good. Health says so before routers are told."""
        await self._server.set_serving(False)
        self._servicer.announce_drain()
        await self.tell()

    async def give_up(self) -> None:
        """Ask to be restarted: the engine is broken, and what is left to do here may hang."""
        await self._server.set_alive(False)

    def start_drain(self, timeout_s: float) -> "asyncio.Task[int]":
        """Begin to drain the engine, which goes on without the caller; or return the drain that is
        under way. Its result is how many requests were handed back.
        """
        if self._drain is None:
            logger.info("asked to drain within %g s", timeout_s)
            self._drain = asyncio.create_task(self._run_drain(timeout_s))
        return self._drain

    async def _run_drain(self, timeout_s: float) -> int:
        await self.withdraw()
        return await self._engine.drain(timeout_s)


class ControlServicer(control_grpc.ControlServiceServicer):
    """One worker's controls."""

    def __init__(
        self, engine: EngineClient, readiness: Readiness, *, drain_timeout_s: float
    ) -> None:
        """`drain_timeout_s` is for drains that name none."""
        self._engine = engine
        self._readiness = readiness
        self._drain_timeout_s = drain_timeout_s
        # The base class has the RPCs: the verbs' names here, never one that a caller sent.
        for verb in VERBS:
            setattr(self, verb.__name__, partial(self._call, verb))

    def add_to_server(self, server: grpc.aio.Server) -> None:
        control_grpc.add_ControlServiceServicer_to_server(self, server)

    async def Drain(
        self, request: control_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[control_pb2.DrainResponse]:
        async with rpc_errors(context):
            drain = self._readiness.start_drain(self._timeout_s(request))
            while not drain.done():
                yield self._progress()
                await asyncio.wait([drain], timeout=PROGRESS_S)
            num_handed_back = drain.result()
            if (problem := self._engine.problem()) is not None:
                raise EngineDeadError(problem)
            yield self._progress(drained=True, num_handed_back=num_handed_back)

    async def GetLoad(
        self, request: control_pb2.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.GetLoadResponse:
        state = self._engine.state()
        return control_pb2.GetLoadResponse(
            scheduler_stats=to_proto(self._engine.stats()),
            paused=state.is_paused,
            sleep_level=state.sleep_level,
            draining=self._readiness.is_draining,
        )

    async def _call(
        self, verb: type[Call[Any]], request: Message, context: grpc.aio.ServicerContext
    ) -> Message:
        async with rpc_errors(context):
            try:
                result = await self._engine.call(from_proto(verb, request))
            finally:
                await self._readiness.tell()
            return verb_result_to_proto(verb, result)

    def _timeout_s(self, request: control_pb2.DrainRequest) -> float:
        if not request.HasField("timeout_ms"):
            return self._drain_timeout_s
        if request.timeout_ms > MAX_DRAIN_TIMEOUT_MS:
            raise InvalidRequestError(
                f"timeout_ms is {request.timeout_ms}, must be at most {MAX_DRAIN_TIMEOUT_MS}",
                field="timeout_ms",
            )
        return request.timeout_ms / 1000

    def _progress(
        self, *, drained: bool = False, num_handed_back: int = 0
    ) -> control_pb2.DrainResponse:
        stats = self._engine.stats()
        return control_pb2.DrainResponse(
            num_requests=stats.num_running_reqs + stats.num_waiting_reqs,
            num_open_kv_sessions=stats.num_open_kv_sessions,
            drained=drained,
            num_handed_back=num_handed_back,
        )
