"""What becomes of guessed tokens."""

from prometheus_client import CollectorRegistry, Counter

from pdserve_common.types.engine import DRAFT_SOURCES, DraftStats

# The series of so many positions are there from the start: as many as workers guess if not told
# otherwise.
NUM_FIRST_POSITIONS = 5


class DraftMetrics:
    """A worker's drafts, by who proposed them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._drafts = Counter(
            "pdserve_spec_decode_num_drafts_total",
            "Drafts that were checked, by who proposed them",
            ["source"],
            registry=registry,
        )
        self._draft_tokens = Counter(
            "pdserve_spec_decode_num_draft_tokens_total",
            "Tokens of drafts, by who proposed them",
            ["source"],
            registry=registry,
        )
        self._accepted_tokens = Counter(
            "pdserve_spec_decode_num_accepted_tokens_total",
            "Tokens of drafts that became tokens of answers, by who proposed them",
            ["source"],
            registry=registry,
        )
        self._accepted_tokens_per_pos = Counter(
            "pdserve_spec_decode_num_accepted_tokens_per_pos_total",
            "The same by place in the draft",
            ["position"],
            registry=registry,
        )
        # At 0: to `rate` the first sample of a series is no increase.
        for source in DRAFT_SOURCES:
            for counter in (self._drafts, self._draft_tokens, self._accepted_tokens):
                counter.labels(source)
        for position in range(NUM_FIRST_POSITIONS):
            self._accepted_tokens_per_pos.labels(str(position))

    def record(self, stats: DraftStats) -> None:
        """A draft was checked."""
        self._drafts.labels(stats.source).inc()
        self._draft_tokens.labels(stats.source).inc(stats.num_draft_tokens)
        self._accepted_tokens.labels(stats.source).inc(stats.num_accepted_tokens)
        for position in range(stats.num_accepted_tokens):
            self._accepted_tokens_per_pos.labels(str(position)).inc()
