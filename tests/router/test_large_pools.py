"""Pools of many workers: everybody has enough pairs and nobody far more, whoever comes first."""

import random
from collections.abc import AsyncIterator

import pytest

from pdserve_common.types.engine import EngineCoreRequest, Generate, WorkerRole
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.workers.clients.worker_client import WorkerClient
from pdserve_router.workers.routing import pairs
from pdserve_router.workers.worker import WorkerState
from support.modelled_pool import ModelledPool, modelled

ENOUGH = pairs.ENOUGH_PAIRS
REQUEST = EngineCoreRequest(
    request_id="r", prompt_token_ids=tuple(range(64)), task=Generate(SamplingParams())
)


@pytest.fixture(autouse=True)
async def models() -> AsyncIterator[None]:
    with modelled():
        yield


def in_order(stage: ModelledPool, order: str) -> list[WorkerClient]:
    prefill, decode = list(stage.pool.prefill), list(stage.pool.decode)
    if order == "mixed":
        every = [*prefill, *decode]
        random.Random(1).shuffle(every)
        return every
    return [*prefill, *decode] if order == "prefill first" else [*decode, *prefill]


@pytest.mark.parametrize("order", ["prefill first", "decode first", "mixed"])
@pytest.mark.parametrize(("num_prefill", "num_decode"), [(40, 40), (16, 64)])
async def test_all_have_enough_pairs_and_none_far_more(order, num_prefill, num_decode) -> None:
    stage = ModelledPool(num_prefill, num_decode)
    for worker in in_order(stage, order):
        stage.attach(worker)
        await stage.proven()
    for workers, others in (
        (stage.pool.prefill, stage.pool.decode),
        (stage.pool.decode, stage.pool.prefill),
    ):
        share = ENOUGH * max(1, len(others) / len(workers))
        numbers = [stage.num_paired(worker) for worker in workers]
        assert min(numbers) >= ENOUGH
        assert max(numbers) <= 3 * share, sorted(numbers)
    await stage.pool.close()


async def test_who_loses_pairs_gets_others() -> None:
    stage = ModelledPool(30, 30)
    for worker in stage.workers:
        stage.attach(worker)
    await stage.proven()
    for worker in (*stage.pool.prefill[:15], *stage.pool.decode[:15]):
        stage.set(worker, WorkerState.DOWN)
        await stage.proven()
        assert stage.num_paired(worker) == 0
    left = (*stage.pool.prefill[15:], *stage.pool.decode[15:])
    assert min(map(stage.num_paired, left)) >= ENOUGH
    stage.list_workers(WorkerRole.DECODE, [w.address for w in stage.pool.decode[:26]])
    await stage.proven()
    # Eleven are left, and those that failed no pair may come back.
    assert min(map(stage.num_paired, stage.pool.prefill[15:])) >= ENOUGH
    await stage.pool.close()


async def test_a_pair_that_fails_is_replaced() -> None:
    stage = ModelledPool(20, 20)
    for worker in stage.workers:
        stage.attach(worker)
    await stage.proven()
    prefill = stage.pool.prefill[0]
    failed = stage.paired(prefill)
    for decode in failed:
        for _ in range(3):
            stage.pool.report_failure((prefill, decode))
    await stage.proven()
    paired = set(stage.paired(prefill))
    assert len(paired) >= min(ENOUGH, 20 - len(failed))
    assert not paired & set(failed)
    await stage.pool.close()


@pytest.mark.parametrize("seed", range(6))
async def test_what_is_kept_is_what_a_walk_would_find(seed: int) -> None:
    """Whatever comes, goes, restarts and fails."""
    rng = random.Random(seed)
    stage = ModelledPool(12, 12, routing_policy="round_robin")
    weights = ("a" * 64, "b" * 64)
    for _ in range(150):
        worker = rng.choice(stage.workers)
        kind = rng.choice(["attach", "lose", "restart", "fail", "fail pair", "list"])
        if kind == "attach":
            stage.attach(worker)
        elif kind == "lose":
            stage.set(worker, rng.choice([WorkerState.DOWN, WorkerState.REATTACHING]))
        elif kind == "restart":
            chosen = rng.choice(weights)
            stage.attach(
                worker,
                epoch=str(rng.random()),
                weights_digest=chosen,
                kv_compatibility_hash=chosen,
            )
        elif kind == "fail":
            for _ in range(3):
                stage.pool.report_failure(worker)
        elif kind == "fail pair":
            pair = rng.choice(stage.pool.prefill), rng.choice(stage.pool.decode)
            for _ in range(3):
                stage.pool.report_failure(pair)
        else:
            kept = rng.sample(range(1, 13), 11)
            stage.list_workers(WorkerRole.DECODE, [f"d:{i}" for i in sorted(kept)])
        if rng.random() < 0.7:
            await stage.proven()
        assert_true(stage)
    await stage.pool.close()


def assert_true(stage: ModelledPool) -> None:
    pool = stage.pool
    for role, workers in ((WorkerRole.PREFILL, pool.prefill), (WorkerRole.DECODE, pool.decode)):
        ready = [w for w in workers if w.is_ready and w not in pool._duplicates]
        for name in {w.model_version.weights for w in ready}:
            alike = {w for w in ready if w.model_version.weights == name}
            assert set(pool._weights.ready(role, name)) == alike
            working = {w for w in alike if not w.breaker.is_open}
            assert set(pool._table.workers(role, name)) == working
            assert working, "the last is never left out"
        for state in ("ready", "down", "mismatched", "connecting"):
            value = stage.registry.get_sample_value(
                "pdserve_workers", {"role": role.name.lower(), "state": state}
            )
            assert value == sum(pool._state_of(worker) == state for worker in workers)
    every = {pair for member in pool._pairs._members.values() for pair in member.pairs.values()}
    for state in ("proven", "unproven", "failed"):
        value = stage.registry.get_sample_value("pdserve_worker_pairs", {"state": state})
        assert value == sum(pair.state == state for pair in every)
    for prefill in pool.prefill:
        for decode in stage.paired(prefill):
            pair = pool._pairs._pair(prefill, decode)
            assert pair.state == "proven"
            assert pair.is_present
