"""The prefill service: an EngineCore as KV producer behind gRPC."""

import functools
from collections.abc import Sequence

import pdserve_common.rpc.grpc_verbosity  # noqa: F401
from pdserve_common.config import parse_config
from pdserve_common.rpc.channels import open_channel
from pdserve_engine.clients.launch import launch_engine
from pdserve_prefill.config import PrefillConfig
from pdserve_worker.kv_link.links import carry_links
from pdserve_worker.process import Worker, WorkerContext, run_worker


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM, and end the process."""
    config = parse_config(PrefillConfig, argv, prog="pdserve-prefill")
    run_worker(config, role="prefill", build=functools.partial(_build, config))


async def _build(config: PrefillConfig, context: WorkerContext) -> Worker:
    engine = await launch_engine(
        config,
        role="prefill",
        engine_id=context.engine_id,
        host=config.host,
        registry=context.registry,
        log_level=config.log_level,
    )
    worker = Worker(engine=engine)
    connectors = engine.connector, engine.prefix_connector
    carry_links(worker, connectors, functools.partial(open_channel, tls=context.tls))
    return worker


if __name__ == "__main__":
    main()
