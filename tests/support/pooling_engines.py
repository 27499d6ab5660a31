"""Engines of models that pool, in the test's process."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.types.engine import EngineCoreOutput, EngineCoreRequest, Pool
from pdserve_common.types.pooling_params import PoolingParams
from pdserve_engine.clients.inproc import InprocEngineClient
from pdserve_engine.config import EngineConfig
from support.engines import Client


class PoolingEngine:
    """An engine, and a front end of it."""

    def __init__(self, client: InprocEngineClient) -> None:
        self.client = client
        self.front_end = Client(client)

    def add(self, name: str, prompt: Sequence[int], task: str = "embed", **fields: Any) -> None:
        """`fields` are of the request, or of its PoolingParams."""
        ours = {key: fields.pop(key) for key in ("dimensions", "use_activation") if key in fields}
        self.front_end.send(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=tuple(prompt),
                task=Pool(PoolingParams(task=task, **ours)),
                **fields,
            )
        )

    def abort(self, name: str) -> None:
        self.client.abort_requests(self.front_end.index, [name])

    async def output(self, name: str) -> EngineCoreOutput:
        """Wait for the request's only output."""
        (output,) = await self.front_end.answer(name)
        return output

    async def pool(
        self, name: str, prompt: Sequence[int], *args: Any, **fields: Any
    ) -> list[float]:
        self.add(name, prompt, **fields)
        return vector_of(await self.output(name))


def vector_of(output: EngineCoreOutput) -> list[float]:
    assert output.error is None
    assert output.pooling_output is not None
    return list(output.pooling_output)


@contextlib.asynccontextmanager
async def pooling_engine(model: Path, **fields: Any) -> AsyncIterator[PoolingEngine]:
    """It must hold no block at the end."""
    settings: dict[str, Any] = {"num_threads": 1, "num_blocks": 200, "max_num_batched_tokens": 64}
    config = EngineConfig(model=str(model), **settings | fields)
    client = await InprocEngineClient.load(
        config, role="prefill", engine_id="p", metrics=KVTransferMetrics(CollectorRegistry())
    )
    try:
        yield PoolingEngine(client)
        stats = client.stats()
        assert stats.num_free_blocks == stats.num_total_blocks
    finally:
        await client.close()
