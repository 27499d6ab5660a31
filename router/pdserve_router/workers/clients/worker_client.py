"""One worker over gRPC: its link, its state, and the requests that run on it."""

import asyncio
import logging
from collections.abc import Callable

import grpc

from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import engine_core_service_pb2_grpc as service_grpc
from pdserve_common import wire
from pdserve_common.errors import (
    DrainingError,
    EngineDeadError,
    InvalidRequestError,
    NoWorkerError,
    PdserveError,
    RequestAbortedError,
)
from pdserve_common.observability import defects
from pdserve_common.rpc import attach_protocol
from pdserve_common.rpc.channels import OpenChannel, open_channel
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineError,
    EngineInfo,
    ErrorCode,
    FinishReason,
    WorkerRole,
)
from pdserve_common.types.kv import KVCacheEvents
from pdserve_common.types.lora import LoRAAdapters
from pdserve_router.text.served_model import ServedModel
from pdserve_router.workers.circuit_breaker import CircuitBreaker
from pdserve_router.workers.clients.attach_client import (
    AttachStream,
    LinkLostError,
    LinkTimings,
    StreamBrokenError,
    is_refused,
    reason_of,
)
from pdserve_router.workers.clients.held_tensors import HeldTensors
from pdserve_router.workers.clients.listeners import (
    Listeners,
    OutputCallback,
    TokenCallback,
    no_token,
)
from pdserve_router.workers.clients.tensor_client import TensorClient
from pdserve_router.workers.model_version import ModelVersion
from pdserve_router.workers.routing.kv_cache_follower import KVCacheFollower
from pdserve_router.workers.routing.prefix_index import PrefixIndex
from pdserve_router.workers.worker import Worker, WorkerState

logger = logging.getLogger(__name__)


# In these it has a stream and runs requests.
_ATTACHED = (WorkerState.READY, WorkerState.PAUSED, WorkerState.DRAINING)


class WorkerClient(Worker):
    """Keeps one worker attached. Everything runs on the event loop's thread; nothing blocks.

    A stream that breaks is replaced at once, and its requests go on where they were if the worker
    still has them. They get their error after `dead_after_s` of silence, or as soon as it is known
    that the worker is gone, is another process than before, or lacks them. Silence means death:
    whether such a worker ever comes back cannot be waited for.
    """

    def __init__(
        self,
        address: str,
        *,
        role: WorkerRole,
        model: ServedModel,
        router_id: str,
        on_change: Callable[[], None],
        runtime: Runtime,
        prefix_index: "PrefixIndex[Worker] | None" = None,
        count_tokens: Callable[[int], None] = lambda num_tokens: None,
        tensors: HeldTensors | None = None,
        timings: LinkTimings | None = None,
        open_channel: OpenChannel = open_channel,
    ) -> None:
        """`prefix_index` is told what the worker has cached; `tensors` has what requests name."""
        super().__init__(address, role=role, runtime=runtime)
        self._runtime = runtime
        self._clock = runtime.now
        self._model = model
        self._router_id = router_id
        # Its own for each client: a worker that is listed twice would otherwise take the second
        # stream for a successor, and end what runs over the first.
        self._router_epoch = f"{runtime.rng.getrandbits(128):032x}"
        self._on_change = on_change
        self._count_tokens = count_tokens
        self._timings = timings or LinkTimings()
        self._open_channel = open_channel
        self._listeners = Listeners()
        self._stream: AttachStream | None = None
        self._tensors = HeldTensors() if tensors is None else tensors
        # As long as the stream.
        self._puts: TensorClient | None = None
        # The first frame that has not come; 0 before the first one.
        self._next_frame_seq = 0
        # While REATTACHING: what it was before, and when the wait ends.
        self._held_state = WorkerState.READY
        self._hold_timer: asyncio.TimerHandle | None = None
        self._attached_at: float | None = None
        self._last_problem = ""
        # Before the next dial.
        self._backoff_s = 0.0
        self._task: asyncio.Task[None] | None = None
        if prefix_index is None:
            prefix_index = PrefixIndex[Worker](num_shards=1, runtime=runtime)
        self._kv_cache = KVCacheFollower(prefix_index, self, self._ask_for_kv_cache)

    @property
    def num_in_flight(self) -> int:
        return len(self._listeners)

    async def wait_until_idle(self) -> None:
        await self._listeners.wait_until_none()

    def start(self) -> None:
        self._task = defects.keep_running(
            "worker_link",
            self._run,
            costs=f"the link to worker {self.address}",
            pause_s=self._timings.min_backoff_s,
            name=f"attach {self.address}",
            on_defect=self._on_defect,
        )

    async def close(self) -> None:
        """End the stream; requests still on it get their error."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            self._release_hold()
            self._kv_cache.on_lost()
        finally:
            self.state = WorkerState.DOWN
            self._fail_all("the router is closing")

    def add_request(
        self,
        request: EngineCoreRequest,
        on_output: OutputCallback,
        on_defect: Callable[[], None] = lambda: None,
        *,
        take_token: TokenCallback = no_token,
    ) -> None:
        if self.state not in (WorkerState.READY, WorkerState.PAUSED):
            raise NoWorkerError(f"worker {self.address} is {self.state.value}")
        message = wire.to_proto(request)
        handle = self._listeners.add(request, on_output, on_defect, take_token)
        added = service_pb2.AttachRequest(add_request=message, handle=handle)
        try:
            if not request.mm_features or self._puts is None:
                self._send(added)
                return
            self._puts.then(
                request,
                lambda: self._send(added),
                lambda error: self._fail_to_put(request, error),
            )
        except BaseException:  # it goes on, and the request is the caller's
            self._listeners.forget(request.request_id)
            raise

    def _fail_to_put(self, request: EngineCoreRequest, error: PdserveError) -> None:
        if self.state in _ATTACHED:
            # An attempt before may run there, which this one should have superseded.
            self._abort_there(request.request_id)
        self._end_with(request.request_id, error.to_engine_error())

    def abort(self, request_id: str) -> None:
        self._listeners.forget(request_id)
        # A lost stream has aborted its requests already; the successor of a broken one does not ask
        # for this request, or finds it adopted and aborts it then.
        if self.state in _ATTACHED:
            self._abort_there(request_id)

    def _abort_there(self, *request_ids: str) -> None:
        abort = service_pb2.AbortRequests(request_ids=request_ids)
        self._send(service_pb2.AttachRequest(abort_requests=abort))

    def _ask_for_kv_cache(self) -> None:
        resync = service_pb2.ResyncKVCacheEvents()
        self._send(service_pb2.AttachRequest(resync_kv_cache_events=resync))

    def _send(self, message: service_pb2.AttachRequest) -> None:
        if self._stream is not None:
            self._stream.send(message)

    async def _run(self) -> None:
        while True:
            # Jitter: routers that lost the same worker do not return all at once.
            await self._runtime.sleep(self._backoff_s * self._runtime.rng.uniform(0.5, 1.0))
            self._backoff_s = self._next_backoff_s
            # A channel for each stream: it takes its certificates when it is made.
            async with self._open_channel(self.address) as channel:
                await self._serve_stream(service_grpc.EngineCoreServiceStub(channel))

    def _on_defect(self, error: BaseException) -> None:
        """A defect of this process: its requests must not hang, and the worker may come back."""
        self._lost("internal error of the router")

    @property
    def _next_backoff_s(self) -> float:
        longest = self._timings.max_backoff_s
        if self.state is WorkerState.REATTACHING:
            # Requests wait for it, but not for long: that must not pass between two tries.
            longest = min(longest, self._timings.dead_after_s / 10)
        return min(max(self._backoff_s * 2, self._timings.min_backoff_s), longest)

    async def _serve_stream(self, stub: service_grpc.EngineCoreServiceStub) -> None:
        self._stream = AttachStream(
            self._timings,
            on_response=self._on_response,
            next_frame_seq=lambda: self._next_frame_seq,
            clock=self._clock,
        )
        self._puts = TensorClient(
            stub, self._tensors, is_wanted=self._listeners.has, clock=self._clock
        )
        self._attached_at = None
        self._kv_cache.on_stream()
        try:
            await self._stream.serve(stub, self._hello())
        except (StreamBrokenError, grpc.aio.AioRpcError) as error:
            self._broken(error)
        except (LinkLostError, InvalidRequestError) as error:
            self._lost(str(error))
        finally:
            self._stream = None
            puts, self._puts = self._puts, None
            await puts.close()
        if self._attached_at is not None:
            # A link that held is replaced at once, one that flaps is not.
            is_old = self._clock() - self._attached_at > self._timings.heartbeat_s
            self._backoff_s = 0.0 if is_old else self._timings.min_backoff_s

    def _hello(self) -> service_pb2.AttachHello:
        hello = service_pb2.AttachHello(
            router_id=self._router_id,
            router_epoch=self._router_epoch,
            min_protocol_version=attach_protocol.MIN_PROTOCOL_VERSION,
            max_protocol_version=attach_protocol.PROTOCOL_VERSION,
            wants_kv_cache_events=True,
        )
        if self.state is WorkerState.REATTACHING:
            resume = service_pb2.AttachResume(
                worker_epoch=self.epoch,
                next_frame_seq=max(self._next_frame_seq, 1),
                requests=[
                    service_pb2.RequestAttempt(request_id=request_id, attempt=attempt)
                    for request_id, attempt in self._listeners.attempts().items()
                ],
            )
            hello.resume.CopyFrom(resume)
        else:
            self._next_frame_seq = 0
        return hello

    def _on_response(self, response: service_pb2.AttachResponse) -> None:
        if response.HasField("kv_cache_events"):
            self._kv_cache.apply(wire.from_proto(KVCacheEvents, response.kv_cache_events))
        kind = response.WhichOneof("message")
        if kind == "outputs":
            if self._is_new_frame(response.frame_seq):
                self._on_tokens(response.outputs.tokens)
                self._on_outputs(wire.engine_core_outputs_from_proto(response.outputs))
        elif kind == "heartbeat":
            self._on_heartbeat(response.heartbeat)
        elif kind == "welcome":
            self._on_welcome(response.welcome)

    def _is_new_frame(self, frame_seq: int) -> bool:
        """False for a frame that came on the stream before this one. Raises LinkLostError if one is
        missing: what was in it is lost.
        """
        expected = self._next_frame_seq
        if expected and frame_seq > expected:
            raise LinkLostError(f"frame {frame_seq} came, {expected} did not")
        self._next_frame_seq = max(expected, frame_seq + 1)
        return frame_seq >= expected

    def _on_welcome(self, welcome: service_pb2.AttachWelcome) -> None:
        version = welcome.protocol_version
        if attach_protocol.agreed_version(version, version) is None:
            raise LinkLostError(
                f"it speaks version {version} of the Attach protocol (pdserve "
                f"{welcome.info.version}), this router {attach_protocol.supported_versions()}"
            )
        info = wire.from_proto(EngineInfo, welcome.info)
        if info.role is not self.role:
            raise LinkLostError(
                f"it is a {info.role.name.lower()} worker, listed under {self.role.name.lower()}"
            )
        if mismatch := self._model.mismatch(info):
            raise LinkLostError(mismatch)
        is_same = info.epoch == self.epoch
        adopted = {(r.request_id, r.attempt) for r in welcome.adopted} if is_same else set()
        was_held = self.state is WorkerState.REATTACHING
        self._attached_at = self._clock()
        self._last_problem = ""
        self._release_hold()
        if not is_same:
            self._kv_cache.on_lost()
            self.breaker = CircuitBreaker(clock=self._clock)
            before = self.info.adapter_digests if self.info is not None else frozenset()
            # It may end again before it was given all of them.
            self.forgotten = (before | self.forgotten) - info.adapter_digests
        self.info = info
        self.model_version = ModelVersion.of(info)
        self.state = self._held_state if is_same and was_held else WorkerState.READY
        logger.info(
            "%s worker %s at %s is %s, epoch %s, %d requests adopted",
            info.role.name.lower(),
            info.engine_id,
            self.address,
            self.state.value,
            info.epoch[:8],
            len(adopted),
        )
        self._on_change()
        self._adopt(adopted)

    def _adopt(self, adopted: set[tuple[str, int]]) -> None:
        """Keep what the worker still has of ours, end the rest on this side and on the other."""
        ours = self._listeners.attempts()
        kept = {name for name, attempt in adopted if ours.get(name) == attempt}
        for request_id in [name for name in ours if name not in kept]:
            self._end_as_lost(request_id, "it no longer has the request")
        if unwanted := {name for name, _ in adopted} - kept:
            self._abort_there(*sorted(unwanted))
        if not kept:
            # The worker may have forgotten us and count anew; old frames are nobody's.
            self._next_frame_seq = 0

    def _on_tokens(self, tokens: core_pb2.TokenColumns) -> None:
        if not len(tokens.handles) == len(tokens.token_ids) == len(tokens.token_indexes):
            raise LinkLostError("its columns of tokens differ in length")
        rows = zip(tokens.handles, tokens.token_ids, tokens.token_indexes, strict=True)
        if num_taken := self._listeners.dispatch_tokens(rows, self._runtime.now_ns()):
            # Once a frame: a counter takes 1 us.
            self._count_tokens(num_taken)

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        if outputs.scheduler_stats is not None:
            self.stats = outputs.scheduler_stats
        for output in outputs.outputs:
            if output.error is not None and output.error.code is ErrorCode.DRAINING:
                self._on_draining()
            self._listeners.dispatch(output)
        for request_id in outputs.finished_requests:
            self._end_with(
                request_id,
                RequestAbortedError(
                    f"worker {self.address} ended the request without an output"
                ).to_engine_error(),
            )
        if outputs.engine_dead is not None:
            raise LinkLostError(f"its engine died: {outputs.engine_dead.message}")

    def _on_heartbeat(self, heartbeat: service_pb2.Heartbeat) -> None:
        self.num_routers = max(1, heartbeat.num_routers)
        if heartbeat.draining:
            self._on_draining()
        elif self.state in (WorkerState.READY, WorkerState.PAUSED):
            self._set_state(WorkerState.PAUSED if heartbeat.paused else WorkerState.READY)
        if heartbeat.HasField("adapters"):
            self._on_adapters(wire.from_proto(LoRAAdapters, heartbeat.adapters))

    def _on_adapters(self, held: LoRAAdapters) -> None:
        if self.info is not None and held.version > self.info.adapters_version:
            self.info = self.info.with_adapters(held)
            self.forgotten -= self.info.adapter_digests
            logger.info("worker %s has %d LoRA adapters", self.address, len(held.adapters))
            self._on_change()

    def _on_draining(self) -> None:
        if self.state in (WorkerState.READY, WorkerState.PAUSED):
            self._set_state(WorkerState.DRAINING)

    def _set_state(self, state: WorkerState) -> None:
        if state is not self.state:
            logger.info("worker %s is %s", self.address, state.value)
            self.state = state
            self._on_change()

    def _broken(self, error: StreamBrokenError | grpc.aio.AioRpcError) -> None:
        """Hold the requests if the worker may still have them."""
        reason = reason_of(error)
        if self.state in _ATTACHED:
            self._hold(reason)
        elif self.state is not WorkerState.REATTACHING or is_refused(error):
            self._lost(reason)

    def _hold(self, reason: str) -> None:
        logger.warning(
            "worker %s: the stream broke, %d requests wait for the next: %s",
            self.address,
            self.num_in_flight,
            reason,
        )
        self._held_state = self.state
        message = f"it did not attach again in time: {reason}"
        self._hold_timer = self._runtime.call_later(self._hold_s(), self._end_hold, message)
        self.stats = None
        self.state = WorkerState.REATTACHING
        self._on_change()

    def _end_hold(self, reason: str) -> None:
        try:
            self._lost(reason)
        except Exception as error:  # a defect: nobody else ends what waits
            defects.record("worker_link", error, f"the wait for worker {self.address}")
            self._on_defect(error)

    def _hold_s(self) -> float:
        """What is left of the worker's time, and enough for one try if it was this process that
        hung.
        """
        assert self._stream is not None, "it has just broken"
        left_s = self._timings.dead_after_s - self._stream.silence_s
        return max(left_s, self._timings.heartbeat_s)

    def _release_hold(self) -> None:
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None

    def _lost(self, reason: str) -> None:
        if reason != self._last_problem:
            logger.warning("worker %s is down: %s", self.address, reason)
            self._last_problem = reason
        self._release_hold()
        self._kv_cache.on_lost()
        self.stats = None
        # One that had said that it drains was expected to go.
        was_held = self.state is WorkerState.REATTACHING
        last_state = self._held_state if was_held else self.state
        error_type = DrainingError if last_state is WorkerState.DRAINING else EngineDeadError
        try:
            if self.state is not WorkerState.DOWN:
                self.state = WorkerState.DOWN
                self._on_change()
        finally:
            self._fail_all(reason, error_type)

    def _fail_all(self, reason: str, error_type: type[PdserveError] = EngineDeadError) -> None:
        for request_id in self._listeners.attempts():
            self._end_as_lost(request_id, reason, error_type)

    def _end_as_lost(
        self, request_id: str, reason: str, error_type: type[PdserveError] = EngineDeadError
    ) -> None:
        error = error_type(f"worker {self.address} was lost: {reason}")
        self._end_with(request_id, error.to_engine_error())

    def _end_with(self, request_id: str, error: EngineError) -> None:
        attempt = self._listeners.attempt_of(request_id)
        if attempt is not None:
            self._listeners.dispatch(
                EngineCoreOutput(
                    request_id=request_id,
                    attempt=attempt,
                    finish_reason=FinishReason.ERROR,
                    error=error,
                )
            )
