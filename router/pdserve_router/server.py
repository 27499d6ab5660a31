"""The router process: every part assembled, started, drained and closed."""

import asyncio
import contextlib
import gc
import logging
import math
import signal
import ssl
from functools import partial

from prometheus_client import CollectorRegistry
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from pdserve_common.limits.receive_guard import ReceiveGuard
from pdserve_common.limits.receive_slots import ReceiveLimits, ReceiveSlots
from pdserve_common.metrics.port import MAX_METRICS_CONNECTIONS, MetricsServer
from pdserve_common.metrics.services import BuildMetrics, LimitMetrics, RouterMetrics
from pdserve_common.observability import defects
from pdserve_common.observability.tracing_config import open_tracing
from pdserve_common.processes.child import ChildProcess
from pdserve_common.processes.descriptors import raise_descriptor_limit, share_descriptors
from pdserve_common.rpc.channels import RpcServer, open_channel
from pdserve_common.runtime import Runtime
from pdserve_common.tokens.tokenizer_digest import tokenizer_digest
from pdserve_common.version import VERSION
from pdserve_router.api.api_keys import OPEN_PATHS, ApiKeys, GrpcApiKeyGuard, HttpApiKeyGuard
from pdserve_router.api.grpc.request_log import GrpcRequestLog
from pdserve_router.api.grpc.service import SERVICE_NAME, InferenceService
from pdserve_router.api.http.app import build_app
from pdserve_router.api.http.body import BODY_TIMEOUT_S
from pdserve_router.api.http.body_guard import BodyGuard
from pdserve_router.api.http.connections import NUM_REFUSING, ConnectionLimits, Connections
from pdserve_router.api.http.host_guard import HostGuard
from pdserve_router.api.http.server import HttpServer
from pdserve_router.api.http.write_queue import WriteQueue
from pdserve_router.api.large_requests.processes import EdgeProcesses, EdgeSettings
from pdserve_router.config import RouterConfig
from pdserve_router.requests.input.input_processor import InputProcessor
from pdserve_router.requests.input.pictures import RequestPictures
from pdserve_router.requests.records.request_log import HttpRequestLog, RequestLog
from pdserve_router.requests.tenants.fair_queue import FairQueue
from pdserve_router.requests.tenants.quotas import Quotas, no_limits
from pdserve_router.router import Router
from pdserve_router.text.picture_processor import PictureProcessor
from pdserve_router.text.served_model import ServedModel, labels_of
from pdserve_router.text.tokenizer import Tokenizer
from pdserve_router.workers.adapter_rollout import AdapterRollout
from pdserve_router.workers.adapter_scale_out import AdapterScaleOut
from pdserve_router.workers.cells import Cell
from pdserve_router.workers.clients.attach_client import LinkTimings
from pdserve_router.workers.clients.control_client import ControlClient
from pdserve_router.workers.clients.worker_client import WorkerClient
from pdserve_router.workers.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

# One of several processes takes connections without workers after this: nobody else may have any.
READY_TIMEOUT_S = 15.0
# For what was written last to reach its clients.
CLOSE_GRACE_S = 2.0
# Clients keep a gRPC channel's connection for as long as they run, and balancers of connections see
# no requests: routers that were added would get none of theirs. Streams run to their end on the old
# one. gRPC varies it by a tenth, so that clients do not all come back at once.
MAX_CONNECTION_AGE_S = 300.0
# Without a call; clients' libraries connect again for the next one.
MAX_CONNECTION_IDLE_S = 60.0


class RouterServer:
    """One router: gRPC, HTTP and metrics on one event loop. Ports are known after `start`."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        timings: LinkTimings | None = None,
        body_timeout_s: float = BODY_TIMEOUT_S,
        close_grace_s: float = CLOSE_GRACE_S,
    ) -> None:
        self.config = config
        self._body_timeout_s = body_timeout_s
        self._close_grace_s = close_grace_s
        self._is_serving = False
        self._health_tasks: set[asyncio.Task[None]] = set()
        runtime = Runtime()
        registry = CollectorRegistry()
        defects.export(registry)
        metrics = RouterMetrics(registry)
        BuildMetrics(registry, role="router", version=VERSION, model=config.model_name)
        self.registry = registry
        self._limits = LimitMetrics(registry, "grpc", "http", "metrics")
        num_http, num_grpc = share_descriptors(
            reserved=NUM_REFUSING + MAX_METRICS_CONNECTIONS,
            max_http=config.max_http_connections,
            max_grpc=config.max_grpc_connections,
        )
        self._connections = Connections(
            ConnectionLimits(
                num_total=num_http,
                num_of_address=min(
                    num_http, config.max_http_connections_of_address or num_http * 3 // 4
                ),
                idle_timeout_s=config.http_idle_timeout_s,
            ),
            partial(self._limits.count, "http"),
        )
        self._metrics = metrics
        self._tls = config.load_tls()
        self._api_keys = (
            ApiKeys(config.api_keys_file, metrics.requests_unauthorized)
            if config.api_keys_file
            else None
        )
        turns = FairQueue(self._prompt_tokens_under_way, runtime)
        metrics.quotas.waiting_tokens.set_function(lambda: turns.waiting)
        self._quotas = Quotas(
            self._api_keys.limits if self._api_keys else no_limits,
            num_parts=config.quota_replicas * config.workers,
            turns=turns,
            metrics=metrics.quotas,
            clock=runtime.now,
        )
        workers_tls = self._tls if config.tls_ca_file else None
        self.pool = WorkerPool(
            prefill=config.prefill,
            decode=config.decode,
            connect=partial(
                WorkerClient,
                model=ServedModel(config.model_name, tokenizer_digest(config.model)),
                router_id=config.router_id,
                count_tokens=metrics.generation_tokens.labels(model=config.model_name).inc,
                timings=timings,
                open_channel=partial(open_channel, tls=workers_tls),
                runtime=runtime,
            ),
            rules=config.rules,
            metrics=metrics,
            on_change=self._on_workers_changed,
            runtime=runtime,
            cell=Cell(config.cell or config.router_id, config.cell_size),
            max_held_tensor_bytes=config.max_held_tensor_bytes,
        )
        picture_processor = PictureProcessor.from_folder(config.model)
        self._tokenizer = Tokenizer(
            config.model,
            image_token_id=picture_processor.image_token_id if picture_processor else None,
        )
        input_processor = InputProcessor(
            self._tokenizer,
            pictures=RequestPictures(
                picture_processor, max_images_per_prompt=config.max_images_per_prompt
            ),
            model_name=config.model_name,
            default_deadline_s=config.default_deadline_s,
            max_deadline_s=config.max_deadline_s,
            chat_format=config.chat_format,
            share_prefixes=config.share_prefixes,
            is_inline=True,
            clock=runtime.now,
        )
        self.edge_processes = EdgeProcesses(
            input_processor, EdgeSettings.from_config(config), metrics
        )
        adapters = AdapterRollout(self.pool, ControlClient(workers_tls), runtime)
        self._scale_out = AdapterScaleOut(
            self.pool,
            adapters,
            max_requests=config.lora_scale_out_requests if config.lora_updates else 0,
            outcomes=metrics.lora.scale_outs,
            runtime=runtime,
        )
        self.router = Router(
            pool=self.pool,
            adapters=adapters,
            scale_out=self._scale_out,
            tokenizer=self._tokenizer,
            input_processor=input_processor,
            metrics=metrics,
            quotas=self._quotas,
            model_name=config.model_name,
            max_num_queued_requests=config.max_num_queued_requests,
            max_redrives=config.max_redrives,
            redrive_wait_s=config.redrive_wait_s,
            runtime=runtime,
        )
        self._tracing = open_tracing(
            config.otlp_traces_endpoint,
            registry,
            service="pdserve-router",
            instance=config.router_id,
        )
        self._request_log = (
            RequestLog(writes=config.log_requests, tracing=self._tracing, model=config.model_name)
            if config.log_requests or self._tracing is not None
            else None
        )
        self._rpc = RpcServer(
            config.host,
            config.grpc_port,
            credentials=self._tls.server_credentials(verifies_clients=False) if self._tls else None,
            interceptors=[
                *([GrpcRequestLog(self._request_log)] if self._request_log else []),
                *([GrpcApiKeyGuard(self._api_keys)] if self._api_keys else []),
                ReceiveGuard(partial(self._limits.count, "grpc")),
            ],
            options={
                "grpc.max_allowed_incoming_connections": num_grpc,
                "grpc.max_connection_age_ms": round(MAX_CONNECTION_AGE_S * 1000),
                "grpc.max_connection_idle_ms": round(MAX_CONNECTION_IDLE_S * 1000),
                "grpc.max_receive_message_length": config.max_body_bytes,
                "grpc.so_reuseport": int(config.workers > 1),
            },
            binds_late=config.workers > 1,
        )
        self._has_been_ready = asyncio.Event()
        self._http: HttpServer | None = None
        self._metrics_server: MetricsServer | None = None
        self.grpc_port = self.http_port = self.metrics_port = 0

    async def start(self) -> None:
        """Listen and attach to the workers. Of several on the same ports each attaches first, as it
        gets its share of the connections from then on. Raises OSError if a port is taken.
        """
        config = self.config
        context = self._tls.server_context() if self._tls else None
        shares_ports = config.workers > 1
        if not shares_ports:
            self._http = self._listen(context)
        self._metrics_server = MetricsServer(
            config.host,
            config.metrics_port,
            self.registry,
            probes=self._rpc.probes(),
            on_limit=partial(self._limits.count, "metrics"),
        )
        writes = WriteQueue()
        service = InferenceService(
            self.router,
            writes,
            client_stall_timeout_s=config.client_stall_timeout_s,
            edge=self.edge_processes,
        )
        service.add_to(self._rpc.server)
        if shares_ports:
            await self._rpc.set_alive(True)
            self.pool.start()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._has_been_ready.wait(), READY_TIMEOUT_S)
            self._http = self._listen(context)
        await self._rpc.start([SERVICE_NAME])
        if self._is_serving:  # that was known before there was a service
            await self._rpc.set_serving(True)
        self.grpc_port = self._rpc.port
        app: ASGIApp = build_app(
            self.router,
            client_stall_timeout_s=config.client_stall_timeout_s,
            max_body_bytes=config.max_body_bytes,
            body_timeout_s=self._body_timeout_s,
            writes=writes,
            edge=self.edge_processes,
            unknown_fields=self._metrics.http_unknown_fields,
            has_lora_updates=config.lora_updates,
            labels=labels_of(config.model),
        )
        slots = ReceiveSlots(ReceiveLimits(), partial(self._limits.count, "http"))
        assert self._http is not None
        self._http.start(self._guarded(BodyGuard(app, slots)))
        self.http_port = self._http.port
        self.metrics_port = self._metrics_server.port
        if not shares_ports:
            self.pool.start()
        logger.info(
            "listening: gRPC on %s, HTTP on %s, metrics on %s",
            self.grpc_port,
            self.http_port,
            self.metrics_port,
        )

    def _listen(self, context: ssl.SSLContext | None) -> HttpServer:
        config = self.config
        shares_port = config.workers > 1
        return HttpServer(config.host, config.http_port, context, self._connections, shares_port)

    def _prompt_tokens_under_way(self) -> float:
        """Return how many prompt tokens workers may have to compute while others wait."""
        num_steps = self.config.fair_queue_steps
        return num_steps * self.pool.shared_limits.num_step_tokens if num_steps else math.inf

    def _guarded(self, app: ASGIApp) -> ASGIApp:
        config = self.config
        if self._api_keys:
            app = HttpApiKeyGuard(app, self._api_keys, self._quotas)
        if config.cors_origins:
            # Around the keys: a browser asks first without one.
            app = CORSMiddleware(
                app,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["*"],
            )
        if not self._api_keys:
            origins = (*config.cors_origins, *config.allowed_origins)
            app = HostGuard(app, config.allowed_hosts, origins)
        if self._request_log is None:
            return app
        return HttpRequestLog(app, self._request_log, silent=OPEN_PATHS)

    async def stop(self, drain_timeout_s: float) -> None:
        """Become not ready, send clients elsewhere, finish what runs, close everything."""
        self.router.is_draining = True
        await self._set_health()
        # At once: clients learn from their connection (GOAWAY, close) that it takes nothing more,
        # and send what they have next over a new one, which leads to another router.
        grace_s = self._close_grace_s
        closing = [asyncio.create_task(self._rpc.stop(grace_s=drain_timeout_s + grace_s))]
        if self._http is not None:
            self._http.stop_accepting()
        await self.router.drain(drain_timeout_s)
        # The ends just written need a moment to reach their clients. What is not a request, such as
        # a Watch of the health service, gets no longer.
        closing.append(asyncio.create_task(self._rpc.stop(grace_s=grace_s)))
        if self._http is not None:
            closing.append(asyncio.create_task(self._http.close(grace_s=grace_s)))
        await asyncio.gather(*closing)
        await self.edge_processes.close()
        await self._scale_out.close()
        await self.pool.close()
        await asyncio.gather(*self._health_tasks)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if self._metrics_server is not None:
            self._metrics_server.close()
        self._tokenizer.close()

    def _on_workers_changed(self) -> None:
        if self.router.is_ready:
            self._has_been_ready.set()
        if self.router.is_ready != self._is_serving:
            task = defects.spawn("event_loop", self._set_health(), costs="word of its health")
            self._health_tasks.add(task)
            task.add_done_callback(self._health_tasks.discard)

    async def _set_health(self) -> None:
        if self.router.is_ready != self._is_serving:
            self._is_serving = self.router.is_ready
            logger.info("the router is %s", "ready" if self._is_serving else "not ready")
            await self._rpc.set_serving(self._is_serving)


async def serve(config: RouterConfig, template: ChildProcess) -> None:
    """Run a router until SIGTERM or SIGINT, then drain. `template` is for its large requests."""
    logger.info("config: %s", config)
    raise_descriptor_limit()
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    defects.watch_event_loop(loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    server = RouterServer(config)
    try:
        await server.start()
        server.edge_processes.start(template)
        # The tokenizer's library brings hundreds of thousands of objects that stay: 0.2 s of a full
        # collection, which large answers bring about.
        gc.collect()
        gc.freeze()
        await stopping.wait()
    finally:
        await server.stop(config.drain_timeout_s)
    logger.info("stopped")
