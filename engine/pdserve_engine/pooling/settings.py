"""What an engine's settings become for a model that pools."""

import dataclasses

from pdserve_engine.config import EngineConfig, Role
from pdserve_engine.models.config import PoolerConfig


def pooling_settings(config: EngineConfig, pooler: PoolerConfig, role: Role) -> EngineConfig:
    """Return them: nothing is handed over, and of a mean nothing is read from the prefix cache, as
    all states are needed. Raises ValueError for a decode worker.
    """
    if role == "decode":
        raise ValueError(
            f"{config.model} serves {', '.join(pooler.tasks)}, which prefill workers do: a decode "
            "worker's model must generate"
        )
    return dataclasses.replace(
        config,
        kv_connector="none",
        enable_prefix_caching=config.enable_prefix_caching and pooler.pooling_type == "last",
    )
