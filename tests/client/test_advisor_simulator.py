"""The simulator: what must hold of every run, and queues whose answer is known."""

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_client.advisor.cost_profile import WorkerLimits
from pdserve_client.advisor.routing import POLICIES, Policy, RoutingRules
from pdserve_client.advisor.search import Goodput, Objectives, find_goodput
from pdserve_client.advisor.simulator import Outcome, Simulation, Split
from pdserve_client.advisor.trace import Trace, TraceRequest, draw_trace, parse_lengths
from support.advisor import HANDOFF, a_profile, checked_pools, poisson, server

SMALL = WorkerLimits(block_size=4, num_blocks=40, max_num_seqs=4, max_num_batched_tokens=24)

requests = st.builds(
    TraceRequest,
    arrival_s=st.floats(0, 0.5),
    num_prompt_tokens=st.integers(1, 100),
    num_output_tokens=st.integers(1, 40),
    # Chains that begin alike.
    prefix=st.tuples(st.integers(0, 2), st.integers(0, 8)).map(
        lambda t: tuple(100 * t[0] + i for i in range(t[1]))
    ),
)


def run(trace: Trace, split: Split, **options: object) -> Outcome:
    profile = options.pop("profile", a_profile())
    return Simulation(trace, profile, split, **options).run()  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=25),
    st.sampled_from([Split(0, 1), Split(0, 2), Split(1, 1), Split(2, 1), Split(1, 2)]),
    st.sampled_from(POLICIES),
    st.sampled_from([0, 30]),
    st.sampled_from([8, 16]),
    st.sampled_from([24, 3]),
)
def test_each_request_gets_its_tokens_and_pools_are_never_overdrawn(
    drawn: list[TraceRequest],
    split: Split,
    policy: Policy,
    threshold: int,
    unit_tokens: int,
    step_tokens: int,
) -> None:
    limits = dataclasses.replace(SMALL, max_num_batched_tokens=step_tokens)
    trace = Trace(tuple(sorted(drawn, key=lambda r: r.arrival_s)), unit_tokens)
    rules = RoutingRules(
        routing_policy=policy,
        disaggregation_threshold_tokens=threshold,
        max_prefill_queue_tokens=threshold * 5,
    )
    with checked_pools() as pools:
        simulation = Simulation(
            trace, a_profile(decode_worker=limits, prefill_worker=limits), split, rules
        )
        outcome = simulation.run()
    assert [pool.num_held for pool in pools] == [0] * (split.num_prefill + split.num_decode)
    for times in outcome.times:
        assert times.num_tokens == times.request.num_output_tokens
        assert times.request.arrival_s < times.first_token_at <= times.last_token_at
    assert len(outcome.itl) == sum(r.num_output_tokens - 1 for r in trace.requests)
    assert min(outcome.itl, default=0.0) >= 0
    for worker in (*simulation.prefill, *simulation.decode):
        assert worker.num_in_flight == 0
        assert worker.num_waiting_tokens == 0


@pytest.mark.parametrize("split", [Split(0, 1), Split(1, 1)])
def test_equal_prompts_are_answered_in_the_order_they_came(split: Split) -> None:
    trace = poisson(50.0, lambda rng: 600, 100)
    first = [times.first_token_at for times in run(trace, split).times]
    assert first == sorted(first)


def waits(trace: Trace, split: Split, service: Callable[[TraceRequest], float]) -> list[float]:
    """Seconds that each prompt waited, on workers that take one at a time."""
    profile = server(0.001)
    if not split.num_prefill:
        one = profile.prefill_worker
        assert one is not None
        profile = dataclasses.replace(profile, decode_worker=one)
    outcome = run(trace, split, profile=profile)
    return [
        ttft - service(times.request)
        for ttft, times in zip(outcome.ttft, outcome.times, strict=True)
    ]


def seconds(request: TraceRequest) -> float:
    return 0.001 * request.num_prompt_tokens


@pytest.mark.parametrize("split", [Split(0, 1), Split(1, 1)])
@pytest.mark.parametrize("pause_s", [0.5, 0.1, 0.04])
def test_a_d_d_1_queue_waits_as_long_as_one_can_count(split: Split, pause_s: float) -> None:
    trace = Trace(tuple(TraceRequest(i * pause_s, 100, 2) for i in range(50)))
    expected = [i * max(0.0, 0.1 - pause_s) for i in range(50)]
    assert waits(trace, split, seconds) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("split", "use"), [(Split(0, 1), 0.8), (Split(1, 1), 0.6)])
def test_an_m_d_1_queue_waits_as_pollaczek_and_khinchin_say(split: Split, use: float) -> None:
    trace = poisson(use / 0.1, lambda rng: 100, 10_000)
    expected = use * 0.1 / (2 * (1 - use))
    assert statistics.mean(waits(trace, split, seconds)) == pytest.approx(expected, rel=0.07)


def test_an_m_m_1_queue_waits_as_the_formula_says() -> None:
    trace = poisson(5.0, lambda rng: max(1, round(rng.expovariate(1 / 100))), 10_000)
    expected = 0.5 * 0.1 / (1 - 0.5)
    assert statistics.mean(waits(trace, Split(1, 1), seconds)) == pytest.approx(expected, rel=0.07)


def test_one_handoff_takes_what_its_parts_take() -> None:
    """Two chunks of 512 and 288 tokens: the first is read under the second."""
    profile = a_profile(overhead_s=0.25)
    step, handoff = profile.step, profile.handoff
    assert handoff is not None
    outcome = run(Trace((TraceRequest(0.0, 800, 3),)), Split(1, 1), profile=profile)
    prefill_s = 2 * step.prefill_base_s + step.prefill_s(512, 0) + step.prefill_s(288, 512)
    assert outcome.ttft == pytest.approx([handoff.grant_s + prefill_s + 0.25])
    first_step_s = step.decode_base_s + step.decode_s(1, 800)
    exposed_s = handoff.chunk_s + 288 * handoff.token_s
    assert list(outcome.itl) == pytest.approx(
        [
            exposed_s + handoff.admit_s + first_step_s,
            step.decode_base_s + step.decode_s(1, 801),
        ]
    )


def test_a_prompt_beside_answers_makes_their_step_longer_only_where_workers_are_mixed() -> None:
    trace = Trace((TraceRequest(0.0, 16, 50), TraceRequest(0.2, 512, 2)))
    longest = {split: max(run(trace, split).itl) for split in (Split(0, 1), Split(1, 1))}
    step = a_profile().step
    assert longest[Split(0, 1)] > step.decode_base_s + step.prefill_s(511, 0)
    # The second token of the prompt waits for a step and takes one.
    assert longest[Split(1, 1)] < 2.5 * step.decode_base_s


def test_what_is_cached_is_not_computed_again() -> None:
    prefix = tuple(range(30))
    trace = Trace((TraceRequest(0.0, 500, 2, prefix), TraceRequest(9.0, 500, 2, prefix)))
    for split in (Split(0, 1), Split(1, 1)):
        outcome = run(trace, split)
        step = a_profile().step
        # 30 units of 16 tokens.
        expected = step.prefill_base_s + step.prefill_s(20, 480)
        expected += HANDOFF.grant_s if split.num_prefill else 0.0
        assert outcome.ttft[1] == pytest.approx(expected)
        assert outcome.decode[0].num_cached_tokens == 480


def test_a_full_pool_preempts_and_loses_nothing() -> None:
    trace = Trace(tuple(TraceRequest(0.0, 20, 60) for _ in range(8)))
    profile = a_profile(decode_worker=SMALL, prefill_worker=SMALL)
    outcome = run(trace, Split(0, 1), profile=profile)
    assert outcome.decode[0].num_preemptions > 0
    assert outcome.peak_kv_share > 0.9


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_replays(policy: Policy) -> None:
    trace = poisson(40.0, lambda rng: rng.randint(1, 900), 200)
    rules = RoutingRules(routing_policy=policy)

    def times(seed: int) -> list[float]:
        outcome = run(trace, Split(3, 3), rules=rules, seed=seed)
        return [each.last_token_at for each in outcome.times]

    assert times(1) == times(1) != times(2)


PRECISION = 0.05


def goodput(split: Split, **options: object) -> Goodput:
    trace = draw_trace(
        num_requests=150,
        rate=1.0,
        prompt_tokens=parse_lengths("lognormal:600:0.7"),
        output_tokens=parse_lengths("lognormal:40:0.5"),
        seed=3,
    )
    return find_goodput(
        split,
        lambda rate: run(trace.at_rate(rate), split, **options),
        Objectives(ttft_p99_ms=1000.0, itl_p99_ms=60.0),
        start_rate=10.0,
        precision=PRECISION,
    )


@pytest.mark.parametrize(
    "splits",
    [
        [Split(0, 1), Split(0, 2), Split(0, 4)],
        [Split(1, 1), Split(2, 1), Split(3, 1)],
        [Split(1, 1), Split(1, 2), Split(1, 3)],
        [Split(1, 1), Split(2, 2)],
    ],
    ids=["mixed", "more P", "more D", "more of both"],
)
def test_more_workers_are_no_worse(splits: list[Split]) -> None:
    rates = [goodput(split).rate for split in splits]
    assert rates[0] > 0
    for fewer, more in itertools.pairwise(rates):
        assert more > fewer * (1 - 2 * PRECISION)


def test_goodput_lies_between_what_meets_and_what_misses() -> None:
    found = goodput(Split(1, 1))
    assert found.best is not None
    assert found.above is not None
    assert found.best.is_met
    assert found.above.missed
    assert found.rate < found.above.rate <= found.rate * (1 + PRECISION)


def test_a_goal_that_nobody_meets_has_no_rate() -> None:
    trace = poisson(1.0, lambda rng: 100, 20)
    found = find_goodput(
        Split(0, 1),
        lambda rate: run(trace.at_rate(rate), Split(0, 1)),
        Objectives(ttft_p99_ms=1.0),
        start_rate=1.0,
        precision=PRECISION,
    )
    assert (found.rate, found.best) == (0.0, None)


def test_what_cannot_be_simulated_is_refused() -> None:
    trace = Trace((TraceRequest(0.0, 150, 20), TraceRequest(1.0, 1, 1)))
    with pytest.raises(ValueError, match="the profile has no handoff"):
        run(trace, Split(1, 1), profile=a_profile(handoff=None, prefill_worker=None))
    with pytest.raises(ValueError, match=r"of 170 tokens does not fit .* a decode worker \(160 "):
        run(trace, Split(0, 1), profile=a_profile(decode_worker=SMALL))
    with pytest.raises(ValueError, match="one must be a multiple of the other"):
        run(dataclasses.replace(trace, unit_tokens=24), Split(0, 1))
    with pytest.raises(ValueError, match="there is no objective"):
        Objectives(ttft_p99_ms=None, itl_p99_ms=None)
    with pytest.raises(ValueError, match="itl_p50_ms is nan, must be a number above 0"):
        Objectives(itl_p50_ms=math.nan)


def test_random_is_only_what_the_seed_says() -> None:
    """Nothing draws from the process's own generator."""
    trace = poisson(40.0, lambda rng: 100, 50)
    random.seed(1)
    before = random.getstate()
    run(trace, Split(2, 2))
    assert random.getstate() == before
