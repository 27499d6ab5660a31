"""Metrics of the tiers that keep KV besides a worker's pool."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdserve_common.metrics.buckets import STAGE_BUCKETS
from pdserve_common.metrics.services import begin


class KVOffloadMetrics:
    """A worker's tiers of KV besides its pool; those of a `tier` begin with it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.num_bytes = Counter(
            "pdserve_kv_offload_bytes_total",
            "KV stored in a tier and loaded from it",
            ["tier", "direction"],
            registry=registry,
        )
        self.used_bytes = Gauge(
            "pdserve_kv_offload_used_bytes", "KV that a tier has", ["tier"], registry=registry
        )
        self.is_writable = Gauge(
            "pdserve_kv_offload_writable",
            "1 while a tier stores blocks, 0 after it could not",
            ["tier"],
            registry=registry,
        )
        self.bad_blocks = Counter(
            "pdserve_kv_offload_bad_blocks_total",
            "Stored blocks that were gone, unreadable or not what was stored, and not used",
            ["tier", "reason"],
            registry=registry,
        )
        self.dropped_blocks = Counter(
            "pdserve_kv_offload_dropped_blocks_total",
            "Blocks that were not stored as too many waited to be copied",
            registry=registry,
        )
        self.tokens = Counter(
            "pdserve_kv_offload_tokens_total",
            "Prompt tokens whose KV was asked of the tiers, by outcome",
            ["outcome"],
            registry=registry,
        )
        self.load_duration = Histogram(
            "pdserve_kv_offload_load_seconds",
            "How long a request waited for its prefix from the tiers",
            ["outcome"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )

    def begin(self, tier: str, reasons: Iterable[str]) -> None:
        """A tier begins."""
        begin(self.num_bytes, tier=(tier,), direction=("stored", "loaded"))
        begin(self.bad_blocks, tier=(tier,), reason=reasons)
        begin(self.tokens, outcome=("loaded", "failed", "given_up"))
