"""The decode service: an EngineCore as KV consumer behind gRPC."""

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


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; the process's exit status."""
    config = parse_config(DecodeConfig, argv, prog="pdserve-decode")
    return run_worker(config, role="decode", build=functools.partial(_build, config))


async def _build(config: DecodeConfig, context: WorkerContext) -> Worker:
    engine = await InprocEngineClient.load(
        config,
        role="decode",
        engine_id=context.engine_id,
        metrics=KVTransferMetrics(context.registry),
        on_step=EngineStatsRecorder(EngineMetrics(context.registry)),
    )
    worker = Worker(engine=engine)
    if isinstance(engine.connector, ConsumerConnector):
        worker.close = KvLinkPool(engine.connector).close
    return worker


if __name__ == "__main__":
    sys.exit(main())
