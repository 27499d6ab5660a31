"""What only the engine on a thread of this process has; the rest is in
test_engine_client_contract.py.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.engine_types import EngineCoreOutputs, EngineCoreRequest, SamplingParams
from pdserve_engine.config import EngineConfig
from pdserve_engine.launch import launch_engine


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
