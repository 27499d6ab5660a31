"""The prefill service's flags."""

from dataclasses import dataclass

from pdserve_engine.config import EngineConfig
from pdserve_worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(EngineConfig, WorkerConfig):
    """Computes prompts and hands their KV blocks over to decode services."""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        WorkerConfig.__post_init__(self)
