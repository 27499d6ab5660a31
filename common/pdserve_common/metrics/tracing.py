"""What becomes of spans."""

from prometheus_client import CollectorRegistry, Counter

EXPORTED = "exported"
QUEUE_FULL = "queue_full"
EXPORT_FAILED = "export_failed"


class TracingMetrics:
    """Every process that exports spans."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.spans = Counter(
            "pdserve_trace_spans_total",
            "Spans by what became of them: exported, or dropped because of queue_full or "
            "export_failed",
            ["outcome"],
            registry=registry,
        )
        for outcome in (EXPORTED, QUEUE_FULL, EXPORT_FAILED):
            self.spans.labels(outcome)
