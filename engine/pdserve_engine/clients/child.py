"""The engine process: an InprocEngineClient behind a SubprocessEngineClient's socket."""

import asyncio
import dataclasses
import functools
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector

from pdserve_common.errors import PdserveError
from pdserve_common.metrics.services import EngineMetrics, GrammarMetrics, KVTransferMetrics
from pdserve_common.observability import defects
from pdserve_common.observability.logging import setup_logging
from pdserve_common.processes.calls import Answer, Call, Failed, ProtocolError
from pdserve_common.processes.channel import Channel
from pdserve_common.rpc.liveness import HEARTBEAT_S, every
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    FinishReason,
    SchedulerStats,
)
from pdserve_common.types.engine_client import EngineClient, EngineState, Tensors
from pdserve_common.types.lora import LoRAAdapters
from pdserve_engine.clients import messages
from pdserve_engine.clients.inproc import InprocEngineClient
from pdserve_engine.clients.link_proxies import LinkHost, host_links
from pdserve_engine.clients.metrics import take_snapshot
from pdserve_engine.clients.stats import EngineStatsRecorder

logger = logging.getLogger(__name__)

# How long the last messages may take to leave.
FLUSH_TIMEOUT_S = 5.0
EXIT_NOT_LOADED = 1
EXIT_LOST = 3
# A client_index no front end has.
NO_CLIENT = -1


async def serve(fd: int) -> int:
    """Load what the socket `fd` asks for and serve it; the process's exit status.

    Ends the process at once when the socket's other end is gone: nobody is left to serve.
    """
    process = _EngineProcess()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(process.on_exception)
    defects.tell_parent(lambda loop: process.channel.send(messages.EngineDefect(loop)))
    await loop.create_unix_connection(lambda: process.channel, sock=socket.socket(fileno=fd))
    return await process.run()


class _EngineProcess:
    """Used on the event loop's thread."""

    _engine: EngineClient | None = None

    def __init__(self) -> None:
        self.channel = Channel(messages.CODEC, self._on_message, self._on_lost)
        self._registry = CollectorRegistry()
        # Beside those of the worker's process, which have the same names without "engine_".
        ProcessCollector(namespace="engine", registry=self._registry)
        self._record = EngineStatsRecorder(EngineMetrics(self._registry))
        self._load_call: asyncio.Future[tuple[messages.LoadEngine, int]] = asyncio.Future()
        self._close_asked = asyncio.Event()
        self._is_closing = False
        self._lost = asyncio.Event()
        self._links: dict[messages.ConnectorKind, LinkHost] = {}
        # By the number the other end gave them.
        self._client_indexes: dict[int, int] = {}
        # Tensors of live requests are kept until the other end says that they have ended.
        self._tensors: dict[bytes, bytes] = {}
        # The version of the adapters that the other end was told.
        self._adapters_version = 0

    async def run(self) -> int:
        """Load, serve, close."""
        self._send_status()
        heartbeat = defects.spawn(
            "engine",
            every(HEARTBEAT_S, self._send_status),
            costs="this engine",
            on_defect=lambda error: self.channel.abort(f"a heartbeat failed: {error!r}"),
        )
        call, ref = await self._load_call
        setup_logging(call.log_level, call.engine_id)
        try:
            engine = await self._load(call)
        except (PdserveError, OSError, ValueError) as error:
            self.channel.send(Failed.of(error), ref)
        else:
            self._tell_ready(engine, ref)
            await self._close_asked.wait()
            await engine.close()
        heartbeat.cancel()
        self._is_closing = True
        self.channel.close()
        await asyncio.wait_for(self._lost.wait(), FLUSH_TIMEOUT_S)
        return 0 if self._engine is not None else EXIT_NOT_LOADED

    async def _load(self, call: messages.LoadEngine) -> InprocEngineClient:
        return await InprocEngineClient.load(
            call.config,
            role=call.role,
            engine_id=call.engine_id,
            metrics=KVTransferMetrics(self._registry),
            grammar_metrics=GrammarMetrics(self._registry),
            on_step=self._on_step,
        )

    def _tell_ready(self, engine: InprocEngineClient, ref: int) -> None:
        self._engine = engine
        # One client that hears of the engine's death even if there is no other.
        engine.register_client(lambda outputs: self._send_status())
        connectors = (engine.connector, engine.prefix_connector)
        self._links = host_links(connectors, self.channel.send)
        identities = {kind: host.identity for kind, host in self._links.items()}
        self._adapters_version = engine.info.adapters_version
        self._send_status()
        ready = messages.EngineReady(info=engine.info, kv_identities=identities)
        self.channel.send(Answer.of(ready), ref)

    # ---- what the engine says

    def _on_step(
        self, stats: SchedulerStats, outputs: Sequence[EngineCoreOutput], has_computed: bool
    ) -> None:
        self._record(stats, outputs, has_computed)
        self._send_status(tuple((o.request_id, o.attempt) for o in outputs if o.finished))

    def _send_status(self, finished_requests: tuple[tuple[str, int], ...] = ()) -> None:
        engine = self._engine
        if engine is None:
            status = messages.EngineStatus(
                step_seq=0, stats=SchedulerStats(), state=EngineState(), is_alive=True, problem=None
            )
        else:
            status = messages.EngineStatus(
                step_seq=engine.step_seq(),
                stats=engine.stats(),
                state=engine.state(),
                is_alive=engine.is_alive(),
                problem=engine.problem(),
                finished_requests=finished_requests,
            )
            self._tell_adapters(engine.info)
        self.channel.send(status)

    def _tell_adapters(self, info: EngineInfo) -> None:
        """Before an answer that says that they have changed."""
        if info.adapters_version != self._adapters_version:
            self._adapters_version = info.adapters_version
            self.channel.send(LoRAAdapters(version=info.adapters_version, adapters=info.adapters))

    # ---- what the worker says

    def on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback or a task has failed: what it was to send is lost, so start anew."""
        loop.default_exception_handler(context)
        defects.count("event_loop")
        self.channel.abort(str(context["message"]))

    def _on_lost(self, reason: str) -> None:
        self._lost.set()
        if not self._is_closing:
            logger.error("no connection to the worker any more: %s", reason)
            os._exit(EXIT_LOST)

    def _on_message(self, message: messages.Message, ref: int) -> None:
        if isinstance(message, messages.LoadEngine):
            self._load_call.set_result((message, ref))
        elif isinstance(message, messages.Close):
            self._close_asked.set()
        elif self._engine is None:
            raise ProtocolError(f"{type(message).__name__} before the engine is loaded")
        else:
            self._on_request(self._engine, message, ref)

    def _on_request(self, engine: EngineClient, message: messages.Message, ref: int) -> None:
        if isinstance(message, messages.AddRequest):
            self._add(engine, message)
        elif isinstance(message, messages.ForgetTensors):
            for content_hash in message.content_hashes:
                self._tensors.pop(content_hash, None)
        elif isinstance(message, messages.LinkMessage):
            self._on_link_message(message, messages.LinkRef.unpack(ref))
        elif isinstance(message, messages.AbortRequests):
            engine.abort_requests(self._client_indexes.get(ref, NO_CLIENT), message.request_ids)
        elif isinstance(message, messages.RegisterClient):
            self._client_indexes[ref] = engine.register_client(
                lambda outputs: self.channel.send(outputs, ref)
            )
        elif isinstance(message, messages.RecordKVCacheEvents):
            engine.record_kv_cache_events(self.channel.send)
        elif isinstance(message, messages.UnregisterClient):
            engine.unregister_client(self._client_indexes.pop(ref))
        elif isinstance(message, Call):
            self.channel.answer(message, ref, functools.partial(self._handle, engine))
        else:
            raise ProtocolError(f"unexpected {type(message).__name__}")

    def _on_link_message(self, message: messages.LinkMessage, link: messages.LinkRef) -> None:
        if link.connector not in self._links:
            raise ProtocolError(f"{type(message).__name__} for a connector that is not there")
        self._links[link.connector].handle(message, link.number)

    def _add(self, engine: EngineClient, message: messages.AddRequest) -> None:
        request = message.request
        self._tensors.update(message.tensors)
        tensors = _tensors_of(request, self._tensors)
        index = self._client_indexes.get(request.client_index, NO_CLIENT)
        try:
            engine.add_request(dataclasses.replace(request, client_index=index), tensors)
        except PdserveError as error:
            # Accepted over there: it has to end over there.
            output = EngineCoreOutput(
                request_id=request.request_id,
                attempt=request.attempt,
                finish_reason=FinishReason.ERROR,
                error=error.to_engine_error(),
            )
            self._send_status(((request.request_id, request.attempt),))
            self.channel.send(EngineCoreOutputs(outputs=(output,)), request.client_index)

    # ---- calls

    async def _handle(self, engine: EngineClient, call: Call[Any]) -> object:
        try:
            return await self._perform(engine, call)
        finally:
            self._send_status()

    async def _perform(self, engine: EngineClient, call: Call[Any]) -> object:
        if isinstance(call, messages.Drain):
            return await engine.drain(call.timeout_s)
        if isinstance(call, messages.GetMetrics):
            return take_snapshot(self._registry)
        return await engine.call(call)


def _tensors_of(request: EngineCoreRequest, held: Tensors) -> Tensors:
    """Return the request's own, which others share."""
    refs = (feature.data for feature in request.mm_features)
    keys = (ref.content_hash for ref in refs if ref is not None)
    return {key: held[key] for key in keys if key in held}
