"""What each tenant may ask for, on generated schedules against a simple model of it."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from pdserve_common.errors import InvalidRequestError, OverloadedError
from pdserve_common.metrics.quotas import MAX_NAMES, QUOTA_OUTCOMES, QuotaMetrics
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import EngineCoreRequest, Generate, Pool
from pdserve_common.types.pooling_params import PoolingParams
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.requests.input.input_processor import ProcessedInput
from pdserve_router.requests.tenants.fair_queue import FairQueue
from pdserve_router.requests.tenants.part_slots import PartSlots
from pdserve_router.requests.tenants.quotas import Admission, Quotas, Reservation
from pdserve_router.requests.tenants.tenant_account import (
    UNSET_MAX_TOKENS,
    RateLimitError,
    TenantLimits,
    duration_text,
)
from pdserve_router.requests.tenants.token_bucket import TokenBucket
from support.clock import Clock

NAME = "alice"
# Of times and sizes that floats have exactly: the model is then the same to the bit.
TICK_S = Fraction(1, 8)
SIZES = st.integers(1, 40).map(lambda number: 15 * number)


@dataclass(frozen=True)
class Step:
    """One call, after a while."""

    wait: int
    num_prompts: int
    num_prompt_tokens: int
    max_tokens: int
    # What of max_tokens it uses; None: it is not sent for want of a worker.
    num_used: int | None
    # How many of those that run have ended before it.
    num_ended: int


@st.composite
def steps(draw: st.DrawFn) -> Step:
    max_tokens = draw(st.integers(1, 200))
    return Step(
        wait=draw(st.sampled_from([0, 0, 1, 5, 40, 500])),
        num_prompts=draw(st.sampled_from([1, 1, 1, 2, 5])),
        num_prompt_tokens=draw(st.integers(1, 100)),
        max_tokens=max_tokens,
        num_used=draw(st.none() | st.integers(0, max_tokens)),
        num_ended=draw(st.integers(0, 3)),
    )


def processed(
    num_prompt_tokens: int,
    max_tokens: int,
    *,
    is_set: bool = True,
    priority: int = 0,
    **params: Any,
) -> ProcessedInput:
    return ProcessedInput(
        core_request=EngineCoreRequest(
            request_id="r",
            external_req_id="r",
            prompt_token_ids=(1,) * num_prompt_tokens,
            task=Generate(SamplingParams(max_tokens=max_tokens, **params)),
            eos_token_id=None,
            arrival_time=0.0,
            priority=priority,
        ),
        has_max_tokens=is_set,
        arrival_ns=0,
        tokenize_start_ns=0,
        tokenize_end_ns=0,
    )


def reserve(
    admission: Admission,
    requests: Sequence[ProcessedInput],
    *,
    num_slots: int = 1000,
    slots: PartSlots | None = None,
) -> list[Reservation]:
    admission.reserve(requests, num_slots=num_slots, slots=slots)
    return turns(admission, requests)


def turns(admission: Admission, requests: Sequence[ProcessedInput]) -> list[Reservation]:
    """Without an event loop: nobody waits."""
    reservations: list[Reservation] = []
    for index, request in enumerate(requests):
        with pytest.raises(StopIteration) as end:
            admission.turn(index, request).send(None)
        reservations.append(end.value.value)
    return reservations


class Bench:
    """Quotas of one tenant, on a clock that the test moves."""

    def __init__(self, *, num_parts: int = 1, **limits: int | None) -> None:
        self.clock = Clock()
        self.registry = CollectorRegistry()
        self.limits: Mapping[str, TenantLimits] = {NAME: TenantLimits(name=NAME, **limits)}
        self.quotas = Quotas(
            lambda: self.limits,
            num_parts=num_parts,
            turns=FairQueue(lambda: math.inf, Runtime()),
            metrics=QuotaMetrics(self.registry),
            clock=self.clock,
        )

    def change(self, **limits: int | None) -> None:
        self.limits = {NAME: TenantLimits(name=NAME, **limits)}

    def admit(self, tenant: str = NAME, *, num_slots: int = 1000) -> Admission:
        return self.quotas.admit(tenant, num_slots=num_slots)

    def send(
        self, *requests: ProcessedInput, tenant: str = NAME, num_slots: int = 1000
    ) -> list[Reservation]:
        """As the router does, up to the requests' beginning."""
        with self.admit(tenant, num_slots=num_slots) as admission:
            return reserve(admission, requests, num_slots=num_slots)

    def counted(self, outcome: str, name: str = NAME) -> float | None:
        labels = {"api_key": name, "outcome": outcome}
        return self.registry.get_sample_value("pdserve_api_key_requests_total", labels)

    def num_tokens(self, kind: str, name: str = NAME) -> float | None:
        labels = {"api_key": name, "kind": kind}
        return self.registry.get_sample_value("pdserve_api_key_tokens_total", labels)


class ModelBucket:
    """A leaky bucket in exact numbers: what was taken leaks out."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.level = Fraction(0)

    def wait(self, duration_s: Fraction) -> None:
        if self.size is not None:
            self.level = max(Fraction(0), self.level - duration_s * self.size / 60)

    def has(self, amount: int) -> bool:
        return self.size is None or self.level + min(amount, self.size) <= self.size

    def take(self, amount: int) -> None:
        self.level = max(Fraction(0), self.level + amount)


class Model:
    """What should happen, from the rules as docs/security.md has them."""

    def __init__(self, requests: int | None, tokens: int | None, running: int | None) -> None:
        self.requests, self.tokens = ModelBucket(requests), ModelBucket(tokens)
        self.max_running = running
        self.num_running = 0

    def outcome(self, step: Step) -> str:
        """Take what a step takes, and return how it ends."""
        if self.max_running is not None and self.num_running >= self.max_running:
            return "max_concurrent_requests"
        if not self.requests.has(1):
            return "requests_per_minute"
        if not self.tokens.has(1):
            return "tokens_per_minute"
        self.requests.take(1)
        more = step.num_prompts - 1
        for limit in (self.requests.size, self.max_running):
            if limit is not None and step.num_prompts > limit:
                return "invalid"
        num_tokens = step.num_prompts * (step.num_prompt_tokens + step.max_tokens)
        if self.tokens.size is not None and num_tokens > self.tokens.size:
            return "invalid"
        if self.max_running is not None and self.num_running + step.num_prompts > self.max_running:
            return "max_concurrent_requests"
        if more and not self.requests.has(more):
            return "requests_per_minute"
        if not self.tokens.has(num_tokens):
            return "tokens_per_minute"
        self.requests.take(more)
        self.tokens.take(num_tokens)
        self.num_running += step.num_prompts
        return "accepted"

    def end(self, step: Step) -> None:
        """One of its requests has ended."""
        self.num_running -= 1
        reserved = step.num_prompt_tokens + step.max_tokens
        used = 0 if step.num_used is None else step.num_prompt_tokens + step.num_used
        self.tokens.take(used - reserved)


@settings(deadline=None, max_examples=300)
@given(
    st.none() | SIZES,
    st.none() | SIZES,
    st.none() | st.integers(1, 6),
    st.lists(steps(), max_size=40),
)
def test_generated_calls_end_as_a_simple_model_says(
    num_requests: int | None,
    num_tokens: int | None,
    max_running: int | None,
    schedule: Sequence[Step],
) -> None:
    bench = Bench(
        requests_per_minute=num_requests,
        tokens_per_minute=num_tokens,
        max_concurrent_requests=max_running,
    )
    model = Model(num_requests, num_tokens, max_running)
    running: list[tuple[Step, Reservation]] = []
    for step in schedule:
        bench.clock.now_s += float(step.wait * TICK_S)
        for bucket in (model.requests, model.tokens):
            bucket.wait(step.wait * TICK_S)
        for before, reservation in running[: step.num_ended]:
            _end(before, reservation)
            model.end(before)
        del running[: step.num_ended]
        reservations, outcome = _send(bench, step)
        assert outcome == model.outcome(step)
        running += [(step, each) for each in reservations]
        _assert_headers(bench, model)
    for before, reservation in running:
        _end(before, reservation)
        _end(before, reservation)  # a request may be ended twice
        model.end(before)
    _assert_headers(bench, model)
    bench.clock.now_s += 10_000
    full = Bench(requests_per_minute=num_requests, tokens_per_minute=num_tokens)
    assert bench.quotas.headers(NAME) == full.quotas.headers(NAME), "what was taken comes back"
    assert model.num_running == 0


def _send(bench: Bench, step: Step) -> tuple[list[Reservation], str]:
    requests = [processed(step.num_prompt_tokens, step.max_tokens)] * step.num_prompts
    before = {outcome: bench.counted(outcome) or 0 for outcome in QUOTA_OUTCOMES}
    try:
        reservations = bench.send(*requests)
    except InvalidRequestError as error:
        return [], _invalid(error)
    except RateLimitError as error:
        (refused,) = (each for each in QUOTA_OUTCOMES if bench.counted(each) != before[each])
        return [], _refused(error, refused)
    assert bench.counted("accepted") == before["accepted"] + len(requests)
    return reservations, "accepted"


def _invalid(error: InvalidRequestError) -> str:
    assert error.field in ("prompt", "max_tokens")
    return "invalid"


def _refused(error: RateLimitError, limit: str) -> str:
    assert error.retry_after_ms is not None
    assert 1 <= error.retry_after_ms <= 600_000
    assert error.message.startswith(limit)
    return limit


def _end(step: Step, reservation: Reservation) -> None:
    if step.num_used is None:
        reservation.settle()
    else:
        reservation.settle(
            num_prompt_tokens=step.num_prompt_tokens, num_output_tokens=step.num_used
        )


def _assert_headers(bench: Bench, model: Model) -> None:
    headers = bench.quotas.headers(NAME)
    for kind, bucket in (("requests", model.requests), ("tokens", model.tokens)):
        if bucket.size is None:
            assert f"x-ratelimit-limit-{kind}" not in headers
            continue
        assert headers[f"x-ratelimit-limit-{kind}"] == str(bucket.size)
        left = max(0, math.floor(bucket.size - bucket.level))
        assert headers[f"x-ratelimit-remaining-{kind}"] == str(left)
        reset_s = bucket.level * 60 / bucket.size
        assert headers[f"x-ratelimit-reset-{kind}"] == duration_text(float(reset_s))


@settings(deadline=None, max_examples=200)
@given(SIZES, st.lists(st.tuples(st.integers(0, 200), st.integers(1, 5)), max_size=60))
def test_no_span_of_time_has_more_than_a_bucket_and_what_flows_into_it(
    size: int, arrivals: Sequence[tuple[int, int]]
) -> None:
    clock = Clock()
    bucket = TokenBucket(clock)
    bucket.resize(size)
    taken: list[tuple[Fraction, int]] = []
    now = Fraction(0)
    for wait, amount in arrivals:
        now += wait * TICK_S
        clock.now_s = float(now)
        # By the definition, over every span that ends now.
        most = max(
            (
                sum(each for at, each in taken if at >= begin) - (now - begin) * size / 60
                for begin, _ in taken
            ),
            default=0,
        )
        fits = max(most, 0) + amount <= size
        assert (bucket.wait_s(amount) == 0) == (fits or amount > size)
        if fits:
            bucket.take(amount)
            taken.append((now, amount))


@settings(deadline=None)
@given(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(0, 10**9))
def test_who_waits_as_long_as_told_gets_it(size: int, amount: int, taken: int) -> None:
    clock = Clock()
    bucket = TokenBucket(clock)
    bucket.resize(size)
    bucket.take(taken)
    wait_s = bucket.wait_s(amount)
    assert 0 <= wait_s <= 60 * (1 + taken / size)
    clock.now_s += math.ceil(1000 * wait_s) / 1000
    assert bucket.wait_s(amount) == 0


def test_limits_that_change_leave_what_was_used() -> None:
    bench = Bench(requests_per_minute=10)
    for _ in range(6):
        bench.send(processed(1, 1))
    bench.change(requests_per_minute=4)
    with pytest.raises(RateLimitError, match="is 4, 0 are left, 1 are needed"):
        bench.send(processed(1, 1))
    bench.change(requests_per_minute=7)
    bench.send(processed(1, 1))
    bench.change()
    for _ in range(100):
        bench.send(processed(1, 1))
    assert bench.quotas.headers(NAME) == {}


def test_a_call_that_is_in_is_not_stopped_by_limits_that_fall_meanwhile() -> None:
    bench = Bench(requests_per_minute=10, max_concurrent_requests=5)
    bench.send(processed(1, 1))
    with bench.admit() as admission:
        bench.change(requests_per_minute=1, max_concurrent_requests=1)
        with pytest.raises(RateLimitError):
            bench.admit()
        assert len(reserve(admission, [processed(1, 1)])) == 1


def test_a_call_that_fails_gives_all_back_but_its_request() -> None:
    bench = Bench(requests_per_minute=10, tokens_per_minute=100, max_concurrent_requests=1)

    def fail(admission: Admission, *, reserves: bool) -> None:
        with admission:
            if reserves:
                reserve(admission, [processed(50, 50)])
            raise ZeroDivisionError

    for number, reserves in enumerate([True, False, True], 1):
        with pytest.raises(ZeroDivisionError):
            fail(bench.admit(), reserves=reserves)
        headers = bench.quotas.headers(NAME)
        assert headers["x-ratelimit-remaining-requests"] == str(10 - number)
        assert headers["x-ratelimit-remaining-tokens"] == "100"


def test_what_can_never_fit_is_refused_by_its_field() -> None:
    bench = Bench(
        requests_per_minute=3, tokens_per_minute=100, max_concurrent_requests=2, best_priority=0
    )
    for requests, message, field in (
        ([processed(101, 1)], "prompt has 101 tokens, at most 100 per minute", "prompt"),
        ([processed(50, 51)], "max_tokens is 51: with the prompt .* 101 tokens", "max_tokens"),
        ([processed(10, 30, n=4)], "max_tokens is 30: with the prompt .* 130", "max_tokens"),
        ([processed(1, 1, priority=-1)], "priority is -1, must be at least 0", "priority"),
        ([processed(1, 1)] * 3, "prompt has 3 prompts, at most 2 concurrent", "prompt"),
    ):
        with pytest.raises(InvalidRequestError, match=message) as error:
            bench.send(*requests)
        assert error.value.field == field
        bench.clock.now_s += 60
    assert bench.counted("tokens_per_minute") == 0


def test_an_answer_of_unknown_length_is_let_in_and_paid_for_afterwards() -> None:
    size = 2 * UNSET_MAX_TOKENS
    bench = Bench(tokens_per_minute=size)
    first = bench.send(processed(10, 100_000, is_set=False))
    assert bench.quotas.headers(NAME)["x-ratelimit-remaining-tokens"] == str(
        size - UNSET_MAX_TOKENS - 10
    )
    first[0].settle(num_prompt_tokens=10, num_output_tokens=3 * size)
    with pytest.raises(RateLimitError) as error:
        bench.admit()
    # A debt of two minutes and of the prompt.
    assert error.value.retry_after_ms is not None
    assert 120_000 < error.value.retry_after_ms < 121_000
    # More than the limit at once by this guess, not by what anybody has asked for.
    bench.clock.now_s += 300
    bench.send(processed(10, 100_000, is_set=False, n=4))


def test_several_routers_share_the_limits_between_them() -> None:
    bench = Bench(
        num_parts=4, requests_per_minute=40, tokens_per_minute=1000, max_concurrent_requests=10
    )
    assert bench.quotas.headers(NAME)["x-ratelimit-limit-requests"] == "10"
    # One that is larger than this router's part takes all of it, and what comes.
    bench.send(processed(500, 500))[0].settle(num_prompt_tokens=500, num_output_tokens=500)
    with pytest.raises(RateLimitError, match="is 250 at this router") as error:
        bench.send(processed(1, 1))
    assert error.value.retry_after_ms is not None
    assert 180_000 < error.value.retry_after_ms < 181_000
    bench.clock.now_s += 600
    for _ in range(3):
        bench.send(processed(1, 1))
    with pytest.raises(RateLimitError, match="max_concurrent_requests of this API key is 3"):
        bench.send(processed(1, 1))


def vector() -> ProcessedInput:
    request = processed(3, 1)
    pooled = replace(request.core_request, task=Pool(PoolingParams(task="embed")))
    return replace(request, core_request=pooled)


def test_a_part_that_ends_leaves_its_slot_to_the_next_of_its_call() -> None:
    bench = Bench(max_concurrent_requests=2)
    with PartSlots() as slots:
        slots.num_to_follow = 2
        with bench.admit() as admission:
            (part,) = reserve(admission, [vector()], slots=slots)
        bench.send(processed(1, 1))
        for _ in range(2):
            part.settle(num_prompt_tokens=3)
            with pytest.raises(RateLimitError, match="max_concurrent_requests"):
                bench.send(processed(1, 1))
            with bench.quotas.admit_part(NAME, slots) as admission:
                admission.reserve_part(vector(), slots)
                (part,) = turns(admission, [vector()])
        # Nobody follows the last one.
        part.settle(num_prompt_tokens=3)
        (other,) = bench.send(processed(1, 1))
        other.settle()
        slots.num_to_follow = 1
        with bench.admit() as admission:
            (part,) = reserve(admission, [vector()], slots=slots)
        part.settle()
        with pytest.raises(RateLimitError, match="max_concurrent_requests"):
            bench.send(processed(1, 1))
    # A call that ends early gives back what it has kept.
    bench.send(processed(1, 1))


def test_a_slot_of_another_account_is_not_taken() -> None:
    """A key leaves the file and comes back while a call of its tenant runs."""
    bench = Bench(max_concurrent_requests=1)
    with PartSlots() as slots:
        slots.num_to_follow = 1
        with bench.admit() as admission:
            (part,) = reserve(admission, [vector()], slots=slots)
        part.settle()
        bench.limits = {}
        bench.quotas.headers(NAME)
        bench.change(max_concurrent_requests=1)
        with bench.quotas.admit_part(NAME, slots) as admission:
            admission.reserve_part(vector(), slots)
            (part,) = turns(admission, [vector()])
        with pytest.raises(RateLimitError, match="max_concurrent_requests"):
            bench.send(processed(1, 1))
        part.settle()
    (other,) = bench.send(processed(1, 1))
    with pytest.raises(RateLimitError, match="max_concurrent_requests"):
        bench.send(processed(1, 1))
    other.settle()


def test_tenants_without_limits_are_counted_and_others_are_not() -> None:
    bench = Bench()
    for tenant in (NAME, "nobody"):
        (reservation,) = bench.send(processed(3, 9), tenant=tenant)
        reservation.settle(num_prompt_tokens=3, num_output_tokens=5)
    assert bench.counted("accepted") == 1
    assert (bench.num_tokens("prompt"), bench.num_tokens("output")) == (3, 5)
    assert bench.counted("accepted", "nobody") is None
    assert bench.counted("accepted", "other") == 0


def test_a_tenants_waiting_requests_leave_slots_for_others() -> None:
    bench = Bench()
    bench.limits = {name: TenantLimits(name=name) for name in (NAME, "bob", "carol")}
    waiting: dict[str, list[Reservation]] = {}
    num_slots = 1024
    for name in bench.limits:
        waiting[name] = []
        with contextlib.suppress(OverloadedError):
            while True:
                waiting[name] += bench.send(processed(1, 1), tenant=name, num_slots=num_slots)
                num_slots -= 1
    assert [len(each) for each in waiting.values()] == [768, 192, 48]
    with pytest.raises(OverloadedError, match="at most 48 may while 16 slots are left"):
        bench.send(processed(1, 1), tenant="carol", num_slots=num_slots)
    for each in waiting[NAME]:
        each.note_token()
        each.note_token()
    bench.send(*[processed(1, 1)] * 100, num_slots=num_slots + 768)
    with pytest.raises(OverloadedError):
        bench.send(*[processed(1, 1)] * 100, num_slots=50)


def test_names_in_metrics_are_bounded() -> None:
    bench = Bench()
    names = [f"name-{number:04}" for number in range(3 * MAX_NAMES)]
    bench.limits = {name: TenantLimits(name=name) for name in names}
    with ExitStack() as stack:
        for name in names:
            reserve(stack.enter_context(bench.admit(name)), [processed(1, 1)])
    samples = [
        sample
        for family in bench.registry.collect()
        for sample in family.samples
        if sample.name == "pdserve_api_key_requests_total"
    ]
    assert len(samples) == (MAX_NAMES + 1) * len(QUOTA_OUTCOMES)
    assert sum(each.value for each in samples) == len(names)
    assert bench.counted("accepted", "other") == len(names) - (MAX_NAMES - 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0201, "21ms"),
        (0.9995, "1s"),
        (1, "1s"),
        (8.64, "8.64s"),
        (59.99, "59.99s"),
        (59.999, "1m0s"),
        (119.7, "2m0s"),
        (360, "6m0s"),
    ],
)
def test_durations_read_as_openais(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
