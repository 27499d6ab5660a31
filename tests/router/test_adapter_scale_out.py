"""An adapter comes to more workers when all that hold it have much to do, and only then."""

import asyncio
import contextlib
import gc
import itertools
import random
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.errors import FailedPreconditionError
from pdserve_common.metrics.lora import ScaleOuts
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import SchedulerStats, WorkerRole
from pdserve_common.types.lora import LoRAAdapter, LoRARequest
from pdserve_router.workers import adapter_rollout, adapter_scale_out
from pdserve_router.workers.adapter_rollout import AdapterRollout
from pdserve_router.workers.adapter_scale_out import AdapterScaleOut
from pdserve_router.workers.clients.worker_client import WorkerClient
from support.modelled_adapters import NEW, ModelledAdapters
from support.modelled_pool import ModelledPool, modelled

MAX_REQUESTS = 8
LORA = LoRARequest(lora_name="a", lora_path="x", digest="")
REQUEST = LoRARequest(lora_name="a", digest=NEW)


class Digest(str):
    """One that can be referred to weakly."""


@pytest.fixture(autouse=True)
async def models(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(adapter_rollout, "LISTED_TIMEOUT_S", 0.1)
    with modelled():
        yield


class Stage:
    """A pool, its workers' adapters, and what is tested, on a clock of its own."""

    def __init__(self, num_prefill: int, num_decode: int, **rules: Any) -> None:
        self.now = 1000.0
        self.pools = ModelledPool(num_prefill, num_decode, **rules)
        self.pool = self.pools.pool
        self.workers = ModelledAdapters(self.pools)
        self.rollout = AdapterRollout(self.pool, self.workers, Runtime())
        self.registry = CollectorRegistry()
        self.scale_out = AdapterScaleOut(
            self.pool,
            self.rollout,
            max_requests=MAX_REQUESTS,
            outcomes=ScaleOuts(self.registry),
            runtime=Runtime(now=lambda: self.now),
        )
        self._begun: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        for worker in self.pools.workers:
            self.pools.attach(worker)
            self.load(worker, 0)
        await self.pools.proven()

    async def close(self) -> None:
        await self.scale_out.close()
        await self.pool.close()

    def load(self, worker: WorkerClient, num_requests: int) -> None:
        worker.stats = SchedulerStats(num_running_reqs=num_requests)

    def load_holders(self, num_requests: int) -> None:
        for worker in self.holders():
            self.load(worker, num_requests)

    async def request(self, lora: LoRARequest = REQUEST, *, after_s: float = 0) -> list[str]:
        """Have a request come; return who was asked to load what."""
        self.now += after_s
        num_calls = len(self.workers.calls)
        self.begin(lora)
        await self.idle()
        return self.workers.calls[num_calls:]

    def begin(self, lora: LoRARequest = REQUEST) -> None:
        """Have a request come, and whatever it leads to begin."""
        before = asyncio.all_tasks()
        self.scale_out.on_request(lora)
        self._begun |= asyncio.all_tasks() - before

    async def idle(self) -> None:
        """Return when what has begun is over."""
        if self._begun:
            await asyncio.wait(self._begun)
        self._begun.clear()

    def holders(self) -> list[WorkerClient]:
        return self.workers.holders(NEW)

    def counted(self) -> tuple[float, float]:
        """Return how often an adapter was added, and how often a worker refused."""
        name = "pdserve_lora_scale_outs_total"
        values = [
            self.registry.get_sample_value(name, {"outcome": o}) for o in ("added", "refused")
        ]
        added, refused = values
        assert added is not None
        assert refused is not None
        return added, refused


@contextlib.asynccontextmanager
async def started(
    num_prefill: int, num_decode: int, *, num_workers: int = 1, load: int = 50
) -> AsyncIterator[Stage]:
    """A stage on which so many pairs hold the adapter and have so much to do."""
    stage = Stage(num_prefill, num_decode)
    await stage.start()
    await stage.rollout.load(LORA, num_workers=num_workers)
    stage.load_holders(load)
    yield stage
    await stage.close()


def num_requests(worker: WorkerClient) -> int:
    assert worker.stats is not None
    return worker.stats.num_running_reqs


def of_role(workers: Iterable[WorkerClient], role: WorkerRole) -> list[WorkerClient]:
    return [worker for worker in workers if worker.role is role]


@pytest.mark.parametrize("seed", range(60))
async def test_whatever_the_load_the_least_loaded_get_it_and_only_where_it_is_wanted(
    seed: int,
) -> None:
    rng = random.Random(seed)
    stage = Stage(rng.randint(0, 4), rng.randint(1, 4))
    await stage.start()
    num_workers = rng.randint(1, min(len(stage.pool.decode), len(stage.pool.prefill) or 4))
    await stage.rollout.load(LORA, num_workers=num_workers)
    for worker in stage.pools.workers:
        stage.load(worker, rng.choice((0, 1, MAX_REQUESTS, MAX_REQUESTS + 1, 50)))
    before = stage.holders()
    refusing = [w for w in stage.pools.workers if w not in before and rng.random() < 0.2]
    stage.workers.refusals = {w.address: FailedPreconditionError("full") for w in refusing}
    calls = await stage.request()
    added = [worker for worker in stage.holders() if worker not in before]

    def is_busy(worker: WorkerClient) -> bool:
        return num_requests(worker) > MAX_REQUESTS

    wanted = [
        role
        for role in (WorkerRole.DECODE, WorkerRole.PREFILL)
        if of_role(before, role) and all(map(is_busy, of_role(before, role)))
    ]
    free = {
        role: [w for w in of_role(stage.pools.workers, role) if w not in before and not is_busy(w)]
        for role in wanted
    }
    if not wanted or not free[wanted[0]]:
        assert (calls, added, stage.counted()) == ([], [], (0, 0))
    elif any(worker.address in calls for worker in refusing):
        assert (added, stage.counted()) == ([], (0, 1))
    else:
        assert stage.counted() == (1, 0)
        (best,) = of_role(added, wanted[0])
        assert num_requests(best) == min(map(num_requests, free[wanted[0]]))
        others = [worker for worker in added if worker is not best]
        assert len(others) <= 1
        # A paired worker with little to do needs nobody beside it.
        role_of_others = {WorkerRole.DECODE: WorkerRole.PREFILL}.get(best.role, WorkerRole.DECODE)
        if any(not is_busy(worker) for worker in of_role(before, role_of_others)):
            assert others == []
        assert all(worker.role is role_of_others for worker in others)
    assert set(before) <= set(stage.holders())
    assert len(calls) <= 3  # two, of whom one takes it back
    await stage.close()


async def test_load_is_looked_at_once_in_a_while_and_new_workers_are_given_time() -> None:
    async with started(3, 3, load=0) as stage:
        assert await stage.request() == []
        stage.load_holders(50)
        assert await stage.request(after_s=adapter_scale_out.LOOK_S / 2) == []
        assert len(await stage.request(after_s=adapter_scale_out.LOOK_S)) == 2
        assert len(stage.holders()) == 4
        stage.load_holders(50)
        assert await stage.request(after_s=adapter_scale_out.LOOK_S) == []
        assert len(await stage.request(after_s=adapter_scale_out.SETTLE_S)) == 2
        # All have it.
        stage.load_holders(50)
        assert await stage.request(after_s=100) == []
        assert stage.counted() == (2, 0)


async def test_who_refuses_is_asked_less_and_less_often() -> None:
    async with started(2, 2) as stage:
        # Full, of adapters that nobody uses: none of them goes for this.
        stage.workers.max_loras = 0
        asked = []
        for second in range(2000):
            if await stage.request(after_s=1):
                asked.append(second)
        waits = [later - earlier for earlier, later in itertools.pairwise(asked)]
        assert waits[:6] == [10, 20, 40, 80, 160, 320]
        assert max(waits) == adapter_scale_out.MAX_BACKOFF_S
        assert len(stage.holders()) == 2
        assert stage.counted() == (0, len(asked))
        stage.workers.max_loras = 16
        assert len(await stage.request(after_s=adapter_scale_out.MAX_BACKOFF_S)) == 2
        assert stage.counted()[0] == 1


async def test_where_one_of_a_pair_refuses_neither_has_it() -> None:
    async with started(2, 2) as stage:
        before = stage.holders()
        (refusing,) = [w for w in stage.pool.prefill if w not in before]
        stage.workers.refusals[refusing.address] = FailedPreconditionError("other folders")
        assert len(await stage.request()) == 3
        assert stage.holders() == before


async def extends_nothing(adapter: LoRAAdapter, workers: Sequence[WorkerClient]) -> bool:
    return False


async def test_those_that_start_again_get_what_they_had_once_requests_ask_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with started(2, 3, num_workers=2, load=0) as stage:
        before = stage.holders()
        restarted = [before[0], next(w for w in before if w.role is not before[0].role)]
        for worker in restarted:
            stage.workers.digests[worker.address].clear()
            stage.pools.attach(worker, epoch="2")
            stage.load(worker, 0)
            worker.forgotten = frozenset({NEW, "e" * 64})
        stage.workers.refusals[restarted[1].address] = FailedPreconditionError("other folders")
        # Nobody is asked while an operator changes adapters, and nothing is lost by that.
        with monkeypatch.context() as patch:
            patch.setattr(stage.rollout, "extend", extends_nothing)
            assert await stage.request(after_s=adapter_scale_out.SETTLE_S) == []
        calls = [await stage.request(after_s=adapter_scale_out.SETTLE_S) for _ in range(4)]
        # One after the other, and who refuses is not asked again.
        assert sorted(map(len, calls)) == [0, 0, 1, 1]
        assert {address for each in calls for address in each} == {w.address for w in restarted}
        assert set(stage.holders()) == set(before) - {restarted[1]}
        assert stage.counted() == (1, 1)
        # Nor is what has been taken away.
        for worker in before:
            worker.forgotten = frozenset({NEW})
        await stage.rollout.unload("a")
        assert await stage.request(after_s=100) == []
        assert not any(NEW in worker.forgotten for worker in before)


async def test_one_is_added_at_a_time_and_what_has_changed_meanwhile_counts() -> None:
    async with started(2, 2) as stage:
        num_calls = len(stage.workers.calls)
        stage.begin()
        # It has begun when the name is taken away.
        unload = asyncio.create_task(stage.rollout.unload("a"))
        for _ in range(5):
            stage.now += 100
            stage.begin()
        await asyncio.gather(unload, stage.idle())
        assert len(stage.workers.calls) - num_calls in (2, 4, 6)
        assert stage.holders() == []
        # The other way round: nothing is loaded for a name that has gone.
        await stage.rollout.load(LORA, num_workers=1)
        stage.load_holders(50)
        unload = asyncio.create_task(stage.rollout.unload("a"))
        await asyncio.sleep(0)
        await stage.request(after_s=100)
        await unload
        assert stage.holders() == []
        assert stage.counted()[1] == 0


@pytest.mark.parametrize("num_hanging", [1, 2])
async def test_what_is_asked_for_does_not_wait_for_a_load_that_is_not(num_hanging: int) -> None:
    async with started(2, 2) as stage:
        others = [w for w in stage.pools.workers if w not in stage.holders()]
        stage.workers.hanging = {worker.address for worker in others[:num_hanging]}
        stage.begin()
        await asyncio.sleep(0.01)
        # One is there already, and goes as well.
        assert len(stage.holders()) == 4 - num_hanging
        await asyncio.wait_for(stage.rollout.unload("a"), 5)
        await stage.idle()
        assert stage.holders() == []
        assert stage.counted() == (0, 0)
        # Nor for one whose turn comes between two that are asked for.
        stage.workers.hanging = set()
        await stage.rollout.load(LORA, num_workers=1)
        stage.load_holders(50)
        others = [w for w in stage.pools.workers if w not in stage.holders()]
        stage.workers.hanging = {worker.address for worker in others}
        first = asyncio.create_task(stage.rollout.load(LORA, num_workers=1))
        stage.now += 100
        await asyncio.sleep(0)
        stage.begin()
        await asyncio.wait_for(asyncio.gather(first, stage.rollout.unload("a"), stage.idle()), 5)
        assert stage.holders() == []


async def test_what_cannot_be_had_elsewhere_stays_where_it_is() -> None:
    async with started(2, 2) as stage:
        for lora in (
            LoRARequest(lora_name="b", digest=NEW),
            LoRARequest(lora_name="a", digest="d" * 64),  # its name stands for another one
        ):
            assert await stage.request(lora) == []
        for worker in stage.holders():
            assert worker.info is not None
            # One of --lora: its folder is the worker's own.
            own = (LoRAAdapter(name="a", digest=NEW, rank=8),)
            stage.pools.attach(worker, adapters=own)
            stage.load(worker, 50)
        assert await stage.request(after_s=100) == []
        assert stage.counted() == (0, 0)


async def test_who_has_another_one_under_the_name_keeps_it() -> None:
    async with started(2, 3, num_workers=2, load=0) as stage:
        other = next(w for w in stage.pool.decode if w not in stage.holders())
        stage.workers.contents[other.address] = "d" * 64
        await stage.workers.add_lora(other.address, LORA)
        stage.load_holders(50)
        assert await stage.request() == []


async def test_adapters_without_end_are_not_remembered_for_ever() -> None:
    stage = Stage(1, 1)
    await stage.start()
    remembered: weakref.WeakValueDictionary[int, Digest] = weakref.WeakValueDictionary()
    for number in range(3 * adapter_scale_out.MAX_REMEMBERED):
        remembered[number] = digest = Digest(number)
        lora = LoRARequest(lora_name="a", digest=digest)
        del digest
        await stage.request(lora, after_s=0.001)
        del lora
        assert number in remembered
    gc.collect()
    assert len(remembered) <= adapter_scale_out.MAX_REMEMBERED
    await stage.close()
