"""A cluster to strike at, and what it does when nobody does."""

import contextlib
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from cases import TRANSFER_TIMEOUT_S
from checks import Answer, Asker, Held, held, wait_until_handing_off
from cluster import Cluster
from network import missing_for_loss, missing_for_partitions

from pdserve_common.engine_types import SamplingParams

TRANSPORTS = ("shm", "tcp")
NUM_TOKENS = 24
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    "sampled": SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True),
}
# Several chunks of a worker under test.
PROMPT = random.Random(0).choices(range(3, 290), k=200)
# What a request may take: without a fault some tenths of a second; until a silent peer is given up
# for dead 5 s, and up to 1 s until the next tick; and the time to compute it anew.
BOUND_S = 10.0
DEADLINE_S = 60.0


class Ground(NamedTuple):
    """A running cluster."""

    cluster: Cluster
    expected: dict[str, Answer]
    baseline: dict[str, Held]


@contextlib.contextmanager
def make_ground(params: Mapping[str, SamplingParams] = PARAMS, **cluster: Any) -> Iterator[Ground]:
    """Start a Cluster and ask PROMPT with each of `params`; the arguments are the Cluster's."""
    with Cluster(**cluster) as running:
        with Asker(running.addresses) as asker:
            wait_until_handing_off(running, asker)
            expected = {kind: asker.ask(PROMPT, each) for kind, each in params.items()}
        assert not any(answer.errors for answer in expected.values())
        assert {answer.metrics.determinism for answer in expected.values()} == {"exact"}
        yield Ground(running, expected, held(running))


@contextlib.contextmanager
def make_grounds(
    model: Path, make_log_dir: Callable[[str], Path], params: Mapping[str, SamplingParams] = PARAMS
) -> Iterator[dict[str, Ground]]:
    """Start a cluster for each transport, of two routers and two workers of each role."""
    with contextlib.ExitStack() as stack:
        grounds = {}
        for transport in TRANSPORTS:
            grounds[transport] = stack.enter_context(
                make_ground(
                    params,
                    model=model,
                    log_dir=make_log_dir(transport),
                    routers=2,
                    transport=transport,
                    networks=not missing_for_partitions(),
                    flags={"kv-transfer-timeout-s": TRANSFER_TIMEOUT_S},
                )
            )
        yield grounds


def run_on_all(runs: Iterable[Callable[[], None]]) -> None:
    """Run them at the same time: what faults cost is mostly waiting. Raises what one raises first,
    and prints what others raise.
    """
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(run) for run in runs]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors[1:]:
        traceback.print_exception(error)
    if errors:
        raise errors[0]


@contextlib.contextmanager
def restored(cluster: Cluster) -> Iterator[None]:
    """Undo what faults are left at the end; print the logs if it fails."""
    try:
        yield
    except BaseException:  # it goes on; the next case finds a whole cluster
        print(cluster.log_tails())
        cluster.restore()
        raise
    cluster.restore()


def missing_for(fault: str) -> str:
    """Say what this machine lacks for a fault of cases.FAULTS, or return ""."""
    if fault == "lossy":
        return missing_for_loss()
    return missing_for_partitions() if fault.startswith("part") else ""
