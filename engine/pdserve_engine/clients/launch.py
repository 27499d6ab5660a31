"""Starts a worker's engine, in its process or in its own, as its config says."""

import asyncio
import dataclasses
import logging
from typing import TYPE_CHECKING, Union

from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import EngineMetrics, GrammarMetrics, KVTransferMetrics
from pdserve_common.model_files.model_folder import find_model
from pdserve_common.processes.cores import confine_process
from pdserve_engine.clients.stats import EngineStatsRecorder
from pdserve_engine.clients.subprocess import SubprocessEngineClient
from pdserve_engine.config import EngineConfig, Role
from pdserve_engine.kv_transfer.transport.net_devices import keep_to_host

if TYPE_CHECKING:
    from pdserve_engine.clients.inproc import InprocEngineClient

logger = logging.getLogger(__name__)

WorkerEngine = Union["InprocEngineClient", SubprocessEngineClient]


async def launch_engine(
    config: EngineConfig,
    *,
    role: Role,
    engine_id: str,
    registry: CollectorRegistry,
    host: str = "127.0.0.1",
    log_level: str = "info",
) -> WorkerEngine:
    """Load an engine and return its client; its metrics appear in `registry`. KV travels over the
    network device of `host` only, unless that means all, or the environment says otherwise.

    Raises ValueError, OSError or a PdserveError if it cannot be loaded.
    """
    if role == "prefill" and config.draft_model is not None:
        logger.info("a prefill worker brings one token of each request: it has no draft model")
        config = dataclasses.replace(
            config, speculation="none", draft_model=None, suffix_decoding_max_cached_requests=0
        )
    # May download it, while the worker's probes answer.
    model = await asyncio.to_thread(find_model, config.model, revision=config.revision)
    draft_model = config.draft_model and await asyncio.to_thread(find_model, config.draft_model)
    config = dataclasses.replace(config, model=model, draft_model=draft_model)
    if config.cores:
        confine_process(config.cores)  # before OpenMP counts them, and for an engine process too
    if config.kv_connector == "nixl":
        keep_to_host(host, require_transport=config.require_transport)
    if config.has_engine_process:
        return await SubprocessEngineClient.load(
            config, role=role, engine_id=engine_id, registry=registry, log_level=log_level
        )
    # Brings in torch, which a worker whose engine is elsewhere does without.
    from pdserve_engine.clients.inproc import InprocEngineClient

    return await InprocEngineClient.load(
        config,
        role=role,
        engine_id=engine_id,
        metrics=KVTransferMetrics(registry),
        grammar_metrics=GrammarMetrics(registry),
        on_step=EngineStatsRecorder(EngineMetrics(registry)),
    )
