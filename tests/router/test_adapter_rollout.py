"""An adapter is loaded on all workers or on as many as asked, or on none."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdserve_common.engine_types import WorkerRole
from pdserve_common.errors import (
    FailedPreconditionError,
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    PdserveError,
)
from pdserve_common.lora_types import LoRAAdapter, LoRAAdapters, LoRARequest
from pdserve_router.workers import adapter_rollout
from pdserve_router.workers.adapter_rollout import AdapterRollout
from pdserve_router.workers.worker_client import WorkerClient, WorkerState
from support.modelled_pool import ModelledPool, modelled

OLD, NEW = "b" * 64, "c" * 64


class Workers:
    """The controls of a pool's workers, which tell the pool at once."""

    def __init__(self, stage: ModelledPool) -> None:
        self.stage = stage
        # What is in a worker's folder, and whom it refuses.
        self.contents: dict[str, str] = {}
        self.refusals: dict[str, PdserveError] = {}
        # Of each worker what the name stands for, last.
        self.digests: dict[str, list[str]] = {w.address: [] for w in stage.workers}
        self.num_calls = 0

    async def add_lora(self, address: str, lora: LoRARequest) -> LoRAAdapter:
        self.num_calls += 1
        await asyncio.sleep(0)
        if address in self.refusals:
            raise self.refusals[address]
        digest = self.contents.get(address, NEW)
        if lora.digest not in ("", digest):
            raise InvalidRequestError(f"digest is {lora.digest}")
        self.digests[address] = [*(d for d in self.digests[address] if d != digest), digest]
        self._tell(address)
        return LoRAAdapter(name=lora.lora_name, digest=digest, rank=8)

    async def remove_lora(self, address: str, name: str, digest: str = "") -> None:
        self.num_calls += 1
        await asyncio.sleep(0)
        self.digests[address] = [d for d in self.digests[address] if digest not in ("", d)]
        self._tell(address)

    def _tell(self, address: str) -> None:
        (worker,) = [w for w in self.stage.workers if w.address == address]
        assert worker.info is not None
        adapters = [
            LoRAAdapter(name="a" if d is self.digests[address][-1] else "", digest=d, rank=8)
            for d in self.digests[address]
        ]
        held = LoRAAdapters(version=self.num_calls, adapters=tuple(adapters))
        worker.info = worker.info.with_adapters(held)
        self.stage.set(worker, WorkerState.READY)


@pytest.fixture(autouse=True)
async def models(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(adapter_rollout, "LISTED_TIMEOUT_S", 0.1)
    with modelled():
        yield


async def started(num_prefill: int, num_decode: int) -> tuple[ModelledPool, Workers]:
    stage = ModelledPool(num_prefill, num_decode)
    for worker in stage.workers:
        stage.attach(worker)
    await stage.proven()
    return stage, Workers(stage)


def holders(stage: ModelledPool, digest: str) -> list[WorkerClient]:
    return [
        worker
        for worker in stage.workers
        if worker.info and any(each.digest == digest for each in worker.info.adapters)
    ]


LORA = LoRARequest(lora_name="a", lora_path="x", digest="")


async def test_all_workers_get_it_and_it_goes_from_all() -> None:
    stage, workers = await started(2, 3)
    rollout = AdapterRollout(stage.pool, workers)
    adapter = await rollout.load(LORA)
    assert adapter.digest == NEW
    assert len(holders(stage, NEW)) == 5
    assert stage.pool.listed_adapters() == (adapter,)
    await rollout.unload("a")
    assert (holders(stage, NEW), stage.pool.listed_adapters()) == ([], ())
    with pytest.raises(ModelNotFoundError, match="lora_name 'a' is no adapter"):
        await rollout.unload("a")
    await stage.pool.close()


async def test_as_many_as_asked_get_it_those_that_have_it_first() -> None:
    stage, workers = await started(5, 5)
    rollout = AdapterRollout(stage.pool, workers)
    await rollout.load(LORA, num_workers=1)
    first = holders(stage, NEW)
    assert {worker.role for worker in first} == set(WorkerRole)
    assert first[0] in stage.pool.partners(first[1])
    await rollout.load(LORA, num_workers=2)
    assert len(holders(stage, NEW)) == 4
    assert set(first) < set(holders(stage, NEW))
    with pytest.raises(NoWorkerError, match="5 decode workers are ready, 6 are asked for"):
        await rollout.load(LORA, num_workers=6)
    await stage.pool.close()


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("has_old", [False, True])
async def test_where_one_refuses_nobody_has_it(number: int, has_old: bool) -> None:
    stage, workers = await started(2, 2)
    rollout = AdapterRollout(stage.pool, workers)
    before: tuple[LoRAAdapter, ...] = ()
    if has_old:
        workers.contents = {worker.address: OLD for worker in stage.workers}
        before = (await rollout.load(LORA),)
        workers.contents = {}
    refusing = stage.workers[number].address
    workers.refusals[refusing] = FailedPreconditionError("all are pinned")
    with pytest.raises(FailedPreconditionError, match="all are pinned"):
        await rollout.load(LORA)
    assert holders(stage, NEW) == []
    assert stage.pool.listed_adapters() == before
    workers.refusals.clear()
    # Another content is as good as none.
    workers.contents[refusing] = "d" * 64
    with pytest.raises(InvalidRequestError, match="digest is"):
        await rollout.load(LORA)
    assert holders(stage, NEW) == holders(stage, "d" * 64) == []
    assert stage.pool.listed_adapters() == before
    await stage.pool.close()


async def test_two_changes_do_not_mix() -> None:
    stage, workers = await started(2, 2)
    rollout = AdapterRollout(stage.pool, workers)
    await asyncio.gather(*(rollout.load(LORA) for _ in range(3)))
    await asyncio.gather(rollout.unload("a"), rollout.load(LORA))
    assert len(holders(stage, NEW)) in (0, 4)
    await stage.pool.close()


async def test_without_a_pair_that_has_it_nobody_is_told_that_it_is_there() -> None:
    stage, workers = await started(1, 1)
    stage.pool._table.unlink(stage.pool.prefill[0], stage.pool.decode[0])
    with pytest.raises(NoWorkerError, match="no proven pair with it is ready"):
        await AdapterRollout(stage.pool, workers).load(LORA)
    await stage.pool.close()
