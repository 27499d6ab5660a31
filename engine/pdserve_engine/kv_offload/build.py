"""Makes the tiers that an engine's config names."""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from pdserve_common.metrics.kv_offload import KVOffloadMetrics
from pdserve_engine.config import EngineConfig
from pdserve_engine.kv.kv_cache import KVCacheSpec
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.kv_offload.block_file import BlockFormat
from pdserve_engine.kv_offload.disk_tier import DiskTier
from pdserve_engine.kv_offload.host_tier import HostTier
from pdserve_engine.kv_offload.offload import Copier, KVOffload
from pdserve_engine.kv_offload.tier import BAD_REASONS, BadReason, KVTier


def make_offload(
    config: EngineConfig,
    spec: KVCacheSpec,
    manager: KVCacheManager,
    *,
    compatibility: str,
    open_copier: Callable[[], Copier],
    registry: CollectorRegistry,
    wakeup: Callable[[], None],
) -> KVOffload | None:
    """Make the tiers and have the manager offer blocks to them; None if the config names none.

    `compatibility` says all that must be equal of engines for one to use another's blocks, weights
    and layout included.
    """
    if not config.has_kv_offload:
        return None
    assert spec.windows == (None,), "combinations.py refuses others"
    metrics = KVOffloadMetrics(registry)
    tiers = _make_tiers(config, spec, compatibility, metrics)
    for tier in tiers:
        metrics.begin(tier.name, BAD_REASONS)
    offload = KVOffload(
        tiers,
        block_pool=manager.block_pool,
        block_size=spec.block_size,
        block_bytes=spec.block_bytes,
        open_copier=open_copier,
        metrics=metrics,
        wakeup=wakeup,
        timeout_s=config.kv_offload_timeout_s,
    )
    manager.block_store = offload
    return offload


def _make_tiers(
    config: EngineConfig, spec: KVCacheSpec, compatibility: str, metrics: KVOffloadMetrics
) -> list[KVTier]:
    """The fastest first."""
    tiers: list[KVTier] = []
    if config.kv_offload_host_bytes:
        num_bytes = config.kv_offload_host_bytes
        tiers.append(HostTier(num_bytes=num_bytes, block_bytes=spec.block_bytes))
    if config.kv_offload_disk_path is not None:
        block_format = BlockFormat(
            digest=hashlib.sha256(compatibility.encode()).digest(),
            dtype=str(spec.dtype).removeprefix("torch."),
            block_bytes=spec.block_bytes,
        )
        disk = DiskTier(
            Path(config.kv_offload_disk_path),
            num_bytes=config.kv_offload_disk_bytes,
            block_format=block_format,
            on_bad=functools.partial(_count_bad, metrics, DiskTier.name),
        )
        tiers.append(disk)
    return tiers


def _count_bad(metrics: KVOffloadMetrics, tier: str, reason: BadReason) -> None:
    metrics.bad_blocks.labels(tier, reason).inc()
