"""Each alert is made to fire by what it is about, and gets to a webhook with its texts.

Rules are those of the chart with durations scaled (prometheus.py); thresholds are as they are.
"""

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest
from checks import find_unproven
from monitoring import autoscaling_targets, rule_name, rules, selectors
from world import NAMESPACE, RELEASE, World

from support.cluster import Member
from support.metrics import total

FIRE_TIMEOUT_S = 90.0
# The longest window that one test leaves to the next.
QUIET_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 60.0
# Longer than a session lives, and shorter than a worker lets its transfers hang (10 s).
HELD_S = 8.0
# Of that.
STOPPED_S = 6.0
# For so long it is looked who waits for what.
STEADY_S = 10
# Whatever else breaks.
NEVER_BY_CHANCE = {"PdserveDuplicateTokenMismatch", "PdserveCorruptBlocks"}
PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")


@contextlib.contextmanager
def slow_prefill(world: World) -> Iterator[None]:
    """More prompts than it can compute; decode is idle, however many queue."""
    with (
        world.load(clients=80, prompt_tokens=(100, 200), max_tokens=4),
        slowed(world, PREFILL, step_s=0.15),
    ):
        yield


@contextlib.contextmanager
def slow_decode(world: World) -> Iterator[None]:
    """0.6 s between the tokens of answers."""
    with (
        world.load(clients=80, prompt_tokens=(200, 400), max_tokens=6),
        slowed(world, DECODE, step_s=0.6),
    ):
        yield


@contextlib.contextmanager
def full_blocks(world: World) -> Iterator[None]:
    """More answers than decode has room for: long prompts fill its KV blocks before its slots. They
    stay for some 10 s, so that prefill fills them on a busy machine too.
    """
    with (
        world.load(clients=80, prompt_tokens=(200, 400), max_tokens=32),
        slowed(world, DECODE, step_s=0.3),
    ):
        yield


@contextlib.contextmanager
def full_slots(world: World) -> Iterator[None]:
    """More answers than decode has places for; they are short, and need little KV. Places are freed
    slowly and one at a time: each of those who wait does so for longer than others may overtake it.
    What decode grants waits for prefill's next step, which is no reason for more prefill workers:
    that takes longer than a grant is overdue (1 s), and two of them less than a session (3.5 s).
    """

    def ends() -> dict[str, object]:
        return {"max_tokens": random.randint(4, 48)}

    with (
        world.load(clients=140, prompt_tokens=(1, 20), fields=ends),
        slowed(world, DECODE, step_s=0.4),
        slowed(world, PREFILL, step_s=1.2),
    ):
        yield


@contextlib.contextmanager
def full_prefill_queues(world: World) -> Iterator[None]:
    """So many prompts that routers send some to decode alone."""
    with (
        world.load(clients=80, prompt_tokens=(300, 400), max_tokens=4),
        slowed(world, PREFILL, step_s=0.15),
    ):
        yield


@contextlib.contextmanager
def slowed(world: World, names: Sequence[str], *, step_s: float) -> Iterator[None]:
    for name in names:
        world.cluster.controls(name).slow_down(step_s)
    yield
    for name in names:
        world.cluster.controls(name).slow_down(0.0)


@contextlib.contextmanager
def lost_reads(world: World) -> Iterator[None]:
    """None works: workers are ready, and no pair of them is proven any more."""
    with faulty_reads(world, "remote_disconnect", count=10_000):
        yield


@contextlib.contextmanager
def one_lost_way(world: World) -> Iterator[None]:
    """One decode worker reads from nobody any more; the other one does."""
    with faulty_reads(world, "remote_disconnect", count=10_000, names=DECODE[:1]):
        yield


@contextlib.contextmanager
def damaged_reads(world: World) -> Iterator[None]:
    with faulty_reads(world, "corrupt", count=2):
        yield


@contextlib.contextmanager
def defective_reads(world: World) -> Iterator[None]:
    with faulty_reads(world, "defect", count=2):
        yield


@contextlib.contextmanager
def slow_reads(world: World) -> Iterator[None]:
    with faulty_reads(world, "late", count=100, delay_s=0.8):
        yield


@contextlib.contextmanager
def faulty_reads(
    world: World,
    fault: str,
    *,
    count: int,
    delay_s: float = 0.0,
    names: Sequence[str] = DECODE,
) -> Iterator[None]:
    with world.load(clients=4, prompt_tokens=(50, 100)):
        for name in names:
            world.cluster.controls(name).inject(fault, count=count, delay_s=delay_s)
        yield


@contextlib.contextmanager
def held_reads(world: World) -> Iterator[None]:
    """Decode workers that do not fetch what prefill holds for them. They stop meanwhile: they would
    give the sessions up when prefill does, and whoever is first says why they ended.
    """
    with world.load(clients=4, prompt_tokens=(50, 100)):
        for name in DECODE:
            world.cluster.controls(name).arm("chunk", hold=True, hold_s=HELD_S)
        for name in DECODE:
            world.cluster.controls(name).wait_reached("chunk", timeout_s=30.0)
        for name in DECODE:
            world.cluster.stop(name)
        time.sleep(STOPPED_S)
        for name in DECODE:
            world.cluster.cont(name)
        yield


@contextlib.contextmanager
def drained_before_reads(world: World) -> Iterator[None]:
    """A prefill worker that has to go before decode has fetched what it holds."""
    with world.load(clients=8, prompt_tokens=(50, 100)):
        for name in DECODE:
            world.cluster.controls(name).arm("chunk", hold=True, hold_s=HELD_S)
        for name in DECODE:
            world.cluster.controls(name).wait_reached("chunk", timeout_s=30.0)
        # What is held may all be of one of them.
        name = max(PREFILL, key=lambda name: num_sessions(world, name))
        try:
            drain(world.cluster.members[name], timeout_s=1)
            yield
        finally:
            world.cluster.kill(name)  # it would take no request any more


def num_sessions(world: World, name: str) -> float:
    return total(world.cluster.metrics(name), "pdserve_kv_sessions")


def drain(member: Member, *, timeout_s: int) -> None:
    ctl = [sys.executable, "-m", "pdserve_client", "ctl", member.address]
    subprocess.run(
        [*ctl, "drain", f"--drain-timeout-s={timeout_s}"], check=True, timeout=DRAIN_TIMEOUT_S
    )


@contextlib.contextmanager
def wrong_repetition(world: World) -> Iterator[None]:
    with world.load(clients=4):
        for name in DECODE:
            world.cluster.controls(name).lie(count=2)
        yield


@contextlib.contextmanager
def dead_prefill(world: World) -> Iterator[None]:
    with world.load(clients=4):
        for name in PREFILL:
            world.cluster.kill(name)
        yield


@contextlib.contextmanager
def dead_decode(world: World) -> Iterator[None]:
    with world.load(clients=16, max_tokens=200):
        time.sleep(2)
        for name in DECODE:
            world.cluster.kill(name)
        yield


@contextlib.contextmanager
def dead_router(world: World) -> Iterator[None]:
    world.cluster.kill("router-0")
    yield


@contextlib.contextmanager
def deaths_while_loading(world: World) -> Iterator[None]:
    """A worker that is killed again and again before it is ready."""
    started = 'process_start_time_seconds{pod="prefill-1"}'
    with hanging_storage(world.cluster.members["prefill-1"]):
        for _ in range(3):
            before = world.prometheus.query(started)
            world.cluster.restart("prefill-1")
            world.wait_until(
                lambda: world.prometheus.query(started) not in ([], before),  # noqa: B023
                "it is scraped again",
                timeout_s=60,
            )
            assert not world.prometheus.query('pdserve_build_info{pod="prefill-1"}'), "it is ready"
    yield


@contextlib.contextmanager
def hanging_storage(member: Member) -> Iterator[None]:
    """Starts of it wait for ever for the first byte of its model; the last one ends with this."""
    job = member.job
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(Path(folder, "config.json"))
        member.job = job._replace(arguments=[*job.arguments, f"--model={folder}"])
        try:
            yield
        finally:
            member.job = job
            member.kill()


@contextlib.contextmanager
def name_taken(world: World) -> Iterator[None]:
    """A decode worker is started again under the other one's engine_id."""
    with started_with(world, "decode-1", "--engine-id=decode-0"):
        yield


@contextlib.contextmanager
def other_weights(world: World) -> Iterator[None]:
    """A decode worker is started again in another dtype, which makes other weights of them."""
    with started_with(world, "decode-1", "--dtype=bfloat16"):
        yield


@contextlib.contextmanager
def started_with(world: World, name: str, flag: str) -> Iterator[None]:
    member = world.cluster.members[name]
    job = member.job
    member.job = job._replace(arguments=[*job.arguments, flag])
    try:
        world.cluster.restart(name)
        yield
    finally:
        member.job = job
        member.kill()


class Case(NamedTuple):
    """A cause, and labels of the alerts that come of it."""

    cause: Callable[[World], AbstractContextManager[None]]
    alerts: tuple[Mapping[str, str], ...]
    # Those that would send people to the wrong pool: silent while the others fire.
    never: tuple[Mapping[str, str], ...] = ()
    # The pool that autoscaling wants to grow, and no other.
    grows: str = ""


def alert(name: str, **labels: str) -> dict[str, str]:
    return {"alertname": name, "release": RELEASE, "namespace": NAMESPACE, **labels}


SHORT_OF_PREFILL = (
    alert("PdservePrefillQueue"),
    alert("PdservePrefillDecodeImbalance", short_of="prefill"),
)
SHORT_OF_DECODE = (
    alert("PdserveDecodeSlots"),
    alert("PdservePrefillDecodeImbalance", short_of="decode"),
)
# First those for which most requests within the scaled 6 hours have to be slow.
CASES = [
    Case(
        slow_prefill,
        (
            alert("PdserveTTFTBudgetBurn", severity="page"),
            alert("PdserveTTFTBudgetBurn", severity="ticket"),
            alert("PdservePrefillQueue"),
            alert("PdservePrefillDecodeImbalance", short_of="prefill"),
        ),
        never=SHORT_OF_DECODE,
        grows="prefill",
    ),
    Case(
        slow_decode,
        (
            alert("PdserveFirstITLBudgetBurn", severity="page"),
            alert("PdserveFirstITLBudgetBurn", severity="ticket"),
            alert("PdserveITLBudgetBurn", severity="page"),
            alert("PdserveITLBudgetBurn", severity="ticket"),
        ),
        never=SHORT_OF_PREFILL,
    ),
    Case(
        full_blocks,
        (
            alert("PdserveDecodeKVPressure", component="decode"),
            alert("PdservePrefillDecodeImbalance", short_of="decode"),
        ),
        never=SHORT_OF_PREFILL,
    ),
    Case(
        full_slots,
        SHORT_OF_DECODE,
        never=(*SHORT_OF_PREFILL, alert("PdserveDecodeKVPressure")),
        grows="decode",
    ),
    Case(full_prefill_queues, (alert("PdserveDowngrade", reason="prefill_queue"),)),
    Case(
        lost_reads,
        (alert("PdserveTransferFailures"), alert("PdserveDowngrade", reason="no_proven_pair")),
    ),
    Case(one_lost_way, (alert("PdservePairFailed"),)),
    # Both: what one still has to raise would be found in the next test.
    Case(damaged_reads, tuple(alert("PdserveCorruptBlocks", pod=name) for name in DECODE)),
    Case(defective_reads, tuple(alert("PdserveDefect", pod=name) for name in DECODE)),
    Case(slow_reads, (alert("PdserveTransferSlow"),)),
    Case(held_reads, (alert("PdserveSessionsExpiredOrFenced", reason="expired"),)),
    Case(drained_before_reads, (alert("PdserveSessionsExpiredOrFenced", reason="fenced"),)),
    Case(wrong_repetition, (alert("PdserveDuplicateTokenMismatch"),)),
    Case(
        dead_prefill,
        (
            alert("PdserveNoReadyWorker", role="prefill"),
            alert("PdserveTargetDown", pod="prefill-0"),
            alert("PdserveTargetDown", pod="prefill-1"),
            alert("PdserveDowngrade", reason="no_prefill_worker"),
        ),
    ),
    Case(
        dead_decode,
        (
            alert("PdserveNoReadyWorker", role="decode"),
            alert("PdserveErrorRatio"),
            alert("PdserveRequestsRefused"),
        ),
    ),
    Case(
        dead_router,
        (alert("PdserveNoRouter"), alert("PdserveTargetDown", pod="router-0")),
    ),
    Case(name_taken, (alert("PdserveWorkerUnused", role="decode", state="duplicate"),)),
    Case(other_weights, (alert("PdserveWorkerUnused", role="decode", state="mismatched"),)),
    Case(deaths_while_loading, (alert("PdserveRestartLoop", pod="prefill-1"),)),
]


def test_every_alert_has_a_cause() -> None:
    caused = {
        (labels["alertname"], labels["severity"])
        for case in CASES
        for labels in map(with_severity, case.alerts)
    }
    assert caused == {
        (rule_name(rule), rule["labels"]["severity"]) for rule in rules() if "alert" in rule
    }


def test_every_reason_of_an_alert_has_a_cause() -> None:
    caused = {
        (labels["alertname"], labels["reason"])
        for case in CASES
        for labels in case.alerts
        if "reason" in labels
    }
    assert caused == {
        (rule_name(rule), reason)
        for rule in rules()
        if "alert" in rule
        for selector in selectors(rule["expr"])
        for matcher in selector.matchers.matchers
        if matcher.name == "reason"
        for reason in matcher.value.split("|")
    }


def with_severity(labels: Mapping[str, str]) -> dict[str, str]:
    severities = {rule_name(r): r["labels"]["severity"] for r in rules() if "alert" in r}
    return {"severity": severities[labels["alertname"]], **labels}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cause.__name__)
def test_alerts_fire_and_arrive(case: Case, world: World) -> None:
    webhook = world.prometheus.webhook
    # After the case before, proofs may be waiting for their next try; alerts may fire until then.
    world.cluster.wait_for(lambda: find_unproven(world.cluster), timeout_s=QUIET_TIMEOUT_S)
    world.wait_until(
        lambda: not any(is_firing(world, labels) for labels in (*case.alerts, *case.never)),
        "none of the alerts fires",
        timeout_s=QUIET_TIMEOUT_S,
    )
    start = time.time()
    with world.restored(), case.cause(world):
        for labels in case.alerts:
            world.wait_until(
                lambda: webhook.find(labels, since=start) is not None,  # noqa: B023
                f"{labels} at the webhook",
                timeout_s=FIRE_TIMEOUT_S,
            )
        # The clients all begin at once: for a moment that is more than prefill can take.
        world.wait_until(
            lambda: points_at_its_pool(world, case),
            "nothing points at another pool",
            timeout_s=FIRE_TIMEOUT_S,
        )
    for labels in case.never:
        if labels not in SHORT_OF_PREFILL:
            assert webhook.find(labels, since=start) is None
    for labels in case.alerts:
        arrived = webhook.find(labels, since=start)
        assert arrived is not None
        check_texts(arrived["annotations"])
    for name in NEVER_BY_CHANCE - {labels["alertname"] for labels in case.alerts}:
        assert webhook.find({"alertname": name}, since=start) is None


def points_at_its_pool(world: World, case: Case) -> bool:
    """Whether alerts that would send people elsewhere are silent, and only its pool is to grow,
    which is what most wait for.
    """
    if any(is_firing(world, labels) for labels in case.never):
        return False
    if not case.grows:
        return True
    is_for_prefill = waiting_for_prefill(world) > 0.5
    return wanted_to_grow(world) == {case.grows} and is_for_prefill == (case.grows == "prefill")


def waiting_for_prefill(world: World) -> float:
    """Return the share of the requests on a prefill worker that do not wait for decode, the largest
    of some time.
    """
    waiting, for_decode = (
        f'{metric}{{component="prefill"}}'
        for metric in ("pdserve_requests_waiting", "pdserve_requests_waiting_for_decode")
    )
    share = f"max(1 - {for_decode} / {waiting})"
    samples = world.prometheus.query(f"max_over_time(({share})[{STEADY_S}s:1s])")
    return max((value for _, value in samples), default=0.0)


def wanted_to_grow(world: World) -> set[str]:
    """Return the pools for which a trigger of KEDA's wants more Pods than there are."""
    num_pods = {"prefill": len(PREFILL), "decode": len(DECODE)}
    return {
        role
        for role, query, target in autoscaling_targets()
        for _, value in world.prometheus.query(query)
        if value > target * num_pods[role]
    }


def is_firing(world: World, labels: Mapping[str, str]) -> bool:
    matchers = ", ".join(f'{name}="{value}"' for name, value in labels.items())
    return bool(world.prometheus.query(f'ALERTS{{alertstate="firing", {matchers}}}'))


def check_texts(annotations: Mapping[str, str]) -> None:
    """They are rendered, and say where to read on."""
    text = annotations["summary"] + annotations["description"]
    assert not {"{{", "}}", "<no value>", "NaN"} & set(text.split())
    assert "{{" not in text
    assert "<no value>" not in text
    assert RELEASE in text
    assert NAMESPACE in annotations["description"]
    assert annotations["runbook"].startswith("docs/operations/runbooks.md#pdserve")
