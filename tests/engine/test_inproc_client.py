"""What only the engine on a thread of this process has; the rest is in
test_engine_client_contract.py.
"""

import asyncio
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.processes.cores import usable_cores
from pdserve_common.runtime import Runtime
from pdserve_engine.assemble import load_engine
from pdserve_engine.clients import inproc
from pdserve_engine.clients.inproc import InprocEngineClient
from pdserve_engine.config import EngineConfig
from pdserve_kernels import name_of, select
from support.engines import Client, engine_config, launched
from support.steps import before_steps, held_steps
from support.waiting import until

CPU = torch.device("cpu")
HELD_S = 0.1


@pytest.fixture
def all_cores() -> Iterator[frozenset[int]]:
    """The cores of this process, all of which it has again afterwards."""
    cores = usable_cores()
    num_threads = torch.get_num_threads()
    yield cores
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)
    torch.set_num_threads(num_threads)


async def test_a_step_that_overruns_its_bound_is_a_problem(make_model: Callable[..., Path]) -> None:
    async with launched(make_model(), kv_cache_memory_mib=8, step_timeout_s=0.1) as engine:
        client = Client(engine)
        assert engine.problem() is None
        with held_steps():
            client.add("a")
            await until(engine.problem)
            assert "a step has taken more than 0.1 s" in (engine.problem() or "")
        await client.end_of("a")


async def test_a_drain_does_not_wait_for_a_step_that_hangs(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inproc, "HAND_BACK_TIMEOUT_S", 1000.0)
    settings = {"kv_cache_memory_mib": 8, "step_timeout_s": 0.1}
    async with launched(make_model(), engine_process="inproc", **settings) as engine:
        with held_steps():
            Client(engine).add("a")
            await until(engine.problem)
            assert await asyncio.wait_for(engine.drain(0.0), 60.0) == 1


async def test_a_request_is_queued_from_its_arrival_on_whatever_the_engine_does(
    make_model: Callable[..., Path],
) -> None:
    async with launched(make_model(), kv_cache_memory_mib=8) as engine:
        client = Client(engine)
        with held_steps() as held:
            client.add("a")
            await until(held.has_begun.is_set)
            client.add("b")
            await asyncio.sleep(HELD_S)
        await client.answer("b")
        stats = client.outputs("b")[0].prefill_stats
        assert stats is not None
        assert stats.queue_s >= HELD_S


async def test_an_engine_without_a_thread_steps_when_somebody_takes_its_turns(
    make_model: Callable[..., Path],
) -> None:
    now_s = 1000.0
    client = InprocEngineClient(Runtime(now=lambda: now_s))
    loaded = load_engine(
        engine_config(make_model(), kv_cache_memory_mib=8),
        role="decode",
        engine_id="d0",
        metrics=KVTransferMetrics(CollectorRegistry()),
        wakeup=client.wake,
        take_aborts=client.take_aborts,
    )
    client.open(loaded)
    try:
        assert "engine" not in thread_names()
        front = Client(client)
        front.add("a", 3)
        num_tokens = []
        while True:
            has_more = client.turn()
            await asyncio.sleep(0)
            num_tokens.append(len(front.tokens("a")))
            if not has_more:
                break
        assert num_tokens[-1] == 3
        assert num_tokens == sorted(num_tokens)
        assert front.ended() == ["a"]
        assert client.stats().num_running_reqs == 0
        assert not client.turn(), "there is nothing to step for"
        assert front.messages[-1].timestamp == now_s
    finally:
        await client.close()


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


async def test_an_engine_stays_on_its_cores_with_a_thread_for_each(
    make_model: Callable[..., Path], all_cores: frozenset[int]
) -> None:
    core = max(all_cores)
    settings = {"num_threads": 0, "cpu_cores": str(core), "kv_cache_memory_mib": 8}
    async with launched(make_model(), engine_process="inproc", **settings) as engine:
        assert "engine" in thread_names()
        # The loading thread would keep a team of its own.
        await until(lambda: not [name for name in thread_names() if name.startswith("load")])
        seen: list[tuple[int, set[int]]] = []
        omp = ctypes.CDLL(None)
        with before_steps(
            lambda step: seen.append((omp.omp_get_max_threads(), os.sched_getaffinity(0)))
        ):
            await Client(engine).run("a", 1)
        assert seen[0] == (1, {core})


def cores_of_threads() -> list[set[int]]:
    """Of each thread of this process."""
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            found.append(os.sched_getaffinity(int(thread)))
    return found


@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")
@pytest.mark.skipif(not name_of(select(CPU)).startswith("cpu/"), reason="needs compiled kernels")
async def test_compute_threads_stay_on_a_core_each_and_sleep_when_idle(
    make_model: Callable[..., Path], all_cores: frozenset[int]
) -> None:
    first, last = min(all_cores), max(all_cores)
    settings = {"num_threads": 0, "cpu_cores": f"{first},{last}", "kv_cache_memory_mib": 8}
    model = make_model(dtype="bfloat16")
    async with launched(model, engine_process="inproc", **settings) as engine:
        engines_own: list[set[int]] = []
        with before_steps(lambda step: engines_own.append(os.sched_getaffinity(0))):
            await Client(engine).run("a")
        assert engines_own[0] == {first, last}
        # The loading thread's team ends some time after it.
        await until(
            lambda: cores_of_threads().count({last}) == 1 and {first} not in cores_of_threads()
        )
        assert await falls_asleep()


async def falls_asleep() -> bool:
    """Does a time come in which this process hardly computes anything?"""
    for _ in range(50):
        before = time.process_time()
        await asyncio.sleep(0.2)
        if time.process_time() - before < 0.02:
            return True
    return False


@pytest.mark.parametrize(
    ("cores", "num_threads", "message"),
    [
        ("0-", 0, "cpu_cores is '0-', must be a list of cores like 0-3,8"),
        ("0-1", 3, "num_threads is 3, cpu_cores has 2 cores"),
    ],
)
def test_cores_that_make_no_sense_are_refused(cores: str, num_threads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(cpu_cores=cores, num_threads=num_threads)
