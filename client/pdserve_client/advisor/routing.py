"""Who takes a request, as the router's `RouteChooser` and its policies decide, with what workers
have now instead of what they last told.
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, TypeVar, get_args

from pdserve_client.advisor.handoff_model import DecodeModel, PrefillModel
from pdserve_client.advisor.worker_model import Leg, WorkerModel

Policy = Literal["prefix", "power_of_two", "round_robin"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
LocalReason = Literal[
    "disabled", "max_tokens_1", "short_prompt", "cached_prompt", "prefill_queue"
]  # fmt: skip

# As in the router's `prefix_policy.py`.
NUM_CACHED = 3
NUM_DRAWN = 2
NUM_PAIRED = 3
TIE = 8.0
# And its flags' defaults.
QUEUE_WEIGHT, DECODE_WEIGHT, ROOM_WEIGHT, TRANSFER_WEIGHT = 1.0, 16.0, 1.0, 0.1
# And `routing_policy.py`.
NUM_IN_TURN = 8

W = TypeVar("W", bound=WorkerModel)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRules:
    """The router's flags of the same names."""

    routing_policy: Policy = "prefix"
    disaggregation_threshold_tokens: int = 0
    max_prefill_queue_tokens: int = 0

    def __post_init__(self) -> None:
        if self.routing_policy not in POLICIES:
            raise ValueError(
                f"routing_policy is {self.routing_policy!r}, must be one of {', '.join(POLICIES)}"
            )
        for name in ("disaggregation_threshold_tokens", "max_prefill_queue_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 0")


@dataclass(frozen=True, slots=True)
class Route:
    """Without `prefill`, decode does it all for `reason`."""

    decode: DecodeModel
    prefill: PrefillModel | None = None
    reason: LocalReason | None = None


class RouterModel:
    """Chooses at once. `legs` it is asked for stand for requests on any of the workers."""

    def __init__(
        self,
        rules: RoutingRules,
        prefill: Sequence[PrefillModel],
        decode: Sequence[DecodeModel],
        rng: random.Random,
    ) -> None:
        self._rules = rules
        self._prefill = prefill
        self._decode = decode
        self._rng = rng
        self._num_turns: dict[WorkerModel, int] = {}

    def choose(self, leg: Leg) -> Route:
        """Return the workers of a new request."""
        if reason := self._reason_to_stay(leg):
            return Route(self._pick_decode(leg), reason=reason)
        if cached := self._with_prompt_cached(leg):
            return Route(min(cached, key=_load), reason="cached_prompt")
        limit = self._rules.max_prefill_queue_tokens
        prefill = [p for p in self._prefill if not 0 < limit < p.num_waiting_tokens]
        if not prefill:
            return Route(self._pick_decode(leg), reason="prefill_queue")
        p, d = self._pick_pair(leg, prefill)
        return Route(d, p)

    def _reason_to_stay(self, leg: Leg) -> LocalReason | None:
        if not self._prefill:
            return "disabled"
        if leg.request.num_output_tokens == 1:
            return "max_tokens_1"
        threshold = max(self._rules.disaggregation_threshold_tokens, 1)
        return "short_prompt" if leg.request.num_prompt_tokens <= threshold else None

    def _with_prompt_cached(self, leg: Leg) -> list[DecodeModel]:
        threshold = self._rules.disaggregation_threshold_tokens
        if threshold == 0:
            return []
        num_prompt = leg.request.num_prompt_tokens
        return [d for d in self._decode if num_prompt - _num_cached(d, leg) <= threshold]

    def _pick_decode(self, leg: Leg) -> DecodeModel:
        if self._rules.routing_policy == "round_robin":
            return self._pick_in_turn(self._decode)
        if self._rules.routing_policy == "power_of_two":
            return min(self._draw(self._decode, 2), key=_load)
        num_prompt = leg.request.num_prompt_tokens
        costs = [
            (num_prompt - _num_cached(d, leg) + decode_cost(d, leg), d)
            for d in self._looked_at(self._decode, leg)
        ]
        return self._one_of_best(costs)

    def _pick_pair(
        self, leg: Leg, prefill: Sequence[PrefillModel]
    ) -> tuple[PrefillModel, DecodeModel]:
        if self._rules.routing_policy == "round_robin":
            return self._pick_in_turn(prefill), self._pick_in_turn(self._decode)
        if self._rules.routing_policy == "power_of_two":
            drawn = self._draw(prefill, 2), self._draw(self._decode, 2)
            return min(drawn[0], key=_load), min(drawn[1], key=_load)
        costs = {p: prefill_cost(p, leg) for p in self._looked_at(prefill, leg)}
        pairs = [
            (costs[p] + decode_cost(d, leg), (p, d))
            for p in heapq.nsmallest(NUM_PAIRED, costs, key=costs.__getitem__)
            for d in self._looked_at(self._decode, leg)
        ]
        return self._one_of_best(pairs)

    def _looked_at(self, workers: Sequence[W], leg: Leg) -> list[W]:
        """Those with the longest beginning cached, and some that are drawn."""
        cached = {w: _num_cached(w, leg) for w in workers} if leg.keys else {}
        holders = heapq.nlargest(NUM_CACHED, cached, key=cached.__getitem__)
        drawn = self._draw(workers, NUM_DRAWN)
        return [*dict.fromkeys([*(w for w in holders if cached[w]), *drawn])]

    def _pick_in_turn(self, workers: Sequence[W]) -> W:
        drawn = self._draw(workers, NUM_IN_TURN)
        chosen = min(drawn, key=lambda worker: self._num_turns.get(worker, 0))
        self._num_turns[chosen] = self._num_turns.get(chosen, 0) + 1
        return chosen

    def _draw(self, workers: Sequence[W], num: int) -> list[W]:
        return self._rng.sample(workers, min(num, len(workers)))

    def _one_of_best(self, costs: Sequence[tuple[float, T]]) -> T:
        best = heapq.nsmallest(2, costs, key=itemgetter(0))
        is_tie = best[-1][0] - best[0][0] < TIE
        return self._rng.choice(best)[1] if is_tie else best[0][1]


def prefill_cost(worker: PrefillModel, leg: Leg) -> float:
    """Return what a prompt costs there, in tokens to compute."""
    num_missing = leg.request.num_prompt_tokens - _num_cached(worker, leg)
    # Half of a step is still to come.
    num_waiting = worker.num_waiting_tokens + worker.step_num_tokens / 2
    return num_missing + num_waiting * QUEUE_WEIGHT


def decode_cost(worker: DecodeModel, leg: Leg) -> float:
    """Return what a request costs there, in tokens to compute."""
    num_missing = leg.request.num_prompt_tokens - _num_cached(worker, leg)
    num_lacking = max(0, num_missing - worker.pool.num_free * worker.pool.block_size)
    return (
        worker.num_in_flight * DECODE_WEIGHT
        + num_lacking * ROOM_WEIGHT
        + num_missing * TRANSFER_WEIGHT
    )


def _num_cached(worker: WorkerModel, leg: Leg) -> int:
    return worker.pool.num_cached_tokens(leg.keys, leg.request.num_prompt_tokens)


def _load(worker: WorkerModel) -> int:
    return worker.num_in_flight
