"""The engine on its thread: requests in, outputs on the event loop, and every way it can end."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.engine_types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    SamplingParams,
)
from pdserve_common.errors import DrainingError, EngineDeadError
from pdserve_common.metrics import KVTransferMetrics
from pdserve_engine.client import InprocEngineClient
from pdserve_engine.config import EngineConfig


@pytest.fixture
async def engine(make_model: Callable[..., Path]) -> AsyncIterator[InprocEngineClient]:
    config = EngineConfig(
        model=str(make_model()), num_threads=1, kv_connector="none", kv_cache_memory_mib=8
    )
    engine = await InprocEngineClient.load(
        config, role="decode", engine_id="d", metrics=KVTransferMetrics(CollectorRegistry())
    )
    yield engine
    await engine.close()


class Client:
    """One front end and what it was told."""

    def __init__(self, engine: InprocEngineClient) -> None:
        self.engine = engine
        self.messages: list[EngineCoreOutputs] = []
        self.index = engine.register_client(self.messages.append)

    def add(self, request_id: str, max_tokens: int = 4) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=(5, 6, 7),
                sampling_params=params,
                client_index=self.index,
            )
        )

    async def end_of(self, request_id: str) -> FinishReason | None:
        found: list[Any] = []
        await until(lambda: found.extend(self._ends(request_id)) or found)
        assert len(self._ends(request_id)) == 1
        return found[0].finish_reason

    def _ends(self, request_id: str) -> list[Any]:
        outputs = [o for m in self.messages for o in m.outputs if o.request_id == request_id]
        return [output for output in outputs if output.finished]


async def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.005)


async def test_each_front_end_gets_its_own_outputs(engine: InprocEngineClient) -> None:
    one, two = Client(engine), Client(engine)
    one.add("a")
    two.add("b")
    assert await one.end_of("a") == await two.end_of("b") == FinishReason.LENGTH
    assert {o.request_id for m in one.messages for o in m.outputs} == {"a"}


async def test_an_id_can_be_used_again_after_an_abort_that_came_too_late(
    engine: InprocEngineClient,
) -> None:
    client = Client(engine)
    for _ in range(20):
        client.messages.clear()
        client.add("a", max_tokens=1)
        await client.end_of("a")
        engine.abort_requests(client.index, ["a"])
        client.messages.clear()
        client.add("a", max_tokens=3)
        assert await client.end_of("a") == FinishReason.LENGTH


async def test_a_front_end_cannot_abort_anothers_request(engine: InprocEngineClient) -> None:
    one, two = Client(engine), Client(engine)
    one.add("a", max_tokens=40)
    engine.abort_requests(two.index, ["a"])
    assert await one.end_of("a") == FinishReason.LENGTH


async def test_a_front_end_that_leaves_takes_its_requests_along(engine: InprocEngineClient) -> None:
    client = Client(engine)
    client.add("a", max_tokens=1000)
    await until(lambda: client.messages)
    engine.unregister_client(client.index)
    await until(lambda: not engine.has_request("a"))
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks


async def test_a_huge_deadline_does_not_end_the_engine(engine: InprocEngineClient) -> None:
    client = Client(engine)
    client.add("a", max_tokens=2)
    request = EngineCoreRequest(
        request_id="b",
        prompt_token_ids=(5,),
        sampling_params=SamplingParams(max_tokens=2, temperature=0.0),
        client_index=client.index,
        deadline=time.monotonic() + 1e10,
    )
    engine.add_request(request)
    await client.end_of("b")
    assert engine.problem() is None


async def test_draining_lets_what_runs_finish_and_takes_nothing_new(
    engine: InprocEngineClient,
) -> None:
    client = Client(engine)
    client.add("a", max_tokens=50)
    drained = asyncio.create_task(engine.drain(10.0))
    await asyncio.sleep(0)
    with pytest.raises(DrainingError):
        client.add("b")
    assert await drained
    assert await client.end_of("a") == FinishReason.LENGTH


async def test_a_dead_engine_tells_every_front_end_and_takes_nothing_more(
    engine: InprocEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(scheduler_output: object) -> None:
        raise RuntimeError("no more")

    one, two = Client(engine), Client(engine)
    monkeypatch.setattr(engine._core.executor, "execute_model", fail)
    one.add("a")
    for client in (one, two):
        await until(lambda client=client: client.messages and client.messages[-1].engine_dead)
        error = client.messages[-1].engine_dead
        assert error is not None
        assert error.code == ErrorCode.ENGINE_DEAD
        assert "no more" in error.message
    assert "no more" in (engine.problem() or "")
    with pytest.raises(EngineDeadError):
        one.add("b")


async def test_a_step_that_overruns_its_bound_is_a_problem(
    engine: InprocEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = engine._core.executor
    execute = executor.execute_model

    def hang(scheduler_output: Any) -> Any:
        time.sleep(0.5)
        return execute(scheduler_output)

    engine._loaded = dataclasses.replace(engine._loaded, step_timeout_s=0.1)
    monkeypatch.setattr(executor, "execute_model", hang)
    client = Client(engine)
    assert engine.problem() is None
    client.add("a", max_tokens=1)
    await until(engine.problem)
    assert "a step has taken more than 0.1 s" in (engine.problem() or "")
    await client.end_of("a")
