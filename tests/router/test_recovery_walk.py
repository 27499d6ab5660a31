"""The router's own parts among workers that fail at random. Steps and promises are those of
tests/kv_transfer/model/recovery_model.py, which explores them exhaustively; here the code that
serves takes them: WorkerClient, Attempt, SingleCompletion, RequestState, RedriveQueue.

As in the model, every token that is sampled is another one, and knows what was before it.
"""

import asyncio
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve_common import wire
from pdserve_common.errors import NoWorkerError
from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineError,
    ErrorCode,
    ErrorFault,
    FinishReason,
    Generate,
    KVLost,
    KVTransferParams,
    WorkerRole,
)
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.requests.input.input_processor import ProcessedInput
from pdserve_router.requests.live_request import LiveRequest, Services
from pdserve_router.requests.output.outputs import RequestOutput
from pdserve_router.requests.redrive import RedriveQueue
from pdserve_router.requests.single_completion import SingleCompletion
from pdserve_router.workers.clients.worker_client import WorkerClient
from pdserve_router.workers.model_version import ModelVersion
from pdserve_router.workers.routing.route_chooser import Route
from pdserve_router.workers.worker import WorkerState
from support.fake_worker import MODEL, engine_info, logprobs_of

NUM_WALKS = 400
# Then nothing fails any more, so that a walk comes to an end.
NUM_STEPS_WITH_FAULTS = 40
MAX_STEPS = 500
NUM_TOKENS = 6
PROMPT = (5, 6, 7)

Step = Callable[[], None]


class Story:
    """Draws tokens, and knows for each all that its worker had before it."""

    def __init__(self) -> None:
        self.of: dict[int, tuple[int, ...]] = {}
        self._ids = itertools.count(10)

    def next_token(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return these tokens and a new one."""
        token_id = next(self._ids)
        self.of[token_id] = (*tokens, token_id)
        return self.of[token_id]


class LegState(Enum):
    """What a worker does with a request."""

    PREFILL = auto()
    # On D: the KV is under way.
    WAITING = auto()
    # D has said that it will not come, and holds on.
    HELD = auto()
    RUNNING = auto()


class Leg(NamedTuple):
    """A request on a worker; the first `num_sent` tokens the router has from there, or had."""

    request: EngineCoreRequest
    state: LegState
    tokens: tuple[int, ...]
    num_sent: int
    # Those that came with the request or its KV: only who sampled a token knows how likely it was.
    num_known: int


class Worker:
    """A worker behind a real WorkerClient, whose messages wait until they are taken."""

    def __init__(self, world: "World", role: WorkerRole, number: int) -> None:
        name = f"{role.name.lower()}-{number}"
        self.client = WorkerClient(
            f"{name}:1",
            role=role,
            model=MODEL,
            router_id="r",
            on_change=lambda: None,
            runtime=Runtime(),
        )
        self.client.info = engine_info(role, vocab_size=1 << 20, engine_id=name)
        self.client.model_version = ModelVersion.of(self.client.info)
        self.attach()
        self.leg: Leg | None = None
        # By attempt: the tokens that came with the KV.
        self.kv: dict[int, tuple[int, ...]] = {}
        self._world = world
        self._inbox: list[service_pb2.AttachRequest] = []
        self._outbox: list[EngineCoreOutput] = []

    def attach(self) -> None:
        self.client._stream = self  # type: ignore[assignment]
        self.client.state = WorkerState.READY

    def send(self, message: service_pb2.AttachRequest) -> None:
        """In the place of AttachStream."""
        self._inbox.append(message)

    def steps(self) -> Iterator[Step]:
        if self._inbox:
            yield self._take
        if self._outbox:
            yield self._deliver
        match self.leg:
            case Leg(state=LegState.PREFILL):
                yield self._prefill
            case Leg(state=LegState.WAITING, request=request) if request.attempt in self.kv:
                yield self._accept_kv
            case Leg(state=LegState.HELD):
                yield lambda: self._fail(ErrorCode.KV_EXPIRED)
            case Leg(state=LegState.RUNNING):
                yield self._decode

    def faults(self) -> Iterator[Step]:
        yield self._die
        if self.leg is not None:
            for code in (ErrorCode.DRAINING, ErrorCode.OVERLOADED):
                yield lambda code=code: self._fail(code)
            if self.leg.state is LegState.WAITING:
                yield self._lose_kv

    def lose_waiting_kv(self) -> None:
        """What it waits for never comes."""
        if self.leg is not None and self.leg.state is LegState.WAITING and not self._inbox:
            self._lose_kv()

    def _take(self) -> None:
        message = self._inbox.pop(0)
        if message.WhichOneof("message") == "abort_requests":
            if self.leg is not None:
                self._emit(finish_reason=FinishReason.ABORT)
                self.leg = None
            return
        request = wire.from_proto(EngineCoreRequest, message.add_request)
        if self.leg is not None and self.leg.request.attempt >= request.attempt:
            return
        params = request.kv_transfer_params or KVTransferParams()
        state = LegState.WAITING if params.do_remote_prefill else LegState.RUNNING
        if params.do_remote_decode:
            state = LegState.PREFILL
        tokens = request.resume_output_token_ids
        self.leg = Leg(request, state, tokens, len(tokens), len(tokens))

    def _prefill(self) -> None:
        assert self.leg is not None
        leg = self.leg = self._sampled(self.leg)
        params = leg.request.kv_transfer_params
        assert params is not None
        self._world.decode_named(params.remote_engine_id).kv[leg.request.attempt] = leg.tokens
        self._emit(finish_reason=FinishReason.LENGTH, kv_transfer_params=params)
        self.leg = None

    def _accept_kv(self) -> None:
        assert self.leg is not None
        tokens = self.kv.pop(self.leg.request.attempt)
        # Its first output repeats P's token.
        self.leg = self.leg._replace(state=LegState.RUNNING, tokens=tokens, num_known=len(tokens))

    def _decode(self) -> None:
        assert self.leg is not None
        leg = self.leg = self._sampled(self.leg)
        is_last = len(leg.tokens) == NUM_TOKENS
        self._emit(finish_reason=FinishReason.LENGTH if is_last else None)
        self.leg = None if is_last else leg._replace(num_sent=len(leg.tokens))

    def _sampled(self, leg: Leg) -> Leg:
        return leg._replace(tokens=self._world.story.next_token(leg.tokens))

    def _lose_kv(self) -> None:
        assert self.leg is not None
        self.leg = self.leg._replace(state=LegState.HELD)
        self.kv.clear()
        self._emit(kv_lost=KVLost(num_confirmed_tokens=2, reason="stall", message="stalled"))

    def _fail(self, code: ErrorCode) -> None:
        assert self.leg is not None
        self.leg = self.leg._replace(tokens=self.leg.tokens[: self.leg.num_sent])
        error = EngineError(code=code, message="at random", is_retryable=True)
        self._emit(finish_reason=FinishReason.ERROR, error=error)
        self.leg = None

    def _die(self) -> None:
        """With all that is under way to and from the router; another process takes its place."""
        self.leg = None
        self.kv.clear()
        self._inbox.clear()
        self._outbox.clear()
        self.client._lost("it died")
        self.attach()

    def _emit(self, **fields: object) -> None:
        """Queue an output, with the tokens that were not sent yet."""
        assert self.leg is not None
        task = self.leg.request.task
        assert isinstance(task, Generate)
        if task.sampling_params.logprobs is not None:
            sampled = self.leg.tokens[max(self.leg.num_sent, self.leg.num_known) :]
            fields["new_logprobs"] = logprobs_of(sampled, 0)
        output = EngineCoreOutput(
            request_id=self.leg.request.request_id,
            attempt=self.leg.request.attempt,
            new_token_ids=self.leg.tokens[self.leg.num_sent :],
            first_token_index=self.leg.num_sent,
            **fields,  # type: ignore[arg-type]
        )
        self._outbox.append(output)

    def _deliver(self) -> None:
        self.client._on_outputs(EngineCoreOutputs(outputs=(self._outbox.pop(0),)))


class World:
    """One request, two workers of each role, and a pool that chooses among them at random."""

    def __init__(self, rng: random.Random) -> None:
        self.story = Story()
        self.registry = CollectorRegistry()
        self._rng = rng
        self._prefills, self._decodes = (
            [Worker(self, role, number) for number in range(2)]
            for role in (WorkerRole.PREFILL, WorkerRole.DECODE)
        )
        self.workers = [*self._prefills, *self._decodes]
        self.prefill, self.decode = (
            tuple(worker.client for worker in workers)
            for workers in (self._prefills, self._decodes)
        )
        self.answering = self.decode
        self.num_ends = 0
        metrics = RouterMetrics(self.registry)
        params = SamplingParams(
            seed=7,
            max_tokens=NUM_TOKENS,
            detokenize=False,
            logprobs=rng.choice((None, 0)),
        )
        request = EngineCoreRequest(request_id="a", prompt_token_ids=PROMPT, task=Generate(params))
        processed = ProcessedInput(
            core_request=request,
            has_max_tokens=True,
            arrival_ns=1,
            tokenize_start_ns=1,
            tokenize_end_ns=1,
        )
        runtime = Runtime()
        redrives = RedriveQueue(
            self,  # type: ignore[arg-type]
            metrics=metrics,
            max_redrives=3,
            wait_s=0,
            runtime=runtime,
        )
        services = Services(
            tokenizer=None,  # type: ignore[arg-type]
            metrics=metrics,
            redrives=redrives,
            runtime=runtime,
            on_tokens=lambda live, num_new: None,
            on_end=self._on_end,
        )
        self.live = SingleCompletion(processed, params, self.route(request), services)

    def decode_named(self, engine_id: str) -> Worker:
        return next(each for each in self._decodes if each.client.engine_id == engine_id)

    def step(self, *, may_fail: bool) -> None:
        steps = [step for worker in self.workers for step in worker.steps()]
        if may_fail and self._rng.random() < 0.2:
            steps = [fault for worker in self.workers for fault in worker.faults()]
        if steps:
            self._rng.choice(steps)()
        elif self._rng.random() < 0.1:
            for worker in self._decodes:
                worker.lose_waiting_kv()

    # In the place of WorkerPool.

    def route(
        self,
        request: EngineCoreRequest,
        *,
        versions: object = (),
        exclude: frozenset = frozenset(),
        session: str = "",
    ) -> Route:
        decodes, prefills = (
            [client for client in clients if client not in exclude]
            for clients in (self.decode, self.prefill)
        )
        if not decodes:
            raise NoWorkerError("nobody is left")
        decode = self._rng.choice(decodes)
        is_local = len(request.resume_output_token_ids) == NUM_TOKENS - 1
        if is_local or not prefills or self._rng.random() < 0.3:
            return Route(decode=decode, reason="no_prefill_worker")
        return Route(prefill=self._rng.choice(prefills), decode=decode)

    def last_served_at(self, versions: object, *, adapter: str = "") -> float:
        return time.monotonic() if any(client.is_ready for client in self.decode) else -math.inf

    def report_failure(self, failing: object) -> None:
        pass

    def report_success(self, working: object) -> None:
        pass

    def _on_end(self, live: LiveRequest) -> None:
        self.num_ends += 1


async def walk(seed: int, outcomes: Counter[str]) -> None:
    """Take random steps to the request's end, and check all that its client gets."""
    rng = random.Random(seed)
    world = World(rng)
    live = world.live
    outputs: list[RequestOutput] = []

    async def read() -> None:
        async for output in live:
            outputs.append(output)

    reader = asyncio.create_task(read())
    live.start()
    for number in range(MAX_STEPS):
        world.step(may_fail=number < NUM_STEPS_WITH_FAULTS)
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        tokens = tuple(live.state.token_ids)
        assert not tokens or world.story.of[tokens[-1]] == tokens, "it is not one answer"
        if live.ending is not None:
            break
    assert live.ending is not None, "it does not end"
    await asyncio.wait_for(reader, 20)
    for _ in range(MAX_STEPS):
        world.step(may_fail=False)
    (completion,) = outputs[-1].outputs
    told = tuple(t for output in outputs for part in output.outputs for t in part.token_ids)
    positions = [
        tuple(position)
        for output in outputs
        for part in output.outputs
        for position in (part.logprobs.logprob_token_ids if part.logprobs is not None else ())
    ]
    if live.state.wants_logprobs:
        assert positions == [(token,) for token in told], "each token has its logprob"
    assert told == tokens == tuple(live.state.token_ids), "each token once and in order"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert world.num_ends == 1
    assert (completion.error is None) == (len(told) == NUM_TOKENS)
    # Two workers that died before they brought a token are its fault.
    is_at_fault = completion.error is not None and completion.error.fault is ErrorFault.REQUEST
    assert completion.error is None or completion.error.is_retryable or is_at_fault
    assert not any(worker.leg for worker in world.workers), "something runs on"
    assert not any(client.num_in_flight for client in (*world.prefill, *world.decode))
    outcomes[f"{'failed' if completion.error else 'answered'} {live.recovery.num_redrives}"] += 1


async def test_the_client_gets_one_answer_whatever_its_workers_do(monkeypatch) -> None:
    for name in (
        "pdserve_router.requests.redrive.REUSE_DELAY_S",
        "pdserve_router.requests.redrive.TICK_S",
        "pdserve_router.requests.single_completion._VERDICT_S",
    ):
        monkeypatch.setattr(name, 0.0)
    outcomes: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        try:
            await walk(seed, outcomes)
        except AssertionError as error:
            pytest.fail(f"walk {seed}: {error}")
    # All kinds are among them.
    for outcome in ("answered 0", "answered 1", "answered 2", "answered 3", "failed 3"):
        assert outcomes[outcome] > NUM_WALKS // 50, outcomes
