"""What only the engine on a thread of this process has; the rest is in
test_engine_client_contract.py.
"""

import asyncio
import contextlib
import ctypes
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from pdserve_common.cores import usable_cores
from pdserve_common.engine_types import EngineCoreOutputs, EngineCoreRequest
from pdserve_common.sampling_params import SamplingParams
from pdserve_engine.clients.launch import launch_engine
from pdserve_engine.config import EngineConfig
from pdserve_kernels import name_of, select
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


async def test_a_step_that_overruns_its_bound_is_a_problem(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model=str(make_model()),
        num_threads=1,
        kv_connector="none",
        kv_cache_memory_mib=8,
        step_timeout_s=0.1,
    )
    engine: Any = await launch_engine(
        config, role="decode", engine_id="d", registry=CollectorRegistry()
    )
    messages: list[EngineCoreOutputs] = []
    index = engine.register_client(messages.append)
    assert engine.problem() is None
    with held_steps():
        engine.add_request(
            EngineCoreRequest(
                request_id="a",
                prompt_token_ids=(5, 6, 7),
                sampling_params=SamplingParams(max_tokens=1),
                client_index=index,
            )
        )
        await until(engine.problem)
        assert "a step has taken more than 0.1 s" in (engine.problem() or "")
    await until(lambda: any(o.finished for m in messages for o in m.outputs))
    await engine.close()


async def test_a_request_is_queued_from_its_arrival_on_whatever_the_engine_does(
    make_model: Callable[..., Path],
) -> None:
    config = EngineConfig(
        model=str(make_model()), num_threads=1, kv_connector="none", kv_cache_memory_mib=8
    )
    engine: Any = await launch_engine(
        config, role="decode", engine_id="d", registry=CollectorRegistry()
    )
    messages: list[EngineCoreOutputs] = []
    index = engine.register_client(messages.append)
    request = EngineCoreRequest(
        request_id="a",
        prompt_token_ids=(5, 6, 7),
        sampling_params=SamplingParams(max_tokens=1),
        client_index=index,
    )
    with held_steps() as held:
        engine.add_request(request)
        await until(held.has_begun.is_set)
        engine.add_request(dataclasses.replace(request, request_id="b"))
        await asyncio.sleep(HELD_S)
    await until(lambda: sum(o.finished for m in messages for o in m.outputs) == 2)
    outputs = {o.request_id: o for m in messages for o in m.outputs if o.new_token_ids}
    assert outputs["b"].prefill_stats.queue_s >= HELD_S
    await engine.close()


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


async def test_an_engine_stays_on_its_cores_with_a_thread_for_each(
    make_model: Callable[..., Path], all_cores: frozenset[int]
) -> None:
    core = max(all_cores)
    config = EngineConfig(
        model=str(make_model()),
        cpu_cores=str(core),
        kv_connector="none",
        kv_cache_memory_mib=8,
        engine_process="inproc",
    )
    engine: Any = await launch_engine(
        config, role="decode", engine_id="d", registry=CollectorRegistry()
    )
    assert "engine" in thread_names()
    # The loading thread would keep a team of its own.
    await until(lambda: not [name for name in thread_names() if name.startswith("load")])
    seen: list[tuple[int, set[int]]] = []
    omp = ctypes.CDLL(None)
    with before_steps(
        lambda step: seen.append((omp.omp_get_max_threads(), os.sched_getaffinity(0)))
    ):
        engine.add_request(
            EngineCoreRequest(
                request_id="a", prompt_token_ids=(5,), sampling_params=SamplingParams(max_tokens=1)
            )
        )
        await until(lambda: seen)
    assert seen[0] == (1, {core})
    await engine.close()


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
    config = EngineConfig(
        model=str(make_model(dtype="bfloat16")),
        cpu_cores=f"{first},{last}",
        kv_connector="none",
        kv_cache_memory_mib=8,
        engine_process="inproc",
    )
    engine: Any = await launch_engine(
        config, role="decode", engine_id="d", registry=CollectorRegistry()
    )
    outputs: list[EngineCoreOutputs] = []
    index = engine.register_client(outputs.append)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engines_own: list[set[int]] = []
    with before_steps(lambda step: engines_own.append(os.sched_getaffinity(0))):
        engine.add_request(
            EngineCoreRequest(
                request_id="a",
                prompt_token_ids=(5, 6, 7),
                sampling_params=params,
                client_index=index,
            )
        )
        await until(lambda: any(o.finished for m in outputs for o in m.outputs))
    assert engines_own[0] == {first, last}
    # The loading thread's team ends some time after it.
    await until(lambda: cores_of_threads().count({last}) == 1 and {first} not in cores_of_threads())
    assert await falls_asleep()
    await engine.close()


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
