"""A peer for the router: a real EngineCoreService that generates scripted tokens, and whose faults
tests choose. The real engine meets the router in tests/integration.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import grpc

from pdserve.v1 import engine_core_service_pb2 as pb2
from pdserve.v1 import engine_core_service_pb2_grpc as pb2_grpc
from pdserve_common import wire
from pdserve_common.engine_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineInfo,
    FinishReason,
    KVTransferStats,
    LogprobsLists,
    PrefillStats,
    SchedulerStats,
    WorkerRole,
)
from pdserve_common.rpc import server_options

EOS = 1
PREFILL_STATS = PrefillStats(num_prompt_tokens=3, num_cached_tokens=2, queue_s=1e-4, prefill_s=2e-4)
KV_STATS = KVTransferStats(
    num_bytes=4096,
    num_blocks=1,
    transport="shm",
    admit_s=1e-5,
    transfer_s=3e-4,
    release_ack_s=1e-5,
    exposed_s=1e-4,
    first_decode_step_s=1e-4,
)

Behaviour = Callable[["Running"], Awaitable[None]]


def engine_info(role: WorkerRole, *, vocab_size: int, **changes: object) -> EngineInfo:
    info = EngineInfo(
        engine_id=f"fake-{role.name.lower()}",
        epoch="0" * 32,
        role=role,
        model="fake",
        max_model_len=4096,
        vocab_size=vocab_size,
        eos_token_ids=(EOS,),
        block_size=16,
        num_blocks=100,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        dtype="bfloat16",
        kv_compatibility_hash="same",
        kv_transport="shm",
        determinism="exact",
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


class Link:
    """One attached router; outputs that pile up leave as one message, like an engine step's."""

    def __init__(self) -> None:
        self._pending: list[EngineCoreOutput] = []
        self._rest: dict[str, object] = {}
        self._event = asyncio.Event()

    def emit(self, output: EngineCoreOutput) -> None:
        self._pending.append(output)
        self._event.set()

    def say(self, **fields: object) -> None:
        """Send what an engine says besides outputs."""
        self._rest.update(fields)
        self._event.set()

    async def next_step(self) -> EngineCoreOutputs:
        await self._event.wait()
        self._event.clear()
        outputs, self._pending = self._pending, []
        stats = SchedulerStats(num_running_reqs=len(outputs))
        rest, self._rest = self._rest, {}
        return EngineCoreOutputs(outputs=tuple(outputs), scheduler_stats=stats, **rest)


class Running:
    """A request on a fake worker, and how a behaviour answers it."""

    def __init__(self, worker: "FakeWorker", link: Link, request: EngineCoreRequest) -> None:
        self.worker = worker
        self.request = request
        self._link = link

    def emit(
        self,
        *token_ids: int,
        at: int,
        finish: FinishReason | None = None,
        num_repeated: int = 0,
        **more,
    ) -> None:
        """Send tokens, the first of which has index `at`. The first `num_repeated` have no
        logprobs.
        """
        more.setdefault("attempt", self.request.attempt)
        num_top = self.request.sampling_params.logprobs
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

    def emit_prompt_logprobs(self, *, chunk: int = 2) -> None:
        """Send them in slices, as a prompt computed in chunks brings them."""
        num_top = self.request.sampling_params.prompt_logprobs
        if num_top is None:
            return
        known = logprobs_of(self.request.prompt_token_ids[1:], num_top)
        for start in range(0, len(known), chunk):
            self.emit(at=0, new_prompt_logprobs=known[start : start + chunk])

    def answer(self) -> tuple[Sequence[int], FinishReason]:
        """The worker's scripted answer, cut at max_tokens."""
        answer = self.worker.answer
        limit = self.request.sampling_params.max_tokens
        if len(answer) < limit:
            return [*answer, EOS], FinishReason.STOP
        return answer[:limit], FinishReason.LENGTH


async def prefill(running: Running) -> None:
    """Compute the first token and hand the request off, unless it was the last."""
    tokens, finish = running.answer()
    if running.worker.step_s:
        await asyncio.sleep(running.worker.step_s)
    running.emit_prompt_logprobs()
    params = running.request.kv_transfer_params
    if len(tokens) == 1:
        params = None
    else:
        finish = FinishReason.LENGTH
    running.emit(
        tokens[0], at=0, finish=finish, prefill_stats=PREFILL_STATS, kv_transfer_params=params
    )


async def decode(running: Running) -> None:
    """Generate token by token; of a request whose KV was pulled, repeat P's token first."""
    tokens, finish = running.answer()
    step_s = running.worker.step_s
    params = running.request.kv_transfer_params
    is_remote = params is not None and params.do_remote_prefill
    if is_remote and len(tokens) == 1:
        await asyncio.Event().wait()  # P ends it; the router aborts this leg
    await asyncio.sleep(2 * step_s if is_remote else step_s)
    start = 2 if is_remote else 1
    if not is_remote:
        running.emit_prompt_logprobs()
    for end in range(start, len(tokens) + 1):
        is_first, is_last = end == start, end == len(tokens)
        running.emit(
            *tokens[0 if is_first else end - 1 : end],
            at=0 if is_first else end - 1,
            finish=finish if is_last else None,
            prefill_stats=PREFILL_STATS if is_first else None,
            kv_transfer_stats=KV_STATS if is_first and is_remote else None,
            # Only P knows how likely its token was.
            num_repeated=1 if is_first and is_remote else 0,
        )
        await asyncio.sleep(step_s)


class FakeWorker(pb2_grpc.EngineCoreServiceServicer):
    """One prefill or decode worker on a free port."""

    def __init__(
        self, role: WorkerRole, *, vocab_size: int, answer: Sequence[int] = (), **info: object
    ) -> None:
        self.info = engine_info(role, vocab_size=vocab_size, **info)
        self.answer = tuple(answer)
        self.step_s = 0.002
        self.behave: Behaviour = prefill if role is WorkerRole.PREFILL else decode
        self.heartbeat_s: float | None = 0.1
        self.is_draining = False
        self.is_paused = False
        self.requests: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.hellos: list[pb2.AttachHello] = []
        self.links: list[Link] = []
        self.num_heartbeats = 0
        self.port = 0
        self._running: dict[str, asyncio.Task[None]] = {}
        self._cut = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def start(self) -> None:
        self._server = grpc.aio.server(options=server_options())
        pb2_grpc.add_EngineCoreServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """Die: the port closes and every stream breaks."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    def cut(self) -> None:
        """Break the streams; the worker lives on."""
        self._cut.set()
        self._cut = asyncio.Event()

    async def Attach(
        self, requests: AsyncIterator[pb2.AttachRequest], context: grpc.aio.ServicerContext
    ) -> None:
        first = await requests.__anext__()
        self.hellos.append(first.hello)
        link = Link()
        self.links.append(link)
        # gRPC takes one write at a time.
        lock = asyncio.Lock()
        await context.write(
            pb2.AttachResponse(welcome=pb2.AttachWelcome(info=wire.engine_info_to_proto(self.info)))
        )
        tasks = [
            asyncio.create_task(part)
            for part in (
                self._read(requests, link),
                self._write(context, lock, link),
                self._beat(context, lock),
                self._cut.wait(),
            )
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks += self._running.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[pb2.AttachRequest], link: Link) -> None:
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "add_request":
                request = wire.engine_core_request_from_proto(message.add_request)
                self.requests.append(request)
                self._run(Running(self, link, request))
            elif kind == "abort_requests":
                for request_id in message.abort_requests.request_ids:
                    self.aborted.append(request_id)
                    if task := self._running.get(request_id):
                        task.cancel()
                        # The engine's contract: one terminal output, also of an abort.
                        link.emit(
                            EngineCoreOutput(
                                request_id=request_id, finish_reason=FinishReason.ABORT
                            )
                        )
            else:
                self.num_heartbeats += 1

    def _run(self, running: Running) -> None:
        request_id = running.request.request_id
        task = asyncio.ensure_future(self.behave(running))
        self._running[request_id] = task
        task.add_done_callback(lambda _: self._running.pop(request_id, None))

    async def _write(
        self, context: grpc.aio.ServicerContext, lock: asyncio.Lock, link: Link
    ) -> None:
        while True:
            step = await link.next_step()
            outputs = wire.engine_core_outputs_to_proto(step)
            async with lock:
                await context.write(pb2.AttachResponse(outputs=outputs))

    async def _beat(self, context: grpc.aio.ServicerContext, lock: asyncio.Lock) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s or 3600)
            if self.heartbeat_s is not None:
                async with lock:
                    heartbeat = pb2.Heartbeat(draining=self.is_draining, paused=self.is_paused)
                    await context.write(pb2.AttachResponse(heartbeat=heartbeat))
