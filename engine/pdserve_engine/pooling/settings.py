"""What an engine's settings become for a model that pools."""

import dataclasses

from pdserve_engine.config import EngineConfig, Role
from pdserve_engine.models.config import PoolerConfig


def pooling_settings(config: EngineConfig, pooler: PoolerConfig, role: Role) -> EngineConfig:
    """Return them: nothing is handed over, and of a mean nothing is read from the prefix cache, as
    all states are needed. Raises ValueError for those that only a model that generates can have.
    """
    if role == "decode":
        raise ValueError(
            f"{config.model} serves {', '.join(pooler.tasks)}, which prefill workers do: a decode "
            "worker's model must generate"
        )
    wanted: dict[str, object] = {
        "speculation": "none",
        "prefix_pulls": False,
        "kv_offload_host_bytes": 0,
        "kv_offload_disk_path": None,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
    }
    if pooler.pooling_type == "mean":
        # How a GPU sums depends on how prompts are cut into chunks.
        wanted["deterministic"] = False
    for name, value in wanted.items():
        found = getattr(config, name)
        if found != value:
            raise ValueError(
                f"{name} is {str(found).lower()}, must be {str(value).lower()} for a model that "
                f"serves {', '.join(pooler.tasks)} by the {pooler.pooling_type} of its states"
            )
    return dataclasses.replace(
        config,
        kv_connector="none",
        enable_prefix_caching=config.enable_prefix_caching and pooler.pooling_type == "last",
    )
