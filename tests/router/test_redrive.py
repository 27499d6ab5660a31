"""The queue of requests that are sent again, on the event loop that routers run on."""

import asyncio
import dataclasses
import itertools
import math
import time
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from pdserve_common.errors import NoWorkerError
from pdserve_common.limits.validation import MAX_ATTEMPT
from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import (
    EngineCoreRequest,
    EngineError,
    ErrorCode,
    Generate,
    SchedulerStats,
    WorkerRole,
)
from pdserve_common.types.lora import LoRARequest
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.requests import redrive
from pdserve_router.requests.redrive import (
    SMALL_NUM_TOKENS,
    TOKENS_PER_REDRIVE,
    Recovery,
    RedriveQueue,
)
from pdserve_router.workers.model_version import ModelVersion
from pdserve_router.workers.routing.route_chooser import Route
from support.clock import Clock
from support.fake_worker import engine_info
from support.stub_worker import StubWorker
from support.waiting import until
from support.work import counted_work


class NobodyPool:
    """A pool without workers."""

    prefill = decode = answering = ()

    def route(
        self, request: EngineCoreRequest, *, versions: object, exclude: object, session: str
    ) -> Route:
        raise NoWorkerError("nobody is here")

    def last_served_at(self, versions: object, *, adapter: str = "") -> float:
        return -math.inf


@dataclasses.dataclass(eq=False)
class LostRequest:
    """A Redrive that only notes its end."""

    core_request: EngineCoreRequest
    recovery: Recovery = dataclasses.field(default_factory=Recovery)
    begun_versions: set[ModelVersion] = dataclasses.field(default_factory=set)
    session: str = ""
    given_up: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def next_request(self) -> EngineCoreRequest:
        return self.core_request

    def resend(self, route: Route) -> None:
        raise AssertionError("there is nobody to send it to")

    def give_up(self, error: EngineError | None = None) -> None:
        self.given_up.set()

    def on_defect(self) -> None:
        raise AssertionError("nothing was tried")


L = TypeVar("L", bound=LostRequest)


def lost_request(name: str, kind: type[L] = LostRequest) -> L:
    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=(1, 2),
        task=Generate(SamplingParams()),
        deadline=time.monotonic() + 60,
    )
    lost = kind(request)
    lost.recovery.errors[object()] = EngineError(  # type: ignore[index]
        code=ErrorCode.ENGINE_DEAD, message="gone", is_retryable=True
    )
    lost.recovery.route = Route(decode=object())  # type: ignore[arg-type]
    return lost


def worker(role: WorkerRole, step_tokens: int = 1) -> Any:
    info = engine_info(role, vocab_size=100, max_num_batched_tokens=step_tokens)
    return StubWorker(role, info=info)


class OnePairPool:
    """A pool of one pair."""

    def __init__(self, *, step_tokens: int) -> None:
        self.prefill = (worker(WorkerRole.PREFILL, step_tokens),)
        self.decode = self.answering = (worker(WorkerRole.DECODE, step_tokens),)

    def route(
        self, request: EngineCoreRequest, *, versions: object, exclude: object, session: str
    ) -> Route:
        return Route(prefill=self.prefill[0], decode=self.decode[0])  # type: ignore[arg-type]


class SentRequest(LostRequest):
    """A Redrive whose next attempt is no more than noted."""

    is_sent = False

    def resend(self, route: Route) -> None:
        self.is_sent = True


class Queue(RedriveQueue):
    """One that knows all that have come."""

    def __init__(
        self,
        pool: Any,
        *,
        max_redrives: int = 3,
        wait_s: float = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            pool,
            metrics=RouterMetrics(CollectorRegistry()),
            max_redrives=max_redrives,
            wait_s=wait_s,
            runtime=Runtime(now=clock),
        )
        self.added: list[Any] = []

    def add(self, redrive: Any, **options: Any) -> None:
        self.added.append(redrive)
        super().add(redrive, **options)


@pytest.fixture
async def make_queue() -> AsyncIterator[Callable[..., Queue]]:
    """Queues of which nothing is left at the end."""
    queues: list[Queue] = []

    def make(*args: Any, **options: Any) -> Queue:
        queues.append(Queue(*args, **options))
        return queues[-1]

    yield make
    for queue in queues:
        for request in queue.added:
            queue.discard(request)


async def add_all(queue: RedriveQueue, *requests: LostRequest) -> None:
    """Have them come, and the queue look at them once."""
    for request in requests:
        queue.add(request)
    await asyncio.sleep(0.01)


async def test_many_short_requests_take_work_in_proportion(make_queue) -> None:
    pool = OnePairPool(step_tokens=1 << 20)
    queue = make_queue(pool)
    num_calls = []
    for number in (500, 1000):
        requests = [lost_request(f"request-{number}-{i}", SentRequest) for i in range(number)]
        with counted_work() as work:
            await add_all(queue, *requests)
        num_calls.append(work.num_calls)
        assert all(request.is_sent for request in requests)
        for request in requests:
            queue.on_token(request)
    # Four times if each looked at all that were sent before.
    assert num_calls[1] < 3 * num_calls[0]
    worker = weakref.ref(pool.prefill[0])
    pool.prefill = ()
    assert worker() is None, "a worker that has left is kept"


@pytest.mark.parametrize(
    ("num_waiting_tokens", "num_routers", "num_sent"),
    [(0, 1, 4), (0, 2, 2), (0, 3, 1), (0, 100, 1), (80, 1, 10), (80, 2, 5)],
)
async def test_routers_share_what_they_may_send_again(
    make_queue, num_waiting_tokens, num_routers, num_sent
) -> None:
    """Of one step of 8 tokens or a quarter of P's queue, in requests of 2; one is always let on."""
    pool = OnePairPool(step_tokens=8)
    pool.prefill[0].stats = SchedulerStats(num_waiting_tokens=num_waiting_tokens)
    pool.prefill[0].num_routers = num_routers
    queue = make_queue(pool)
    requests = [lost_request(f"request-{i}", SentRequest) for i in range(20)]
    await add_all(queue, *requests)
    assert sum(request.is_sent for request in requests) == num_sent


async def test_those_whose_deadline_is_near_go_first(make_queue) -> None:
    queue = make_queue(OnePairPool(step_tokens=2))
    sent = []
    for number, within_s in enumerate((50, 30, 40)):
        request = lost_request(str(number), SentRequest)
        deadline = time.monotonic() + within_s
        request.core_request = dataclasses.replace(request.core_request, deadline=deadline)
        request.resend = lambda route, request=request: sent.append(request)
        queue.add(request)
    for number in range(1, 4):
        await until(lambda: len(sent) == number)  # noqa: B023
        queue.on_token(sent[-1])
    assert [request.core_request.request_id for request in sent] == ["1", "2", "0"]


async def test_what_decode_holds_blocks_of_does_not_wait_for_prefill(make_queue) -> None:
    pool = OnePairPool(step_tokens=2)
    queue = make_queue(pool)
    first, second, held = (lost_request(name, SentRequest) for name in ("a", "b", "c"))
    held.recovery.holder = pool.decode[0]  # type: ignore[assignment]
    await add_all(queue, first, second, held)
    assert [request.is_sent for request in (first, second, held)] == [True, False, True]


async def test_what_is_spent_is_given_up_in_time_whoever_waits_before_it(make_queue) -> None:
    pool = OnePairPool(step_tokens=2)
    queue = make_queue(pool)
    first, second, spent = (lost_request(name, SentRequest) for name in ("a", "b", "c"))
    spent.recovery.num_spent = 3
    for request in (first, second):
        queue.add(request)
    queue.add(spent, delay_s=0.05)
    await asyncio.sleep(0.01)
    assert not spent.given_up.is_set()
    await asyncio.wait_for(spent.given_up.wait(), 20)
    assert [request.is_sent for request in (first, second, spent)] == [True, False, False]
    assert spent not in queue


async def test_one_that_has_to_wait_for_longer_holds_nobody_up(make_queue) -> None:
    pool = OnePairPool(step_tokens=8)
    queue = make_queue(pool)
    soon, later = lost_request("a", SentRequest), lost_request("b", SentRequest)
    queue.add(soon)
    queue.add(later, delay_s=60)
    await asyncio.sleep(0.01)
    assert (soon.is_sent, later.is_sent) == (True, False)


async def test_a_token_lets_the_next_one_on_at_once(
    make_queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redrive, "TICK_S", 60.0)
    pool = OnePairPool(step_tokens=2)
    queue = make_queue(pool)
    first, second = lost_request("a", SentRequest), lost_request("b", SentRequest)
    await add_all(queue, first, second)
    assert (first.is_sent, second.is_sent) == (True, False)
    queue.on_token(first)
    await asyncio.sleep(0.01)
    assert second.is_sent


class NobodyListedPool(NobodyPool):
    """A pool whose only decode worker has left the list, with what runs there."""

    def __init__(self) -> None:
        self.leaving = worker(WorkerRole.DECODE, 2)


async def test_what_decode_holds_blocks_of_goes_on_there_after_it_has_left_the_list(
    make_queue,
) -> None:
    pool = NobodyListedPool()
    queue = make_queue(pool, wait_s=0.1)
    held, other = (lost_request(name, SentRequest) for name in ("a", "b"))
    held.recovery.holder = pool.leaving  # type: ignore[assignment]
    for request in (held, other):
        queue.add(request)
    await asyncio.wait_for(other.given_up.wait(), 20)
    assert (held.is_sent, held.given_up.is_set(), other.is_sent) == (True, False, False)


async def test_what_decode_holds_just_enough_of_goes_on_there_while_nobody_is_listed(
    make_queue,
) -> None:
    pool = NobodyListedPool()
    queue = make_queue(pool, wait_s=60)
    request = lost_request("a", SentRequest)
    request.core_request = dataclasses.replace(request.core_request, prompt_token_ids=(1,) * 1000)
    request.recovery.holder = pool.leaving  # type: ignore[assignment]
    request.recovery.num_confirmed_tokens = 1000 - SMALL_NUM_TOKENS
    queue.add(request)
    await asyncio.sleep(0.01)
    assert request.is_sent


async def test_what_decode_holds_too_little_of_waits_while_nobody_is_listed(make_queue) -> None:
    pool = NobodyListedPool()
    queue = make_queue(pool, wait_s=0.1)
    request = lost_request("a", LongRequest)
    request.core_request = dataclasses.replace(request.core_request, prompt_token_ids=(1,) * 1000)
    request.recovery.holder = pool.leaving  # type: ignore[assignment]
    request.recovery.num_confirmed_tokens = 480
    queue.add(request)
    await asyncio.wait_for(request.given_up.wait(), 20)


class DefectiveRequest(LostRequest):
    """A Redrive that cannot be sent."""

    is_ended = False

    def resend(self, route: Route) -> None:
        raise ValueError("broken on purpose")

    def on_defect(self) -> None:
        self.is_ended = True


async def test_a_defect_of_one_request_ends_it_and_stops_no_other(make_queue) -> None:
    pool = OnePairPool(step_tokens=8)
    queue = make_queue(pool)
    broken, good = lost_request("a", DefectiveRequest), lost_request("b", SentRequest)
    await add_all(queue, broken, good)
    assert (broken.is_ended, good.is_sent) == (True, True)
    assert broken not in queue


class LongRequest(LostRequest):
    """A Redrive whose next attempt takes long to make."""

    @property
    def next_request(self) -> EngineCoreRequest:
        raise AssertionError("there is nobody to send it to")


async def test_while_nobody_is_there_no_attempt_is_made(make_queue) -> None:
    queue = make_queue(NobodyPool(), wait_s=0.1)
    request = lost_request("a", LongRequest)
    queue.add(request)
    await asyncio.wait_for(request.given_up.wait(), 20)


async def lose_several_at_once() -> None:
    queue = Queue(NobodyPool(), wait_s=0.1)
    requests = [lost_request(f"request-{i}") for i in range(3)]
    for request, delay_s in zip(requests, (0.0, 0.2, 0.0), strict=True):
        queue.add(request, delay_s=delay_s)
    await asyncio.wait_for(asyncio.gather(*(r.given_up.wait() for r in requests)), 30)
    assert not any(request in queue for request in requests)


def test_requests_that_are_lost_together_all_get_their_turn() -> None:
    uvloop.run(lose_several_at_once())


class SecondsPool(NobodyPool):
    """Nobody is ready, and somebody was at a time."""

    served_at = 0.0
    num_asked = 0

    def last_served_at(self, versions: object, *, adapter: str = "") -> float:
        self.num_asked += 1
        return self.served_at


@pytest.mark.parametrize(("ago_s", "is_given_up"), [(0.0, False), (5.0, False), (70.0, True)])
async def test_a_request_waits_while_somebody_has_not_been_gone_for_long(
    make_queue, ago_s: float, is_given_up: bool
) -> None:
    pool, clock = SecondsPool(), Clock()
    queue = make_queue(pool, wait_s=60, clock=clock)
    request = lost_request("a")
    request.core_request = dataclasses.replace(request.core_request, deadline=clock() + 1000)
    queue.add(request)
    await until(lambda: pool.num_asked > 0)
    clock.now_s += 100
    pool.served_at = clock() - ago_s
    await until(lambda: pool.num_asked > 3 or request.given_up.is_set())
    assert request.given_up.is_set() is is_given_up


class SometimesDecodePool(OnePairPool):
    """A pool whose decode worker the test takes away; counts how often nobody was there."""

    num_asked = 0

    def last_served_at(self, versions: object, *, adapter: str = "") -> float:
        self.num_asked += 1
        return -math.inf


async def test_a_request_that_waits_for_its_turn_has_not_been_without_a_worker(make_queue) -> None:
    pool, clock = SometimesDecodePool(step_tokens=2), Clock()
    queue = make_queue(pool, wait_s=60, clock=clock)
    first, second = lost_request("a", SentRequest), lost_request("b", SentRequest)
    for request, within_s in ((first, 1000), (second, 2000)):
        request.core_request = dataclasses.replace(
            request.core_request, deadline=clock() + within_s
        )
    (decode,) = pool.decode
    decode.is_ready = False
    queue.add(second)
    await until(lambda: pool.num_asked > 0)
    clock.now_s += 30
    decode.is_ready = True
    queue.add(first)
    await until(lambda: first.is_sent)
    decode.is_ready = False
    for seconds, is_given_up in ((40, False), (60, True)):
        clock.now_s += seconds
        pool.num_asked = 0
        await until(lambda: pool.num_asked > 1 or second.given_up.is_set())
        assert second.given_up.is_set() is is_given_up
    assert not second.is_sent


def lose_again(recovery: Recovery, *, code: ErrorCode = ErrorCode.ENGINE_DEAD) -> None:
    lost = worker(WorkerRole.DECODE)
    error = EngineError(code=code, message="gone", is_retryable=True)
    recovery.add(Route(decode=lost), lost, error, reason="", now=0.0)  # type: ignore[arg-type]
    recovery.begin_attempt()


@pytest.mark.parametrize("code", [ErrorCode.KV_TRANSFER_FAILED, ErrorCode.KV_EXPIRED])
def test_a_handoff_that_failed_is_put_down_to_prefill_unless_decode_failed_itself(
    code: ErrorCode,
) -> None:
    recovery = Recovery()
    prefill, decode = worker(WorkerRole.PREFILL, 1), worker(WorkerRole.DECODE, 1)
    route = Route(prefill=prefill, decode=decode)  # type: ignore[arg-type]
    for each, blamed in ((code, prefill), (ErrorCode.ENGINE_DEAD, decode)):
        error = EngineError(code=each, message="gone", is_retryable=True)
        recovery.add(route, decode, error, reason="", now=0.0)  # type: ignore[arg-type]
        found: frozenset[object] = recovery.blamed
        assert found == {blamed}


def test_progress_gives_redrives_back_and_drains_take_none() -> None:
    recovery = Recovery()
    for _ in range(20):
        lose_again(recovery, code=ErrorCode.DRAINING)
    assert (recovery.num_redrives, recovery.num_spent) == (20, 0)
    for _ in range(3):
        lose_again(recovery)
        recovery.note_tokens(TOKENS_PER_REDRIVE - 1)
    assert recovery.num_spent == 3, "no stretch was long enough"
    recovery.note_tokens(1)
    assert recovery.num_spent == 2
    recovery.note_tokens(5 * TOKENS_PER_REDRIVE)
    assert recovery.num_spent == 0
    lose_again(recovery)
    assert recovery.num_spent == 1, "progress is not saved up"


def wait_of(recovery: Recovery, worker: object) -> float:
    """For how long the worker is not asked again, in steps of 0.5 s."""
    waits = (step / 2 for step in itertools.count(1))
    return next(s for s in waits if worker not in recovery.not_yet(recovery.lost_at + s))


def test_a_worker_that_is_no_use_again_and_again_is_asked_less_and_less() -> None:
    recovery = Recovery()
    waits = []
    lost = worker(WorkerRole.DECODE)
    for _ in range(7):
        error = EngineError(code=ErrorCode.DRAINING, message="gone", is_retryable=True)
        recovery.add(Route(decode=lost), lost, error, reason="", now=0.0)  # type: ignore[arg-type]
        waits.append(wait_of(recovery, lost))
        recovery.begin_attempt()
    assert waits == [0.5, 1, 2, 4, 8, 8, 8]
    recovery.note_tokens(1)
    recovery.add(Route(decode=lost), lost, error, reason="", now=0.0)  # type: ignore[arg-type]
    assert wait_of(recovery, lost) == 0.5, "a token came"


async def test_what_only_drains_ends_with_the_last_attempt_of_the_wire(make_queue) -> None:
    queue = make_queue(NobodyPool(), max_redrives=0, wait_s=60)
    request = lost_request("a")
    request.recovery.is_planned = True
    assert not queue.is_spent(request)
    request.recovery.num_redrives = MAX_ATTEMPT
    assert queue.is_spent(request)


@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_a_token_beside_a_refusal_for_want_of_room_costs_nothing(
    make_queue, num_tokens: int
) -> None:
    """P's first token may come behind D's word that it has no room."""
    pool, clock = OnePairPool(step_tokens=8), Clock()
    queue = make_queue(pool, max_redrives=1, clock=clock)
    lost = lost_request("a", SentRequest)
    lost.recovery.forget()
    no_room = EngineError(code=ErrorCode.OVERLOADED, message="no room", is_retryable=True)
    route = Route(prefill=pool.prefill[0], decode=pool.decode[0])
    lost.recovery.add(route, pool.decode[0], no_room, reason="overloaded", now=clock())
    if num_tokens:
        lost.recovery.note_tokens(num_tokens)
    assert not queue.is_spent(lost)
    clock.now_s += 2
    assert queue.is_spent(lost)


class OneOfTwo(LostRequest):
    """A completion whose end is the other one's as well."""

    other: "OneOfTwo"
    queue: RedriveQueue

    def give_up(self, error: EngineError | None = None) -> None:
        super().give_up(error)
        self.queue.discard(self.other)


def die_under(request: LostRequest, *workers: Any) -> None:
    """Let workers die under it, the last of them under its current attempt."""
    for lost in workers:
        error = EngineError(code=ErrorCode.ENGINE_DEAD, message="gone", is_retryable=True)
        route = Route(decode=lost)
        request.recovery.forget()
        request.recovery.add(route, lost, error, reason="", now=time.monotonic())
        lost.is_ready = False


async def test_completions_of_one_request_that_are_both_at_fault_end_together(make_queue) -> None:
    queue = make_queue(NobodyPool(), wait_s=60)
    both = [lost_request(name, OneOfTwo) for name in "ab"]
    for request, other in itertools.permutations(both):
        request.other, request.queue = other, queue
        die_under(request, worker(WorkerRole.DECODE), worker(WorkerRole.DECODE))
        queue.add(request)
    behind = lost_request("c")
    behind.recovery.num_spent = 3
    queue.add(behind)
    await asyncio.wait_for(behind.given_up.wait(), 20)
    await until(lambda: not any(request in queue for request in both))
    assert sum(request.given_up.is_set() for request in both) == 1
    assert queue._timer is None


async def test_who_has_no_attempt_left_waits_for_the_verdict_on_another_one(make_queue) -> None:
    queue = make_queue(OnePairPool(step_tokens=8), max_redrives=1)
    first, second = worker(WorkerRole.DECODE), worker(WorkerRole.DECODE)
    culprit, bystander = lost_request("a"), lost_request("b", SentRequest)
    die_under(culprit, first, second)
    die_under(bystander, second)
    bystander.recovery.num_spent = 1
    for each in (culprit, bystander):
        assert each.recovery.is_by_death
        queue.add(each)
    await until(lambda: bystander.is_sent)
    assert culprit.given_up.is_set()


async def test_who_ends_before_the_verdict_is_judged_all_the_same(make_queue) -> None:
    """A deadline, or a client that goes, must not leave the others with its deaths."""
    queue = make_queue(OnePairPool(step_tokens=8))
    first, second, third = (worker(WorkerRole.DECODE) for _ in range(3))
    culprit, bystander = lost_request("a"), lost_request("b", SentRequest)
    die_under(bystander, first, third)
    die_under(culprit, first, second, third)
    for each in (culprit, bystander):
        queue.add(each)
    queue.discard(culprit)
    await until(lambda: bystander.is_sent or bystander.given_up.is_set())
    assert bystander.is_sent


async def test_a_death_that_is_explained_is_not_held_against_another_request(make_queue) -> None:
    queue = make_queue(OnePairPool(step_tokens=8))
    first, second, third = (worker(WorkerRole.DECODE) for _ in range(3))
    culprit, bystander = lost_request("a"), lost_request("b", SentRequest)
    # It runs on elsewhere while the culprit ends another worker.
    die_under(bystander, first)
    die_under(culprit, first, second)
    queue.add(culprit)
    await until(culprit.given_up.is_set)
    die_under(bystander, third)
    queue.add(bystander)
    await until(lambda: bystander.is_sent or bystander.given_up.is_set())
    assert bystander.is_sent


@pytest.mark.parametrize("where", ["next_request", "resend", "give_up", "route", "find_at_fault"])
async def test_an_exception_anywhere_costs_one_request_at_most(
    make_queue, monkeypatch, where: str
) -> None:
    def fail(*args: object, **kwargs: object) -> Any:
        raise KeyError("broken on purpose")

    class Defective(SentRequest):
        is_ended = False

        def on_defect(self) -> None:
            self.is_ended = True
            raise ValueError("broken as well")

    pool = OnePairPool(step_tokens=8)
    queue = make_queue(pool)
    broken, good = lost_request("a", Defective), lost_request("b", SentRequest)
    if where == "next_request":
        monkeypatch.setattr(Defective, where, property(fail))
    elif where == "route":
        as_ever = pool.route
        pool.route = lambda request, **more: (  # type: ignore[method-assign]
            fail() if request is broken.core_request else as_ever(request, **more)
        )
    elif where == "find_at_fault":
        monkeypatch.setattr(redrive, where, fail)
    else:
        setattr(broken, where, fail)
        broken.recovery.num_spent = 3 if where == "give_up" else 0
    await add_all(queue, broken, good)
    await until(lambda: good.is_sent and broken not in queue)
    assert broken.is_ended is (where != "find_at_fault")
    assert broken not in queue
    later = lost_request("c", SentRequest)
    queue.on_token(good)
    await add_all(queue, later)
    assert later.is_sent


@pytest.mark.parametrize("max_redrives", [1, 3])
async def test_whoever_may_have_ended_a_worker_is_tried_alone_whatever_is_left_of_its_redrives(
    make_queue, monkeypatch, max_redrives: int
) -> None:
    monkeypatch.setattr(redrive, "REUSE_DELAY_S", 0.0)
    pool = OnePairPool(step_tokens=8)
    queue = make_queue(pool, max_redrives=max_redrives)
    dead = [worker(WorkerRole.DECODE) for _ in range(2)]
    both = [lost_request(name, SentRequest) for name in "ab"]
    for request in both:
        request.recovery.num_spent = 1
        die_under(request, *dead)
        queue.lose(request, Route(decode=dead[1]), dead[1], request.recovery.error, reason="")
        request.recovery.ended.pop()
        assert not queue.is_spent(request)
        queue.add(request)
    await until(lambda: any(request.is_sent for request in both))
    first, second = sorted(both, key=lambda each: not each.is_sent)
    assert not second.is_sent
    # D's first message came before P's.
    route = Route(prefill=pool.prefill[0], decode=pool.decode[0])
    queue.on_answer(first, route, pool.decode[0])
    await until(lambda: second.is_sent)
    assert not any(request.given_up.is_set() for request in both)


async def test_few_tokens_between_refusals_for_want_of_room_do_not_begin_the_wait_anew(
    make_queue,
) -> None:
    clock = Clock()
    queue = make_queue(NobodyPool(), wait_s=60, clock=clock)
    lost, full = lost_request("a"), worker(WorkerRole.DECODE)
    lost.recovery.forget()
    no_room = EngineError(code=ErrorCode.OVERLOADED, message="no room", is_retryable=True)

    def refuse() -> bool:
        lost.recovery.add(Route(decode=full), full, no_room, reason="", now=clock())
        is_spent = queue.is_spent(lost)
        lost.recovery.begin_attempt()
        clock.now_s += 10
        return is_spent

    for num_tokens in (1, redrive.CLEARING_TOKENS):
        num_free = 0
        while not refuse() and num_free < 50:
            num_free += 1
            lost.recovery.note_tokens(num_tokens)
        assert num_free == (6 if num_tokens == 1 else 50)
        lost.recovery.note_tokens(redrive.CLEARING_TOKENS)
    assert lost.recovery.num_spent == 0


async def test_whose_adapter_nobody_ready_holds_waits_no_longer_than_others(make_queue) -> None:
    class OthersPool(NobodyPool):
        """Who is ready lacks the adapter."""

        def may_serve_adapter(self, digest: str) -> bool:
            return True

        def last_served_at(self, versions: object, *, adapter: str = "") -> float:
            return -math.inf if adapter else time.monotonic()

    queue = make_queue(OthersPool(), wait_s=0.05)
    request = lost_request("a")
    lora = LoRARequest(lora_name="a", digest="a" * 64)
    request.core_request = dataclasses.replace(request.core_request, lora_request=lora)
    queue.add(request)
    await asyncio.wait_for(request.given_up.wait(), 20)
