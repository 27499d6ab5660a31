"""What a router's index of cached blocks counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdserve_common.metrics.buckets import LOOKUP_BUCKETS


class PrefixIndexMetrics:
    """Which blocks workers have cached, as far as the router knows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.blocks = Gauge(
            "pdserve_prefix_index_blocks",
            "Blocks in the router's index, at whatever worker",
            registry=registry,
        )
        self.evictions = Counter(
            "pdserve_prefix_index_evictions_total",
            "Blocks that the index had no room for, though a worker may have them",
            registry=registry,
        )
        self.lookup = Histogram(
            "pdserve_prefix_index_lookup_seconds",
            "Finding out how much of a prompt each worker has cached",
            buckets=LOOKUP_BUCKETS,
            registry=registry,
        )
        events = Counter(
            "pdserve_kv_cache_events_total",
            "What workers said of their caches: blocks stored, blocks removed, times all cleared",
            ["event"],
            registry=registry,
        )
        self.stored = events.labels(event="stored")
        self.removed = events.labels(event="removed")
        self.cleared = events.labels(event="cleared")
        self.resyncs = Counter(
            "pdserve_kv_cache_resyncs_total",
            "Gaps in a worker's events, after which the router asked for all that it has cached",
            registry=registry,
        )
