"""The contract of every RoutingPolicy, and what each promises besides."""

import dataclasses
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter

import pytest

from pdserve_common.runtime import Runtime
from pdserve_common.types.engine import EngineCoreRequest, Generate, SchedulerStats, WorkerRole
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_router.workers.routing.candidates import Candidates
from pdserve_router.workers.routing.prefix_index import MAX_LOOKED_AT, PrefixIndex, prefix_hashes
from pdserve_router.workers.routing.prefix_policy import PrefixRouting, RoutingWeights
from pdserve_router.workers.routing.route_table import RouteTable
from pdserve_router.workers.routing.routing_policy import (
    ROUTING_POLICIES,
    PowerOfTwo,
    RoundRobin,
    SessionAffinity,
)
from support.fake_worker import engine_info
from support.stub_worker import StubWorker

P, D = WorkerRole.PREFILL, WorkerRole.DECODE
REQUEST = EngineCoreRequest(
    request_id="r", prompt_token_ids=tuple(range(100)), task=Generate(SamplingParams())
)


@dataclass
class Pool:
    """A table in which everybody works with everybody of the other role."""

    table: RouteTable = field(default_factory=RouteTable)
    index: PrefixIndex = field(
        default_factory=lambda: PrefixIndex(runtime=Runtime(), role_of=attrgetter("role"))
    )
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    prefill: list[StubWorker] = field(default_factory=list)
    decode: list[StubWorker] = field(default_factory=list)

    def join(self, role: WorkerRole, **fields: object) -> StubWorker:
        own, others = (self.prefill, self.decode)[:: 1 if role is P else -1]
        worker = StubWorker(role, f"{role.name}:{len(own) + 1}", **fields)
        worker.info = engine_info(role, vocab_size=300)
        own.append(worker)
        self.table.place(worker, "weights")
        for other in others:
            self.table.link(*((worker, other) if role is P else (other, worker)))
        return worker

    def candidates(self, **limits: object) -> Candidates:
        return Candidates(self.table, "weights", index=self.index, rng=self.rng, **limits)


def make_pool(num_prefill: int, num_decode: int) -> Pool:
    pool = Pool()
    for role, num in ((P, num_prefill), (D, num_decode)):
        for _ in range(num):
            pool.join(role)
    return pool


@pytest.fixture(params=sorted(ROUTING_POLICIES))
def policy(request):
    return ROUTING_POLICIES[request.param](RoutingWeights(), Runtime())


def test_picks_the_only_pair(policy) -> None:
    pool = make_pool(1, 1)
    assert policy.pick_pair(REQUEST, pool.candidates()) == (pool.prefill[0], pool.decode[0])
    assert policy.pick_decode(REQUEST, pool.candidates()) is pool.decode[0]


def test_has_nobody_where_nobody_is(policy) -> None:
    for pool in (Pool(), make_pool(2, 0)):
        assert policy.pick_pair(REQUEST, pool.candidates()) is None
        assert policy.pick_decode(REQUEST, pool.candidates()) is None
    lonely = make_pool(0, 2)
    assert policy.pick_pair(REQUEST, lonely.candidates()) is None
    assert policy.pick_decode(REQUEST, lonely.candidates()) in lonely.decode


def test_reaches_every_worker_when_all_are_idle(policy) -> None:
    pool = make_pool(4, 4)
    pairs = [policy.pick_pair(REQUEST, pool.candidates()) for _ in range(400)]
    alone = [policy.pick_decode(REQUEST, pool.candidates()) for _ in range(400)]
    for picked in (*zip(*pairs, strict=True), alone):
        counts = Counter(worker.address for worker in picked)
        assert len(counts) == 4
        assert min(counts.values()) > 40


def test_survives_workers_that_come_and_go(policy) -> None:
    pool = make_pool(5, 5)
    for size in (5, 1, 3, 2, 5, 4):
        for workers in (pool.prefill, pool.decode):
            for place, worker in enumerate(workers):
                pool.table.place(worker, *(["weights"] if place < size else []))
        for _ in range(7):
            prefill, decode = policy.pick_pair(REQUEST, pool.candidates())
            assert prefill in pool.prefill[:size]
            assert decode in pool.decode[:size]


@pytest.mark.parametrize("num_workers", [3, 40])
def test_never_picks_who_may_not_take_it(policy, num_workers) -> None:
    pool = make_pool(num_workers, num_workers)
    allowed = {*pool.prefill[:2], *pool.decode[:2]}
    exclude = frozenset({*pool.prefill, *pool.decode} - allowed)
    for _ in range(20):
        pair = policy.pick_pair(REQUEST, pool.candidates(exclude=exclude))
        alone = policy.pick_decode(REQUEST, pool.candidates(exclude=exclude))
        assert {*pair, alone} <= allowed
    full = SchedulerStats(num_waiting_tokens=1001)
    for worker in pool.prefill[1:]:
        worker.stats = full
    for _ in range(20):
        prefill, _ = policy.pick_pair(REQUEST, pool.candidates(max_queue_tokens=1000))
        assert prefill is pool.prefill[0]
    pool.prefill[0].stats = full
    assert policy.pick_pair(REQUEST, pool.candidates(max_queue_tokens=1000)) is None


def test_takes_the_decode_worker_that_is_asked_for(policy) -> None:
    pool = make_pool(3, 9)
    asked = pool.decode[7]
    pool.table.unlink(pool.prefill[0], asked)
    for _ in range(20):
        prefill, decode = policy.pick_pair(REQUEST, pool.candidates(only_decode=asked))
        assert decode is asked
        assert prefill is not pool.prefill[0]
        assert policy.pick_decode(REQUEST, pool.candidates(only_decode=asked)) is asked


def test_looks_at_few_of_many(policy) -> None:
    class Watched(StubWorker):
        num_looks = 0

        @property
        def num_in_flight(self) -> int:
            Watched.num_looks += 1
            return 0

        @num_in_flight.setter
        def num_in_flight(self, value: int) -> None:
            pass

    pool = Pool()
    for role in (P, D):
        for _ in range(150):
            pool.join(role).__class__ = Watched
    policy.pick_pair(REQUEST, pool.candidates())
    assert Watched.num_looks <= MAX_LOOKED_AT


def test_round_robin_is_even() -> None:
    pool, policy = make_pool(3, 3), RoundRobin()
    pairs = [policy.pick_pair(REQUEST, pool.candidates()) for _ in range(30)]
    for picked in zip(*pairs, strict=True):
        assert set(Counter(picked).values()) == {10}


def test_round_robin_is_nearly_even_among_many() -> None:
    pool, policy = make_pool(50, 100), RoundRobin()
    pairs = [policy.pick_pair(REQUEST, pool.candidates()) for _ in range(1000)]
    for workers, picked in zip((pool.prefill, pool.decode), zip(*pairs, strict=True), strict=True):
        counts = Counter(picked)
        mean = 1000 / len(workers)
        assert all(0.5 * mean <= counts[worker] <= 1.5 * mean for worker in workers)


def test_rounds_of_two_roles_do_not_run_in_step() -> None:
    pool, policy = make_pool(2, 2), RoundRobin()
    pairs = Counter(policy.pick_pair(REQUEST, pool.candidates()) for _ in range(400))
    assert set(pairs) == set(itertools.product(pool.prefill, pool.decode))
    assert min(pairs.values()) > 50


def test_power_of_two_avoids_the_most_loaded() -> None:
    pool, policy = make_pool(1, 0), PowerOfTwo()
    busy = pool.join(D, stats=SchedulerStats(num_running_reqs=9, num_waiting_reqs=9))
    mine = pool.join(D, num_in_flight=8)
    idle = pool.join(D)
    picks = (policy.pick_decode, lambda *args: policy.pick_pair(*args)[1])
    for pick in picks:
        picked = Counter(pick(REQUEST, pool.candidates()) for _ in range(200))
        assert picked[idle] > picked[mine]
        assert picked[busy] == 0


# By cost

BLOCK = 16
CHAT = EngineCoreRequest(
    request_id="c", prompt_token_ids=tuple(range(64 * BLOCK)), task=Generate(SamplingParams())
)


def prefix_routing(**weights: float) -> PrefixRouting:
    return PrefixRouting(RoutingWeights(**weights), Runtime())


def note_cached(pool: Pool, worker: StubWorker, num_blocks: int, request=CHAT) -> None:
    pool.index.stored(worker, prefix_hashes(request, BLOCK)[:num_blocks])


def test_a_prefix_is_used_where_it_is() -> None:
    pool, policy = make_pool(20, 20), prefix_routing()
    p, d = pool.prefill[13], pool.decode[7]
    note_cached(pool, p, 40)
    note_cached(pool, pool.prefill[4], 20)
    note_cached(pool, d, 40)
    note_cached(pool, pool.decode[5], 10)
    for _ in range(8):
        assert policy.pick_pair(CHAT, pool.candidates())[0] is p
        p.stats = SchedulerStats()  # it is done
    assert policy.pick_decode(CHAT, pool.candidates()) is d
    salted = dataclasses.replace(CHAT, cache_salt="another")
    picked = {policy.pick_pair(salted, pool.candidates())[0] for _ in range(40)}
    assert len(picked) > 4


@pytest.mark.parametrize(("num_waiting_tokens", "is_used"), [(0, True), (500, True), (800, False)])
def test_a_prefix_is_left_when_its_worker_is_saturated(num_waiting_tokens, is_used) -> None:
    pool, policy = make_pool(4, 1), prefix_routing()
    note_cached(pool, pool.prefill[2], 40)  # 640 tokens
    pool.prefill[2].stats = SchedulerStats(num_waiting_tokens=num_waiting_tokens)
    prefill, _ = policy.pick_pair(CHAT, pool.candidates())
    assert (prefill is pool.prefill[2]) == is_used


def test_what_was_sent_counts_before_stats_say_so() -> None:
    pool, policy = make_pool(4, 4), prefix_routing()
    pairs = [policy.pick_pair(CHAT, pool.candidates()) for _ in range(400)]
    for picked in zip(*pairs, strict=True):
        counts = Counter(picked)
        assert min(counts.values()) > 70


def test_decode_room_and_load_count() -> None:
    pool, policy = make_pool(1, 2), prefix_routing()
    full, free = pool.decode
    for stats in (
        SchedulerStats(num_free_blocks=1, num_total_blocks=100),
        SchedulerStats(num_free_blocks=100, num_running_reqs=50),
    ):
        full.stats, free.stats = stats, SchedulerStats(num_free_blocks=100)
        assert policy.pick_pair(CHAT, pool.candidates())[1] is free


def test_the_nearer_decode_worker_is_taken_of_equal_ones() -> None:
    pool, policy = make_pool(1, 2), prefix_routing()
    pool.prefill[0].address = pool.decode[1].address = "host-a:1"
    assert policy.pick_pair(CHAT, pool.candidates())[1] is pool.decode[1]


def test_a_worker_of_another_zone_is_taken_only_if_it_is_far_cheaper() -> None:
    pool, policy = make_pool(1, 2), prefix_routing()
    workers = (*pool.prefill, *pool.decode)
    for number, (worker, zone) in enumerate(zip(workers, ("a", "b", "a"), strict=True)):
        worker.address = f"host-{number}:1"
        worker.info = dataclasses.replace(worker.info, zone=zone)
    far, near = pool.decode
    for num_running, taken in ((10, near), (30, far)):
        near.stats = SchedulerStats(num_free_blocks=100, num_running_reqs=num_running)
        far.stats = SchedulerStats(num_free_blocks=100)
        assert policy.pick_pair(CHAT, pool.candidates())[1] is taken
    near.info = dataclasses.replace(near.info, zone="")  # who knows
    near.stats = SchedulerStats(num_free_blocks=100, num_running_reqs=10)
    assert policy.pick_pair(CHAT, pool.candidates())[1] is near


def test_a_session_stays_until_its_pair_is_saturated_or_gone() -> None:
    pool, policy = make_pool(5, 5), SessionAffinity()
    pair = policy.pick_pair(CHAT, pool.candidates(), session="s")
    for _ in range(20):
        assert policy.pick_pair(CHAT, pool.candidates(), session="s") == pair
        assert policy.pick_decode(CHAT, pool.candidates(), session="s") is pair[1]
    assert len({policy.pick_pair(CHAT, pool.candidates()) for _ in range(40)}) > 4
    pair[0].stats = SchedulerStats(num_waiting_tokens=100_000)
    moved = policy.pick_pair(CHAT, pool.candidates(), session="s")
    pair[0].stats = None
    assert policy.pick_pair(CHAT, pool.candidates(), session="s") == moved
    pool.table.place(moved[1])
    again = policy.pick_pair(CHAT, pool.candidates(), session="s")
    assert again[1] is not moved[1]
