"""A cluster to strike at, and what it does when nobody does."""

import contextlib
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from cases import TRANSFER_TIMEOUT_S
from checks import NUM_RANKS, Answer, Asker, Held, held, wait_until_handing_off

from pdserve_common.types.sampling_params import SamplingParams
from support.cluster import Cluster
from support.network import missing_for_loss, missing_for_partitions

TRANSPORTS = ("shm", "tcp")
NUM_TOKENS = 24
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    "sampled": SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True),
}
# For so many requests at a time, each another: what comes of a mix-up of two has to show. All of
# several chunks of a worker under test.
NUM_PROMPTS = 8
PROMPTS = [random.Random(number).choices(range(3, 290), k=200) for number in range(NUM_PROMPTS)]
PROMPT = PROMPTS[0]
# What a request may take: without a fault some tenths of a second; until a silent peer is given up
# for dead 5 s, and up to 1 s until the next tick; and the time to compute it anew.
BOUND_S = 10.0
DEADLINE_S = 60.0


class Ground(NamedTuple):
    """A running cluster."""

    cluster: Cluster
    # To each kind of request, of PROMPTS in their order.
    expected: dict[str, list[Answer]]
    baseline: dict[str, Held]


@contextlib.contextmanager
def make_ground(
    params: Mapping[str, SamplingParams] = PARAMS, *, num_prompts: int = 1, **cluster: Any
) -> Iterator[Ground]:
    """Start a Cluster and ask so many of PROMPTS with each of `params`; the arguments are the
    Cluster's.
    """
    prompts = PROMPTS[:num_prompts]
    with Cluster(**cluster) as running:
        with Asker(running.addresses) as asker:
            wait_until_handing_off(running, asker)
            expected = {kind: ask_all(asker, prompts, each) for kind, each in params.items()}
        for answers in expected.values():
            assert not any(answer.errors for answer in answers)
            assert {answer.metrics.determinism for answer in answers} == {"exact"}
            assert len({tuple(answer.token_ids) for answer in answers}) == len(prompts)
        yield Ground(running, expected, held(running))


def ask_all(asker: Asker, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Answer]:
    """Return the answers to them, asked at the same time."""
    askings = [asker.start(prompt, params) for prompt in prompts]
    return [asking.answer.result(DEADLINE_S) for asking in askings]


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
                    num_prompts=NUM_PROMPTS,
                    model=model,
                    log_dir=make_log_dir(transport),
                    routers=2,
                    transport=transport,
                    networks=not missing_for_partitions(),
                    # In which any number of ranks brings the same bits.
                    flags={"kv-transfer-timeout-s": TRANSFER_TIMEOUT_S, "dtype": "bfloat16"},
                    prefill_flags={"tensor-parallel-size": NUM_RANKS},
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
