"""An adapter is loaded on all workers or on as many as asked, or on none."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest

from pdserve_common.errors import (
    FailedPreconditionError,
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
)
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import WorkerRole
from pdserve_common.types.lora import LoRAAdapter, LoRARequest
from pdserve_router.workers import adapter_rollout
from pdserve_router.workers.adapter_rollout import AdapterRollout
from support.modelled_adapters import NEW, ModelledAdapters
from support.modelled_pool import ModelledPool, modelled

OLD = "b" * 64


@pytest.fixture(autouse=True)
async def models(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(adapter_rollout, "LISTED_TIMEOUT_S", 0.1)
    with modelled():
        yield


async def started(num_prefill: int, num_decode: int) -> tuple[ModelledPool, ModelledAdapters]:
    stage = ModelledPool(num_prefill, num_decode)
    for worker in stage.workers:
        stage.attach(worker)
    await stage.proven()
    return stage, ModelledAdapters(stage)


LORA = LoRARequest(lora_name="a", lora_path="x", digest="")


async def test_all_workers_get_it_and_it_goes_from_all() -> None:
    stage, workers = await started(2, 3)
    rollout = AdapterRollout(stage.pool, workers, Runtime())
    adapter = await rollout.load(LORA)
    assert adapter.digest == NEW
    assert len(workers.holders(NEW)) == 5
    assert stage.pool.listed_adapters() == (dataclasses.replace(adapter, path="x"),)
    await rollout.unload("a")
    assert (workers.holders(NEW), stage.pool.listed_adapters()) == ([], ())
    with pytest.raises(ModelNotFoundError, match="lora_name 'a' is no adapter"):
        await rollout.unload("a")
    await stage.pool.close()


async def test_as_many_as_asked_get_it_those_that_have_it_first() -> None:
    stage, workers = await started(5, 5)
    rollout = AdapterRollout(stage.pool, workers, Runtime())
    await rollout.load(LORA, num_workers=1)
    first = workers.holders(NEW)
    assert {worker.role for worker in first} == set(WorkerRole)
    assert first[0] in stage.pool.paired(first[1])
    await rollout.load(LORA, num_workers=2)
    assert len(workers.holders(NEW)) == 4
    assert set(first) < set(workers.holders(NEW))
    with pytest.raises(NoWorkerError, match="5 decode workers are ready, 6 are asked for"):
        await rollout.load(LORA, num_workers=6)
    await stage.pool.close()


async def load_old(
    rollout: AdapterRollout, stage: ModelledPool, workers: ModelledAdapters
) -> tuple[LoRAAdapter]:
    """Have the name stand for another content; return what is listed then."""
    workers.contents = {worker.address: OLD for worker in stage.workers}
    adapter = await rollout.load(LORA)
    workers.contents = {}
    return (dataclasses.replace(adapter, path="x"),)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("has_old", [False, True])
async def test_where_one_refuses_nobody_has_it(number: int, has_old: bool) -> None:
    stage, workers = await started(2, 2)
    rollout = AdapterRollout(stage.pool, workers, Runtime())
    before = await load_old(rollout, stage, workers) if has_old else ()
    refusing = stage.workers[number].address
    workers.refusals[refusing] = FailedPreconditionError("all are pinned")
    with pytest.raises(FailedPreconditionError, match="all are pinned"):
        await rollout.load(LORA)
    assert workers.holders(NEW) == []
    assert stage.pool.listed_adapters() == before
    workers.refusals.clear()
    # Another content is as good as none.
    workers.contents[refusing] = "d" * 64
    with pytest.raises(InvalidRequestError, match="digest is"):
        await rollout.load(LORA)
    assert workers.holders(NEW) == workers.holders("d" * 64) == []
    assert stage.pool.listed_adapters() == before
    await stage.pool.close()


async def test_it_is_taken_back_from_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, workers = await started(2, 2)
    refusing, *others = (worker.address for worker in stage.workers)
    workers.refusals[refusing] = FailedPreconditionError("all are pinned")
    asked: list[str] = []
    are_all_asked = asyncio.Event()

    async def freeze(address: str, name: str, digest: str = "") -> None:
        asked.append(address)
        if len(asked) == len(others):
            are_all_asked.set()
        await are_all_asked.wait()
        raise NoWorkerError(f"worker {address}: (DEADLINE_EXCEEDED)")

    monkeypatch.setattr(workers, "remove_lora", freeze)
    loading = AdapterRollout(stage.pool, workers, Runtime()).load(
        dataclasses.replace(LORA, digest=NEW)
    )
    with pytest.raises(FailedPreconditionError, match="all are pinned"):
        await asyncio.wait_for(loading, 30)
    assert sorted(asked) == sorted(others)
    await stage.pool.close()


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("has_old", [False, True])
async def test_where_one_loads_it_too_late_nobody_has_it(number: int, has_old: bool) -> None:
    stage, workers = await started(2, 2)
    rollout = AdapterRollout(stage.pool, workers, Runtime())
    before = await load_old(rollout, stage, workers) if has_old else ()
    workers.late = {stage.workers[number].address}
    # What the first one has loaded only its answer says, unless the call does.
    lora = dataclasses.replace(LORA, digest=NEW if has_old else "")
    with pytest.raises(NoWorkerError, match="DEADLINE_EXCEEDED"):
        await rollout.load(lora)
    assert workers.holders(NEW) == []
    assert stage.pool.listed_adapters() == before
    await stage.pool.close()


async def test_an_extension_that_is_too_late_is_taken_back() -> None:
    stage, workers = await started(2, 2)
    rollout = AdapterRollout(stage.pool, workers, Runtime())
    adapter = dataclasses.replace(await rollout.load(LORA, num_workers=1), path="x")
    others = [w for w in stage.workers if w not in workers.holders(NEW)]
    workers.late = {others[0].address}
    with pytest.raises(NoWorkerError, match="DEADLINE_EXCEEDED"):
        await rollout.extend(adapter, others)
    assert len(workers.holders(NEW)) == 2
    await stage.pool.close()


async def test_two_changes_do_not_mix() -> None:
    stage, workers = await started(2, 2)
    rollout = AdapterRollout(stage.pool, workers, Runtime())
    await asyncio.gather(*(rollout.load(LORA) for _ in range(3)))
    await asyncio.gather(rollout.unload("a"), rollout.load(LORA))
    assert len(workers.holders(NEW)) in (0, 4)
    await stage.pool.close()


async def test_without_a_pair_that_has_it_nobody_is_told_that_it_is_there() -> None:
    stage, workers = await started(1, 1)
    for _ in range(3):
        stage.pool.report_failure((stage.pool.prefill[0], stage.pool.decode[0]))
    with pytest.raises(NoWorkerError, match="no proven pair with it is ready"):
        await AdapterRollout(stage.pool, workers, Runtime()).load(LORA)
    await stage.pool.close()


async def test_an_extension_holds_up_only_changes_of_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, workers = await started(2, 2)
    rollout = AdapterRollout(stage.pool, workers, Runtime())
    adapter = dataclasses.replace(await rollout.load(LORA, num_workers=1), path="x")
    others = [worker for worker in stage.workers if worker not in workers.holders(NEW)]
    assert not await rollout.extend(dataclasses.replace(adapter, digest=OLD), others)
    workers.hanging = {worker.address for worker in others}
    extending = asyncio.create_task(rollout.extend(adapter, others))
    await asyncio.sleep(0.01)
    assert not await rollout.extend(adapter, others)
    may_answer = asyncio.Event()
    remove = workers.remove_lora

    async def answer_late(address: str, name: str, digest: str = "") -> None:
        await may_answer.wait()
        await remove(address, name, digest)

    monkeypatch.setattr(workers, "remove_lora", answer_late)
    # What it has begun is given up, and may not be gone from its workers yet.
    workers.hanging = set()
    same = asyncio.create_task(rollout.load(LORA))
    await asyncio.sleep(0.01)
    assert not same.done()
    same.cancel()
    await asyncio.wait([same])
    workers.contents = {worker.address: OLD for worker in stage.workers}
    await asyncio.wait_for(rollout.load(dataclasses.replace(LORA, lora_name="b")), 10)
    assert len(workers.holders(OLD)) == 4
    assert not extending.done()
    may_answer.set()
    assert await extending is False
    await stage.pool.close()
