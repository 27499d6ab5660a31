"""How many tokens of each draft are worth computing."""

import random
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from pdserve_engine.request.request import Request
from pdserve_engine.spec_decode.proposer import Draft

# Each new value's share of a mean. A value counts as at most so many times the mean.
COST_SHARE, MAX_OUTLIER = 0.125, 1.5
GROUP_ROWS = 4
ACCEPTANCE_SHARE = 0.1
FIRST_ACCEPTANCE = 0.6
# In this share of the steps with drafts one tries another number than is thought best. It is not
# much dearer: at most twice as many, or one of each request, or a few.
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
        # By requests: what a draft model takes for a draft of each.
        self._guesses: dict[int, float] = {}

    def observe(self, num_requests: int, num_rows: int, duration_s: float) -> None:
        """Such a step took so long."""
        means, group = self._means.setdefault(num_requests, {}), _group(num_requests, num_rows)
        found = duration_s / _typical_cost(num_rows)
        mean = means.get(group, found)
        means[group] = _moved(mean, found)

    def observe_guesses(self, num_requests: int, num_drafts: int, duration_s: float) -> None:
        """A draft model took so long for so many drafts of each of some requests."""
        found = duration_s / num_drafts
        self._guesses[num_requests] = _moved(self._guesses.get(num_requests, found), found)

    def expect_guess(self, num_requests: int) -> float | None:
        """Return what a draft of each of so many requests is likely to cost, in the unit of
        `expect`; None: not known yet.
        """
        if not self._guesses or num_requests not in self._means:
            return None
        known = min(self._guesses, key=lambda known: abs(known - num_requests))
        return self._guesses[known]

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
        # What is usual for all requests, by source.
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
        best, _ = _best(gains, num_requests, self._expect(num_requests, num_rows, len(gains)))
        if self._rng.random() < PROBE_SHARE:
            most = max(2 * best, num_requests, MIN_PROBE)
            best = self._rng.randrange(min(len(gains), most) + 1)
        lengths: dict[Request, int] = {}
        for _, request in gains[:best]:
            lengths[request] = lengths.get(request, 0) + 1
        return lengths

    def choose_guesses(
        self, limits: Mapping[Request, int], num_requests: int, most: int
    ) -> dict[Request, int]:
        """Return how many drafts of each request a draft model is to guess, at most `limits`, for a
        step that computes `most` in all beside a token of each of `num_requests` requests. What is
        not in there: none.
        """
        if not limits:
            return {}
        best = self._best_guesses(limits, num_requests, most)
        if self._rng.random() < PROBE_SHARE:
            if best == 0:
                request = self._rng.choice(list(limits))
                return {request: limits[request]}
            best = max(limits.values())
        return {request: min(limit, best) for request, limit in limits.items() if best}

    def _best_guesses(self, limits: Mapping[Request, int], num_requests: int, most: int) -> int:
        longest, guess = max(limits.values()), self._costs.expect_guess(num_requests)
        if guess is None:
            return longest
        costs = self._expect(num_requests, num_requests, min(most, sum(limits.values())))
        best, best_rate = 0, 0.0
        for length in range(longest + 1):
            drafts = {
                request: Draft("draft_model", range(min(limit, length)))
                for request, limit in limits.items()
            }
            gains = sorted(self._gains(drafts), key=lambda gain: gain[0], reverse=True)[:most]
            _, rate = _best(gains, num_requests, [cost + length * guess for cost in costs])
            if rate > best_rate:
                best, best_rate = length, rate
        return best

    def _expect(self, num_requests: int, num_rows: int, most: int) -> list[float]:
        """Return what such a step costs with no draft more, with one, and so on."""
        return [self._costs.expect(num_requests, num_rows + count) for count in range(most + 1)]

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


def _best(
    gains: Sequence[tuple[float, Request]], num_requests: int, costs: Sequence[float]
) -> tuple[int, float]:
    """Return how many of the gains are worth computing, beside a token of each request, and how
    many tokens that brings by what it costs; costs[i] is that of a step with i of them.
    """
    best, best_rate, num_tokens = 0, num_requests / costs[0], float(num_requests)
    for count, (gain, _) in enumerate(gains, 1):
        num_tokens += gain
        if num_tokens / costs[count] > best_rate:
            best, best_rate = count, num_tokens / costs[count]
    return best, best_rate


def _moved(mean: float, found: float) -> float:
    """Return the mean after one more value."""
    return mean + COST_SHARE * (min(found, MAX_OUTLIER * mean) - mean)


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
