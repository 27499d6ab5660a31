"""The decode service: an EngineCore as KV consumer behind gRPC."""

import asyncio
import functools
import sys
from collections.abc import Sequence

from pdserve_common.config import parse_config
from pdserve_common.metrics import EngineMetrics, KVTransferMetrics
from pdserve_common.worker.process import Worker, WorkerContext, run_worker
from pdserve_common.worker.stats import EngineStatsRecorder
from pdserve_decode.config import DecodeConfig
from pdserve_decode.service import KvLinkPool
from pdserve_engine.client import InprocEngineClient
from pdserve_engine.kv_transfer.consumer import ConsumerConnector
from pdserve_engine.loading import load_engine


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; the process's exit status."""
    config = parse_config(DecodeConfig, argv, prog="pdserve-decode")
    return run_worker(config, role="decode", build=functools.partial(_build, config))


async def _build(config: DecodeConfig, context: WorkerContext) -> Worker:
    client = InprocEngineClient()
    load = functools.partial(
        load_engine,
        config,
        role="decode",
        engine_id=context.engine_id,
        metrics=KVTransferMetrics(context.registry),
        wakeup=client.wake,
        take_aborts=client.take_aborts,
    )
    loaded = await asyncio.get_running_loop().run_in_executor(None, load)
    recorder = EngineStatsRecorder(EngineMetrics(context.registry))
    client.start(loaded, recorder)
    worker = Worker(engine=client)
    if isinstance(loaded.connector, ConsumerConnector):
        worker.close = KvLinkPool(loaded.connector).close
    return worker


if __name__ == "__main__":
    sys.exit(main())
