"""Pairs are used once a generation has gone over them, and only those."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from pdserve.v1 import engine_core_pb2 as core
from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.errors import NoWorkerError
from pdserve_common.limits.request_validation import validate_engine_core_request
from pdserve_common.limits.validation import PROBE_PRIORITY
from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineInfo,
    ErrorCode,
    FinishReason,
    Generate,
    KVLost,
    WorkerRole,
)
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.workers import worker_pool
from pdserve_router.workers.circuit_breaker import FAILURES_TO_OPEN, CircuitBreaker
from pdserve_router.workers.clients.worker_client import WorkerClient
from pdserve_router.workers.routing import pair_probe, pairs
from pdserve_router.workers.routing.route_chooser import RoutingRules
from pdserve_router.workers.worker_pool import WorkerPool
from support.fake_worker import (
    EOS,
    KV_STATS,
    MODEL,
    FakeWorker,
    Running,
    decode,
    engine_info,
    fails_with,
    hang,
    prefill,
)
from support.router_stack import TIMINGS
from support.waiting import until

VOCAB_SIZE = 300


class Stage:
    """A pool over fake workers, and how its readiness went."""

    def __init__(
        self, workers: list[FakeWorker], *, also_prefill: Sequence[str] = (), **rules: object
    ) -> None:
        self.prefill = [w for w in workers if w.info.role is WorkerRole.PREFILL]
        self.decode = [w for w in workers if w.info.role is WorkerRole.DECODE]
        self.registry = CollectorRegistry()
        self.readiness: list[bool] = []
        self.pool = WorkerPool(
            prefill=[*(worker.address for worker in self.prefill), *also_prefill],
            decode=[worker.address for worker in self.decode],
            connect=partial(
                WorkerClient, model=MODEL, router_id="r", timings=TIMINGS, runtime=Runtime()
            ),
            rules=RoutingRules(**rules),
            metrics=RouterMetrics(self.registry),
            on_change=lambda: self.readiness.append(self.pool.is_ready),
            runtime=Runtime(),
        )

    def count(self, state: str) -> float:
        value = self.registry.get_sample_value("pdserve_worker_pairs", {"state": state})
        assert value is not None
        return value

    @property
    def path(self) -> str:
        request = EngineCoreRequest(
            request_id="a",
            prompt_token_ids=(5, 6),
            task=Generate(SamplingParams(max_tokens=3)),
        )
        route = self.pool.route(request)
        return route.reason or route.path

    async def all_attached(self) -> None:
        clients = (*self.pool.prefill, *self.pool.decode)
        await until(lambda: all(client.is_ready for client in clients))


def worker(role: WorkerRole, number: int = 0, **info: object) -> FakeWorker:
    info.setdefault("engine_id", f"{role.name.lower()}-{number}")
    return FakeWorker(role, vocab_size=VOCAB_SIZE, answer=range(5, 15), **info)


Start = Callable[..., "contextlib.AbstractAsyncContextManager[Stage]"]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """async with start(num_prefill, num_decode, change, **rules) as stage; `change` gets the
    workers before they start.
    """
    monkeypatch.setattr("pdserve_router.workers.circuit_breaker.MIN_BACKOFF_S", 0.1)

    @contextlib.asynccontextmanager
    async def start(
        num_prefill: int = 1,
        num_decode: int = 1,
        change: Callable[[list[FakeWorker]], None] = lambda workers: None,
        **rules: object,
    ) -> AsyncIterator[Stage]:
        workers = [worker(WorkerRole.PREFILL, i) for i in range(num_prefill)]
        workers += [worker(WorkerRole.DECODE, i) for i in range(num_decode)]
        change(workers)
        async with contextlib.AsyncExitStack() as stack:
            for fake in workers:
                await fake.start()
                stack.push_async_callback(fake.close)
            stage = Stage(workers, **rules)
            stack.push_async_callback(stage.pool.close)
            stage.pool.start()
            yield stage

    return start


fail = fails_with(ErrorCode.KV_TRANSFER_FAILED, "no route to NIXL")


async def compute_alone(running: Running) -> None:
    running.emit(4, 5, at=0, finish=FinishReason.LENGTH)


async def lose_kv(running: Running) -> None:
    running.emit(at=0, kv_lost=KVLost(num_confirmed_tokens=0, reason="stall", message="stalled"))


async def end_too_early(running: Running) -> None:
    running.emit(4, at=0, finish=FinishReason.STOP, kv_transfer_stats=KV_STATS)


async def hand_nothing_over(running: Running) -> None:
    running.emit(4, at=0, finish=FinishReason.STOP)


async def test_a_pair_is_proven_by_a_generation_over_both(start) -> None:
    async with start() as stage:
        await until(lambda: stage.pool.is_ready)
        assert stage.path == "disaggregated"
        assert stage.count("proven") == 1
        (p_leg,), (d_leg,) = stage.prefill[0].probes, stage.decode[0].probes
        assert p_leg.request_id == d_leg.request_id
        assert p_leg.request_id.startswith("probe-")
        assert p_leg.prompt_token_ids == d_leg.prompt_token_ids
        info = stage.decode[0].info
        assert len(p_leg.prompt_token_ids) == 2 * info.block_size
        assert not set(p_leg.prompt_token_ids) & set(info.eos_token_ids)
        assert p_leg.task.sampling_params.max_tokens == 2
        assert p_leg.task.sampling_params.is_greedy
        for leg, worker in ((p_leg, stage.prefill[0]), (d_leg, stage.decode[0])):
            assert leg.priority == PROBE_PRIORITY
            validate_engine_core_request(leg, worker.info)
        assert p_leg.kv_transfer_params.remote_engine_id == "decode-0"
        assert d_leg.kv_transfer_params.remote_engine_id == "prefill-0"
        assert stage.pool.prefill[0].num_in_flight == stage.pool.decode[0].num_in_flight == 0


class WatchedIds(tuple):
    """Counts how often something is looked for."""

    num_looks = 0

    def __contains__(self, token_id: object) -> bool:
        self.num_looks += 1
        return super().__contains__(token_id)


class Answering:
    """A worker that brings what it is asked for at once."""

    role = WorkerRole.DECODE

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self.requests: list[EngineCoreRequest] = []

    def add_request(self, request: EngineCoreRequest, on_output) -> None:
        self.requests.append(request)
        tokens = (5,) * request.task.sampling_params.max_tokens
        on_output(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=tokens,
                finish_reason=FinishReason.LENGTH,
            )
        )

    def abort(self, request_id: str) -> None:
        pass


async def test_a_proof_looks_at_no_more_of_a_vocabulary_than_it_needs() -> None:
    eos = WatchedIds((EOS,))
    info = engine_info(WorkerRole.DECODE, vocab_size=150_000, eos_token_ids=eos)
    worker = Answering(info)
    await pair_probe.probe_alone(worker, timeout_s=20, runtime=Runtime())
    (request,) = worker.requests
    assert len(set(request.prompt_token_ids)) == info.block_size
    assert eos.num_looks == info.block_size + 1


async def test_readiness_waits_for_the_first_proof_and_never_flaps(start) -> None:
    def slow(workers: list[FakeWorker]) -> None:
        workers[1].behave_probe = hang

    async with start(change=slow) as stage:
        await stage.all_attached()
        await until(lambda: stage.decode[0].probes != [])
        assert not stage.pool.is_ready
        assert stage.count("unproven") == 1
        assert stage.path == "no_proven_pair"
        request = stage.decode[0].probes[0]
        await decode(Running(stage.decode[0], stage.decode[0].links[0], request))
        await until(lambda: stage.pool.is_ready)
        assert stage.readiness == sorted(stage.readiness)


async def test_a_proof_may_keep_readiness_only_so_long(start, monkeypatch) -> None:
    def slow(workers: list[FakeWorker]) -> None:
        workers[1].behave_probe = hang

    monkeypatch.setattr(pairs, "PROBE_TIMEOUT_S", 0.2)
    async with start(change=slow) as stage:
        await until(lambda: stage.pool.is_ready)
        # When the first and when the second had attached it was not.
        assert stage.readiness[:2] == [False, False]
        assert stage.path == "no_proven_pair"
        assert stage.count("failed") == 1


async def test_a_prefill_worker_that_never_answers_keeps_readiness_only_so_long(
    monkeypatch,
) -> None:
    monkeypatch.setattr(worker_pool, "SETTLE_S", 0.2)
    fake = worker(WorkerRole.DECODE)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        await fake.start()
        stage = Stage([fake], also_prefill=[f"127.0.0.1:{silent.getsockname()[1]}"])
        stage.pool.start()
        try:
            await until(lambda: stage.pool.is_ready)
            assert stage.readiness[0] is False
            assert stage.readiness[-1]
        finally:
            await stage.pool.close()
            await fake.close()


@pytest.mark.parametrize(
    ("role", "behave", "reason"),
    [
        (WorkerRole.DECODE, fail, "decode-0 failed: no route to NIXL"),
        (WorkerRole.PREFILL, fail, "prefill-0 failed: no route to NIXL"),
        (WorkerRole.DECODE, lose_kv, "decode-0 lost the KV: stalled"),
        (WorkerRole.DECODE, compute_alone, "decode-0 pulled no KV blocks"),
        (WorkerRole.DECODE, end_too_early, "decode-0 has 1 of 2 tokens"),
        (WorkerRole.PREFILL, hand_nothing_over, "prefill-0 handed nothing over"),
    ],
)
async def test_a_failed_proof_excludes_the_pair_until_one_succeeds(
    start, caplog, role, behave, reason
) -> None:
    def break_one(workers: list[FakeWorker]) -> None:
        on_prefill, on_decode = workers
        # While P fails D waits, as it would for KV.
        on_decode.behave_probe = hang
        (on_prefill if role is WorkerRole.PREFILL else on_decode).behave_probe = behave

    async with start(change=break_one) as stage:
        await until(lambda: stage.count("failed") == 1)
        assert stage.path == "no_proven_pair"
        assert f"prefill-0 and decode-0 are not used: {reason}" in caplog.text
        assert stage.pool.is_ready
        stage.prefill[0].behave_probe, stage.decode[0].behave_probe = prefill, decode
        await until(lambda: stage.count("proven") == 1)
        assert stage.path == "disaggregated"


async def test_no_worker_is_left_with_a_probe_that_got_no_answer(start, monkeypatch) -> None:
    def slow(workers: list[FakeWorker]) -> None:
        workers[1].behave_probe = hang

    monkeypatch.setattr(pairs, "PROBE_TIMEOUT_S", 0.1)
    # There is no second one.
    monkeypatch.setattr("pdserve_router.workers.circuit_breaker.MIN_BACKOFF_S", 600)
    async with start(change=slow) as stage:
        await until(lambda: stage.count("failed") == 1)
        await until(lambda: not stage.decode[0].num_probes_running)
        assert stage.pool.decode[0].num_in_flight == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_compatibility_hash", "other"),
        ("block_size", 32),
        ("dtype", "float32"),
        ("kv_transport", "local"),
    ],
)
async def test_a_mismatch_is_never_tried_and_names_what_differs(start, caplog, field, value):
    def differ(workers: list[FakeWorker]) -> None:
        workers[1].info = replace(workers[1].info, **{field: value})

    async with start(change=differ) as stage:
        await stage.all_attached()
        assert stage.count("mismatched") == 1
        assert stage.pool.is_ready
        assert stage.path == "no_proven_pair"
        ours = getattr(stage.prefill[0].info, field)
        assert f"cannot work together: {field} is {ours} and {value}" in caplog.text
        for is_paused in (True, False):  # they are looked at again
            stage.prefill[0].is_paused = is_paused
            await until(lambda is_paused=is_paused: stage.pool.prefill[0].is_ready != is_paused)
        assert caplog.text.count("cannot work together") == 1
        assert stage.decode[0].probes == []


async def test_another_transport_than_required_is_refused(start, caplog) -> None:
    async with start(require_transport="tcp", require_disaggregation=True) as stage:
        await until(lambda: stage.count("mismatched") == 1)
        assert "KV travels over shm, --require-transport is tcp" in caplog.text
        assert not stage.pool.is_ready
        with pytest.raises(NoWorkerError, match=r"--require-disaggregation: no prefill worker has"):
            _ = stage.path


@pytest.mark.parametrize("required", ["shm", "any"])
async def test_a_transport_that_changes_ends_a_pair(start_stack, caplog, required) -> None:
    """As after a link was made anew between the same two processes."""

    async def path_of(stack: object) -> str:
        call = stack.stub.Generate(pb2.GenerateRequest(text="hello"), timeout=30)
        outputs = [response.output async for response in call]
        assert outputs[-1].outputs[0].finish_reason == core.FINISH_REASON_STOP
        return outputs[-1].metrics.path

    async with start_stack(require_transport=required) as stack:
        assert await path_of(stack) == "disaggregated"
        # Nothing travelled: D had all of it.
        stack.decode.kv_stats = replace(KV_STATS, num_blocks=0, transport="")
        assert await path_of(stack) == "disaggregated"
        stack.decode.kv_stats = replace(KV_STATS, transport="tcp")
        assert await path_of(stack) == "disaggregated"
        assert await path_of(stack) == ("local" if required == "shm" else "disaggregated")
        is_refused = "KV travels over tcp, --require-transport is shm" in caplog.text
        assert is_refused == (required == "shm")
        assert stack.metric("pdserve_worker_pairs", state="mismatched") == is_refused
        # A new process may do better.
        stack.decode.kv_stats = KV_STATS
        stack.decode.info = replace(stack.decode.info, epoch="1" * 32)
        stack.decode.cut()
        await until(lambda: stack.server.pool.decode[0].epoch == "1" * 32)
        await until(lambda: stack.metric("pdserve_worker_pairs", state="proven") == 1)


async def test_a_restarted_worker_has_to_prove_itself_again(start) -> None:
    async with start() as stage:
        await until(lambda: stage.count("proven") == 1)
        stage.decode[0].behave_probe = hang
        stage.decode[0].info = replace(stage.decode[0].info, epoch="1" * 32)
        stage.decode[0].cut()
        await until(lambda: stage.count("unproven") == 1)
        await until(lambda: len(stage.decode[0].probes) == 2)
        assert stage.path == "no_proven_pair"


async def test_a_stream_that_broke_proves_nothing_new(start) -> None:
    async with start() as stage:
        await until(lambda: stage.count("proven") == 1)
        stage.decode[0].cut()
        await until(lambda: len(stage.decode[0].hellos) == 2)
        await stage.all_attached()
        assert stage.path == "disaggregated"
        assert len(stage.decode[0].probes) == 1


async def test_failing_handoffs_call_for_another_proof(start) -> None:
    async with start() as stage:
        await until(lambda: stage.count("proven") == 1)
        stage.decode[0].behave_probe = hang
        pair = (stage.pool.prefill[0], stage.pool.decode[0])
        stage.pool.report_failure(pair)
        stage.pool.report_transfer(*pair, KV_STATS)
        for _ in range(2):
            stage.pool.report_failure(pair)
        assert stage.path == "disaggregated"
        stage.pool.report_failure(pair)
        assert stage.path == "no_proven_pair"
        assert stage.count("failed") == 1
        stage.decode[0].behave_probe = decode
        await until(lambda: stage.count("proven") == 1)
        assert len(stage.decode[0].probes) == 2


async def test_a_proof_that_comes_due_while_others_are_looked_at_is_not_forgotten(
    start, monkeypatch
) -> None:
    seen = set()

    def due_in_a_moment(breaker: CircuitBreaker) -> float:
        if not breaker.is_open or breaker in seen:
            return 0.0
        seen.add(breaker)
        return 1e-6

    # It would look at all pairs again.
    monkeypatch.setattr(worker_pool, "SETTLE_S", 600.0)
    async with start() as stage:
        await until(lambda: stage.count("proven") == 1)
        monkeypatch.setattr(CircuitBreaker, "retry_in_s", property(due_in_a_moment))
        for _ in range(FAILURES_TO_OPEN):
            stage.pool.report_failure((stage.pool.prefill[0], stage.pool.decode[0]))
        await until(lambda: len(stage.decode[0].probes) == 2)
        await until(lambda: stage.count("proven") == 1)


async def test_a_big_pool_proves_enough_for_every_worker_a_few_at_a_time(start, monkeypatch):
    monkeypatch.setattr(pairs, "ENOUGH_PAIRS", 1)
    real, running, most = pairs.probe, 0, 0
    may_run = asyncio.Event()

    async def counted(*workers: object, **options: object) -> object:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await may_run.wait()
            return await real(*workers, **options)
        finally:
            running -= 1

    monkeypatch.setattr(pairs, "probe", counted)
    async with start(6, 6) as stage:
        await stage.all_attached()
        may_run.set()
        workers = (*stage.prefill, *stage.decode)
        await until(lambda: running == 0 and all(fake.probes for fake in workers))
        await until(lambda: stage.count("proven") >= 6)
        assert most == pairs.MAX_PROBES
        assert stage.count("proven") < 12


async def test_without_disaggregation_nothing_is_proven(start) -> None:
    async with start(disaggregation=False) as stage:
        await stage.all_attached()
        assert stage.pool.is_ready
        assert stage.path == "disabled"
        assert stage.decode[0].probes == []
