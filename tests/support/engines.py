"""Engines with models in the test's process or in one of its own, requests to them, and what is
around them in a worker.
"""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.rpc.channels import RpcServer
from pdserve_common.types.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from pdserve_common.types.engine_client import NO_TENSORS, Tensors
from pdserve_engine.assemble import LoadedEngine, load_engine
from pdserve_engine.clients.launch import WorkerEngine, launch_engine
from pdserve_engine.config import EngineConfig, Role
from pdserve_engine.core.engine_core import EngineCore
from pdserve_engine.request.sched_output import AsyncModelRunnerOutput, SchedulerOutput
from pdserve_engine.runner.rank import Rank
from pdserve_worker.kv_link.client import KVLinkPool
from pdserve_worker.kv_link.service import SERVICE_NAME, KvTransferServicer
from support.requests import PROMPT, greedy, make_request
from support.waiting import TIMEOUT_S, until

# So many tokens take longer than a test, which ends what asks for them.
LONG = 8000


def engine_config(model: Path, **fields: Any) -> EngineConfig:
    """One thread and no other worker, unless it is said."""
    return EngineConfig(model=str(model), **{"num_threads": 1, "kv_connector": "none", **fields})


def load(
    model: Path,
    *,
    role: Role = "decode",
    registry: CollectorRegistry | None = None,
    wakeup: Callable[[], None] = lambda: None,
    **fields: Any,
) -> LoadedEngine:
    """Load an engine that is stepped by hand. `fields` are the config's, and `make_executor`."""
    options = {"make_executor": fields.pop("make_executor")} if "make_executor" in fields else {}
    return load_engine(
        engine_config(model, **fields),
        role=role,
        engine_id=f"{role[0]}0",
        metrics=KVTransferMetrics(registry or CollectorRegistry()),
        wakeup=wakeup,
        **options,
    )


@contextlib.contextmanager
def loaded(model: Path, **fields: Any) -> Iterator[LoadedEngine]:
    """Load, and at the end close, an engine that is stepped by hand."""
    engine = load(model, **fields)
    try:
        yield engine
    finally:
        assert engine.close()


@contextlib.asynccontextmanager
async def launched(
    model: Path, role: Role = "decode", registry: CollectorRegistry | None = None, **fields: Any
) -> AsyncIterator[WorkerEngine]:
    """Start an engine as a worker does, and close it at the end."""
    engine = await launch_engine(
        engine_config(model, **fields),
        role=role,
        engine_id=f"{role[0]}0",
        registry=registry or CollectorRegistry(),
    )
    try:
        yield engine
    finally:
        await engine.close()


def tokens_of(outputs: Iterable[EngineCoreOutput]) -> list[int]:
    """Return a request's tokens; it must not have failed."""
    outputs = list(outputs)
    assert [output.error for output in outputs if output.error] == []
    return [token_id for output in outputs for token_id in output.new_token_ids]


def run_to_end(
    core: EngineCore,
    requests: Iterable[EngineCoreRequest] = (),
    *,
    at_once: int = 1000,
    between: Callable[[], object] = lambda: None,
) -> dict[str, list[EngineCoreOutput]]:
    """Return the outputs of all requests by their ids, once all have ended. So many come with each
    step, and `between` runs before it. No step is taken while a grammar is being compiled: which
    requests run together does not depend on how long that takes.
    """
    left, found = list(requests), dict[str, list[EngineCoreOutput]]()
    while left or core.scheduler.has_requests() or core.has_work():
        for request in left[:at_once]:
            core.add_request(request)
        del left[:at_once]
        between()
        results = []
        deadline = time.monotonic() + TIMEOUT_S
        while core.scheduler.containers.waiting_for_fsm or _only_waits(core):
            assert time.monotonic() < deadline, "what is waited for does not come"
            time.sleep(0.001)
            results.append(core.poll())
        results.append(core.step())
        for output in (o for result in results for each in result.outputs.values() for o in each):
            found.setdefault(output.request_id, []).append(output)
    return found


def _only_waits(core: EngineCore) -> bool:
    """Is there nothing to compute before something comes from another thread?"""
    return core.scheduler.has_requests() and not core.has_work()


def generate(
    core: EngineCore, requests: Iterable[EngineCoreRequest] = (), **options: Any
) -> dict[str, list[int]]:
    """The same, of their tokens; none may fail."""
    found = run_to_end(core, requests, **options)
    return {name: tokens_of(outputs) for name, outputs in found.items()}


def generate_greedily(
    engine: LoadedEngine, prompts: Mapping[str, Sequence[int]], max_tokens: int, **fields: Any
) -> dict[str, list[int]]:
    """The same of requests for so many tokens of each prompt."""
    params = greedy(max_tokens)
    requests = [make_request(name, prompt, params, **fields) for name, prompt in prompts.items()]
    return generate(engine.core, requests)


class Client:
    """One front end, and what it was told."""

    def __init__(self, engine: WorkerEngine) -> None:
        self.engine = engine
        self.messages: list[EngineCoreOutputs] = []
        self.index = engine.register_client(self.messages.append)

    def send(self, request: EngineCoreRequest, tensors: Tensors = NO_TENSORS) -> EngineCoreRequest:
        request = dataclasses.replace(request, client_index=self.index)
        self.engine.add_request(request, tensors)
        return request

    def add(
        self, name: str, max_tokens: int = 4, prompt: Sequence[int] = PROMPT, **fields: Any
    ) -> EngineCoreRequest:
        """Send a request. `fields` are its own; `params` replace those of so many tokens."""
        params = fields.pop("params", None) or greedy(max_tokens)
        return self.send(make_request(name, prompt, params, **fields))

    def outputs(self, name: str | None = None) -> list[EngineCoreOutput]:
        """Return what has come of a request, or of all."""
        outputs = [output for message in self.messages for output in message.outputs]
        return [output for output in outputs if name in (None, output.request_id)]

    def tokens(self, name: str) -> list[int]:
        """Return the tokens that have come of a request."""
        return [token for output in self.outputs(name) for token in output.new_token_ids]

    def ended(self) -> list[str]:
        """Return the requests that have ended, in the order in which they did."""
        return [output.request_id for output in self.outputs() if output.finished]

    async def end_of(self, name: str) -> EngineCoreOutput:
        """Wait for a request's end, which must be its only one."""
        await until(lambda: name in self.ended())
        (end,) = [output for output in self.outputs(name) if output.finished]
        return end

    async def finish_reason(self, name: str) -> FinishReason | None:
        return (await self.end_of(name)).finish_reason

    async def answer(self, name: str) -> list[EngineCoreOutput]:
        """Wait for a request's end, and return all that came of it."""
        await until(lambda: any(output.finished for output in self.outputs(name)))
        return self.outputs(name)

    async def run(self, name: str, *args: Any, **fields: Any) -> list[int]:
        """Send a request, wait until it has ended of itself, and return its tokens."""
        self.add(name, *args, **fields)
        outputs = await self.answer(name)
        assert outputs[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        return tokens_of(outputs)

    async def start(self, name: str, max_tokens: int = LONG, **fields: Any) -> None:
        """Send a request, and wait until a token of it has come."""
        self.add(name, max_tokens, **fields)
        await until(lambda: self.tokens(name))

    def abort(self, *names: str) -> None:
        self.engine.abort_requests(self.index, names)

    def close(self) -> None:
        self.engine.unregister_client(self.index)


async def until_idle(engine: WorkerEngine) -> None:
    """Wait until no request has a block, or waits for one."""
    await until(lambda: engine.stats().num_free_blocks == engine.stats().num_total_blocks)
    assert engine.stats().num_running_reqs == engine.stats().num_waiting_reqs == 0


@contextlib.asynccontextmanager
async def linked(p: WorkerEngine, d: WorkerEngine) -> AsyncIterator[int]:
    """Carry the KvLink between two engines as their services do; yield P's port."""
    p_connector: Any = p.connector
    d_connector: Any = d.connector
    server = RpcServer("127.0.0.1", 0)
    servicer = KvTransferServicer(p_connector)
    servicer.add_to_server(server.server)
    await server.start([SERVICE_NAME])
    pool = KVLinkPool(d_connector)
    try:
        yield server.port
    finally:
        await pool.close()
        await servicer.close()
        await server.stop(1.0)


@contextlib.contextmanager
def counted_drafts() -> Iterator[Counter[str]]:
    """Within it the drafts of draft models in all steps of this process's engines are counted: how
    many there were (`drafts`), and how many of them the model sampled (`accepted`).
    """
    counts: Counter[str] = Counter()
    proposed: dict[str, tuple[int, ...]] = {}
    execute = Rank.execute_model

    def count(rank: Rank, scheduled: SchedulerOutput) -> AsyncModelRunnerOutput:
        output = execute(rank, scheduled)
        result = output.get_output()
        sampled = dict(zip(result.request_ids, result.sampled_token_ids, strict=True))
        for request_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
            if proposed.get(request_id, ())[: len(drafts)] == drafts:
                counts["drafts"] += len(drafts)
                counts["accepted"] += max(0, len(sampled[request_id]) - 1)
        for request_id in scheduled.num_scheduled_tokens:
            proposed[request_id] = result.draft_token_ids.get(request_id, ())
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rank, "execute_model", count)
        yield counts
