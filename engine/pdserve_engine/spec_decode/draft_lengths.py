"""How many tokens of each draft are worth computing."""

import random
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from pdserve_engine.request.request import Request
from pdserve_engine.spec_decode.proposer import Draft

# Of a mean, by each new value. A value counts as at most so many times the mean.
COST_SHARE, MAX_OUTLIER = 0.125, 1.5
GROUP_ROWS = 4
ACCEPTANCE_SHARE = 0.1
FIRST_ACCEPTANCE = 0.6
# Of steps in which there are drafts one tries another number than is thought best.
# It is not much dearer: at most twice as many, or one of each request, or a few.
PROBE_SHARE = 1 / 64
MIN_PROBE = 4


class StepCosts:
    """What steps cost that compute some rows of some requests, all of them decodes or drafts.

    What a step takes varies from one to the next, so steps of similar numbers of rows are measured
    together: how they compare with what is typical.
    """

    def __init__(self) -> None:
        # By requests, then by drafts in groups.
        self._means: dict[int, dict[int, float]] = {}

    def observe(self, num_requests: int, num_rows: int, duration_s: float) -> None:
        """Such a step took so long."""
        means, group = self._means.setdefault(num_requests, {}), _group(num_requests, num_rows)
        found = duration_s / _typical_cost(num_rows)
        mean = means.get(group, found)
        means[group] = mean + COST_SHARE * (min(found, MAX_OUTLIER * mean) - mean)

    def expect(self, num_requests: int, num_rows: int) -> float:
        """Return what a step is likely to cost, in a unit that is one and the same for all steps of
        so many requests.
        """
        typical, means = _typical_cost(num_rows), self._means.get(num_requests)
        if not means:
            return typical
        group = _group(num_requests, num_rows)
        if group not in means:
            group = min(means, key=lambda known: abs(known - group))
        return means[group] * typical


class DraftLengths:
    """Chooses what is expected to bring most tokens a second: from how often so many tokens of a
    request's drafts were accepted, and from what steps cost.
    """

    def __init__(self, costs: StepCosts, rng: random.Random) -> None:
        self._costs = costs
        self._rng = rng
        # By source: of each place in a draft, how often it was accepted. They go with their
        # requests.
        self._acceptance: WeakKeyDictionary[Request, dict[str, list[float]]] = WeakKeyDictionary()
        # Of all requests, by source.
        self._usual: dict[str, list[float]] = {}

    def observe(self, request: Request, source: str, num_drafts: int, num_accepted: int) -> None:
        """Of a draft the first `num_accepted` tokens were accepted."""
        usual = self._usual.setdefault(source, [])
        means = self._acceptance.setdefault(request, {}).setdefault(source, list(usual))
        for found in (means, usual):
            for place in range(num_drafts):
                if place == len(found):
                    found.append(_expected_next(found))
                found[place] += ACCEPTANCE_SHARE * ((place < num_accepted) - found[place])

    def choose(
        self, drafts: Mapping[Request, Draft], num_requests: int, num_rows: int, most: int
    ) -> dict[Request, int]:
        """Return how many tokens of each draft to compute, `most` in all, beside `num_rows` rows of
        `num_requests` requests that bring a token each. What is not in there: none.
        """
        gains = sorted(self._gains(drafts), key=lambda gain: gain[0], reverse=True)[:most]
        best, best_rate, num_tokens = 0, 0.0, float(num_requests)
        for count in range(len(gains) + 1):
            num_tokens += gains[count - 1][0] if count else 0.0
            rate = num_tokens / self._costs.expect(num_requests, num_rows + count)
            if rate > best_rate:
                best, best_rate = count, rate
        if self._rng.random() < PROBE_SHARE:
            most = max(2 * best, num_requests, MIN_PROBE)
            best = self._rng.randrange(min(len(gains), most) + 1)
        lengths: dict[Request, int] = {}
        for _, request in gains[:best]:
            lengths[request] = lengths.get(request, 0) + 1
        return lengths

    def _gains(self, drafts: Mapping[Request, Draft]) -> list[tuple[float, Request]]:
        """Return of each draft token how likely it is that it will count: of a request's, one less
        than the one before it.
        """
        gains = []
        for request, draft in drafts.items():
            usual = self._usual.get(draft.source, [])
            found = list(self._acceptance.get(request, {}).get(draft.source, usual))
            gain = 1.0
            for place in range(len(draft.token_ids)):
                if place == len(found):
                    found.append(_expected_next(found))
                gain = min(gain, found[place])
                gains.append((gain, request))
        return gains


def _expected_next(found: Sequence[float]) -> float:
    """Return how often the next place is accepted, of which nothing is known."""
    return FIRST_ACCEPTANCE * found[-1] if found else FIRST_ACCEPTANCE


def _group(num_requests: int, num_rows: int) -> int:
    """Return which steps such a step is like: those without drafts have a group of their own."""
    return -((num_requests - num_rows) // GROUP_ROWS)


def _typical_cost(num_rows: int) -> float:
    """Return what rows cost by one row, before it is measured: a decode waits for memory, and has
    time for some more rows.
    """
    return 1.0 + 0.04 * min(num_rows - 1, 5) + 0.12 * max(0, num_rows - 6)
