"""The simulated router decides as the real one does, from the same state."""

import dataclasses
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_client.advisor import routing
from pdserve_client.advisor.handoff_model import DecodeModel, Handoff
from pdserve_client.advisor.routing import RoutingRules, decode_cost, prefill_cost
from pdserve_client.advisor.simulator import Simulation, Split
from pdserve_client.advisor.trace import Trace, TraceRequest
from pdserve_client.advisor.worker_model import Leg
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import SchedulerStats
from pdserve_router.workers.routing import prefix_policy, routing_policy
from pdserve_router.workers.routing.prefix_policy import PrefixRouting, RoutingWeights
from support.advisor import LIMITS, a_profile


class Worker:
    """What the router's policy looks at."""

    def __init__(self, num_cached: int, num_in_flight: int, **stats: int) -> None:
        self.num_cached = num_cached
        self.num_in_flight = num_in_flight
        self.info = SimpleNamespace(block_size=LIMITS.block_size)
        self.stats = SchedulerStats(**stats)


def simulated(num_units: int, num_prompt: int, num_cached_units: int) -> tuple[Simulation, Leg]:
    """One P and one D with so much of the prompt cached, and its leg."""
    prefix = tuple(range(num_units))
    request = TraceRequest(0.0, num_prompt, 5, prefix)
    simulation = Simulation(Trace((request, request)), a_profile(), Split(1, 1))
    keys = simulation.decode[0].pool.keys(prefix, num_prompt)
    for worker in (*simulation.prefill, *simulation.decode):
        other = Leg(9, request, keys, 5)
        worker.grow(other, num_cached_units * LIMITS.block_size)
        worker.pool.publish(other.holding, keys[:num_cached_units])
        worker.pool.free(other.holding)
    return simulation, Leg(0, request, keys, 5)


@given(
    num_units=st.integers(0, 20),
    num_more=st.integers(1, 300),
    num_cached=st.integers(0, 20),
    num_in_flight=st.integers(0, 50),
    num_held=st.integers(0, LIMITS.num_blocks - 30),
    num_waiting=st.integers(0, 5000),
    num_step=st.integers(0, 512),
)
def test_a_pair_costs_what_the_routers_policy_says(
    num_units: int,
    num_more: int,
    num_cached: int,
    num_in_flight: int,
    num_held: int,
    num_waiting: int,
    num_step: int,
) -> None:
    num_prompt = num_units * LIMITS.block_size + num_more
    num_cached = min(num_cached, num_units)
    simulation, leg = simulated(num_units, num_prompt, num_cached)
    (p,), (d,) = simulation.prefill, simulation.decode
    if num_waiting:
        # Its decode worker has no room for it.
        (full,) = simulated(0, 1, 0)[0].decode
        assert full.grow(Leg(8, leg.request, (), 5), LIMITS.num_blocks * LIMITS.block_size)
        waits = TraceRequest(0.0, num_waiting, 2)
        p.hand_over(Handoff(p, full, Leg(7, waits, (), 1), Leg(7, waits, (), 2)))
    d.num_in_flight, p.step_num_tokens = num_in_flight, num_step
    assert d.grow(Leg(8, leg.request, (), 5), num_held * LIMITS.block_size)
    real = PrefixRouting(RoutingWeights(), Runtime(now=lambda: 0.0))
    cached_tokens = num_cached * LIMITS.block_size
    cached: Any = SimpleNamespace(num_tokens=lambda worker: worker.num_cached)
    real_p: Any = Worker(
        cached_tokens,
        0,
        num_waiting_tokens=num_waiting,
        step_num_tokens=num_step,
        num_running_reqs=1,
    )
    real_d: Any = Worker(cached_tokens, num_in_flight, num_free_blocks=LIMITS.num_blocks - num_held)
    assert prefill_cost(p, leg) == num_prompt - cached_tokens + real._queue_cost(real_p)
    assert decode_cost(d, leg) == pytest.approx(real._decode_cost(real_d, num_prompt, cached))


def test_its_numbers_are_the_routers() -> None:
    weights = RoutingWeights()
    assert weights.routing_queue_weight == routing.QUEUE_WEIGHT
    assert weights.routing_decode_weight == routing.DECODE_WEIGHT
    assert weights.routing_room_weight == routing.ROOM_WEIGHT
    assert weights.routing_transfer_weight == routing.TRANSFER_WEIGHT
    assert routing.NUM_CACHED == prefix_policy.NUM_CACHED
    assert routing.NUM_DRAWN == prefix_policy.NUM_DRAWN
    assert routing.NUM_PAIRED == prefix_policy.NUM_PAIRED
    assert routing.TIE == prefix_policy.TIE
    assert routing.NUM_IN_TURN == routing_policy.NUM_IN_TURN


def reasons(trace: list[TraceRequest], **rules: int) -> Counter[str]:
    simulation = Simulation(Trace(tuple(trace)), a_profile(), Split(1, 1), RoutingRules(**rules))  # type: ignore[arg-type]
    return Counter(simulation.run().local_reasons)


def test_what_need_not_cross_the_handoff_stays_on_decode() -> None:
    prefix = tuple(range(60))
    long = TraceRequest(0.0, 1000, 5, prefix)
    assert reasons([long, TraceRequest(0.0, 1000, 1), TraceRequest(0.0, 1, 5)]) == {
        "max_tokens_1": 1,
        "short_prompt": 1,
    }
    again = TraceRequest(5.0, 1000, 5, prefix)
    assert reasons([long, again], disaggregation_threshold_tokens=100) == {"cached_prompt": 1}
    assert reasons([long, again]) == {}
    burst = [TraceRequest(0.0, 1000, 5) for _ in range(9)]
    assert reasons(burst, max_prefill_queue_tokens=2500)["prefill_queue"] > 0


@pytest.mark.parametrize("policy", routing.POLICIES)
def test_work_is_spread(policy: routing.Policy) -> None:
    trace = Trace(tuple(TraceRequest(i * 0.02, 400, 20) for i in range(200)))
    rules = RoutingRules(routing_policy=policy)
    simulation = Simulation(trace, a_profile(), Split(2, 4), rules)
    outcome = simulation.run()
    rows = [worker.num_rows for worker in outcome.decode]
    assert max(rows) < 1.3 * min(rows)


def test_a_worker_that_is_full_is_avoided() -> None:
    profile = a_profile(decode_worker=dataclasses.replace(LIMITS, num_blocks=200))
    request = TraceRequest(0.0, 1600, 5)
    simulation = Simulation(Trace((request, request)), profile, Split(1, 2))
    full, free = simulation.decode
    assert full.grow(Leg(8, request, (), 5), 150 * 16)
    router = routing.RouterModel(
        RoutingRules(), simulation.prefill, simulation.decode, random.Random(0)
    )
    chosen: set[DecodeModel] = {router.choose(Leg(0, request, (), 5)).decode for _ in range(20)}
    assert chosen == {free}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"routing_policy": "session"}, "routing_policy is 'session', must be one of prefix"),
        ({"disaggregation_threshold_tokens": -1}, "is -1, must be at least 0"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutingRules(**rules)
