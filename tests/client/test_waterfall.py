"""What `pdserve run` prints of a request's time."""

from itertools import pairwise
from pathlib import Path

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.waterfall import BAR_WIDTH, FIRST_ITL_STAGES, TTFT_STAGES, format_waterfall

ROOT = Path(__file__).parents[2]
MS = 1_000_000
USAGE = pb2.Usage(num_prompt_tokens=9, num_cached_tokens=4, num_output_tokens=3)
METRICS = {
    "router_queue_ns": 1 * MS,
    "tokenize_ns": 1 * MS,
    "dispatch_ns": 2 * MS,
    "prefill_queue_ns": 2 * MS,
    "decode_queue_ns": 6 * MS,
    "prefill_ns": 20 * MS,
    "return_ns": 4 * MS,
    "ttft_ns": 36 * MS,
    "kv_transfer_exposed_ns": 1 * MS,
    "release_ack_ns": 2 * MS,
    "decode_admit_ns": 1 * MS,
    "first_decode_step_ns": 8 * MS,
    "decode_return_ns": 4 * MS,
    "first_itl_ns": 16 * MS,
    "kv_transfer_ns": 5 * MS,
    "kv_transfer_bytes": 2**20,
    "kv_transport": "shm",
    "path": "disaggregated",
    "prefill_engine_id": "p",
    "decode_engine_id": "d",
    "determinism": "exact",
}


def lines_of(**changes: object) -> list[str]:
    metrics = pb2.RequestMetrics(**{**METRICS, **changes})  # type: ignore[arg-type]
    return format_waterfall(metrics, USAGE).splitlines()


def stages_of(lines: list[str]) -> list[tuple[str, float]]:
    """Names and ms of the lines with a bar."""
    return [(line[2:26].strip(), float(line[26:37])) for line in lines if "█" in line]


def test_what_is_printed_sums_and_its_bars_follow_each_other() -> None:
    lines = lines_of()
    stages = [milliseconds for _, milliseconds in stages_of(lines)]
    assert sum(stages[:7]) == 36.0
    assert sum(stages[7:]) == 16.0
    bars = [line[line.index(" ms  ") + 5 :] for line in lines if "█" in line]
    for before, after in pairwise(bars):
        assert len(after) - after.count("█") in (len(before), 0)
    assert max(map(len, bars)) == BAR_WIDTH


def test_the_wait_for_decode_stands_apart_from_the_one_for_prefill() -> None:
    stages = dict(stages_of(lines_of()))
    assert (stages["prefill queue"], stages["decode queue"]) == (2.0, 6.0)


def test_one_sees_how_much_of_the_transfer_the_prefill_hid() -> None:
    lines = lines_of()
    (hidden,) = [line for line in lines if "under prefill" in line]
    assert hidden.split() == ["under", "prefill", "4.000", "ms", "(80%)"]
    # Not more than there was.
    assert any("0.000 ms (0%)" in line for line in lines_of(kv_transfer_exposed_ns=9 * MS))
    assert not any("KV transfer  " in line for line in lines_of(kv_transfer_bytes=0))


def test_a_local_request_says_why() -> None:
    local = {"path": "local", "prefill_engine_id": "", "route_reason": "no_proven_pair"}
    assert "path             local (no_proven_pair): d" in lines_of(**local)
    assert "path             disaggregated: p -> d" in lines_of()


def test_a_recovered_request_says_so() -> None:
    assert "redrives         2" in lines_of(num_redrives=2)
    assert not any(line.startswith("redrives") for line in lines_of())
    assert "determinism      exact" in lines_of()


def test_the_chat_page_and_the_docs_call_stages_the_same() -> None:
    page = (ROOT / "router" / "pdserve_router" / "api" / "http" / "chat_page.html").read_text()
    docs = (ROOT / "docs" / "metrics.md").read_text()
    readme = (ROOT / "README.md").read_text()
    for stage, name in (TTFT_STAGES | FIRST_ITL_STAGES).items():
        assert f'["{stage}", "{name}", ' in page
        assert f"| `{stage}` | {name} |" in docs
        assert f"\n  {name:<24} " in readme
