"""The waterfall: stages that sum, whatever other hosts' clocks say."""

import dataclasses
import random

import pytest
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import RouterMetrics
from pdserve_common.types.engine import KVTransferStats, PrefillStats
from pdserve_router.requests.records.request_metrics import (
    FIRST_ITL_STAGES,
    TTFT_STAGES,
    RequestMetrics,
    Timeline,
    measure,
    observe_end,
    observe_first_token,
)

MS = 1_000_000
PREFILL = PrefillStats(
    num_prompt_tokens=1, num_cached_tokens=0, queue_s=0.004, prefill_s=0.02, decode_queue_s=0.003
)
TRANSFER = KVTransferStats(
    num_bytes=4096,
    num_blocks=1,
    num_reads=1,
    transport="shm",
    transfer_s=0.009,
    exposed_s=0.001,
    release_ack_s=0.002,
    decode_admit_s=0.003,
    first_decode_step_s=0.005,
)


def timeline(**changes: int) -> Timeline:
    moments = {
        "arrival_ns": 0,
        "tokenize_start_ns": 1 * MS,
        "tokenize_end_ns": 3 * MS,
        "dispatched_ns": 4 * MS,
        "first_token_ns": 40 * MS,
        "second_token_ns": 55 * MS,
        "last_token_ns": 80 * MS,
        "finished_ns": 81 * MS,
    }
    return Timeline(**{**moments, **changes})


def measured(timeline: Timeline, **changes: object) -> RequestMetrics:
    fields: dict[str, object] = {
        "num_tokens": 5,
        "prefill": PREFILL,
        "transfer": TRANSFER,
        "path": "disaggregated",
        "route_reason": "",
        "prefill_engine_id": "p",
        "decode_engine_id": "d",
        "determinism": "exact",
        "num_redrives": 0,
    }
    return measure(timeline, **{**fields, **changes})  # type: ignore[arg-type]


def stages(metrics: RequestMetrics, names: tuple[str, ...]) -> list[int]:
    return [getattr(metrics, f"{name}_ns") for name in names]


@pytest.mark.parametrize("seed", range(50))
def test_the_stages_sum_exactly_whatever_the_clocks_say(seed) -> None:
    rng = random.Random(seed)
    moments = sorted(rng.randrange(1, 10**9) for _ in range(8))
    names = [field.name for field in dataclasses.fields(Timeline)]
    times = Timeline(**dict(zip(names, moments, strict=True)))
    prefill = dataclasses.replace(
        PREFILL, queue_s=rng.random(), prefill_s=rng.random(), decode_queue_s=rng.random()
    )
    transfer = dataclasses.replace(
        TRANSFER,
        transfer_s=rng.random(),
        exposed_s=rng.uniform(-0.1, 0.3),
        release_ack_s=rng.uniform(-0.1, 0.3),
        decode_admit_s=rng.uniform(-0.1, 0.3),
        first_decode_step_s=rng.uniform(-0.1, 0.3),
    )
    metrics = measured(
        times, prefill=rng.choice([prefill, None]), transfer=rng.choice([transfer, None])
    )
    for total, parts in (
        (metrics.ttft_ns, stages(metrics, TTFT_STAGES)),
        (metrics.first_itl_ns, stages(metrics, FIRST_ITL_STAGES)),
    ):
        assert min(parts) >= 0
        assert sum(parts) == total
    assert metrics.ttft_ns == times.first_token_ns - times.arrival_ns
    assert metrics.first_itl_ns == times.second_token_ns - times.first_token_ns
    assert metrics.mean_itl_ns == (times.last_token_ns - times.first_token_ns) // 4


def test_a_handoff_is_told_stage_by_stage() -> None:
    metrics = measured(timeline())
    assert stages(metrics, TTFT_STAGES) == [ms * MS for ms in (1, 2, 1, 1, 3, 20, 12)]
    assert stages(metrics, FIRST_ITL_STAGES) == [ms * MS for ms in (1, 3, 5, 2, 4)]
    assert metrics.kv_transfer_ns == 9 * MS


def test_without_a_handoff_nothing_is_known_of_the_first_decode_step() -> None:
    metrics = measured(timeline(), transfer=None, path="local", prefill_engine_id="")
    assert stages(metrics, FIRST_ITL_STAGES) == [0, 0, 0, 0, 15 * MS]


def test_what_a_lost_attempt_took_is_in_the_remainders() -> None:
    """The loss of P before the first token, and of D before the second one."""
    metrics = measured(
        timeline(first_token_ns=1040 * MS, second_token_ns=3055 * MS), num_redrives=2
    )
    assert metrics.return_ns == 1012 * MS
    assert metrics.decode_return_ns == 2004 * MS
    assert sum(stages(metrics, TTFT_STAGES)) == 1040 * MS
    assert sum(stages(metrics, FIRST_ITL_STAGES)) == 2015 * MS


def test_a_request_without_tokens_has_no_ttft() -> None:
    metrics = measured(
        Timeline(arrival_ns=10, tokenize_start_ns=20, tokenize_end_ns=30, finished_ns=50),
        num_tokens=0,
        prefill=None,
        transfer=None,
        path="local",
        prefill_engine_id="",
    )
    assert (metrics.ttft_ns, metrics.first_itl_ns, metrics.e2e_ns) == (0, 0, 40)


def test_tokens_that_come_together_have_no_time_between_them() -> None:
    timeline = Timeline(arrival_ns=0, tokenize_start_ns=0, tokenize_end_ns=0)
    timeline.on_tokens(100, num_before=0, num_new=2)
    assert (timeline.first_token_ns, timeline.second_token_ns) == (100, 100)
    timeline.on_tokens(300, num_before=2, num_new=1)
    assert (timeline.second_token_ns, timeline.last_token_ns) == (100, 300)


def test_trailers_have_every_stage_and_say_how_the_answer_came() -> None:
    trailers = dict(measured(timeline(), num_redrives=2).trailers())
    for stage in (*TTFT_STAGES, *FIRST_ITL_STAGES, "kv_transfer", "ttft", "first_itl"):
        assert float(trailers[f"pdserve-{stage.replace('_', '-')}-ms"]) > 0
    assert trailers["pdserve-determinism"] == "exact"
    assert (trailers["pdserve-recovered"], trailers["pdserve-num-redrives"]) == ("1", "2")
    assert dict(measured(timeline()).trailers())["pdserve-recovered"] == "0"


@pytest.mark.parametrize("is_local", [False, True])
def test_histograms_have_only_stages_that_a_request_went_through(is_local) -> None:
    registry = CollectorRegistry()
    local = {"transfer": None}
    metrics = measured(timeline(), **(local if is_local else {}))
    exported = RouterMetrics(registry)
    observe_first_token(exported, metrics, model="tiny")
    observe_end(exported, metrics, model="tiny")
    shared = {*TTFT_STAGES, "decode_return"}
    for stage in (*shared, *FIRST_ITL_STAGES, "kv_transfer"):
        name, labels = "pdserve_request_stage_seconds", {"stage": stage}
        count = registry.get_sample_value(f"{name}_count", labels) or 0
        assert count == (stage in shared or not is_local)
        seconds = registry.get_sample_value(f"{name}_sum", labels) or 0
        assert seconds == pytest.approx(getattr(metrics, f"{stage}_ns") / 1e9)
