"""The life of a worker process: bind, load, serve, drain, exit."""

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import grpc
import uvloop
from prometheus_client import CollectorRegistry

from pdserve.v1 import engine_core_service_pb2_grpc as service_grpc
from pdserve_common.config import warn_of_unknown_variables
from pdserve_common.errors import PdserveError
from pdserve_common.limits.receive_guard import ReceiveGuard
from pdserve_common.metrics.port import MetricsServer
from pdserve_common.metrics.services import BuildMetrics, LimitMetrics
from pdserve_common.metrics.tensors import TensorMetrics
from pdserve_common.observability import defects
from pdserve_common.observability.logging import setup_logging
from pdserve_common.observability.tracing_config import open_tracing
from pdserve_common.processes.descriptors import descriptor_limit, raise_descriptor_limit
from pdserve_common.processes.lifecycle import end_now
from pdserve_common.rpc.channels import RpcServer
from pdserve_common.rpc.tls import Tls
from pdserve_common.types.engine_client import EngineClient
from pdserve_common.version import VERSION
from pdserve_worker import control_service
from pdserve_worker.attach_service import SERVICE_NAME, EngineCoreServicer
from pdserve_worker.config import WorkerConfig
from pdserve_worker.self_check import check_engine
from pdserve_worker.tensor_store import TensorStore

if TYPE_CHECKING:
    from pdserve_common.observability.tracing import Tracing

logger = logging.getLogger(__name__)

# After the drain, how long streams that are still open may take to end.
STOP_GRACE_S = 2.0
# For the engine to end its step and release its memory; then the system does. With all the rest it
# is less than `pdserve up`, compose.yaml and the chart give beside the drain.
ENGINE_CLOSE_TIMEOUT_S = 7.0
EXIT_CANNOT_START = 1
EXIT_BROKEN = 2
HEALTH_CHECK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a role gets to build its engine with."""

    engine_id: str
    registry: CollectorRegistry
    # For dialling other workers; plain text without.
    tls: Tls | None


async def _nothing_to_close() -> None:
    pass


@dataclass(slots=True, kw_only=True)
class Worker:
    """What a role has built."""

    engine: EngineClient
    # Closes what the role holds besides the engine: after the drain, before the engine.
    close: Callable[[], Awaitable[None]] = _nothing_to_close
    # Further services: their names and what adds them to a server.
    services: dict[str, Callable[[grpc.aio.Server], None]] = field(default_factory=dict)


BuildWorker = Callable[[WorkerContext], Awaitable[Worker]]


def run_worker(config: WorkerConfig, *, role: str, build: BuildWorker) -> NoReturn:
    """Run until SIGTERM or SIGINT and end the process with status 0, with 1 if the worker cannot
    start, with 2 if it has to be restarted.
    """
    setup_logging(config.log_level, config.engine_id or role)
    warn_of_unknown_variables(type(config))
    uvloop.install()
    asyncio.run(_serve(config, role, build))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """What has been started."""

    config: WorkerConfig
    server: RpcServer
    metrics_server: MetricsServer
    worker: Worker
    tensors: TensorStore
    tracing: "Tracing | None"


async def _serve(config: WorkerConfig, role: str, build: BuildWorker) -> NoReturn:
    stop = asyncio.Event()
    defects.watch_event_loop(asyncio.get_running_loop())
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    try:
        process = await _start(config, role, build, stop)
    except (OSError, ValueError, PdserveError) as error:
        # A port in use, a missing model, a setting that does not fit: one line that says what.
        logger.error("cannot start: %s", error)
        # An engine that is up may hang, or have its memory under a READ.
        end_now(EXIT_CANNOT_START)
    try:
        servicer, readiness = await _open(process)
        problem = await wait_for_the_end(stop, process.worker.engine, readiness)
        await readiness.withdraw()
        problem = await _shut_down(process, servicer, problem)
    except Exception as error:
        defects.record("event_loop", error, "this worker")
        problem = f"it has failed: {error!r}"
    # Threads may hang, and memory may be under a READ: only the system can clean up.
    if problem is not None:
        logger.error("exiting to be restarted: %s", problem)
        end_now(EXIT_BROKEN)
    logger.info("stopped")
    end_now(0)


async def _start(
    config: WorkerConfig, role: str, build: BuildWorker, stop: asyncio.Event
) -> _Process:
    """Bind the ports, serve probes and metrics, and build the worker."""
    registry = CollectorRegistry()
    defects.export(registry)
    tls = config.load_tls()
    credentials = tls.server_credentials(verifies_clients=True) if tls else None
    raise_descriptor_limit()
    limits = LimitMetrics(registry, "grpc", "metrics")
    server = RpcServer(
        config.host,
        config.port,
        credentials=credentials,
        interceptors=[ReceiveGuard(partial(limits.count, "grpc"))],
        # The rest is for KV transports, links and files.
        options={"grpc.max_allowed_incoming_connections": descriptor_limit() // 2},
    )
    metrics_server = MetricsServer(
        config.host,
        config.metrics_port,
        registry,
        probes=server.probes(),
        on_limit=partial(limits.count, "metrics"),
    )
    engine_id = config.engine_id or _engine_id(config.host, role, server.port)
    tracing = open_tracing(
        config.otlp_traces_endpoint, registry, service=f"pdserve-{role}", instance=engine_id
    )
    building = build(WorkerContext(engine_id=engine_id, registry=registry, tls=tls))
    worker = await _unless_stopped(
        _build_and_check(building, timeout_s=config.self_check_timeout_s), stop
    )
    info = worker.engine.info
    BuildMetrics(registry, role=role, version=VERSION, model=info.model, kernels=info.kernels)
    return _Process(
        config=config,
        server=server,
        metrics_server=metrics_server,
        worker=worker,
        tensors=TensorStore(config.tensor_cache_bytes, TensorMetrics(registry)),
        tracing=tracing,
    )


async def _open(process: _Process) -> tuple[EngineCoreServicer, control_service.Readiness]:
    """Serve requests."""
    engine, server, config = process.worker.engine, process.server, process.config
    servicer = EngineCoreServicer(engine, tensors=process.tensors, tracing=process.tracing)
    service_grpc.add_EngineCoreServiceServicer_to_server(servicer, server.server)
    readiness = control_service.Readiness(engine, server, servicer)
    controls = control_service.ControlServicer(
        engine, readiness, drain_timeout_s=config.drain_timeout_s
    )
    services = {control_service.SERVICE_NAME: controls.add_to_server, **process.worker.services}
    for add_to_server in services.values():
        add_to_server(server.server)
    await server.start([SERVICE_NAME, *services])
    await readiness.tell()
    logger.info(
        "ready on %s:%d, metrics on port %d: %s",
        config.host,
        server.port,
        process.metrics_server.port,
        engine.info,
    )
    return servicer, readiness


async def _shut_down(
    process: _Process, servicer: EngineCoreServicer, problem: str | None
) -> str | None:
    """Drain, unless there is a problem, and close everything that still can be; return a problem
    that this finds, or the one there was.
    """
    engine = process.worker.engine
    drain_timeout_s = process.config.drain_timeout_s if problem is None else 0.0
    if num_handed_back := await engine.drain(drain_timeout_s):
        logger.warning("requests that the drain has handed back: %d", num_handed_back)
    problem = problem or engine.problem()
    servicer.stop()
    await process.worker.close()
    await process.server.stop(STOP_GRACE_S)
    if process.tracing is not None:
        await asyncio.to_thread(process.tracing.close)
    process.metrics_server.close()
    return problem or await close_engine(engine, timeout_s=ENGINE_CLOSE_TIMEOUT_S)


async def close_engine(engine: EngineClient, *, timeout_s: float) -> str | None:
    """Return what is wrong with it. One that takes longer is left to the system: a busy machine is
    no fault of it, and nothing waits for it any more.
    """
    try:
        await asyncio.wait_for(engine.close(), timeout_s)
    except asyncio.TimeoutError:
        logger.warning("the engine has not closed within %g s: the system ends it", timeout_s)
    return engine.problem()


def _engine_id(host: str, role: str, port: int) -> str:
    # A wildcard is the same on every host, and link tables are keyed by this name.
    is_wildcard = host in ("", "0.0.0.0", "::", "[::]")
    return f"{role}-{socket.gethostname() if is_wildcard else host}-{port}"


async def _build_and_check(building: Awaitable[Worker], *, timeout_s: float) -> Worker:
    """Wait for the worker and have it prove itself. Raises SelfCheckError, besides what `building`
    raises.
    """
    worker = await building
    await check_engine(worker.engine, timeout_s=timeout_s)
    return worker


async def _unless_stopped(starting: Awaitable[Worker], stop: asyncio.Event) -> Worker:
    """Wait for the worker; leave the process at once if it is asked to stop before.

    Loading runs on a thread that nothing can interrupt, and there is nothing to drain yet.
    """
    start = asyncio.ensure_future(starting)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([start, stopped], return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        logger.info("asked to stop while loading")
        end_now(0)
    stopped.cancel()
    return await start


async def wait_for_the_end(
    stop: asyncio.Event, engine: EngineClient, readiness: control_service.Readiness
) -> str | None:
    """Wait until the process is asked to stop, or return what is wrong with its engine."""
    while (problem := engine.problem()) is None:
        await readiness.tell()
        try:
            await asyncio.wait_for(stop.wait(), HEALTH_CHECK_S)
        except asyncio.TimeoutError:
            continue
        logger.info("asked to stop: draining")
        return None
    await readiness.give_up()
    return problem
