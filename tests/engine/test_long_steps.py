"""What does not wait for the end of a step of D's engine, however long that is."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from scripted_engine import ON_D, ScriptedConnector

from pdserve_common.engine_types import EngineCoreRequest, SamplingParams
from pdserve_engine.config import EngineConfig
from pdserve_engine.launch import launch_engine


def request(request_id: str, **fields: Any) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=2)
    return EngineCoreRequest(
        request_id=request_id, prompt_token_ids=(5, 6, 7), sampling_params=params, **fields
    )


class Connector(ScriptedConnector):
    """Notes what has come; a real one dials."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatched: list[EngineCoreRequest] = []

    def on_dispatched(self, request: EngineCoreRequest) -> None:
        self.dispatched.append(request)


async def test_the_connector_hears_of_a_request_in_the_midst_of_a_step(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model=str(make_model()),
        num_threads=1,
        kv_connector="none",
        kv_cache_memory_mib=8,
        engine_process="inproc",
    )
    engine: Any = await launch_engine(
        config, role="decode", engine_id="d0", registry=CollectorRegistry()
    )
    connector = Connector()
    engine._loaded = replace(engine._loaded, connector=connector)
    execute = engine._core.executor.execute_model
    is_in_step, may_end = threading.Event(), threading.Event()

    def hang(*args: Any) -> Any:
        is_in_step.set()
        assert may_end.wait(60)
        return execute(*args)

    monkeypatch.setattr(engine._core.executor, "execute_model", hang)
    engine.add_request(request("local"))
    assert await asyncio.to_thread(is_in_step.wait, 60)
    ticket = request("remote", kv_transfer_params=ON_D)
    engine.add_request(ticket)
    assert connector.dispatched[-1] is ticket
    may_end.set()
    await engine.close()
