"""One set of weights serves, another takes over as a whole, and no answer has parts of two."""

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import replace

import grpc
import pytest

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import WorkerRole
from pdserve_router.workers.clients.worker_client import WorkerClient
from pdserve_router.workers.model_version import UNKNOWN, ModelVersion
from pdserve_router.workers.served_weights import GONE_S, ServedWeights
from pdserve_router.workers.worker import WorkerState
from support.crew import ANSWERS, A, B, numbers
from support.fake_worker import MODEL, engine_info
from support.waiting import until

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
READY = WorkerState.READY
# It serves and has not gone for good in any of them.
BLIPS = (WorkerState.REATTACHING, WorkerState.PAUSED, WorkerState.DOWN)


class Pool:
    """Workers in whatever state, and what one router's rule makes of them."""

    def __init__(self, *, disaggregation: bool = True, require_exact: bool = False) -> None:
        self.workers: list[WorkerClient] = []
        self.left: list[WorkerClient] = []
        self.now = 1000.0
        self.has_settled = True
        # What serves after each change, without repetitions.
        self.history: list[str] = []
        self.weights = self.new_rule(disaggregation, require_exact)

    def new_rule(self, disaggregation: bool = True, require_exact: bool = False) -> ServedWeights:
        """As in another router."""
        return ServedWeights(
            disaggregation=disaggregation,
            require_exact=require_exact,
            has_pair=self.has_pair,
            on_change=lambda: None,
            runtime=Runtime(now=lambda: self.now),
        )

    def join(self, role: WorkerRole, weights: str, **info: object) -> WorkerClient:
        number = next(numbers)
        worker = WorkerClient(
            f"{role.name.lower()}:{number}",
            role=role,
            model=MODEL,
            router_id="r",
            on_change=lambda: None,
            runtime=Runtime(),
        )
        self.workers.append(worker)
        self.start(worker, weights, **info)
        return worker

    def start(self, worker: WorkerClient, weights: str, **info: object) -> None:
        fields = {"weights_digest": weights, "started_at_ms": next(numbers), **info}
        worker.info = engine_info(worker.role, vocab_size=300, **fields)
        worker.model_version = ModelVersion.of(worker.info)
        self.set(worker, READY)

    def set(self, worker: WorkerClient, state: WorkerState) -> None:
        worker.state = state
        self.update()

    def leave(self, worker: WorkerClient) -> None:
        self.workers.remove(worker)
        self.left.append(worker)
        self.update()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.update()

    def update(self, *rules: ServedWeights) -> None:
        is_dialed = [worker.state is WorkerState.CONNECTING for worker in self.of(D)]
        for rule in rules or (self.weights,):
            for worker in (*self.workers, *self.left):
                rule.note(worker, is_listed=worker in self.workers)
            rule.decide(num_dialed=sum(is_dialed), has_settled=self.has_settled)
        if self.serving and self.history[-1:] != [self.serving]:
            self.history.append(self.serving)

    def has_pair(self, weights: str) -> bool:
        return all(
            any(w.is_ready and w.model_version.weights == weights for w in self.of(role))
            for role in (P, D)
        )

    def of(self, role: WorkerRole, weights: str = "") -> list[WorkerClient]:
        return [
            worker
            for worker in self.workers
            if worker.role is role and worker.model_version.weights.startswith(weights[:16])
        ]

    @property
    def serving(self) -> str:
        """The weights' digest; empty if none serve."""
        return self.weights.name[:1] * 64

    def num_ready(self, weights: str) -> int:
        return sum(w.is_ready for role in (P, D) for w in self.of(role, weights))


@pytest.fixture
async def pool():
    pool = Pool()
    yield pool
    pool.weights.close()


async def test_who_is_alone_never_takes_over(pool) -> None:
    first = [pool.join(P, A), pool.join(D, A)]
    mismatched = pool.join(D, B)
    for worker, blip in itertools.product(first, BLIPS):
        for state in (blip, READY):
            pool.set(worker, state)
            assert pool.serving == A
            assert not pool.weights.serves(mismatched)
    for worker in first:
        pool.start(worker, A)
    assert pool.history == [A]


async def test_a_mismatched_worker_that_attaches_first_does_not_stay(pool) -> None:
    pool.join(D, B)
    assert pool.serving == B
    pool.join(D, A)
    assert pool.serving == B
    pool.join(P, A)
    assert pool.serving == A
    assert pool.history == [B, A]


async def test_the_first_set_waits_for_those_that_are_dialed(pool) -> None:
    pool.has_settled = False
    pool.workers = [
        WorkerClient(
            f"d:{i}",
            role=D,
            model=MODEL,
            router_id="r",
            on_change=lambda: None,
            runtime=Runtime(),
        )
        for i in range(3)
    ]
    pool.start(pool.workers[0], B)
    assert pool.serving == ""
    pool.start(pool.workers[1], A)
    assert pool.serving == ""
    pool.start(pool.workers[2], A)
    assert pool.serving == A
    assert pool.history == [A]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_of_two_alike_routers_take_the_older_whatever_the_order(pool, order) -> None:
    pool.has_settled = False
    old, new = pool.join(D, B, started_at_ms=1), pool.join(D, A, started_at_ms=2)
    pool.workers = [(old, new)[i] for i in order]
    rule = pool.new_rule()
    pool.update(rule)
    assert rule.name == B[:16]


@pytest.mark.parametrize("by", ["drain", "leave", "replace"])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("roles", [(P, D), (D, P), (D,)])
async def test_a_rolling_update_goes_over_once_and_ends_with_the_new(
    pool, roles, num_workers, by
) -> None:
    """One role after the other, worker by worker: the new one first, or in its place."""
    for role in roles:
        for _ in range(num_workers):
            pool.join(role, A)
    for role in roles:
        for old in pool.of(role, A):
            if by == "replace":
                pool.set(old, WorkerState.DRAINING)
                pool.set(old, WorkerState.DOWN)
                pool.start(old, B)
                continue
            pool.join(role, B)
            if by == "drain":
                pool.set(old, WorkerState.DRAINING)
                pool.set(old, WorkerState.DOWN)
            pool.leave(old)
    assert pool.history == [A, B]
    assert all(pool.weights.serves(worker) for worker in pool.workers)


async def test_new_weights_take_over_as_a_whole(pool) -> None:
    for role in (P, D):
        pool.join(role, A)
    for _ in range(4):
        pool.join(D, B)
        assert pool.serving == A, "they have no prefill worker"
    prefill = pool.join(P, B)
    assert pool.serving == B
    pool.set(prefill, WorkerState.DOWN)
    assert pool.serving == B


async def test_a_crashed_pool_is_waited_for_before_other_weights_serve(pool) -> None:
    first = [pool.join(P, A), pool.join(D, A)]
    pool.join(D, B)
    for worker in first:
        pool.set(worker, WorkerState.DOWN)
    # As names do when a Pod is gone.
    pool.leave(first[1])
    pool.wait(GONE_S - 1)
    assert pool.serving == A
    pool.wait(2)
    assert pool.serving == B


async def test_other_arithmetic_is_refused_only_where_all_must_be_exact() -> None:
    for require_exact in (False, True):
        pool = Pool(require_exact=require_exact)
        for _ in range(2):
            pool.join(D, A)
        others = [pool.join(D, A, numerics_id="other"), pool.join(D, A, determinism="consistent")]
        assert [pool.weights.serves(worker) for worker in others] == [not require_exact] * 2
        assert pool.weights.serves(pool.workers[0])
        pool.weights.close()


async def test_what_has_begun_goes_on_where_it_began(pool) -> None:
    old, new = (ModelVersion.of(pool.join(D, weights).info) for weights in (A, B))
    rule = pool.weights
    assert rule.name == rule.name_for([]) == rule.name_for([UNKNOWN]) == A[:16]
    assert rule.name_for([new, UNKNOWN]) == B[:16]
    assert rule.name_for([old, new]) == ""


def random_step(pool: Pool, rng: random.Random) -> str:
    """Do something to the pool, and return what."""
    kind = rng.choice(["join", "leave", "drain", "restart", "blip", "wait", "update"])
    if kind == "join" and len(pool.workers) < 10:
        pool.join(rng.choice((P, D)), rng.choice((A, B)))
    elif kind == "wait":
        pool.wait(rng.choice((1.0, GONE_S)))
    elif kind != "join" and pool.workers:
        worker = rng.choice(pool.workers)
        if kind == "leave":
            pool.leave(worker)
        elif kind == "drain":
            pool.set(worker, WorkerState.DRAINING)
        elif kind == "restart":
            pool.set(worker, WorkerState.DOWN)
            pool.start(worker, rng.choice((A, B)))
        elif kind == "blip":
            pool.set(worker, rng.choice(BLIPS))
        else:
            pool.set(worker, READY)
    return kind


@pytest.mark.parametrize("seed", range(200))
async def test_whatever_happens_weights_change_for_a_reason_and_settle(seed: int) -> None:
    rng = random.Random(seed)
    pool = Pool()
    for _ in range(60):
        before = pool.serving
        random_step(pool, rng)
        after = pool.serving
        if before not in ("", after):
            assert any(worker.is_ready for worker in pool.of(D, after)), "nobody could serve"
            is_larger = pool.num_ready(after) > pool.num_ready(before)
            assert is_larger or not any(w.is_ready for w in pool.of(D, before)), "for nothing"
        # What is short and passes moves nothing twice.
        counts = len(pool.history)
        for _ in range(3):
            for worker in [w for w in pool.workers if w.is_ready]:
                pool.set(worker, WorkerState.REATTACHING)
                pool.set(worker, READY)
        assert len(pool.history) <= counts + 1, "it flaps"
    # The update is done in the end: all others are gone.
    target = rng.choice((A, B))
    for role in (P, D):
        pool.join(role, target)
    for worker in [w for w in pool.workers if w.model_version.weights != target[:16]]:
        pool.set(worker, WorkerState.DRAINING)
        pool.leave(worker)
    for worker in pool.workers:
        pool.set(worker, READY)
    assert pool.serving == target
    another = pool.new_rule()
    pool.update(another)
    assert another.name == pool.weights.name, "routers differ"
    pool.weights.close()
    another.close()


# Over fake workers, whose answers say which weights they have.


class FailedError(Exception):
    """A request that began and could not go on."""


async def ask(stack, **params: object) -> set[str]:
    """Return whose tokens an answer has; it must be one set's from its first to its last token."""
    request = pb2.GenerateRequest(
        tokens=pb2.TokenPrompt(token_ids=[5, 6, 7]),
        sampling_params=core.SamplingParams(**{"max_tokens": 8, **params}),
    )
    parts: Counter[int] = Counter()
    async for response in stack.stub.Generate(request, timeout=60):
        for completion in response.output.outputs:
            if completion.HasField("error"):
                raise FailedError(completion.error.message)
            parts.update(completion.token_ids)
    return {weights for weights, answer in ANSWERS.items() if set(answer) & parts.keys()}


def state(stack, name: str, role: str = "decode") -> float:
    return stack.metric("pdserve_workers", role=role, state=name)


async def test_a_decode_worker_of_other_weights_answers_nothing(start_stack, crew, caplog) -> None:
    for role in (P, D):
        await crew.join(role, A)
    async with start_stack(wait=False, **crew.sources) as stack:
        await until(lambda: stack.metric("pdserve_worker_pairs", state="proven") == 1)
        await crew.join(D, B)
        await until(lambda: state(stack, "mismatched") == 1)
        for params in ({"max_tokens": 1}, {}, {"n": 3}, {"max_tokens": 1, "n": 2}):
            for _ in range(4):
                assert await ask(stack, **params) == {A}
        search = {"use_beam_search": True, "n": 2, "max_tokens": 3, "temperature": 0.0}
        request = pb2.GenerateRequest(text="x", sampling_params=core.SamplingParams(**search))
        for _ in range(4):
            _ = [response async for response in stack.stub.Generate(request, timeout=60)]
        assert crew.num_requests(B) == 0
        assert state(stack, "ready") == 1
        assert f"has weights {B[:16]}, weights {A[:16]} serve" in caplog.text


@pytest.mark.parametrize("seed", range(6))
async def test_no_answer_has_parts_of_two_sets_whatever_joins_and_leaves(
    start_stack, crew, seed
) -> None:
    """Requests run on while workers of both sets come, go, drain and restart."""
    rng = random.Random(seed)
    for role in (P, D, D):
        await crew.join(role, A)
    seen: Counter[str] = Counter()
    is_over = asyncio.Event()
    params = ({}, {"n": 3}, {"max_tokens": 1}, {"max_tokens": 1, "n": 2})

    async def client(stack, number: int) -> None:
        chosen = random.Random(f"{seed}.{number}")
        while not is_over.is_set():
            try:
                whose = await ask(stack, **chosen.choice(params))
            except FailedError:
                # The last worker of the weights that its answer had begun with is gone.
                continue
            except grpc.aio.AioRpcError as error:
                # Between the last of one set and the first of the other.
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.02)
                continue
            assert len(whose) == 1, whose
            seen[whose.pop()] += 1

    async with start_stack(wait=False, redrive_wait_s=1.0, **crew.sources) as stack:
        await until(lambda: stack.server.pool.is_ready)
        clients = [asyncio.create_task(client(stack, number)) for number in range(4)]
        for _ in range(12):
            kind = rng.choice(["join", "join", "leave", "cut", "restart"])
            if kind == "join":
                await crew.join(rng.choice((P, D)), rng.choice((A, B)))
            elif kind == "leave" and len(crew.listed) > 3:
                crew.leave(rng.choice(crew.listed))
            elif kind == "cut":
                rng.choice(crew.listed).cut()
            elif kind == "restart":
                worker, weights = rng.choice(crew.listed), rng.choice((A, B))
                worker.info = replace(
                    worker.info,
                    weights_digest=weights,
                    kv_compatibility_hash=weights,
                    epoch=f"{next(numbers):032x}",
                )
                worker.answer = ANSWERS[weights]
                worker.cut()
            await asyncio.sleep(rng.uniform(0.0, 0.15))
        # The update is done: all of it is B's.
        for role in (P, D):
            await crew.join(role, B)
        for worker in [w for w in crew.listed if w.info.weights_digest == A]:
            crew.leave(worker)
        await until(
            lambda: state(stack, "mismatched") == state(stack, "mismatched", "prefill") == 0
        )
        await until(lambda: stack.server.pool.is_ready)
        num_before = seen[B]
        await until(lambda: seen[B] > num_before + 8 or any(c.done() for c in clients))
        is_over.set()
        await asyncio.gather(*clients)
        assert await ask(stack) == {B}


async def test_what_has_not_begun_follows_the_pool_and_what_has_does_not(start_stack, crew) -> None:
    """Both lose their worker; of one with a token only those weights may go on."""
    old = await crew.join(D, A)
    holds = asyncio.Event()

    async def hold(running, num_tokens: int) -> None:
        if num_tokens >= running.request.task.sampling_params.min_tokens:
            await holds.wait()

    old.before_token = hold
    async with start_stack(wait=False, redrive_wait_s=1.0, **crew.sources) as stack:
        await until(lambda: stack.server.pool.is_ready)
        # One waits for its first token, one has two, and one of three completions has some.
        new = asyncio.create_task(ask(stack))
        begun = asyncio.create_task(ask(stack, min_tokens=2))
        several = asyncio.create_task(ask(stack, n=3, min_tokens=2))
        await until(lambda: old.num_running == 5)
        await until(lambda: stack.server.router.num_queued == 1)
        for _ in range(2):
            await crew.join(D, B)
        await until(lambda: state(stack, "mismatched") == 1)
        await old.stop()
        assert await new == {B}
        for task in (begun, several):
            with pytest.raises(FailedError, match="was lost"):
                await task
        assert not [r for w in crew.of(B) for r in w.requests if r.resume_output_token_ids]


async def test_all_completions_of_a_request_are_of_one_set(start_stack, crew) -> None:
    """One has tokens and ends; a sibling without any loses its worker, where others are ready."""
    old = await crew.join(D, A)

    async def hold_forks(running, num_tokens: int) -> None:
        if not running.request.request_id.startswith("0_"):
            await asyncio.Event().wait()

    old.before_token = hold_forks
    async with start_stack(wait=False, redrive_wait_s=0.5, **crew.sources) as stack:
        await until(lambda: stack.server.pool.is_ready)
        task = asyncio.create_task(ask(stack, n=2))
        await until(lambda: old.num_running == 1 and len(old.requests) == 2)
        for _ in range(2):
            await crew.join(D, B)
        await until(lambda: state(stack, "ready") == 2)
        await old.stop()
        with pytest.raises(FailedError, match="was lost"):
            await task
        assert crew.num_requests(B) == 0
