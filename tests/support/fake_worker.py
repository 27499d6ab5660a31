"""A peer for the router: a real EngineCoreService that generates scripted tokens, and whose faults
tests choose. The real engine meets the router in tests/integration.
"""

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from pdserve.v1 import engine_core_service_pb2 as pb2
from pdserve.v1 import engine_core_service_pb2_grpc as pb2_grpc
from pdserve_common import wire
from pdserve_common.metrics.tensors import TensorMetrics
from pdserve_common.rpc.attach_protocol import PROTOCOL_VERSION
from pdserve_common.rpc.channels import rpc_errors, server_options
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineError,
    EngineInfo,
    ErrorCode,
    FinishReason,
    Generate,
    KVTransferStats,
    LogprobsLists,
    Pool,
    PrefillStats,
    SchedulerStats,
    WorkerRole,
)
from pdserve_common.types.kv import KVCacheEvents
from pdserve_common.types.lora import LoRAAdapters
from pdserve_common.types.pooling_params import GENERATE
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.text.served_model import ServedModel
from pdserve_worker.tensor_service import receive_tensor
from pdserve_worker.tensor_store import TensorStore

EOS = 1
# Of the fakes, which have no tokenizer, and of `make_model_dir`.
MODEL = ServedModel("tiny", tokenizer_digest="")
# Of a model that pools.
EMBEDDER_SIZE = 8
EMBEDDER: dict[str, Any] = {
    "tasks": ("embed",),
    "embedding_size": EMBEDDER_SIZE,
    "is_matryoshka": True,
    "eos_token_ids": (),
    "kv_transport": "none",
}
PREFILL_STATS = PrefillStats(num_prompt_tokens=3, num_cached_tokens=2, queue_s=1e-4, prefill_s=2e-4)
KV_STATS = KVTransferStats(
    num_bytes=4096,
    num_blocks=1,
    num_reads=1,
    transport="shm",
    transfer_s=3e-4,
    exposed_s=1e-4,
    release_ack_s=1e-5,
    decode_admit_s=1e-5,
    first_decode_step_s=1e-4,
)

# What the router's probes of pairs get; they are kept apart from what tests send.
PROBE_ANSWER = (4, 5)

Behaviour = Callable[["Running"], Awaitable[None]]
# Awaited before a request's next token, with how many it has.
BeforeToken = Callable[["Running", int], Awaitable[None]]


REUSEPORT = "grpc.so_reuseport"


def reserve_port() -> socket.socket:
    """Bind a free port of this machine; servers that share ports may listen on it."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reservation.bind(("127.0.0.1", 0))
    return reservation


def is_probe(request_id: str) -> bool:
    return request_id.startswith("probe-")


def engine_info(role: WorkerRole, *, vocab_size: int, **changes: Any) -> EngineInfo:
    info = EngineInfo(
        engine_id=f"fake-{role.name.lower()}",
        epoch="0" * 32,
        role=role,
        model=MODEL.name,
        max_model_len=4096,
        vocab_size=vocab_size,
        eos_token_ids=(EOS,),
        block_size=16,
        num_blocks=100,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        dtype="bfloat16",
        kv_compatibility_hash="same",
        weights_digest="a" * 64,
        kv_transport="shm",
        determinism="exact",
        numerics_id="fake",
        version="0",
    )
    return dataclasses.replace(info, **changes)


def logprobs_of(token_ids: Sequence[int], num_top: int) -> LogprobsLists:
    """What the fake says of chosen tokens: the logprob of token t is -t / 64, and its rank t; the
    top ones are tokens 4, 5, ... with -1, -2, ...
    """
    top = range(4, 4 + num_top)
    return LogprobsLists(
        logprob_token_ids=tuple((token_id, *top) for token_id in token_ids),
        logprobs=tuple((-t / 64, *(-1.0 - i for i in range(num_top))) for t in token_ids),
        sampled_token_ranks=tuple(token_ids),
    )


def vector_of(request: EngineCoreRequest, size: int) -> list[float]:
    """What the fake pools a prompt to: numbers that fp32 holds exactly, other ones for other tokens
    and in another order.
    """
    assert isinstance(request.task, Pool)
    values = [0] * (request.task.pooling_params.dimensions or size)
    for place, token_id in enumerate(request.prompt_token_ids, 1):
        values = [(value * 31 + token_id * (i + place)) % 1021 for i, value in enumerate(values)]
    return [value / 64 for value in values]


class Link:
    """One attached router; outputs that pile up leave as one frame, like an engine step's. What has
    left stays, for a router that comes back for it.
    """

    def __init__(self) -> None:
        self.frames: list[pb2.AttachResponse] = []
        self.num_waiting_tokens = 0
        # What the router calls attempts of requests.
        self.handles: dict[tuple[str, int], int] = {}
        self._pending: list[EngineCoreOutput] = []
        self._rest: dict[str, Any] = {}
        self._kv_cache_events: KVCacheEvents | None = None
        self._event = asyncio.Event()

    def emit(self, output: EngineCoreOutput) -> None:
        self._pending.append(output)
        self._event.set()

    def say(self, **fields: Any) -> None:
        """Send what an engine says besides outputs."""
        self._rest.update(fields)
        self._event.set()

    def tell_cached(self, events: KVCacheEvents) -> None:
        """Send what has changed in its cache."""
        self._kv_cache_events = events
        self._event.set()

    def outputs(self) -> list[EngineCoreOutput]:
        """All outputs so far."""
        sent = (wire.engine_core_outputs_from_proto(frame.outputs) for frame in self.frames)
        return [output for step in sent for output in step.outputs] + self._pending

    async def next_frame(self) -> pb2.AttachResponse:
        step = await self._next_step()
        outputs = wire.engine_core_outputs_to_proto(step, handles=self.handles)
        frame = pb2.AttachResponse(outputs=outputs, frame_seq=len(self.frames) + 1)
        if self._kv_cache_events is not None:
            frame.kv_cache_events.CopyFrom(wire.to_proto(self._kv_cache_events))
            self._kv_cache_events = None
        self.frames.append(frame)
        return frame

    async def _next_step(self) -> EngineCoreOutputs:
        await self._event.wait()
        self._event.clear()
        outputs, self._pending = self._pending, []
        stats = SchedulerStats(
            num_running_reqs=len(outputs), num_waiting_tokens=self.num_waiting_tokens
        )
        rest, self._rest = self._rest, {}
        return EngineCoreOutputs(outputs=tuple(outputs), scheduler_stats=stats, **rest)


class Running:
    """A request on a fake worker, and how a behaviour answers it."""

    def __init__(self, worker: "FakeWorker", link: Link, request: EngineCoreRequest) -> None:
        self.worker = worker
        self.request = request
        self._link = link
        # The index of the next token, as an engine tells it with an end.
        self._num_emitted = len(request.resume_output_token_ids)

    @property
    def params(self) -> SamplingParams:
        assert isinstance(self.request.task, Generate)
        return self.request.task.sampling_params

    @property
    def num_resumed(self) -> int:
        return len(self.request.resume_output_token_ids)

    def stats(self, *, is_remote: bool) -> dict[str, Any]:
        """Of D's first output: P's stats of the prompt if P has computed it, else its own."""
        prefill = self.worker.prefill_stats if self.num_resumed == 0 else None
        if not is_remote:
            return {"prefill_stats": prefill}
        return {
            "kv_transfer_stats": dataclasses.replace(self.worker.kv_stats, prefill_stats=prefill)
        }

    async def turn(self, num_tokens: int) -> None:
        """Wait until the next token may come."""
        if not is_probe(self.request.request_id):
            await self.worker.before_token(self, num_tokens)

    def emit(
        self,
        *token_ids: int,
        at: int,
        finish: FinishReason | None = None,
        num_repeated: int = 0,
        **more: Any,
    ) -> None:
        """Send tokens, the first of which has index `at`. The first `num_repeated` have no
        logprobs.
        """
        more.setdefault("attempt", self.request.attempt)
        self._num_emitted = max(self._num_emitted, at + len(token_ids))
        num_top = self.params.logprobs
        if num_top is not None and token_ids:
            more.setdefault("new_logprobs", logprobs_of(token_ids[num_repeated:], num_top))
        self._link.emit(
            EngineCoreOutput(
                request_id=self.request.request_id,
                new_token_ids=token_ids,
                first_token_index=at,
                finish_reason=finish,
                **more,
            )
        )

    def fail(self, code: ErrorCode, message: str = "broken on purpose", **fields: Any) -> None:
        """End a request of any kind with an error, of which `fields` are further ones."""
        error = EngineError(code=code, message=message, **fields)
        self._link.emit(
            EngineCoreOutput(
                request_id=self.request.request_id,
                first_token_index=self._num_emitted,
                finish_reason=FinishReason.ERROR,
                error=error,
                attempt=self.request.attempt,
            )
        )

    def emit_vector(self, vector: Sequence[float]) -> None:
        """End a pooling request."""
        self._link.emit(
            EngineCoreOutput(
                request_id=self.request.request_id,
                pooling_output=tuple(vector),
                finish_reason=FinishReason.STOP,
                prefill_stats=self.worker.prefill_stats,
                attempt=self.request.attempt,
            )
        )

    def emit_prompt_logprobs(self, *, chunk: int = 2) -> None:
        """Send them in slices, as a prompt computed in chunks brings them."""
        num_top = self.params.prompt_logprobs
        if num_top is None:
            return
        known = logprobs_of(self.request.prompt_token_ids[1:], num_top)
        for start in range(0, len(known), chunk):
            self.emit(at=0, new_prompt_logprobs=known[start : start + chunk])

    def answer(self) -> tuple[Sequence[int], FinishReason]:
        """The worker's scripted answer, cut at max_tokens."""
        answer = PROBE_ANSWER if is_probe(self.request.request_id) else self.worker.answer
        limit = self.params.max_tokens
        assert limit is not None
        if len(answer) < limit:
            return [*answer, EOS], FinishReason.STOP
        return answer[:limit], FinishReason.LENGTH


async def prefill(running: Running) -> None:
    """Compute the first token, or the first that is not resumed, and hand the request off, unless
    it was the last.
    """
    tokens, finish = running.answer()
    num_known = running.num_resumed
    if running.worker.step_s:
        await asyncio.sleep(running.worker.step_s)
    await running.turn(num_known)
    running.emit_prompt_logprobs()
    params = running.request.kv_transfer_params
    if len(tokens) == num_known + 1:
        params = None
    else:
        finish = FinishReason.LENGTH
    running.emit(
        tokens[num_known],
        at=num_known,
        finish=finish,
        prefill_stats=running.worker.prefill_stats if num_known == 0 else None,
        kv_transfer_params=params,
    )


async def decode(running: Running) -> None:
    """Generate token by token; of a request whose KV was pulled, repeat P's token first."""
    tokens, finish = running.answer()
    step_s = running.worker.step_s
    params = running.request.kv_transfer_params
    is_remote = params is not None and params.do_remote_prefill
    num_known = running.num_resumed
    if is_remote and len(tokens) == num_known + 1:
        await asyncio.Event().wait()  # P ends it; the router aborts this leg
    await asyncio.sleep(2 * step_s if is_remote else step_s)
    start = num_known + (2 if is_remote else 1)
    if not is_remote:
        running.emit_prompt_logprobs()
    for end in range(start, len(tokens) + 1):
        await running.turn(end - 1)
        is_first, is_last = end == start, end == len(tokens)
        begin = num_known if is_first else end - 1
        running.emit(
            *tokens[begin:end],
            at=begin,
            finish=finish if is_last else None,
            **(running.stats(is_remote=is_remote) if is_first else {}),
            # Only P knows how likely its token was.
            num_repeated=1 if is_first and is_remote else 0,
        )
        await asyncio.sleep(step_s)


async def pool(running: Running) -> None:
    """Answer with the prompt's vector."""
    if running.worker.step_s:
        await asyncio.sleep(running.worker.step_s)
    await running.turn(0)
    running.emit_vector(vector_of(running.request, running.worker.info.embedding_size))


async def hang(running: Running) -> None:
    """Answer nothing, until it is aborted."""
    await asyncio.Event().wait()


def fails_with(code: ErrorCode, message: str = "broken on purpose", **fields: Any) -> Behaviour:
    """End each request with an error, as Running.fail does."""

    async def fail(running: Running) -> None:
        running.fail(code, message, **fields)

    return fail


def all_behave(workers: "Iterable[FakeWorker]", behave: Behaviour) -> None:
    """Have each of the workers answer so from now on."""
    for worker in workers:
        worker.behave = behave


async def at_once(running: Running, num_tokens: int) -> None:
    """Keep no token back."""


async def no_wait() -> None:
    """Keep nobody waiting."""


class FakeWorker(pb2_grpc.EngineCoreServiceServicer):
    """One prefill or decode worker on a free port, which stays its own until it is closed."""

    def __init__(
        self, role: WorkerRole, *, vocab_size: int, answer: Sequence[int] = (), **info: Any
    ) -> None:
        self.info = engine_info(role, vocab_size=vocab_size, **info)
        self.answer = tuple(answer)
        self.step_s = 0.002
        self.behave: Behaviour = prefill if role is WorkerRole.PREFILL else decode
        if GENERATE not in self.info.tasks:
            self.behave = pool
        self.behave_probe = self.behave
        self.before_token: BeforeToken = at_once
        self.heartbeat_s: float | None = 0.1
        self.is_draining = False
        self.is_paused = False
        self.num_routers = 1
        # What every heartbeat tells of them; None: nothing.
        self.adapters: LoRAAdapters | None = None
        self.protocol_version = PROTOCOL_VERSION
        # What it says of every prompt and of every pull.
        self.prefill_stats = PREFILL_STATS
        self.kv_stats = KV_STATS
        # Cleared: it takes no message of its routers, and still says that it lives.
        self.reads = asyncio.Event()
        self.reads.set()
        # Awaited before a router is welcomed.
        self.before_welcome: Callable[[], Awaitable[object]] = no_wait
        # Whether it sends all frames again, instead of those that a router asks for.
        self.repeats_frames = False
        # Whether requests live on when the stream is cut.
        self.adopts = True
        self.requests: list[EngineCoreRequest] = []
        self.tensors = TensorStore(1 << 26, TensorMetrics(CollectorRegistry()))
        # Of its PutTensors; what they raise they end with.
        self.before_put: Callable[[], Awaitable[object]] = no_wait
        self.probes: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.hellos: list[pb2.AttachHello] = []
        self.links: list[Link] = []
        self.num_heartbeats = 0
        # The first frame that the router does not have yet, by its last heartbeat.
        self.acked_frame_seq = 0
        self.port = 0
        self._running: dict[str, tuple[int, asyncio.Task[None]]] = {}
        self._cut = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        # Bound and not listening: while the worker is stopped its port refuses connections, and
        # nobody else gets it.
        self._reservation: socket.socket | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_running(self) -> int:
        return sum(not is_probe(request_id) for request_id in self._running)

    @property
    def num_probes_running(self) -> int:
        return len(self._running) - self.num_running

    async def start(self) -> None:
        if self._reservation is None:
            self._reservation = reserve_port()
            self.port = self._reservation.getsockname()[1]
        options = [option for option in server_options() if option[0] != REUSEPORT]
        self._server = grpc.aio.server(options=[*options, (REUSEPORT, 1)])
        pb2_grpc.add_EngineCoreServiceServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(self.address) == self.port
        await self._server.start()

    async def stop(self) -> None:
        """Die: nobody listens any more and every stream breaks."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None
        await self._end_all()

    async def close(self) -> None:
        """Stop for good."""
        await self.stop()
        if self._reservation is not None:
            self._reservation.close()

    def cut(self) -> None:
        """Break the streams; the worker lives on."""
        self._cut.set()
        self._cut = asyncio.Event()

    async def PutTensor(
        self, requests: AsyncIterator[pb2.PutTensorRequest], context: grpc.aio.ServicerContext
    ) -> pb2.PutTensorResponse:
        async with rpc_errors(context):
            await self.before_put()
            ttl_s = await receive_tensor(requests, self.tensors, client=context.peer())
            return pb2.PutTensorResponse(ttl_ms=round(1000 * ttl_s))
        raise AssertionError("unreachable: rpc_errors aborts")

    def tensors_of(self, request: EngineCoreRequest) -> list[bytes]:
        """What a request names, in its order; TensorNotHeldError if one is not here."""
        refs = [feature.data for feature in request.mm_features if feature.data is not None]
        held = self.tensors.get_all(refs)
        return [held[ref.content_hash] for ref in refs]

    async def Attach(
        self, requests: AsyncIterator[pb2.AttachRequest], context: grpc.aio.ServicerContext
    ) -> None:
        cut = self._cut
        hello = (await requests.__anext__()).hello
        self.hellos.append(hello)
        await self.before_welcome()
        link, adopted = await self._link_for(hello)
        # gRPC takes one write at a time.
        lock = asyncio.Lock()
        welcome = pb2.AttachWelcome(
            info=wire.to_proto(self.info),
            adopted=adopted,
            protocol_version=self.protocol_version,
        )
        await context.write(pb2.AttachResponse(welcome=welcome))
        tasks = [
            asyncio.create_task(part)
            for part in (
                self._read(requests, link),
                self._write(context, lock, link, hello.resume.next_frame_seq),
                self._beat(context, lock),
                cut.wait(),
            )
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not (cut.is_set() and self.adopts) and link is self.links[-1]:
                await self._end_all()

    async def _link_for(self, hello: pb2.AttachHello) -> tuple[Link, list[pb2.RequestAttempt]]:
        """Return the link that the router left, if it wants it and it is there."""
        if not (hello.HasField("resume") and hello.resume.worker_epoch == self.info.epoch):
            await self._end_all()
            self.links.append(Link())
            return self.links[-1], []
        link = self.links[-1]
        ended = {(o.request_id, o.attempt) for o in link.outputs() if o.finished}
        running = {(name, attempt) for name, (attempt, _) in self._running.items()}
        wanted = [(wish.request_id, wish.attempt) for wish in hello.resume.requests]
        for request_id in self._running.keys() - {name for name, _ in wanted}:
            self.abort(request_id)
        kept = [wish for wish in wanted if wish in ended | running] if self.adopts else []
        return link, [pb2.RequestAttempt(request_id=name, attempt=n) for name, n in kept]

    async def _end_all(self) -> None:
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[pb2.AttachRequest], link: Link) -> None:
        async for message in requests:
            await self.reads.wait()
            kind = message.WhichOneof("message")
            if kind == "add_request":
                request = wire.from_proto(EngineCoreRequest, message.add_request)
                (self.probes if is_probe(request.request_id) else self.requests).append(request)
                if message.handle:
                    link.handles[request.request_id, request.attempt] = message.handle
                self._run(Running(self, link, request))
            elif kind == "abort_requests":
                for request_id in message.abort_requests.request_ids:
                    attempt = self.abort(request_id)
                    if attempt is not None:
                        # The engine's contract: one terminal output, also of an abort.
                        end = EngineCoreOutput(
                            request_id=request_id,
                            attempt=attempt,
                            finish_reason=FinishReason.ABORT,
                        )
                        link.emit(end)
            elif kind == "heartbeat":
                self.num_heartbeats += 1
                self.acked_frame_seq = message.heartbeat.next_frame_seq

    def abort(self, request_id: str) -> int | None:
        """End a request; return the attempt that was aborted, if one ran."""
        if not is_probe(request_id):
            self.aborted.append(request_id)
        attempt, task = self._running.pop(request_id, (None, None))
        if task is not None:
            task.cancel()
        return attempt

    def _run(self, running: Running) -> None:
        """Begin; a higher attempt takes the place of a lower one, which gets no end."""
        request = running.request
        if request.request_id in self._running:
            self._running.pop(request.request_id)[1].cancel()
        behave = self.behave_probe if is_probe(request.request_id) else self.behave
        task = asyncio.ensure_future(behave(running))
        self._running[request.request_id] = (request.attempt, task)
        task.add_done_callback(lambda _: self._on_done(request))

    def _on_done(self, request: EngineCoreRequest) -> None:
        attempt, _ = self._running.get(request.request_id, (None, None))
        if attempt == request.attempt:
            del self._running[request.request_id]

    async def _write(
        self, context: grpc.aio.ServicerContext, lock: asyncio.Lock, link: Link, next_seq: int
    ) -> None:
        for frame in link.frames[0 if self.repeats_frames else max(next_seq, 1) - 1 :]:
            async with lock:
                await context.write(frame)
        while True:
            frame = await link.next_frame()
            async with lock:
                await context.write(frame)

    async def _beat(self, context: grpc.aio.ServicerContext, lock: asyncio.Lock) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s or 3600)
            if self.heartbeat_s is not None:
                async with lock:
                    heartbeat = pb2.Heartbeat(
                        draining=self.is_draining,
                        paused=self.is_paused,
                        num_routers=self.num_routers,
                    )
                    if self.adapters is not None:
                        heartbeat.adapters.CopyFrom(wire.to_proto(self.adapters))
                    await context.write(pb2.AttachResponse(heartbeat=heartbeat))
