"""Random faults at random times on random targets, and requests among them."""

import dataclasses
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from cases import FATAL_READ_FAULTS, LONG_S, LOSS_PERCENT, READ_FAULTS, SHORT_S
from checks import (
    SLACK,
    Asker,
    Asking,
    Held,
    check_answer,
    held,
    wait_for_baseline,
    wait_until_handing_off,
)
from ground import BOUND_S, NUM_PROMPTS, PARAMS, PROMPTS, Ground, missing_for, restored

from pdserve_common.types.sampling_params import SamplingParams
from support.cluster import CLIENT, Cluster
from support.controls import ControlError

SOAK_PARAMS: Mapping[str, SamplingParams] = {
    **PARAMS,
    "long": dataclasses.replace(PARAMS["sampled"], max_tokens=150, seed=8),
    "two": dataclasses.replace(PARAMS["sampled"], n=2, logprobs=1),
}
MAX_FAULTS = 3
# Requests and faults begin within so long.
SPAN_S = 1.5
# How long the router lets a request wait for a worker if none is left.
REDRIVE_WAIT_S = 10.0
DEADLINE_S = 60.0
# So much more than before all cases and schedules is no leak. UCX keeps a descriptor for each link
# that was lost between two processes that live on, some 0.2 in a schedule (7 were seen over all
# cases), and memory grows by 0.4 MiB in one.
TOTAL_SLACK = {"fds": 24, "threads": 8, "rss_mib": 128}

PARTINGS = ("part_from_peer", "part_from_router", "part_from_client")
# After these a worker or router is of no use for some seconds.
HARMFUL = ("kill", "stop", "restart", "freeze", *PARTINGS[1:], *FATAL_READ_FAULTS)
PROCESS_FAULTS = ("kill", "stop", "pause", "restart", "freeze")
NETWORK_FAULTS = (*PARTINGS, "lossy")
# Each kind as often as the others. Corrupt blocks show as wrong tokens.
FAULTS = (
    PROCESS_FAULTS,
    tuple(fault for fault in NETWORK_FAULTS if not missing_for(fault)) or PROCESS_FAULTS,
    tuple(fault for fault in READ_FAULTS if fault != "corrupt"),
)


class Event(NamedTuple):
    """Something that happens `at` seconds after the schedule's begin."""

    at: float
    what: str
    # Of a fault: who is struck and, if the fault lies between two, the other one.
    victim: str = ""
    peer: str = ""


class Schedule(NamedTuple):
    """What happens in one round, in order."""

    events: list[Event]

    @property
    def faults(self) -> list[Event]:
        return [event for event in self.events if event.victim]

    def may_fail(self, cluster: Cluster) -> bool:
        """Could a request find nobody who serves it?"""
        harmed = {fault.victim for fault in self.faults if fault.what in HARMFUL}
        return harmed >= set(cluster.of_role("decode")) or harmed >= set(cluster.routers)

    @property
    def bound_s(self) -> float:
        """One fault after another has to be noticed, and workers to be waited for."""
        return BOUND_S * len(self.faults) + REDRIVE_WAIT_S


def make_schedule(seed: int, transport: str, cluster: Cluster) -> Schedule:
    """Return the same one for the same arguments."""
    rng = random.Random(f"{seed} {transport}")
    kinds = rng.choices(list(SOAK_PARAMS), k=rng.randint(2, NUM_PROMPTS))
    events = [Event(rng.uniform(0, SPAN_S), kind) for kind in kinds]
    for _ in range(rng.randint(1, MAX_FAULTS)):
        events.append(_make_fault(rng, cluster))
    return Schedule(sorted(events))


def _make_fault(rng: random.Random, cluster: Cluster) -> Event:
    what, at = rng.choice(rng.choice(FAULTS)), rng.uniform(0, SPAN_S)
    if what in READ_FAULTS or what in ("part_from_peer", "lossy"):
        return Event(
            at, what, rng.choice(cluster.of_role("decode")), rng.choice(cluster.of_role("prefill"))
        )
    if what == "part_from_router":
        return Event(at, what, rng.choice(cluster.workers), rng.choice(cluster.routers))
    if what == "part_from_client":
        return Event(at, what, rng.choice(cluster.routers), CLIENT)
    return Event(at, what, rng.choice([*cluster.workers, *cluster.routers]))


def strike(cluster: Cluster, fault: Event) -> None:
    """A victim that is dead already is left in peace."""
    member = cluster.members[fault.victim]
    if fault.what in PARTINGS:
        cluster.partition(fault.victim, fault.peer)
    elif fault.what == "lossy":
        cluster.loss(fault.victim, fault.peer, LOSS_PERCENT)
    elif not member.is_running or member.is_stopped:
        return
    elif fault.what in READ_FAULTS:
        with suppress(ControlError):  # it is not there yet, or about to end
            cluster.controls(fault.victim).inject(fault.what, delay_s=2 * SHORT_S)
    elif fault.what == "freeze":
        cluster.freeze_loop(fault.victim, LONG_S)
    elif fault.what == "pause":
        cluster.stop(fault.victim)
        time.sleep(SHORT_S)
        cluster.cont(fault.victim)
    else:
        getattr(cluster, fault.what)(fault.victim)


def run_schedule(ground: Ground, seed: int, transport: str) -> None:
    """Play the schedule of a seed, and check what comes of it."""
    cluster = ground.cluster
    schedule = make_schedule(seed, transport, cluster)
    lines = [f"  {e.at:.2f} s {e.what} {e.victim} {e.peer}" for e in schedule.events]
    print(f"over {transport}; alone: SOAK_SEED={seed} SOAK_SCHEDULES=2 pytest -k random:")
    print("\n".join(lines))
    with restored(cluster), Asker(cluster.addresses) as asker:
        wait_until_handing_off(cluster, asker)
        baseline = grown(ground.baseline, held(cluster))
        for number, (kind, asking) in enumerate(play(cluster, asker, schedule)):
            answer = asking.answer.result(DEADLINE_S + 5.0)
            print(f"{transport} {kind}: {answer.errors or 'whole'} after {answer.seconds:.2f} s")
            check_answer(
                answer,
                ground.expected[kind][number],
                within_s=schedule.bound_s,
                may_fail=schedule.may_fail(cluster),
            )
    wait_for_baseline(cluster, baseline)
    wait_for_baseline(cluster, ground.baseline, slack=TOTAL_SLACK)


def grown(baseline: Mapping[str, Held], now: Mapping[str, Held]) -> dict[str, Held]:
    """Return the baseline with the descriptors, threads and memory of now: over one case or
    schedule they may grow less than over all.
    """
    return {
        name: old._replace(**{what: getattr(now[name], what) for what in SLACK})
        for name, old in baseline.items()
    }


def play(cluster: Cluster, asker: Asker, schedule: Schedule) -> list[tuple[str, Asking]]:
    """Return the requests and their kinds, in the order of PROMPTS."""
    begin = time.monotonic()
    askings = []
    for event in schedule.events:
        time.sleep(max(0.0, begin + event.at - time.monotonic()))
        if event.victim:
            strike(cluster, event)
        else:
            prompt, params = PROMPTS[len(askings)], SOAK_PARAMS[event.what]
            askings.append((event.what, asker.start(prompt, params, deadline_s=DEADLINE_S)))
    return askings
