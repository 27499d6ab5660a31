"""Every fault at every stage, and random ones: the same tokens, in time; and nothing is left.

    PDSERVE_FAULTS=all .venv/bin/python -m pytest tests/faults/test_matrix.py
    PDSERVE_FAULTS=3 .venv/bin/python -m pytest tests/faults/test_matrix.py -k 'not random'
    make soak SOAK_SEED=7 SOAK_SCHEDULES=200

The last one runs the first one, too. Of the cases of faults at stages one share is run, each fault
once: the first of 16, or the one that PDSERVE_FAULTS names.

Two cases run at the same time, one over each transport, as most of it is waiting. A schedule of
random faults that fails prints how to run it alone.
"""

import itertools
import operator
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from cases import LATE_S, READ_FAULTS, Case, run_case
from checks import Asker, check_answer, held, wait_for_baseline, wait_until_handing_off
from ground import (
    BOUND_S,
    DEADLINE_S,
    PARAMS,
    PROMPTS,
    TRANSPORTS,
    Ground,
    make_grounds,
    missing_for,
    restored,
    run_on_all,
)
from pdserve_faults.stages import STAGES
from soak import SOAK_PARAMS, TOTAL_SLACK, grown, run_schedule

IS_WHOLE = os.environ.get("PDSERVE_FAULTS") == "all"
SHARE = 0 if IS_WHOLE else int(os.environ.get("PDSERVE_FAULTS", "0"))
# Of the requests of one case, two and two.
NUM_REQUESTS = 4
FAULTS = (
    *(("kill", victim) for victim in ("prefill", "decode", "router")),
    *(("stop", victim) for victim in ("prefill", "decode", "router")),
    *(("pause", victim) for victim in ("prefill", "decode", "router")),
    *(("restart", victim) for victim in ("prefill", "decode", "router")),
    *(("freeze", victim) for victim in ("prefill", "decode", "router")),
    ("part_from_peer", "decode"),
    ("part_from_router", "prefill"),
    ("part_from_router", "decode"),
    ("part_from_client", "router"),
    ("lossy", "decode"),
)
# How often the stage is passed before it counts.
SKIP = {"mid_stream": 8}
STAGES_AND_SKIPS = [(stage, SKIP.get(stage, 0)) for stage in STAGES]
# What is corrupt shows as wrong tokens.
READ_VICTIMS = [(fault, "decode") for fault in READ_FAULTS if fault != "corrupt"]
# Of a request's first READ, or of its last but one.
READ_STAGES = [("chunk", 0), ("chunk", 2)]
KINDS = tuple(PARAMS)
# Cases that run together, one over each transport.
Runs = list[tuple[Case, ...]]


def _shared(faults: Sequence[Sequence[str]], stages: Sequence[tuple[str, int]]) -> Runs:
    """Each fault at one stage over one transport; with each share at the next, until the stages
    are through, and then over the next transport. Those of one fault take about as long, and run
    together.
    """
    cases: list[list[Case]] = [[] for _ in TRANSPORTS]
    for row, (fault, victim) in enumerate(faults):
        stage, skip = stages[(row + SHARE) % len(stages)]
        cases[(row + SHARE // len(stages)) % len(TRANSPORTS)].append(
            Case(stage, fault, victim, skip)
        )
    by_fault = [sorted(each, key=operator.attrgetter("fault")) for each in cases]
    return list(itertools.zip_longest(*by_fault, fillvalue=cases[0][0]))


def _whole(faults: Sequence[Sequence[str]], stages: Sequence[tuple[str, int]]) -> Runs:
    """Each fault at each stage over each transport."""
    cases = (Case(stage, *fault, skip) for fault in faults for stage, skip in stages)
    return [(case,) * len(TRANSPORTS) for case in cases]


_runs = _whole if IS_WHOLE else _shared
RUNS = [*_runs(FAULTS, STAGES_AND_SKIPS), *_runs(READ_VICTIMS, READ_STAGES)]

FIRST_SEED = int(os.environ.get("SOAK_SEED", "1"))
NUM_SCHEDULES = int(os.environ.get("SOAK_SCHEDULES", "4"))
SEEDS = range(FIRST_SEED, FIRST_SEED + NUM_SCHEDULES // len(TRANSPORTS))


@pytest.fixture(scope="module")
def grounds(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ground]]:
    with make_grounds(model, tmp_path_factory.mktemp, SOAK_PARAMS) as grounds:
        yield grounds


@pytest.mark.parametrize(
    ("number", "cases"), list(enumerate(RUNS)), ids=["+".join(map(str, cases)) for cases in RUNS]
)
def test_a_fault_shows_no_wrong_token_and_leaves_nothing(
    grounds: dict[str, Ground], number: int, cases: tuple[Case, ...]
) -> None:
    missing = [missing_for(case.fault) for case in cases]
    assert not (IS_WHOLE and any(missing)), missing
    if all(missing):
        pytest.skip(missing[0])
    first = KINDS[number % len(KINDS)]
    run_on_all(
        partial(run, grounds[transport], case, first)
        for transport, case, lack in zip(TRANSPORTS, cases, missing, strict=True)
        if not lack
    )


def run(ground: Ground, case: Case, first: str) -> None:
    kinds = [first, *itertools.islice(itertools.cycle(KINDS), NUM_REQUESTS - 1)]
    questions = [(prompt, PARAMS[each]) for prompt, each in zip(PROMPTS, kinds, strict=False)]
    with restored(ground.cluster), Asker(ground.cluster.addresses) as asker:
        wait_until_handing_off(ground.cluster, asker)
        baseline = grown(ground.baseline, held(ground.cluster))
        answers = run_case(ground.cluster, asker, case, questions, deadline_s=DEADLINE_S)
        print(f"{case}: after {', '.join(f'{answer.seconds:.2f}' for answer in answers)} s")
        for number, (each, answer) in enumerate(zip(kinds, answers, strict=True)):
            check_answer(answer, ground.expected[each][number], within_s=BOUND_S)
        if case.fault == "late":
            use_all_blocks(ground, asker, LATE_S)
    wait_for_baseline(ground.cluster, baseline)
    wait_for_baseline(ground.cluster, ground.baseline, slack=TOTAL_SLACK)


def use_all_blocks(ground: Ground, asker: Asker, seconds: float) -> None:
    """Send requests for so long, so that the pools change hands, and check them."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        askings = [asker.start(PROMPTS[i], PARAMS[kind]) for i, kind in enumerate(KINDS)]
        for number, (kind, asking) in enumerate(zip(KINDS, askings, strict=True)):
            answer = asking.answer.result(DEADLINE_S)
            check_answer(answer, ground.expected[kind][number], within_s=BOUND_S)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_faults_show_no_wrong_token_and_leave_nothing(
    grounds: dict[str, Ground], seed: int
) -> None:
    run_on_all(partial(run_schedule, grounds[each], seed, each) for each in TRANSPORTS)
