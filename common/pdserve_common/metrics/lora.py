"""What becomes of LoRA adapters, and who asks for them."""

from collections import Counter as Counts

from prometheus_client import CollectorRegistry, Counter

# Adapters that have a series of their own, and names that are counted to find them. Names come and
# go for ever.
MAX_SHOWN = 50
MAX_COUNTED = 20 * MAX_SHOWN
OTHER = "other"


class MostUsed:
    """A counter with a series for each of the most used values of its label, and one for the others
    together. A value that comes to be one of the most used begins at 0; what is not any more goes
    on in the others', which never falls.
    """

    def __init__(self, counter: Counter, *, max_shown: int = MAX_SHOWN) -> None:
        self._counter = counter
        self._max_shown = max_shown
        self._counts: Counts[str] = Counts()
        # With a series, by what that says.
        self._shown: dict[str, int] = {}
        counter.labels(OTHER)

    def begin(self, value: str) -> None:
        """Make a series for a value that may be counted, at 0, while there is room: to `rate` the
        first sample of one is no increase.
        """
        is_new = value != OTHER and value not in self._shown
        if is_new and len(self._shown) < self._max_shown:
            self._shown[value] = 0
            self._counter.labels(value)

    def inc(self, value: str) -> None:
        self._counts[value] += 1
        if value not in self._shown and not self._may_show(value):
            self._counter.labels(OTHER).inc()
            self._forget_rare()
            return
        self._shown[value] = self._shown.get(value, 0) + 1
        self._counter.labels(value).inc()

    def _may_show(self, value: str) -> bool:
        if value == OTHER:
            return False  # whose name that is has no series of its own
        if len(self._shown) < self._max_shown:
            return True
        least = min(self._shown, key=lambda each: self._counts[each])
        if self._counts[value] <= self._counts[least]:
            return False
        self._counter.remove(least)
        self._counter.labels(OTHER).inc(self._shown.pop(least))
        return True

    def _forget_rare(self) -> None:
        if len(self._counts) > MAX_COUNTED:
            kept = self._counts.most_common(MAX_COUNTED // 2)
            self._counts = Counts(dict(kept) | {each: self._counts[each] for each in self._shown})


class ScaleOuts:
    """How often adapters were added to more workers, or were not because one refused."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = Counter(
            "pdserve_lora_scale_outs_total",
            "LoRA adapters that the router added to more workers for their load, by outcome",
            ["outcome"],
            registry=registry,
        )
        self.added, self.refused = map(counter.labels, ("added", "refused"))


class RouterLoraMetrics:
    """What a router does with adapters."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # By their adapter's name.
        self.requests = MostUsed(
            Counter(
                "pdserve_lora_requests_total",
                "Requests with a LoRA adapter, by its name: the 50 most used and the others "
                "together",
                ["adapter"],
                registry=registry,
            )
        )
        self.scale_outs = ScaleOuts(registry)
