"""A trace on modelled workers: discrete events on a virtual clock. The same seed, the same result.

What is left out is listed in docs/advisor.md.
"""

import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve_client.advisor.clock import VirtualClock
from pdserve_client.advisor.cost_profile import CostProfile
from pdserve_client.advisor.handoff_model import DecodeModel, Handoff, PrefillModel
from pdserve_client.advisor.routing import LocalReason, RouterModel, RoutingRules
from pdserve_client.advisor.trace import Trace, TraceRequest
from pdserve_client.advisor.worker_model import Leg, WorkerModel, WorkerStats

# Told of progress every so many requests.
_PROGRESS_EVERY = 100


@dataclass(frozen=True, slots=True)
class Split:
    """How many workers of each role; without prefill, decode workers compute prompts too."""

    num_prefill: int
    num_decode: int

    def __post_init__(self) -> None:
        if self.num_prefill < 0 or self.num_decode < 1:
            raise ValueError(
                f"{self.num_prefill} prefill and {self.num_decode} decode workers: there must be "
                "at least 1 decode worker"
            )

    def __str__(self) -> str:
        if not self.num_prefill:
            return f"{self.num_decode} mixed"
        return f"{self.num_prefill}P + {self.num_decode}D"


@dataclass(slots=True)
class RequestTimes:
    """What became of one request, in virtual seconds."""

    request: TraceRequest
    first_token_at: float = math.nan
    last_token_at: float = math.nan
    num_tokens: int = 0


@dataclass(slots=True)
class Outcome:
    """What a simulation has shown. TTFT and ITL as a client sees them, in seconds."""

    split: Split
    times: list[RequestTimes]
    ttft: Sequence[float] = ()
    itl: "array[float]" = field(default_factory=lambda: array("d"))
    # From the first arrival to the last one, and until then each worker's seconds in steps.
    arrivals_s: float = 0.0
    prefill_busy_s: list[float] = field(default_factory=list)
    # From the first arrival to the last token.
    duration_s: float = 0.0
    local_reasons: Counter[LocalReason] = field(default_factory=Counter)
    prefill: list[WorkerStats] = field(default_factory=list)
    decode: list[WorkerStats] = field(default_factory=list)
    # Seconds that each handoff waited for decode to grant it.
    grant_waits: list[float] = field(default_factory=list)

    # The most that a decode worker held of its KV blocks at a time.
    peak_kv_share: float = 0.0

    @property
    def prefill_busy(self) -> float:
        """The share of time that prefill workers computed while requests came."""
        time_s = self.arrivals_s * len(self.prefill_busy_s)
        return min(1.0, sum(self.prefill_busy_s) / time_s) if time_s else 0.0

    @property
    def decode_batch(self) -> float:
        """Mean rows that decode in a step of a decode worker."""
        num_steps = sum(worker.num_steps for worker in self.decode)
        return sum(worker.num_rows for worker in self.decode) / num_steps if num_steps else 0.0


class Simulation:
    """One run of a trace on one split."""

    def __init__(
        self,
        trace: Trace,
        profile: CostProfile,
        split: Split,
        rules: RoutingRules | None = None,
        *,
        seed: int = 0,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """`on_progress` is told now and then how many requests have arrived. Raises ValueError if
        the profile has no handoff and the split needs it, or if a request fits in no worker.
        """
        if split.num_prefill and profile.handoff is None:
            raise ValueError(
                f"{split}: the profile has no handoff, it was measured without prefill workers"
            )
        self._trace, self._profile = trace, profile
        self._clock = VirtualClock()
        self._on_progress = on_progress
        self.prefill = [self._prefill_worker(f"P{i}") for i in range(split.num_prefill)]
        self.decode = [self._decode_worker(f"D{i}") for i in range(split.num_decode)]
        _check_sizes(trace, self.prefill, self.decode)
        rng = random.Random(seed)
        self._router = RouterModel(rules or RoutingRules(), self.prefill, self.decode, rng)
        self._handoffs: list[Handoff] = []
        self.outcome = Outcome(split, [RequestTimes(request) for request in trace.requests])

    def run(self) -> Outcome:
        """Run it to its end, once."""
        self._clock.at(self._trace.requests[0].arrival_s, lambda: self._arrive(0))
        self._clock.run()
        outcome = self.outcome
        unfinished = [t for t in outcome.times if t.num_tokens < t.request.num_output_tokens]
        assert not unfinished, f"{len(unfinished)} requests were left behind"
        overhead_s = self._profile.overhead_s
        outcome.ttft = [
            times.first_token_at - times.request.arrival_s + overhead_s for times in outcome.times
        ]
        outcome.duration_s = max(times.last_token_at for times in outcome.times)
        outcome.prefill = [worker.stats for worker in self.prefill]
        outcome.decode = [worker.stats for worker in self.decode]
        outcome.peak_kv_share = max(
            worker.stats.peak_blocks / worker.pool.num_blocks for worker in self.decode
        )
        outcome.grant_waits = [
            h.granted_at - h.asked_at for h in self._handoffs if h.granted_at is not None
        ]
        return outcome

    def _prefill_worker(self, name: str) -> PrefillModel:
        profile = self._profile
        limits, _ = profile.limits
        unit = self._trace.unit_tokens
        return PrefillModel(name, self._clock, profile.step, limits, unit, self._on_token)

    def _decode_worker(self, name: str) -> DecodeModel:
        profile, unit = self._profile, self._trace.unit_tokens
        args = (name, self._clock, profile.step, profile.decode_worker, unit, self._on_token)
        return DecodeModel(*args, handoff=profile.handoff)

    def _arrive(self, number: int) -> None:
        """A request comes, and the next one is due."""
        requests = self._trace.requests
        if number + 1 < len(requests):
            self._clock.at(requests[number + 1].arrival_s, lambda: self._arrive(number + 1))
        else:
            self.outcome.arrivals_s = self._clock.now
            self.outcome.prefill_busy_s = [worker.stats.busy_s for worker in self.prefill]
        if self._on_progress is not None and number % _PROGRESS_EVERY == 0:
            self._on_progress(number)
        request = requests[number]
        keys = self.decode[0].pool.keys(request.prefix, request.num_prompt_tokens)
        leg = Leg(number, request, keys, request.num_output_tokens)
        route = self._router.choose(leg)
        route.decode.num_in_flight += 1
        if route.prefill is None:
            assert route.reason is not None
            self.outcome.local_reasons[route.reason] += 1
            route.decode.add(leg)
            return
        route.prefill.num_in_flight += 1
        handoff = Handoff(route.prefill, route.decode, Leg(number, request, keys, 1), leg)
        self._handoffs.append(handoff)
        route.prefill.hand_over(handoff)

    def _on_token(self, worker: WorkerModel, leg: Leg) -> None:
        times, now = self.outcome.times[leg.number], self._clock.now
        times.num_tokens += 1
        if times.num_tokens == 1:
            times.first_token_at = now
        else:
            self.outcome.itl.append(now - times.last_token_at)
        times.last_token_at = now
        if leg.num_output == leg.num_to_generate:
            worker.num_in_flight -= 1


def _check_sizes(
    trace: Trace, prefill: Sequence[WorkerModel], decode: Sequence[WorkerModel]
) -> None:
    """Each request has to fit in a worker that is empty. Raises ValueError."""
    prompts = max(request.num_prompt_tokens for request in trace.requests)
    both = max(each.num_prompt_tokens + each.num_output_tokens for each in trace.requests)
    for what, role, num_tokens, workers in (
        ("a prompt", "prefill", prompts, prefill),
        ("a prompt and its answer", "decode", both, decode),
    ):
        for worker in workers[:1]:
            size = worker.limits.num_blocks * worker.limits.block_size
            if num_tokens > size:
                raise ValueError(
                    f"{what} of {num_tokens} tokens does not fit in the KV blocks of a {role} "
                    f"worker ({size} tokens)"
                )
