"""Engines with models in the test's process, and what is around them in a worker."""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from pdserve_common.engine_client import NO_TENSORS, Tensors
from pdserve_common.engine_types import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from pdserve_common.rpc import RpcServer
from pdserve_engine.clients.launch import WorkerEngine
from pdserve_engine.request.sched_output import AsyncModelRunnerOutput, SchedulerOutput
from pdserve_engine.runner.rank import Rank
from pdserve_worker.kv_link_client import KVLinkPool
from pdserve_worker.kv_link_service import SERVICE_NAME, KvTransferServicer
from support.waiting import until


class Client:
    """One front end, and the tokens that it gets."""

    def __init__(self, engine: WorkerEngine) -> None:
        self._engine = engine
        self._messages: list[EngineCoreOutputs] = []
        self.index = engine.register_client(self._messages.append)

    def add(self, request: EngineCoreRequest, tensors: Tensors = NO_TENSORS) -> None:
        request = dataclasses.replace(request, client_index=self.index)
        self._engine.add_request(request, tensors)

    async def tokens(self, request_id: str) -> list[int]:
        """Wait for the request's end."""
        outputs = await self.outputs(request_id)
        assert [output.error for output in outputs if output.error] == []
        return [token_id for output in outputs for token_id in output.new_token_ids]

    async def outputs(self, request_id: str) -> list[EngineCoreOutput]:
        """Wait for the request's end, and return all that came."""
        await until(lambda: any(output.finished for output in self._outputs(request_id)))
        return self._outputs(request_id)

    def _outputs(self, request_id: str) -> list[EngineCoreOutput]:
        outputs = [output for message in self._messages for output in message.outputs]
        return [output for output in outputs if output.request_id == request_id]


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
