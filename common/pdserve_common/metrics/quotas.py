"""What tenants ask for, and what of it their limits refuse."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

# Names of API keys that have series of their own. Those of one file are few; over months names come
# and go.
MAX_NAMES = 100
OTHER = "other"
ACCEPTED = "accepted"
QUOTA_OUTCOMES = (
    ACCEPTED,
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrent_requests",
)
_KINDS = ("prompt", "output")


class QuotaMetrics:
    """Counts by the names of API keys: the first ones seen, and the others together."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "pdserve_api_key_requests_total",
            "Requests by the name of their API key: accepted, or the limit of the key that refused "
            "them",
            ["api_key", "outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "pdserve_api_key_tokens_total",
            "Tokens of requests that have ended, by the name of their API key: prompt, output",
            ["api_key", "kind"],
            registry=registry,
        )
        self.waiting_tokens = Gauge(
            "pdserve_fair_queue_tokens",
            "Prompt tokens that wait at the router for the turn of their API key",
            registry=registry,
        )
        self._names: set[str] = set()
        self._begin_series(OTHER)

    def begin(self, names: Iterable[str]) -> None:
        """Make series at 0 for names that may be counted, while there is room."""
        for name in sorted(set(names) - self._names):
            if len(self._names) < MAX_NAMES:
                self._names.add(name)
                self._begin_series(name)

    def count_requests(self, name: str, outcome: str, number: int) -> None:
        """`outcome` is one of QUOTA_OUTCOMES. A caller without a name is not counted."""
        if name:
            self._requests.labels(api_key=self._label(name), outcome=outcome).inc(number)

    def count_tokens(self, name: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        if name:
            label = self._label(name)
            self._tokens.labels(api_key=label, kind="prompt").inc(num_prompt_tokens)
            self._tokens.labels(api_key=label, kind="output").inc(num_output_tokens)

    def _label(self, name: str) -> str:
        return name if name in self._names else OTHER

    def _begin_series(self, label: str) -> None:
        for outcome in QUOTA_OUTCOMES:
            self._requests.labels(api_key=label, outcome=outcome)
        for kind in _KINDS:
            self._tokens.labels(api_key=label, kind=kind)
