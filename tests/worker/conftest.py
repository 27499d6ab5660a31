"""Fixtures of the worker's suites."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_engine.clients.inproc import InprocEngineClient
from pdserve_engine.config import EngineConfig
from support.worker import LONG, Worker, serve


@pytest.fixture
async def worker(
    make_model: Callable[..., Path], request: pytest.FixtureRequest
) -> AsyncIterator[Worker]:
    """Parameters, if there are any, are further fields of EngineConfig."""
    config = EngineConfig(
        model=str(make_model(max_position_embeddings=LONG + 8)),
        num_threads=1,
        kv_connector="none",
        kv_cache_memory_mib=8,
        max_num_seqs=4,
        **getattr(request, "param", {}),
    )
    engine = await InprocEngineClient.load(
        config, role="decode", engine_id="d", metrics=KVTransferMetrics(CollectorRegistry())
    )
    async with serve(engine) as worker:
        yield worker
    await engine.close()
