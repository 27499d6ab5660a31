"""A fault at a stage: holds a request there, strikes, and hands back what clients saw."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from checks import Answer, Asker, Asking
from pdserve_faults.stages import STAGES

from pdserve_common.types.sampling_params import SamplingParams
from support.cluster import CLIENT, Cluster, ClusterError
from support.controls import ControlError

STAGE_TIMEOUT_S = 120.0
# Longer than any peer waits for a word of another (5 s).
LONG_S = 6.5
# Short enough that nobody is given up for it.
SHORT_S = 1.0
POLL_S = 0.01
# Of READs, by their name in pdserve_faults.reads: of the victim's next one.
READ_FAULTS = (
    "post_backend_error",
    "post_remote_disconnect",
    "backend_error",
    "remote_disconnect",
    "stall",
    "late",
    "corrupt",
    "defect",
)
# Of these nobody knows whether it will land: the worker has to be restarted.
FATAL_READ_FAULTS = ("post_backend_error", "backend_error")
# Longer than TRANSFER_TIMEOUT_S, so that it lands when it has been given up.
LATE_S = 2.5
TRANSFER_TIMEOUT_S = 1.5
LOSS_PERCENT = 20
# Time for a few tokens.
MIXING_S = 0.05
# The one that clients ask first.
ROUTER = "router-0"


class Ends(NamedTuple):
    """The workers that serve a request."""

    prefill: str
    decode: str

    def peer(self, name: str) -> str:
        """Return the other end; for a router, D."""
        return self.prefill if name == self.decode else self.decode


class Holding(NamedTuple):
    """A request that is held at a stage."""

    asking: Asking
    ends: Ends
    # Which of them holds it.
    worker: str


class Case(NamedTuple):
    """One line of the matrix."""

    # Of STAGES, where the request is held.
    stage: str
    fault: str
    # The role that is struck, or "router".
    victim: str
    # How often the stage is passed before it counts.
    skip: int = 0

    def __str__(self) -> str:
        return f"{self.fault}-{self.victim}-{self.stage}{self.skip or ''}"


# A prompt's token ids, and how to go on from there.
Question = tuple[Sequence[int], SamplingParams]
Strike = Callable[[Cluster, Ends, str], None]


def _inject(fault: str, cluster: Cluster, ends: Ends, victim: str) -> None:
    cluster.controls(victim).inject(fault, delay_s=LATE_S)


def _pause(cluster: Cluster, name: str, seconds: float) -> None:
    """SIGSTOP, and SIGCONT so much later."""
    cluster.stop(name)
    time.sleep(seconds)
    cluster.cont(name)


# By name: what happens to the victim. Cluster.restore ends what does not end by itself.
FAULTS: Mapping[str, Strike] = {
    "kill": lambda cluster, ends, victim: cluster.kill(victim),
    "restart": lambda cluster, ends, victim: cluster.restart(victim),
    "stop": lambda cluster, ends, victim: cluster.stop(victim),
    "pause": lambda cluster, ends, victim: _pause(cluster, victim, SHORT_S),
    "sleep": lambda cluster, ends, victim: _pause(cluster, victim, LONG_S),
    "freeze": lambda cluster, ends, victim: cluster.freeze_loop(victim, LONG_S),
    "part_from_peer": lambda cluster, ends, victim: cluster.partition(victim, ends.peer(victim)),
    "part_from_router": lambda cluster, ends, victim: cluster.partition(victim, ROUTER),
    "part_from_client": lambda cluster, ends, victim: cluster.partition(victim, CLIENT),
    "hang_step": lambda cluster, ends, victim: cluster.controls(victim).hang_step(),
    "lossy": lambda cluster, ends, victim: cluster.loss(victim, ends.peer(victim), LOSS_PERCENT),
    **{fault: partial(_inject, fault) for fault in READ_FAULTS},
}


def run_case(
    cluster: Cluster, asker: Asker, case: Case, questions: Sequence[Question], *, deadline_s: float
) -> list[Answer]:
    """Run requests into the fault; the cluster is left as the fault leaves it.

    The first is held at the case's stage. The others are sent then: they are wherever they have got
    to when the fault strikes, or wait on the worker that is held.
    """
    first, ends, held = hold(cluster, asker, case, questions[0], deadline_s=deadline_s)
    others = [asker.start(*question, deadline_s=deadline_s) for question in questions[1:]]
    time.sleep(MIXING_S)
    strike(cluster, ends, case.fault, case.victim)
    with suppress(ControlError):  # killed, or stopped: then it goes on after Cluster.restore
        if not cluster.members[held].is_stopped:
            cluster.controls(held).go(case.stage)
    return [asking.answer.result(deadline_s + 5.0) for asking in (first, *others)]


def hold(
    cluster: Cluster, asker: Asker, case: Case, question: Question, *, deadline_s: float
) -> Holding:
    """Send a request and hold it at the case's stage. Raises ClusterError if it does not come."""
    holding = cluster.of_role(STAGES[case.stage].role)
    for name in cluster.workers:
        if case.stage != "queued" or name not in holding:
            cluster.controls(name).arm("queued")
    for name in holding:
        cluster.controls(name).arm(case.stage, skip=case.skip, hold=True)
    asking = asker.start(*question, deadline_s=deadline_s)
    held = _first_at(cluster, holding, case.stage, asking)
    ends = Ends(
        *(_first_at(cluster, cluster.of_role(role), "queued", asking) for role in Ends._fields)
    )
    for name in cluster.workers:  # nobody else is to be held
        if name != held:
            cluster.controls(name).reset()
    return Holding(asking, ends, held)


def strike(cluster: Cluster, ends: Ends, fault: str, victim: str) -> None:
    """Let a fault strike one of a request's ends, by its role, or the router."""
    FAULTS[fault](cluster, ends, ROUTER if victim == "router" else getattr(ends, victim))


def _first_at(cluster: Cluster, names: Sequence[str], stage: str, asking: Asking) -> str:
    deadline = time.monotonic() + STAGE_TIMEOUT_S
    while True:
        for name in names:
            with suppress(ControlError):
                cluster.controls(name).wait_reached(stage, timeout_s=0.0)
                return name
        if asking.answer.done() or time.monotonic() > deadline:
            answer = asking.answer.result() if asking.answer.done() else "none"
            where = " or ".join(names)
            raise ClusterError(f"the request has not come to {stage} on {where}; answer: {answer}")
        time.sleep(POLL_S)
