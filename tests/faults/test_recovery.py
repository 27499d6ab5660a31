"""What recovery keeps right besides the tokens, and what it does where there is nobody else."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from cases import LONG_S, ROUTER, Case, hold, run_case, strike
from checks import Answer, Asker, check_answer, held, wait_for_baseline, wait_until_handing_off
from ground import BOUND_S, DEADLINE_S, PARAMS, PROMPT, Ground, make_ground, restored, run_on_all

from pdserve_common.types.sampling_params import SamplingParams
from support.cluster import Cluster
from support.network import missing_for_partitions
from support.samples import sampled

MID_STREAM = 8
# A worker or a router is back after some seconds; a request waits so long for it.
REDRIVE_WAIT_S = 30.0
RESTART_BOUND_S = 25.0
# A short step counts as hung after 10 s; then the worker leaves its streams to others and exits.
HANG_BOUND_S = 10.0 + BOUND_S
HANG_DEADLINE_S = 90.0
# A worker that has nothing left to wait for has ended by then.
END_S = 1.0

# With it an answer of 1000 tokens takes longer than anything that a test waits for meanwhile.
STEP_S = 0.1

SAMPLED = PARAMS["sampled"]
LONG = dataclasses.replace(SAMPLED, max_tokens=1000)
RICH_PARAMS: Mapping[str, SamplingParams] = {
    "several completions": dataclasses.replace(SAMPLED, n=2, logprobs=2),
    "all logprobs": dataclasses.replace(PARAMS["greedy"], logprobs=3, prompt_logprobs=2),
    "penalties": dataclasses.replace(
        SAMPLED,
        ignore_eos=False,
        min_tokens=20,
        presence_penalty=0.7,
        frequency_penalty=0.6,
        repetition_penalty=1.2,
        logit_bias={1: 8.0, 40: 3.0},
    ),
}


@pytest.fixture(scope="module")
def pools(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """Two workers of each role, which compare checksums."""
    with make_ground(
        {**PARAMS, **RICH_PARAMS, "long": LONG},
        model=model,
        log_dir=tmp_path_factory.mktemp("logs"),
        networks=not missing_for_partitions(),
        flags={"kv-checksums": True},
    ) as ground:
        yield ground


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """One worker of each role, whose engine is a process of its own, and one router."""
    with make_ground(
        {**PARAMS, "long": LONG},
        model=model,
        log_dir=tmp_path_factory.mktemp("logs"),
        prefill=1,
        decode=1,
        flags={"engine-process": "subprocess"},
        router_flags={"redrive-wait-s": REDRIVE_WAIT_S},
    ) as ground:
        yield ground


# ---- what a request may ask for


@pytest.mark.parametrize("kind", sampled(RICH_PARAMS, "several completions", "penalties"))
def test_an_answer_goes_on_as_it_was_when_its_decode_worker_dies(pools: Ground, kind: str) -> None:
    expected = pools.expected[kind][0]
    has_prompt_logprobs = RICH_PARAMS[kind].prompt_logprobs is not None
    assert len(expected.prompt_logprobs) == has_prompt_logprobs * len(PROMPT)
    check_answer(run_killed(pools.cluster, RICH_PARAMS[kind]), expected, within_s=BOUND_S)


def test_a_stop_string_is_found_across_the_border(pools: Ground) -> None:
    text = pools.expected["sampled"][0].completions[0].text
    # Begins before the worker dies and ends after that.
    stop = text[MID_STREAM - 1 : MID_STREAM + 6]
    params = dataclasses.replace(SAMPLED, stop=(stop,))
    with Asker(pools.cluster.addresses) as asker:
        wait_until_handing_off(pools.cluster, asker)
        expected = asker.ask(PROMPT, params)
    assert expected.completions[0].stop_reason == stop
    assert len(expected.token_ids) > MID_STREAM + 2
    check_answer(run_killed(pools.cluster, params), expected, within_s=BOUND_S)


def run_killed(cluster: Cluster, params: SamplingParams) -> Answer:
    case = Case("mid_stream", "restart", "decode", skip=MID_STREAM)
    with restored(cluster), Asker(cluster.addresses) as asker:
        wait_until_handing_off(cluster, asker)
        (answer,) = run_case(cluster, asker, case, [(PROMPT, params)], deadline_s=DEADLINE_S)
        assert answer.metrics.num_redrives > 0
        assert answer.metrics.determinism == "exact"
    return answer


# ---- blocks that come wrong


@pytest.mark.parametrize("skip", sampled([0, 2], 2))
def test_a_corrupt_block_is_noticed_and_read_anew(pools: Ground, skip: int) -> None:
    case = Case("chunk", "corrupt", "decode", skip)
    with restored(pools.cluster), Asker(pools.cluster.addresses) as asker:
        wait_until_handing_off(pools.cluster, asker)
        (answer,) = run_case(pools.cluster, asker, case, [(PROMPT, SAMPLED)], deadline_s=DEADLINE_S)
        check_answer(answer, pools.expected["sampled"][0], within_s=BOUND_S)
        assert answer.metrics.num_redrives == 1
        sample = "pdserve_kv_checksum_mismatches_total"
        decodes = pools.cluster.of_role("decode")
        assert sum(pools.cluster.metrics(name)[sample] for name in decodes) > 0
    wait_for_baseline(pools.cluster, pools.baseline)


# ---- where there is nobody else


@pytest.mark.parametrize(
    ("stage", "skip"), sampled([("queued", 0), ("chunk", 1), ("last_chunk", 0)], ("chunk", 1))
)
def test_a_decode_worker_goes_on_alone_when_the_only_prefill_worker_dies(
    pair: Ground, stage: str, skip: int
) -> None:
    answer = run_alone(pair, Case(stage, "kill", "prefill", skip))
    assert answer.metrics.num_redrives > 0
    assert answer.path == "local"


@pytest.mark.parametrize(
    ("stage", "skip"),
    sampled([("granted", 0), ("mid_stream", MID_STREAM)], ("mid_stream", MID_STREAM)),
)
def test_a_stream_goes_on_when_the_only_decode_worker_is_back(
    pair: Ground, stage: str, skip: int
) -> None:
    answer = run_alone(pair, Case(stage, "restart", "decode", skip))
    assert answer.metrics.num_redrives > 0


def test_a_stream_goes_on_when_the_only_router_is_back(pair: Ground) -> None:
    run_alone(pair, Case("mid_stream", "restart", "router", MID_STREAM))


def run_alone(pair: Ground, case: Case) -> Answer:
    with restored(pair.cluster), Asker(pair.cluster.addresses) as asker:
        wait_until_handing_off(pair.cluster, asker)
        question = (PROMPT, PARAMS["sampled"])
        (answer,) = run_case(pair.cluster, asker, case, [question], deadline_s=120.0)
        check_answer(answer, pair.expected["sampled"][0], within_s=RESTART_BOUND_S)
    wait_for_baseline(pair.cluster, pair.baseline)
    return answer


# ---- workers that hang, or are told to end


def test_a_worker_whose_step_hangs_ends_and_its_streams_go_on(pair: Ground, pools: Ground) -> None:
    """Its event loop, and so its heartbeat, goes on."""
    run_on_all(
        [
            partial(run_hung, pair, Case("queued", "hang_step", "prefill")),
            partial(run_hung, pools, Case("mid_stream", "hang_step", "decode", MID_STREAM)),
        ]
    )


def run_hung(ground: Ground, case: Case) -> None:
    with restored(ground.cluster), Asker(ground.cluster.addresses) as asker:
        wait_until_handing_off(ground.cluster, asker)
        question = (PROMPT, SAMPLED)
        (answer,) = run_case(ground.cluster, asker, case, [question], deadline_s=HANG_DEADLINE_S)
        check_answer(answer, ground.expected["sampled"][0], within_s=HANG_BOUND_S)
        assert answer.metrics.num_redrives > 0
    wait_for_baseline(ground.cluster, ground.baseline)


def test_a_worker_that_awakes_says_nothing_that_counts(pair: Ground, pools: Ground) -> None:
    """It has been replaced, and the request still runs there: on D alone, or on another D."""
    run_on_all(
        [
            partial(run_asleep, pair, Case("last_chunk", "sleep", "prefill")),
            partial(run_asleep, pools, Case("mid_stream", "sleep", "decode", MID_STREAM)),
        ]
    )


def run_asleep(ground: Ground, case: Case) -> None:
    cluster, question = ground.cluster, (PROMPT, LONG)
    with restored(cluster), Asker(cluster.addresses) as asker:
        wait_until_handing_off(cluster, asker)
        asking, ends, sleeper = hold(cluster, asker, case, question, deadline_s=DEADLINE_S)
        others = [name for name in cluster.of_role("decode") if name != sleeper]
        for name in others:
            cluster.controls(name).slow_down(STEP_S)
        strike(cluster, ends, case.fault, case.victim)
        cluster.controls(sleeper).go(case.stage)  # what it says of this step comes too late
        cluster.wait_for(lambda: find_more(cluster, sleeper), timeout_s=DEADLINE_S)
        assert not asking.answer.done()
        for name in others:
            cluster.controls(name).slow_down(0.0)
        answer = asking.answer.result(DEADLINE_S)
        check_answer(answer, ground.expected["long"][0], within_s=LONG_S + BOUND_S)
        assert answer.metrics.num_redrives == 1
    wait_for_baseline(cluster, ground.baseline)


def find_more(cluster: Cluster, name: str, *, num_sessions: int = 0) -> str:
    """Say what a worker has besides so many sessions, or return ""."""
    now = held(cluster)[name]
    found = now.running, now.waiting, now.sessions
    right = (0, 0, num_sessions)
    return "" if found == right else f"requests that run and wait, and sessions: {found}"


def test_a_prefill_worker_ends_only_when_what_it_holds_is_read(pair: Ground) -> None:
    prefill, decode = pair.cluster.members["prefill-0"], pair.cluster.controls("decode-0")
    with restored(pair.cluster), Asker(pair.cluster.addresses) as asker:
        wait_until_handing_off(pair.cluster, asker)
        decode.arm("mid_read", hold=True)
        asking = asker.start(PROMPT, SAMPLED)
        decode.wait_reached("mid_read")
        pair.cluster.terminate("prefill-0")
        pair.cluster.wait_for(
            lambda: find_more(pair.cluster, "prefill-0", num_sessions=1), timeout_s=DEADLINE_S
        )
        time.sleep(END_S)
        assert prefill.is_running
        decode.go("mid_read")
        assert prefill.wait_exit() == 0
        answer = asking.answer.result(DEADLINE_S)
        check_answer(answer, pair.expected["sampled"][0], within_s=BOUND_S)
        assert (answer.path, answer.metrics.num_redrives) == ("disaggregated", 0)


# ---- links that heal


@pytest.mark.skipif(bool(missing_for_partitions()), reason=missing_for_partitions())
@pytest.mark.parametrize("seconds", sampled([0.7, 2.5], 2.5))
def test_a_link_to_the_router_that_is_soon_back_costs_no_redrive(
    pools: Ground, seconds: float
) -> None:
    """It goes on as it was, or is attached anew and adopts what runs."""
    with restored(pools.cluster), Asker(pools.cluster.addresses) as asker:
        wait_until_handing_off(pools.cluster, asker)
        workers = pools.cluster.of_role("decode")
        asking = asker.start(PROMPT, LONG)
        asking.wait_for_tokens(MID_STREAM)
        for name in workers:
            pools.cluster.partition(name, ROUTER)
        time.sleep(seconds)
        for name in workers:
            pools.cluster.heal(name, ROUTER)
        answer = asking.answer.result(DEADLINE_S)
    check_answer(answer, pools.expected["long"][0], within_s=BOUND_S)
    assert answer.metrics.num_redrives == 0
