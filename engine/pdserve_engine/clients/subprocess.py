"""SubprocessEngineClient: the EngineClient of an engine in a child process."""

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from pdserve_common.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineDeadError,
    OverloadedError,
)
from pdserve_common.observability import defects
from pdserve_common.processes.calls import Call, ProtocolError, ResultT
from pdserve_common.processes.channel import MAX_UNSENT_BYTES, Channel
from pdserve_common.processes.child import ChildProcess, start
from pdserve_common.rpc.liveness import HEARTBEAT_S, keep_calling
from pdserve_common.types.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    SchedulerStats,
)
from pdserve_common.types.engine_client import (
    NO_TENSORS,
    EngineState,
    KVCacheEventsCallback,
    OutputsCallback,
    Tensors,
)
from pdserve_common.types.kv import KVCacheEvents
from pdserve_common.types.lora import LoRAAdapters
from pdserve_engine.clients import messages
from pdserve_engine.clients.link_proxies import ConsumerProxy, ProducerProxy
from pdserve_engine.clients.metrics import EngineProcessCollector
from pdserve_engine.clients.owners import RequestOwners
from pdserve_engine.clients.sent_tensors import SentTensors
from pdserve_engine.config import EngineConfig, Role

logger = logging.getLogger(__name__)

# Loading may keep the process from saying something for longer.
SILENCE_S = 10.0
LOADING_SILENCE_S = 120.0
# The engine process gives a call up by itself; these are for one that does not answer.
CALL_TIMEOUT_S = 1800.0
ANSWER_MARGIN_S = 5.0
# Longer than the engine thread is waited for.
CLOSE_TIMEOUT_S = 40.0
# A process whose socket has closed is on its way out.
EXIT_TIMEOUT_S = 5.0


class SubprocessEngineClient:
    """Owns the engine process from `load` to `close`. Used on the event loop's thread."""

    info: EngineInfo
    # What the service has to carry the KvLink's messages to.
    connector: ProducerProxy | ConsumerProxy | None = None
    # The same for links over which prefixes are read.
    prefix_connector: ProducerProxy | ConsumerProxy | None = None
    _process: ChildProcess
    _channel: Channel[messages.Message]
    _status: messages.EngineStatus

    def __init__(self) -> None:
        self._lost = asyncio.Event()
        self._clients: dict[int, OutputsCallback] = {}
        self._owners = RequestOwners()
        self._tensors = SentTensors()
        self._client_indexes = itertools.count(1)
        self._on_kv_cache_events: KVCacheEventsCallback = lambda events: None
        self._proxies: dict[messages.ConnectorKind, ProducerProxy | ConsumerProxy] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_loaded = False
        self._is_draining = False
        self._is_closing = False
        self._error: str | None = None

    @classmethod
    async def load(
        cls,
        config: EngineConfig,
        *,
        role: Role,
        engine_id: str,
        registry: CollectorRegistry,
        log_level: str = "info",
    ) -> "SubprocessEngineClient":
        """Start a process, load an engine in it and wait until it is ready.

        The engine's metrics appear in `registry`. Raises ValueError, OSError or a PdserveError if
        it cannot be loaded.
        """
        # Without the settings of the worker around it.
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(EngineConfig)}
        load = messages.LoadEngine(
            config=EngineConfig(**fields), role=role, engine_id=engine_id, log_level=log_level
        )
        client = cls()
        await client._start_process()
        try:
            client._become_ready(await client._channel.call(load, None), role)
            snapshot = await client.call(messages.GetMetrics())
        except BaseException:  # a cancelled start leaves no process behind either
            client._is_closing = True
            client._process.kill()
            await client._end()
            raise
        registry.register(
            EngineProcessCollector(snapshot, lambda: client.call(messages.GetMetrics()))
        )
        return client

    async def _start_process(self) -> None:
        self._process = ChildProcess("the engine process", *start("pdserve_engine.clients"))
        self._channel = Channel(messages.CODEC, self._on_message, self._on_lost)
        (end,) = self._process.sockets
        await asyncio.get_running_loop().create_unix_connection(lambda: self._channel, sock=end)
        costs = "a look at the engine process"
        self._tasks.append(keep_calling("engine", HEARTBEAT_S, self._tick, costs=costs))

    def _become_ready(self, ready: messages.EngineReady, role: Role) -> None:
        self._is_loaded = True
        self.info = ready.info
        name = ready.info.kv_transport
        for proxy in (ProducerProxy, ConsumerProxy):
            identity = ready.kv_identities.get(proxy.kind)
            if identity is not None:
                self._proxies[proxy.kind] = proxy(identity, name, self._channel.send)
        kinds = ProducerProxy.kind, ConsumerProxy.kind
        own, other = kinds if role == "prefill" else reversed(kinds)
        self.connector = self._proxies.get(own)
        self.prefix_connector = self._proxies.get(other)

    # ---- EngineClient

    def register_client(self, on_outputs: OutputsCallback) -> int:
        index = next(self._client_indexes)
        self._clients[index] = on_outputs
        self._channel.send(messages.RegisterClient(), index)
        return index

    def unregister_client(self, client_index: int) -> None:
        if self._clients.pop(client_index, None) is not None:
            self._channel.send(messages.UnregisterClient(), client_index)
            self._owners.disown(client_index)

    def record_kv_cache_events(self, on_events: KVCacheEventsCallback) -> None:
        self._on_kv_cache_events = on_events
        self._channel.send(messages.RecordKVCacheEvents())

    def add_request(self, request: EngineCoreRequest, tensors: Tensors = NO_TENSORS) -> None:
        if self._error is not None:
            raise EngineDeadError(self._error)
        if self._is_draining:
            raise DrainingError("the worker is shutting down")
        num_bytes = sum(map(len, tensors.values()))
        if num_bytes and self._channel.unsent_bytes + num_bytes > MAX_UNSENT_BYTES // 2:
            # More would end the connection, and everybody's requests.
            raise OverloadedError("too many tensors are on their way to the engine process")
        self._owners.add(request)
        lacking, unused = self._tensors.add(request.request_id, tensors)
        self._channel.send(messages.AddRequest(request, lacking))
        self._forget_tensors(unused)

    def _forget_tensors(self, content_hashes: tuple[bytes, ...]) -> None:
        if content_hashes:
            self._channel.send(messages.ForgetTensors(content_hashes))

    def _release_tensors(self, request_id: str) -> None:
        """An attempt has ended: of the request, unless another one runs."""
        if request_id not in self._owners:
            self._forget_tensors(self._tensors.release(request_id))

    def abort_requests(self, client_index: int, request_ids: Sequence[str]) -> None:
        # The process knows best which are whose.
        self._channel.send(messages.AbortRequests(tuple(request_ids)), client_index)

    def stats(self) -> SchedulerStats:
        return self._status.stats

    def step_seq(self) -> int:
        return self._status.step_seq

    def state(self) -> EngineState:
        return self._status.state

    def is_alive(self) -> bool:
        return self._error is None and not self._is_closing

    def problem(self) -> str | None:
        if self._error is not None:
            return self._error
        silence_s = self._channel.silence_s
        if silence_s > SILENCE_S and not self._is_closing:
            return f"the engine process has said nothing for {silence_s:.0f} s"
        return self._status.problem

    # ---- calls

    async def call(self, verb: Call[ResultT]) -> ResultT:
        return await self._call(verb, CALL_TIMEOUT_S)

    async def _call(self, call: Call[ResultT], timeout_s: float) -> ResultT:
        """Return the result. Raises the PdserveError it is, EngineDeadError or
        DeadlineExceededError.
        """
        if not self.is_alive():
            raise EngineDeadError(self._error or "the engine is closed")
        return await self._channel.call(call, timeout_s)

    # ---- the end

    async def drain(self, timeout_s: float) -> int:
        self._is_draining = True
        try:
            return await self._call(messages.Drain(timeout_s), timeout_s + ANSWER_MARGIN_S)
        except EngineDeadError:
            return 0  # nothing is left; `problem` tells
        except DeadlineExceededError:
            return len(self._owners)

    async def close(self) -> None:
        """Stop the engine, wait for its process to end and kill it if it does not."""
        self._is_draining = self._is_closing = True
        self._channel.send(messages.Close())
        try:
            await asyncio.wait_for(self._lost.wait(), CLOSE_TIMEOUT_S)
        except asyncio.TimeoutError:
            self._error = self._error or "the engine process did not stop and was killed"
            self._process.kill()
        await self._end()

    async def _end(self) -> None:
        self._channel.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._process.end, EXIT_TIMEOUT_S)
        self._channel.fail_calls(EngineDeadError("the engine is closed"))

    # ---- what the process says

    def _on_message(self, message: messages.Message, ref: int) -> None:
        if self._error is not None:
            return
        if isinstance(message, messages.EngineStatus):
            self._on_status(message)
        elif isinstance(message, EngineCoreOutputs):
            self._on_outputs(message, ref)
        elif isinstance(message, messages.EngineDefect):
            defects.count(message.loop)
        elif isinstance(message, LoRAAdapters):
            self.info = self.info.with_adapters(message)
        elif isinstance(message, KVCacheEvents):
            self._on_kv_cache_events(message)
        elif isinstance(message, messages.LinkMessage):
            self._on_link_message(message, messages.LinkRef.unpack(ref))
        else:
            raise ProtocolError(f"unexpected {type(message).__name__}")

    def _on_link_message(self, message: messages.LinkMessage, link: messages.LinkRef) -> None:
        if link.connector not in self._proxies:
            raise ProtocolError(f"{type(message).__name__} of a connector that is not there")
        self._proxies[link.connector].deliver(message, link.number)

    def _on_outputs(self, message: EngineCoreOutputs, client_index: int) -> None:
        outputs = self._owners.release_ended(message.outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._release_tensors(output.request_id)
        callback = self._clients.get(client_index)
        if callback is not None:
            callback(dataclasses.replace(message, outputs=outputs))

    def _on_status(self, status: messages.EngineStatus) -> None:
        self._status = status
        for request_id, attempt in status.finished_requests:
            self._owners.release(request_id, attempt)
            self._release_tensors(request_id)
        if not status.is_alive and not self._is_closing:
            self._die(status.problem or "the engine died")

    def _tick(self) -> None:
        self._channel.tick()
        if self._channel.silence_s > LOADING_SILENCE_S and not self._is_loaded:
            self._channel.fail_calls(EngineDeadError("the engine process hangs while loading"))

    def _on_lost(self, reason: str) -> None:
        self._lost.set()
        if self.is_alive():
            self._error = f"the engine process is gone: {reason}"
            end = self._on_process_end(reason)
            self._tasks.append(defects.spawn("engine", end, costs="how the engine process ended"))

    async def _on_process_end(self, reason: str) -> None:
        """The process is gone, or as good as gone: find out how, and tell everyone."""
        await asyncio.to_thread(self._process.end, EXIT_TIMEOUT_S)
        self._die(f"the engine process {self._process.describe_end()}: {reason}")

    def _die(self, error: str) -> None:
        """Give every client its last message, and whoever waits an exception."""
        logger.error("%s", error)
        self._error = error
        self._owners.clear()
        self._channel.fail_calls(EngineDeadError(error))
        for proxy in self._proxies.values():
            proxy.close(error)
        engine_dead = EngineDeadError(error).to_engine_error()
        for callback in list(self._clients.values()):
            with defects.contained("engine", "a client word of the engine's death"):
                callback(EngineCoreOutputs(engine_dead=engine_dead))
