"""A fault at a stage: holds a request there, strikes, and hands back what the client saw."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from checks import Answer, Asker, Asking
from cluster import Cluster, ClusterError
from controls import ControlError
from pdserve_faults.stages import STAGES

from pdserve_common.engine_types import SamplingParams

STAGE_TIMEOUT_S = 10.0
# Longer than any peer waits for a word of another (5 s).
LONG_S = 6.5
# Short enough that nobody is given up for it.
SHORT_S = 1.0
POLL_S = 0.01


class Ends(NamedTuple):
    """The workers that serve a request."""

    prefill: str
    decode: str

    def peer(self, name: str) -> str:
        """Return the other end; for the router, D."""
        return self.prefill if name == self.decode else self.decode


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


Strike = Callable[[Cluster, Ends, str], None]

# By name: what happens to the victim. Cluster.restore ends what does not end by itself.
FAULTS: Mapping[str, Strike] = {
    "kill": lambda cluster, ends, victim: cluster.kill(victim),
    "restart": lambda cluster, ends, victim: cluster.restart(victim),
    "stop": lambda cluster, ends, victim: cluster.stop(victim),
    "pause": lambda cluster, ends, victim: _pause(cluster, victim),
    "freeze": lambda cluster, ends, victim: cluster.freeze_loop(victim, LONG_S),
    "part_from_peer": lambda cluster, ends, victim: cluster.partition(victim, ends.peer(victim)),
    "part_from_router": lambda cluster, ends, victim: cluster.partition(victim, "router"),
}


def run_case(
    cluster: Cluster,
    asker: Asker,
    case: Case,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    deadline_s: float,
) -> Answer:
    """Run one request into the fault; the cluster is left as the fault leaves it."""
    holding = cluster.of_role(STAGES[case.stage].role)
    for name in cluster.workers:
        if case.stage != "queued" or name not in holding:
            cluster.controls(name).arm("queued")
    for name in holding:
        cluster.controls(name).arm(case.stage, skip=case.skip, hold=True)
    asking = asker.start(prompt, params, deadline_s=deadline_s)
    held = _first_at(cluster, holding, case.stage, asking)
    ends = Ends(
        *(_first_at(cluster, cluster.of_role(role), "queued", asking) for role in Ends._fields)
    )
    for name in cluster.workers:  # another attempt must not be held
        if name != held:
            cluster.controls(name).reset()
    victim = "router" if case.victim == "router" else getattr(ends, case.victim)
    FAULTS[case.fault](cluster, ends, victim)
    with suppress(ControlError):  # killed, or stopped: then it goes on after Cluster.restore
        if not cluster.members[held].is_stopped:
            cluster.controls(held).go(case.stage)
    return asking.answer.result(deadline_s + 5.0)


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


def _pause(cluster: Cluster, name: str) -> None:
    """SIGSTOP, and SIGCONT soon."""
    cluster.stop(name)
    time.sleep(SHORT_S)
    cluster.cont(name)
