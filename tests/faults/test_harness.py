"""Each tool of the fault suites does what it says."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from checks import (
    Answer,
    Asker,
    Completion,
    Held,
    check_answer,
    held,
    wait_for_baseline,
    wait_until_handing_off,
)
from pdserve_faults.stages import STAGES

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common.types.sampling_params import SamplingParams
from support.cluster import CLIENT, Cluster, ClusterError
from support.network import (
    Network,
    missing_for_loss,
    missing_for_partitions,
    namespaces,
    remove_leftovers,
)

pytestmark = pytest.mark.soak

NUM_TOKENS = 24
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    "sampled": SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True),
}
PROMPT = random.Random(0).choices(range(3, 290), k=200)
# A peer that says nothing is given up after 5 s.
SILENCE_S = 10.0
# Of a loop, while a process is asked something.
FROZEN_S = 8.0
TRANSFER_TIMEOUT_S = 0.5

needs_partitions = pytest.mark.skipif(
    bool(missing_for_partitions()), reason=missing_for_partitions()
)
needs_loss = pytest.mark.skipif(bool(missing_for_loss()), reason=missing_for_loss())


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    networks = not missing_for_partitions()
    with Cluster(
        model=model,
        log_dir=tmp_path_factory.mktemp("logs"),
        prefill=1,
        decode=1,
        transport="tcp" if networks else "shm",
        networks=networks,
        flags={"kv-transfer-timeout-s": TRANSFER_TIMEOUT_S},
        router_flags={"redrive-wait-s": 1.0},
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    yield running
    running.restore()


@pytest.fixture(scope="module")
def expected(running: Cluster) -> dict[str, Answer]:
    """What is generated without faults."""
    with Asker(running.addresses) as asker:
        wait_until_handing_off(running, asker)
        answers = {kind: asker.ask(PROMPT, params) for kind, params in PARAMS.items()}
    assert all(answer.path == "disaggregated" for answer in answers.values())
    return answers


@pytest.fixture(scope="module")
def baseline(running: Cluster, expected: object) -> dict[str, Held]:
    return held(running)


@pytest.fixture
def asker(cluster: Cluster) -> Iterator[Asker]:
    with Asker(cluster.addresses, max_resumes=0) as asker:
        yield asker


# ---- stages


def test_a_request_passes_all_stages(
    cluster: Cluster, asker: Asker, expected: dict[str, Answer]
) -> None:
    for stage, point in STAGES.items():
        cluster.controls(f"{point.role}-0").arm(stage)
    check_answer(asker.ask(PROMPT, PARAMS["greedy"]), expected["greedy"], within_s=10.0)
    for stage, point in STAGES.items():
        cluster.controls(f"{point.role}-0").wait_reached(stage)


@pytest.mark.parametrize("kind", PARAMS)
def test_a_barrier_holds_a_request_until_it_may_go_on(
    cluster: Cluster,
    asker: Asker,
    expected: dict[str, Answer],
    kind: str,
) -> None:
    controls = cluster.controls("decode-0")
    controls.arm("mid_stream", skip=5, hold=True)
    asking = asker.start(PROMPT, PARAMS[kind])
    controls.wait_reached("mid_stream")
    asking.wait_for_tokens(5)
    time.sleep(0.3)
    num_tokens = len(asking.token_ids)
    assert 5 <= num_tokens <= 7
    controls.go("mid_stream")
    check_answer(asking.answer.result(60), expected[kind], within_s=10.0)


# ---- processes


@pytest.mark.parametrize("name", ["decode-0", "router-0"])
def test_a_frozen_loop_serves_nothing_while_other_threads_go_on(
    cluster: Cluster, name: str
) -> None:
    cluster.freeze_loop(name, FROZEN_S)
    frozen_at = time.monotonic()
    cluster.wait_for(lambda: "serving" if cluster.is_serving(name) else "", timeout_s=FROZEN_S)
    assert cluster.metrics(name)
    assert time.monotonic() - frozen_at < FROZEN_S, "too slow to say anything"
    cluster.wait_for(lambda: "" if cluster.is_serving(name) else "frozen", timeout_s=4 * FROZEN_S)


# ---- networks


@needs_partitions
def test_only_the_two_that_are_parted_do_not_hear_each_other(
    cluster: Cluster, asker: Asker, expected: dict[str, Answer]
) -> None:
    cluster.partition("prefill-0", "decode-0")
    asking = asker.start(PROMPT, PARAMS["greedy"])
    check_answer(asking.answer.result(SILENCE_S), expected["greedy"], within_s=SILENCE_S)
    cluster.wait_for(lambda: links_of(cluster, "decode-0"), timeout_s=SILENCE_S)
    cluster.wait_until_ready()  # the router sees both
    cluster.heal("prefill-0", "decode-0")
    wait_until_handing_off(cluster, asker)


def links_of(cluster: Cluster, name: str) -> str:
    count = cluster.metrics(name)["pdserve_kv_links"]
    return f"{name} has {count:g} links" if count else ""


@needs_loss
def test_lost_packets_are_lost_and_change_no_token(
    cluster: Cluster, asker: Asker, expected: dict[str, Answer]
) -> None:
    cluster.loss("prefill-0", "decode-0", 20)
    cluster.loss(CLIENT, "router-0", 10)
    check_answer(asker.ask(PROMPT, PARAMS["greedy"]), expected["greedy"], within_s=60.0)
    cluster.wait_for(
        lambda: "" if cluster.num_lost() >= 2 else f"lost {cluster.num_lost()}", timeout_s=10.0
    )
    with pytest.raises(ValueError, match="percent is 100, must be 0 to 99"):
        cluster.loss(CLIENT, "router-0", 100)


@needs_partitions
def test_no_namespace_is_left_after_a_failure() -> None:
    before = namespaces(os.getpid())
    network = Network(["one", "two"])
    with contextlib.suppress(ZeroDivisionError), network:
        assert len(namespaces(os.getpid())) == len(before) + 3
        assert network.link in links()
        raise ZeroDivisionError
    assert namespaces(os.getpid()) == before
    assert network.link not in links()


def links() -> str:
    return subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


@needs_partitions
def test_namespaces_of_a_killed_test_go_with_the_next() -> None:
    script = "from support.network import Network; Network(['x']).__enter__(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
    ) as process:
        deadline = time.monotonic() + 10
        while len(namespaces(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(namespaces(process.pid)) == 2
        process.send_signal(signal.SIGKILL)
    remove_leftovers()
    assert not namespaces(process.pid)


# ---- NIXL


@pytest.mark.parametrize(
    "fault",
    ["post_backend_error", "post_remote_disconnect", "backend_error", "remote_disconnect"],
)
def test_an_injected_error_arrives(
    cluster: Cluster, asker: Asker, expected: dict[str, Answer], fault: str
) -> None:
    failures = sum_of(cluster, "decode-0", "pdserve_kv_transfer_failures_total")
    cluster.controls("decode-0").inject(fault)
    answer = asker.ask(PROMPT, PARAMS["greedy"])
    is_fatal = not fault.endswith("disconnect")
    check_answer(answer, expected["greedy"], within_s=SILENCE_S, may_fail=is_fatal)
    if not is_fatal:
        assert sum_of(cluster, "decode-0", "pdserve_kv_transfer_failures_total") > failures
    else:  # its memory is not to be trusted any more
        process = cluster.members["decode-0"].process
        assert process is not None
        assert process.wait(20) == 2


def sum_of(cluster: Cluster, name: str, metric: str) -> float:
    return sum(v for key, v in cluster.metrics(name).items() if key.startswith(metric))


def test_a_stalled_read_is_unlanded_until_it_lands(
    cluster: Cluster,
    asker: Asker,
    expected: dict[str, Answer],
    baseline: dict[str, Held],
) -> None:
    cluster.controls("decode-0").inject("stall")
    check_answer(asker.ask(PROMPT, PARAMS["greedy"]), expected["greedy"], within_s=SILENCE_S)
    now = held(cluster)["decode-0"]
    assert (now.unlanded, now.handles) == (1, 1)
    assert now.blocks > 0
    with pytest.raises(ClusterError, match="decode-0 holds 1 unlanded, held 0"):
        wait_for_baseline(cluster, baseline, timeout_s=0.5)
    cluster.controls("decode-0").reset()
    wait_for_baseline(cluster, baseline)


@needs_partitions
def test_a_disconnect_is_told_when_nothing_lands_any_more(
    cluster: Cluster, asker: Asker, baseline: dict[str, Held]
) -> None:
    """Over TCP, where a READ needs the other end's help. One READ, so that no other is unlanded."""
    prompt = PROMPT[:50]
    expected = asker.ask(prompt, PARAMS["greedy"])
    controls = cluster.controls("decode-0")
    controls.inject("remote_disconnect")
    controls.arm("chunk", hold=True)
    asking = asker.start(prompt, PARAMS["greedy"])
    controls.wait_reached("chunk")
    cluster.stop("prefill-0")
    controls.go("chunk")
    unlanded = "pdserve_kv_unlanded_reads"
    cluster.wait_for(
        lambda: "" if cluster.metrics("decode-0")[unlanded] else "the READ is over",
        timeout_s=SILENCE_S,
    )
    cluster.cont("prefill-0")
    check_answer(asking.answer.result(SILENCE_S), expected, within_s=SILENCE_S)
    wait_for_baseline(cluster, baseline)


def test_a_late_read_lands_late_and_changes_no_token(
    cluster: Cluster, asker: Asker, expected: dict[str, Answer]
) -> None:
    delay_s = TRANSFER_TIMEOUT_S / 2
    cluster.controls("decode-0").inject("late", delay_s=delay_s)
    answer = asker.ask(PROMPT, PARAMS["greedy"])
    check_answer(answer, expected["greedy"], within_s=10.0)
    assert answer.seconds > delay_s


def test_corrupt_blocks_make_wrong_tokens(
    cluster: Cluster, asker: Asker, expected: dict[str, Answer]
) -> None:
    cluster.controls("decode-0").inject("corrupt")
    answer = asker.ask(PROMPT, PARAMS["greedy"])
    assert cluster.controls("decode-0").counts()["faulty_reads"] > 0
    assert answer.token_ids != expected["greedy"].token_ids, (
        "the fault has not touched what is read"
    )


# ---- checks


def answer_of(*token_ids: int, errors: tuple[str, ...] = (), num_ends: int = 1) -> Answer:
    usage = pb2.Usage(num_output_tokens=len(token_ids))
    completion = Completion(list(token_ids), text="".join(map(chr, token_ids)))
    return Answer({0: completion}, list(errors), num_ends, 1.0, pb2.RequestMetrics(), usage)


def with_logprob(answer: Answer, logprob: float) -> Answer:
    first = answer.completions[0]
    positions = [([token_id], [logprob]) for token_id in first.token_ids]
    return answer._replace(completions={0: replace(first, logprobs=positions)})


GOOD = [
    answer_of(4, 5, 6),
    answer_of(4, 5, errors=("ENGINE_DEAD",)),
    answer_of(errors=("grpc UNAVAILABLE",), num_ends=0),
]
BAD = {
    "wrong token": answer_of(4, 5, 7),
    "lost token": answer_of(4, 6),
    "short": answer_of(4, 5),
    "token twice": answer_of(4, 4, 5, 6),
    "wrong token before an error": answer_of(4, 6, errors=("ENGINE_DEAD",)),
    "two errors": answer_of(4, errors=("ENGINE_DEAD", "ENGINE_DEAD")),
    "untyped": answer_of(4, errors=("INTERNAL",)),
    "untyped status": answer_of(4, errors=("grpc UNKNOWN",), num_ends=0),
    "no end": answer_of(4, 5, 6, num_ends=0),
    "two ends": answer_of(4, 5, 6, num_ends=2),
}


@pytest.mark.parametrize("answer", GOOD)
def test_a_right_answer_passes(answer: Answer) -> None:
    check_answer(answer, GOOD[0], within_s=1.0, may_fail=True)


@pytest.mark.parametrize("answer", BAD.values(), ids=BAD)
def test_a_wrong_answer_does_not_pass(answer: Answer) -> None:
    with pytest.raises(AssertionError):
        check_answer(answer, GOOD[0], within_s=1.0, may_fail=True)


def with_prompt_logprob(answer: Answer, logprob: float) -> Answer:
    # Nothing precedes the first token.
    return answer._replace(prompt_logprobs=[([], []), ([7], [logprob])])


@pytest.mark.parametrize("with_one", [with_logprob, with_prompt_logprob])
def test_other_logprobs_do_not_pass(with_one: Callable[[Answer, float], Answer]) -> None:
    expected = with_one(GOOD[0], -1.0)
    check_answer(with_one(GOOD[0], -1.000001), expected, within_s=1.0)
    for wrong in (with_one(GOOD[0], -1.0001), GOOD[0]):
        with pytest.raises(AssertionError):
            check_answer(wrong, expected, within_s=1.0)


def test_a_slow_answer_or_an_error_does_not_pass_where_none_may_be() -> None:
    with pytest.raises(AssertionError, match=r"took 1\.0 s"):
        check_answer(GOOD[0], GOOD[0], within_s=0.001)
    with pytest.raises(AssertionError, match="failed with"):
        check_answer(GOOD[1], GOOD[0], within_s=1.0)
