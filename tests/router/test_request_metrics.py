import random

import pytest

from pdserve_common.engine_types import KVTransferStats, PrefillStats
from pdserve_router.request_metrics import FIRST_ITL_STAGES, TTFT_STAGES, Timeline, measure


@pytest.mark.parametrize("seed", range(50))
def test_the_stages_sum_exactly_whatever_the_clocks_say(seed) -> None:
    rng = random.Random(seed)
    moments = sorted(rng.randrange(1, 10**9) for _ in range(8))
    timeline = Timeline(
        arrival_ns=moments[0], tokenize_start_ns=moments[1], tokenize_end_ns=moments[2]
    )
    timeline.dispatched_ns = moments[3]
    timeline.first_token_ns, timeline.second_token_ns = moments[4:6]
    timeline.last_token_ns, timeline.finished_ns = moments[6:8]
    prefill = PrefillStats(
        num_prompt_tokens=1, num_cached_tokens=0, queue_s=rng.random(), prefill_s=rng.random()
    )
    transfer = KVTransferStats(
        num_bytes=1,
        num_blocks=1,
        transport="shm",
        admit_s=0,
        transfer_s=rng.random(),
        release_ack_s=0,
        exposed_s=rng.random(),
        first_decode_step_s=rng.random(),
    )
    metrics = measure(
        timeline,
        num_tokens=5,
        prefill=rng.choice([prefill, None]),
        transfer=rng.choice([transfer, None]),
        path="disaggregated",
        prefill_engine_id="p",
        decode_engine_id="d",
    )
    for total, stages in (("ttft", TTFT_STAGES), ("first_itl", FIRST_ITL_STAGES)):
        parts = [getattr(metrics, f"{stage}_ns") for stage in stages]
        assert min(parts) >= 0
        assert sum(parts) == getattr(metrics, f"{total}_ns")
    assert metrics.ttft_ns == timeline.first_token_ns - timeline.arrival_ns
    assert metrics.mean_itl_ns == (timeline.last_token_ns - timeline.first_token_ns) // 4


def test_a_request_without_tokens_has_no_ttft() -> None:
    timeline = Timeline(arrival_ns=10, tokenize_start_ns=20, tokenize_end_ns=30)
    timeline.finished_ns = 50
    metrics = measure(
        timeline,
        num_tokens=0,
        prefill=None,
        transfer=None,
        path="local",
        prefill_engine_id="",
        decode_engine_id="d",
    )
    assert (metrics.ttft_ns, metrics.first_itl_ns, metrics.e2e_ns) == (0, 0, 40)


def test_tokens_that_come_together_have_no_time_between_them() -> None:
    timeline = Timeline(arrival_ns=0, tokenize_start_ns=0, tokenize_end_ns=0)
    timeline.on_tokens(100, num_before=0, num_new=2)
    assert (timeline.first_token_ns, timeline.second_token_ns) == (100, 100)
    timeline.on_tokens(300, num_before=2, num_new=1)
    assert (timeline.second_token_ns, timeline.last_token_ns) == (100, 300)
