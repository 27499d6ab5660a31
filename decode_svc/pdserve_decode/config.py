"""The decode service's flags."""

from dataclasses import dataclass

from pdserve_engine.config import EngineConfig
from pdserve_worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(EngineConfig, WorkerConfig):
    """Generates tokens, from KV blocks pulled from prefill services or from its own."""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        WorkerConfig.__post_init__(self)
