"""The contract of every RoutingPolicy, and what each promises besides."""

from collections import Counter
from dataclasses import dataclass

import pytest

from pdserve_common.engine_types import EngineCoreRequest, SchedulerStats, WorkerRole
from pdserve_router.workers.routing_policy import ROUTING_POLICIES, PowerOfTwo, RoundRobin


@dataclass
class Candidate:
    address: str
    num_in_flight: int = 0
    stats: SchedulerStats | None = None


REQUEST = EngineCoreRequest(request_id="r", prompt_token_ids=(1,))


@pytest.fixture(params=[(name, role) for name in sorted(ROUTING_POLICIES) for role in WorkerRole])
def policy(request):
    name, role = request.param
    return ROUTING_POLICIES[name](role)


def test_picks_the_only_candidate(policy) -> None:
    only = Candidate("a:1")
    assert policy.pick([only], REQUEST) is only


def test_reaches_every_candidate_when_all_are_idle(policy) -> None:
    candidates = [Candidate(f"w:{i}") for i in range(1, 5)]
    picked = Counter(policy.pick(candidates, REQUEST).address for _ in range(400))
    assert len(picked) == 4
    assert min(picked.values()) > 40


def test_survives_candidates_that_come_and_go(policy) -> None:
    candidates = [Candidate(f"w:{i}") for i in range(1, 6)]
    for size in (5, 1, 3, 2, 5, 4):
        present = candidates[:size]
        assert all(policy.pick(present, REQUEST) in present for _ in range(7))


def test_does_not_change_the_candidates(policy) -> None:
    candidates = tuple(Candidate(f"w:{i}") for i in range(1, 4))
    policy.pick(candidates, REQUEST)
    assert [c.address for c in candidates] == ["w:1", "w:2", "w:3"]


@pytest.mark.parametrize("role", WorkerRole)
def test_round_robin_is_even(role) -> None:
    candidates = [Candidate(f"w:{i}") for i in range(1, 4)]
    policy = RoundRobin(role)
    picked = Counter(policy.pick(candidates, REQUEST).address for _ in range(30))
    assert set(picked.values()) == {10}


def test_rounds_of_two_roles_do_not_run_in_step() -> None:
    roles = [[Candidate(f"{role}:{i}") for i in range(1, 3)] for role in "pd"]
    policies = [RoundRobin(WorkerRole.PREFILL), RoundRobin(WorkerRole.DECODE)]
    pairs = Counter(
        tuple(map(lambda policy, role: policy.pick(role, REQUEST).address, policies, roles))
        for _ in range(400)
    )
    assert len(pairs) == 4
    assert min(pairs.values()) > 50


def test_power_of_two_avoids_the_most_loaded() -> None:
    busy = Candidate("busy:1", stats=SchedulerStats(num_running_reqs=9, num_waiting_reqs=9))
    mine = Candidate("mine:1", num_in_flight=8)
    idle = Candidate("idle:1")
    policy = PowerOfTwo(WorkerRole.DECODE)
    picked = Counter(policy.pick([busy, mine, idle], REQUEST).address for _ in range(200))
    assert "busy:1" not in picked
    assert picked["idle:1"] > picked["mine:1"]
