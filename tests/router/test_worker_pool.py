"""Lists that change while requests run, who is chosen and why, and who is left alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.errors import NoWorkerError, OverloadedError
from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    Generate,
    SchedulerStats,
    WorkerRole,
)
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.workers import circuit_breaker
from pdserve_router.workers.cells import Cell
from pdserve_router.workers.clients.worker_client import WorkerClient
from pdserve_router.workers.duplicates import Duplicates
from pdserve_router.workers.routing import candidates
from pdserve_router.workers.routing.prefix_index import prefix_hashes
from pdserve_router.workers.routing.route_chooser import Route, RoutingRules
from pdserve_router.workers.worker import WorkerState
from pdserve_router.workers.worker_pool import WorkerPool
from support.fake_worker import MODEL, FakeWorker, Running, fails_with, hang
from support.router_stack import TIMINGS, replace_file
from support.waiting import until

BLOCK = 16


def request(num_tokens: int = 40, *, first: int = 5, **fields: object) -> EngineCoreRequest:
    params = fields.pop("params", {})
    return EngineCoreRequest(
        request_id="a",
        prompt_token_ids=tuple(range(first, first + num_tokens)),
        task=Generate(SamplingParams(**{"max_tokens": 3, **params})),
        **fields,
    )


class Stage:
    """Fake workers and a pool over some of them."""

    def __init__(self, prefill: list[FakeWorker], decode: list[FakeWorker]) -> None:
        self.prefill = prefill
        self.decode = decode
        self.registry = CollectorRegistry()
        self.pool: WorkerPool

    def start(
        self, prefill: list[str], decode: list[str], cell: Cell | None = None, **rules: object
    ) -> None:
        self.make(prefill, decode, cell, **rules)
        self.pool.start()

    def make(
        self, prefill: list[str], decode: list[str], cell: Cell | None = None, **rules: object
    ) -> None:
        self.pool = WorkerPool(
            prefill=prefill,
            decode=decode,
            connect=partial(
                WorkerClient, model=MODEL, router_id="r", timings=TIMINGS, runtime=Runtime()
            ),
            rules=RoutingRules(**rules),
            metrics=RouterMetrics(self.registry),
            on_change=lambda: None,
            runtime=Runtime(),
            cell=cell,
        )

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefill, *self.decode]

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    async def proven(self, num_pairs: int) -> None:
        await until(lambda: self.metric("pdserve_worker_pairs", state="proven") == num_pairs)

    def route(self, *args: object, exclude: frozenset = frozenset(), **fields: object) -> Route:
        return self.pool.route(request(*args, **fields), exclude=exclude)

    def serve(self, *args: object, **fields: object) -> Route:
        """Have a request answered, after which its decode worker has it cached."""
        route = self.route(*args, **fields)
        self.pool.prefix_index.stored(route.decode, prefix_hashes(request(*args, **fields), BLOCK))
        return route


Start = Callable[..., "contextlib.AbstractAsyncContextManager[Stage]"]


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., object]]:
    """await make(num_prefill, num_decode) is a Stage whose pool is not started."""
    async with contextlib.AsyncExitStack() as stack:

        async def workers(role: WorkerRole, count: int) -> list[FakeWorker]:
            fakes = [
                FakeWorker(
                    role,
                    vocab_size=300,
                    answer=range(5, 15),
                    engine_id=f"{role.name.lower()}-{i}",
                )
                for i in range(count)
            ]
            for fake in fakes:
                await fake.start()
                stack.push_async_callback(fake.close)
            return fakes

        async def make(num_prefill: int, num_decode: int) -> Stage:
            stage = Stage(
                await workers(WorkerRole.PREFILL, num_prefill),
                await workers(WorkerRole.DECODE, num_decode),
            )
            stack.push_async_callback(lambda: stage.pool.close())
            return stage

        yield make


@pytest.fixture
def start(make) -> Start:
    """async with start(num_prefill, num_decode, **rules) as stage; all pairs are proven."""

    @contextlib.asynccontextmanager
    async def start(num_prefill: int = 1, num_decode: int = 1, **rules: object):
        stage = await make(num_prefill, num_decode)
        stage.start([w.address for w in stage.prefill], [w.address for w in stage.decode], **rules)
        await until(lambda: all(client.is_ready for client in stage.pool.decode))
        await stage.proven(num_prefill * num_decode)
        yield stage

    return start


@pytest.fixture
def fast_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve_router.workers.discovery.FileSource.interval_s", 0.02)


# Lists


async def test_workers_join_and_leave_with_the_file(make, tmp_path: Path, fast_lists) -> None:
    stage = await make(1, 2)
    prefill, decode = tmp_path / "prefill", tmp_path / "decode"
    prefill.write_text("")
    decode.write_text("")
    stage.start([f"file://{prefill}"], [f"file://{decode}"])
    await asyncio.sleep(0.05)
    assert not stage.pool.is_ready
    with pytest.raises(NoWorkerError, match="none is listed"):
        stage.pool.model_limits()
    replace_file(decode, f"{stage.decode[0].address}\n")
    await until(lambda: stage.pool.is_ready)
    assert stage.route().reason == "no_prefill_worker"
    replace_file(prefill, f"{stage.prefill[0].address}\n")
    replace_file(decode, f"{stage.decode[0].address}\n{stage.decode[1].address}\n")
    await stage.proven(2)
    assert {stage.route().decode.engine_id for _ in range(4)} == {"decode-0", "decode-1"}
    assert stage.pool.is_ready
    replace_file(decode, f"{stage.decode[1].address}\n")
    await until(lambda: len(stage.pool.decode) == 1)
    assert {stage.route().decode.engine_id for _ in range(4)} == {"decode-1"}
    await until(lambda: stage.metric("pdserve_worker_pairs", state="proven") == 1)


async def test_a_router_attaches_to_the_workers_of_its_cell(make, tmp_path, fast_lists) -> None:
    stage = await make(2, 2)
    prefill, decode = tmp_path / "prefill", tmp_path / "decode"
    for path, workers in ((prefill, stage.prefill), (decode, stage.decode)):
        path.write_text("".join(f"{worker.address}\n" for worker in workers))
    stage.start([f"file://{prefill}"], [f"file://{decode}"], cell=Cell("router-1", 2))
    await stage.proven(1)
    (own,) = stage.pool.decode
    assert len(stage.pool.prefill) == 1
    # The list shrinks to what is one cell: the one that is left is everybody's.
    (left,) = (worker for worker in stage.decode if worker.address != own.address)
    replace_file(decode, f"{left.address}\n")
    await until(lambda: [worker.address for worker in stage.pool.decode] == [left.address])
    await until(lambda: len(stage.pool.prefill) == 2)
    await stage.proven(2)


async def test_what_runs_on_a_worker_that_leaves_goes_on(make, tmp_path, fast_lists) -> None:
    stage = await make(0, 1)
    may_answer = asyncio.Event()
    stage.decode[0].before_token = lambda running, num_tokens: may_answer.wait()
    path = tmp_path / "decode"
    path.write_text(stage.decode[0].address)
    stage.start([], [f"file://{path}"])
    await until(lambda: stage.pool.is_ready)
    client = stage.pool.decode[0]
    outputs: list[EngineCoreOutput] = []
    client.add_request(request(), outputs.append)
    await until(lambda: stage.decode[0].num_running == 1)
    replace_file(path, "")
    await until(lambda: stage.pool.decode == ())
    assert not stage.pool.is_ready
    assert client.state is WorkerState.READY
    may_answer.set()
    await until(lambda: bool(outputs) and outputs[-1].finished)
    assert outputs[-1].error is None
    await until(lambda: client.state is WorkerState.DOWN)
    assert stage.decode[0].aborted == []


async def test_a_worker_that_returns_before_it_is_idle_keeps_its_link(make, tmp_path, fast_lists):
    stage = await make(0, 1)
    stage.decode[0].behave = hang
    path = tmp_path / "decode"
    path.write_text(stage.decode[0].address)
    stage.start([], [f"file://{path}"])
    await until(lambda: stage.pool.is_ready)
    client = stage.pool.decode[0]
    client.add_request(request(), lambda output: None)
    replace_file(path, "")
    await until(lambda: stage.pool.decode == ())
    replace_file(path, stage.decode[0].address)
    await until(lambda: stage.pool.decode == (client,))
    client.abort("a")
    await asyncio.sleep(0.1)
    assert client.is_ready
    assert len(stage.decode[0].hellos) == 1


async def test_a_name_brings_its_workers(make) -> None:
    stage = await make(0, 1)
    stage.start([], [f"dns://localhost:{stage.decode[0].port}", stage.decode[0].address])
    await until(lambda: stage.pool.is_ready)
    addresses = [client.address for client in stage.pool.decode]
    assert addresses.count(stage.decode[0].address) == 1


async def test_a_worker_with_two_names_is_used_under_one(make, caplog) -> None:
    """Such as both addresses of a name: on one link each they would end each other's requests."""
    stage = await make(1, 1)
    prefill, decode = stage.prefill[0], stage.decode[0]
    stage.start(
        [prefill.address, f"localhost:{prefill.port}"],
        [decode.address, f"localhost:{decode.port}"],
    )
    clients = (*stage.pool.prefill, *stage.pool.decode)
    await until(lambda: all(client.is_ready for client in clients))
    await stage.proven(1)
    assert stage.metric("pdserve_worker_pairs", state="mismatched") == 0
    assert {stage.route().workers for _ in range(4)} == {(clients[0], clients[2])}
    assert "is another name of worker" in caplog.text
    assert all(len({hello.router_epoch for hello in fake.hellos}) == 2 for fake in stage.workers)


async def test_a_worker_whose_first_name_is_gone_is_used_under_the_other(
    make, tmp_path, fast_lists
) -> None:
    stage = await make(0, 1)
    path = tmp_path / "decode"
    names = [stage.decode[0].address, f"localhost:{stage.decode[0].port}"]
    path.write_text("\n".join(names))
    stage.start([], [f"file://{path}"])
    await until(lambda: [client.is_ready for client in stage.pool.decode] == [True, True])
    assert stage.route().decode.address == names[0]
    replace_file(path, names[1])
    await until(lambda: len(stage.pool.decode) == 1)
    assert stage.route().decode.address == names[1]


async def test_a_worker_listed_under_the_wrong_role_keeps_its_requests(make) -> None:
    stage = await make(0, 1)
    worker = stage.decode[0]
    stage.start([f"localhost:{worker.port}"], [worker.address])
    await until(lambda: stage.pool.is_ready)
    await until(lambda: len(worker.hellos) >= 3)
    epochs = [hello.router_epoch for hello in worker.hellos]
    assert len(set(epochs)) == 2
    assert stage.pool.prefill[0].state is WorkerState.DOWN
    assert stage.route().reason == "no_prefill_worker"


async def test_readiness_waits_for_prefill_workers_that_are_being_dialed(make) -> None:
    stage = await make(1, 1)
    await stage.prefill[0].stop()
    stage.start([stage.prefill[0].address], [stage.decode[0].address])
    prefill = stage.pool.prefill[0]
    await until(lambda: stage.pool.decode[0].is_ready)
    assert stage.pool.is_ready == (prefill.state is not WorkerState.CONNECTING)
    await until(lambda: prefill.state is WorkerState.DOWN)
    assert stage.pool.is_ready
    assert stage.route().reason == "no_prefill_worker"


# Which way


@pytest.mark.parametrize(
    ("rules", "fields", "reason"),
    [
        ({}, {"num_tokens": 1}, "short_prompt"),
        ({"disaggregation_threshold_tokens": 40}, {}, "short_prompt"),
        ({}, {"params": {"max_tokens": 1}}, "max_tokens_1"),
        ({}, {"resume_output_token_ids": (7, 8)}, "max_tokens_1"),
        ({}, {"params": {"use_beam_search": True}}, "beam_search"),
        ({"disaggregation": False}, {}, "disabled"),
    ],
)
async def test_what_needs_no_handoff_stays_on_decode(make, rules, fields, reason) -> None:
    stage = await make(1, 1)
    stage.start([stage.prefill[0].address], [stage.decode[0].address], **rules)
    await until(lambda: stage.pool.is_ready)
    route = stage.route(**fields)
    assert (route.path, route.reason) == ("local", reason)
    assert route.workers == (stage.pool.decode[0],)


async def test_longer_prompts_cross_the_handoff(start) -> None:
    async with start(disaggregation_threshold_tokens=39) as stage:
        route = stage.route()
        assert (route.path, route.reason) == ("disaggregated", "")
        assert route.workers == (stage.pool.prefill[0], stage.pool.decode[0])


async def test_tokens_of_earlier_attempts_count(start) -> None:
    async with start(disaggregation_threshold_tokens=39) as stage:
        params = {"max_tokens": 100}
        assert stage.route(num_tokens=39, params=params).reason == "short_prompt"
        resumed = {"resume_output_token_ids": (9,), "cache_salt": "another", "params": params}
        assert stage.route(num_tokens=39, **resumed).path == "disaggregated"


async def test_a_prompt_that_decode_should_have_cached_stays_there(start) -> None:
    async with start(1, 2, disaggregation_threshold_tokens=BLOCK) as stage:
        for _ in range(2):
            assert stage.route(4 * BLOCK).path == "disaggregated", "nobody has answered it"
        first = stage.serve(4 * BLOCK)
        assert first.path == "disaggregated"
        again = stage.serve(5 * BLOCK)
        assert (again.reason, again.decode) == ("cached_prompt", first.decode)
        assert stage.route(5 * BLOCK, cache_salt="another").path == "disaggregated"
        assert stage.route(5 * BLOCK, first=6).path == "disaggregated"
        assert stage.route(5 * BLOCK + BLOCK + 1).path == "disaggregated"


async def test_a_prompt_whose_logprobs_are_wanted_is_computed_whole(start) -> None:
    async with start(disaggregation_threshold_tokens=BLOCK) as stage:
        stage.serve(4 * BLOCK)
        assert stage.route(4 * BLOCK).reason == "cached_prompt"
        params = {"prompt_logprobs": 0}
        assert stage.route(4 * BLOCK, params=params).path == "disaggregated"


async def test_required_disaggregation_relies_on_no_guess(start) -> None:
    rules = {"require_disaggregation": True, "disaggregation_threshold_tokens": BLOCK}
    async with start(**rules) as stage:
        for _ in range(2):
            assert stage.serve(4 * BLOCK).path == "disaggregated"
        assert stage.route(BLOCK).reason == "short_prompt"


async def test_a_prompt_that_decode_has_evicted_crosses_the_handoff(start) -> None:
    async with start(disaggregation_threshold_tokens=BLOCK) as stage:
        decode = stage.serve(8 * BLOCK).decode
        hashes = prefix_hashes(request(8 * BLOCK), BLOCK)
        stage.pool.prefix_index.removed(decode, hashes[7:])
        assert stage.route(8 * BLOCK).reason == "cached_prompt"
        stage.pool.prefix_index.removed(decode, hashes[6:])
        assert stage.route(8 * BLOCK).path == "disaggregated"


async def test_blocks_of_another_size_are_other_blocks(start) -> None:
    async with start(disaggregation_threshold_tokens=BLOCK) as stage:
        (decode,) = stage.pool.decode
        hashes = prefix_hashes(request(8 * BLOCK), BLOCK // 2)
        stage.pool.prefix_index.stored(decode, hashes)
        assert stage.route(8 * BLOCK).path == "disaggregated"
        decode.info = replace(decode.info, block_size=BLOCK // 2)
        assert stage.route(8 * BLOCK).reason == "cached_prompt"


async def test_a_prompt_that_is_hashed_already_is_not_hashed_again(start, monkeypatch) -> None:
    async with start(disaggregation_threshold_tokens=BLOCK) as stage:
        assert stage.pool.limits.block_size == BLOCK
        stage.serve(8 * BLOCK)
        hashes = prefix_hashes(request(8 * BLOCK), BLOCK)
        monkeypatch.setattr(candidates, "prefix_hashes", None)
        route = stage.pool.route(request(8 * BLOCK), hashes=hashes)
        assert route.reason == "cached_prompt"


async def test_what_a_worker_has_cached_is_forgotten_with_its_process(start) -> None:
    async with start(disaggregation_threshold_tokens=BLOCK) as stage:
        (client,) = stage.pool.decode
        assert stage.serve(4 * BLOCK).path == "disaggregated"
        stage.decode[0].cut()
        await until(lambda: stage.decode[0].hellos[-1].HasField("resume"))
        await until(lambda: client.is_ready)
        assert stage.route(4 * BLOCK).reason == "cached_prompt", "the process lives"
        stage.decode[0].info = replace(stage.decode[0].info, epoch="1" * 32)
        stage.decode[0].cut()
        await until(lambda: client.epoch == "1" * 32)
        await stage.proven(1)
        assert stage.route(4 * BLOCK).path == "disaggregated"


async def test_full_queues_of_prefill_have_decode_work_alone(start) -> None:
    async with start(2, 1, max_prefill_queue_tokens=1000) as stage:
        busy, other = stage.pool.prefill
        busy.stats = SchedulerStats(num_waiting_tokens=1001)
        assert {stage.route().prefill for _ in range(4)} == {other}
        other.stats = SchedulerStats(num_waiting_tokens=1001)
        assert stage.route().reason == "prefill_queue"
        other.stats = SchedulerStats(num_waiting_tokens=1000)
        assert stage.route().prefill is other


async def test_required_disaggregation_refuses_instead(start) -> None:
    rules = {"require_disaggregation": True, "max_prefill_queue_tokens": 1000}
    async with start(**rules) as stage:
        assert stage.route().path == "disaggregated"
        assert stage.route(num_tokens=1).reason == "short_prompt"
        prefill = stage.pool.prefill[0]
        prefill.stats = SchedulerStats(num_waiting_tokens=1001)
        with pytest.raises(OverloadedError, match="--max-prefill-queue-tokens") as caught:
            stage.route()
        assert caught.value.retry_after_ms
        await stage.prefill[0].stop()
        await until(lambda: not prefill.is_ready)
        with pytest.raises(
            NoWorkerError, match="no prefill worker with the weights that serve is ready"
        ):
            stage.route()
        assert not stage.pool.is_ready


# Who


async def test_excluded_workers_are_never_taken(start) -> None:
    async with start(2, 2) as stage:
        p, d = stage.pool.prefill[0], stage.pool.decode[0]
        for _ in range(4):
            assert not {p, d} & set(stage.route(exclude=frozenset({p, d})).workers)
        alone = stage.route(exclude=frozenset(stage.pool.prefill))
        assert (alone.path, alone.reason) == ("local", "no_prefill_worker")
        with pytest.raises(NoWorkerError, match="no decode worker is left"):
            stage.route(exclude=frozenset(stage.pool.decode))


@pytest.fixture
def fast_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_BACKOFF_S", "MAX_BACKOFF_S"):
        monkeypatch.setattr(circuit_breaker, name, 0.02)


def fail(stage: Stage, client: WorkerClient, times: int = 3) -> None:
    for _ in range(times):
        stage.pool.report_failure(client)


def num_failing(stage: Stage, role: str) -> float:
    return stage.metric("pdserve_workers_failing", role=role)


fail_probe = fails_with(ErrorCode.INTERNAL, "broken")


async def stop_early(running: Running) -> None:
    running.emit(4, at=0, finish=FinishReason.STOP)


async def test_a_decode_worker_that_keeps_failing_is_left_alone_until_it_is_tried(
    fast_trials, start
) -> None:
    async with start(0, 2, routing_policy="round_robin") as stage:
        bad, good = stage.pool.decode
        stage.decode[0].behave_probe = fail_probe
        fail(stage, bad)
        assert {stage.route().decode for _ in range(4)} == {good}
        assert num_failing(stage, "decode") == 1
        # What was under way when it opened says nothing.
        stage.pool.report_success(bad)
        await until(lambda: len(stage.decode[0].probes) > 2)
        assert {stage.route().decode for _ in range(4)} == {good}
        stage.decode[0].behave_probe = stage.decode[1].behave
        await until(lambda: not bad.breaker.is_open)
        assert {stage.route().decode for _ in range(4)} == {bad, good}
        assert num_failing(stage, "decode") == 0


@pytest.mark.parametrize("behave", [hang, stop_early], ids=["silent", "too few tokens"])
async def test_a_trial_needs_all_its_tokens_in_time(
    fast_trials, monkeypatch, start, behave
) -> None:
    monkeypatch.setattr("pdserve_router.workers.worker_trials.TRIAL_TIMEOUT_S", 0.05)
    async with start(0, 2) as stage:
        stage.decode[0].behave_probe = behave
        fail(stage, stage.pool.decode[0])
        await until(lambda: len(stage.decode[0].probes) > 2)
        assert stage.pool.decode[0].breaker.is_open
        if behave is hang:
            await until(lambda: stage.decode[0].num_probes_running <= 1)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_the_last_worker_of_a_role_is_never_left_out(start, role) -> None:
    async with start(2, 2) as stage:
        first, last = getattr(stage.pool, role)
        fail(stage, first)
        fail(stage, last, times=20)
        assert num_failing(stage, role) == 1
        route = stage.route()
        assert getattr(route, role) is last
        assert stage.pool.is_ready


async def test_a_failing_worker_is_used_again_when_the_others_have_gone(start, caplog) -> None:
    async with start(0, 2) as stage:
        bad, good = stage.pool.decode
        fail(stage, bad)
        await stage.decode[1].stop()
        await until(lambda: not good.is_ready)
        assert stage.route().decode is bad
        assert num_failing(stage, "decode") == 0
        assert stage.pool.is_ready
        assert f"worker {bad.address} keeps failing, but no other is left" in caplog.text


async def test_a_worker_that_is_gone_is_not_tried(fast_trials, start) -> None:
    async with start(0, 2) as stage:
        stage.decode[0].behave_probe = fail_probe
        fail(stage, stage.pool.decode[0])
        await stage.decode[0].stop()
        await until(lambda: not stage.pool.decode[0].is_ready)
        num_probes = len(stage.decode[0].probes)
        stage.decode[0].behave_probe = stage.decode[1].behave
        await stage.decode[0].start()
        await until(lambda: stage.pool.decode[0].is_ready)
        await until(lambda: not stage.pool.decode[0].breaker.is_open)
        assert len(stage.decode[0].probes) <= num_probes + 1


async def test_a_prefill_worker_that_keeps_failing_is_left_alone_until_it_is_tried(
    fast_trials, start
) -> None:
    async with start(2, 1, routing_policy="round_robin") as stage:
        bad, good = stage.pool.prefill
        stage.prefill[0].behave_probe = fail_probe
        fail(stage, bad)
        assert {stage.route().prefill for _ in range(4)} == {good}
        stage.prefill[0].behave_probe = stage.prefill[1].behave
        await until(lambda: not bad.breaker.is_open)
        assert {stage.route().prefill for _ in range(4)} == {bad, good}


async def test_readiness_needs_a_pair_that_requests_can_take(start) -> None:
    async with start(2, 1, require_disaggregation=True) as stage:
        failing, lonely = stage.pool.prefill
        fail(stage, failing)
        assert stage.pool.is_ready
        stage.prefill[1].behave_probe = hang
        for _ in range(3):
            stage.pool.report_failure((lonely, stage.pool.decode[0]))
        assert not stage.pool.is_ready
        with pytest.raises(NoWorkerError):
            stage.route()


async def test_a_worker_that_a_defect_kept_from_leaving_leaves_the_next_time(
    start, monkeypatch
) -> None:
    async with start(0, 3) as stage:
        lost, later, _ = stage.pool.decode
        with monkeypatch.context() as patch:
            patch.setattr(Duplicates, "update", lambda *args, **fields: 1 / 0)
            await stage.decode[0].stop()
            await until(lambda: lost.state is WorkerState.DOWN)
            assert stage.metric("pdserve_workers", role="decode", state="ready") == 3
        await stage.decode[1].stop()
        await until(lambda: later.state is WorkerState.DOWN)
        assert stage.metric("pdserve_workers", role="decode", state="ready") == 1
