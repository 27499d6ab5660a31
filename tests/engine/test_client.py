"""What only the engine on a thread of this process has; the rest is in
test_engine_client_contract.py.
"""

import asyncio
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
from pdserve_common.engine_types import EngineCoreOutputs, EngineCoreRequest, SamplingParams
from pdserve_engine.config import EngineConfig
from pdserve_engine.launch import launch_engine


@pytest.fixture
def all_cores() -> Iterator[frozenset[int]]:
    """The cores of this process, all of which it has again afterwards."""
    cores = usable_cores()
    num_threads = torch.get_num_threads()
    yield cores
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)
    torch.set_num_threads(num_threads)


async def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.005)


async def test_a_step_that_overruns_its_bound_is_a_problem(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model=str(make_model()), num_threads=1, kv_connector="none", kv_cache_memory_mib=8
    )
    engine: Any = await launch_engine(
        config, role="decode", engine_id="d", registry=CollectorRegistry()
    )
    executor = engine._core.executor
    execute = executor.execute_model

    def hang(*args: Any) -> Any:
        time.sleep(0.5)
        return execute(*args)

    engine._loaded = dataclasses.replace(engine._loaded, step_timeout_s=0.1)
    monkeypatch.setattr(executor, "execute_model", hang)
    messages: list[EngineCoreOutputs] = []
    index = engine.register_client(messages.append)
    assert engine.problem() is None
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
    engine._post(
        lambda: seen.append((ctypes.CDLL(None).omp_get_max_threads(), os.sched_getaffinity(0)))
    )
    await until(lambda: seen)
    assert seen == [(1, {core})]
    await engine.close()


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
