"""`pdserve advise`: what it prints of sample traces, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve_client.__main__ import main
from pdserve_client.advisor.cost_profile import save_profile
from support.advisor import a_profile

OBJECTIVES = ["--ttft-p99-ms=500", "--itl-p99-ms=30", "--precision=0.2"]


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    save_profile(a_profile(), path)
    return f"--profile={path}"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Long prompts, in Mooncake's format, half of which begin alike."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 200 * i,
            "input_length": 2000,
            "output_length": 20,
            "hash_ids": [0, 1, 2 + i, 100 + i] if i % 2 else [1000 + 4 * i + j for j in range(4)],
        }
        for i in range(60)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return f"--trace={path}"


def answer(capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    assert main(["advise", *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_finds_the_split_and_says_why(
    capsys: pytest.CaptureFixture[str], profile: str, trace: str
) -> None:
    flags = [profile, trace, "--workers=3", *OBJECTIVES]
    found = answer(capsys, *flags)
    assert [(s["num_prefill"], s["num_decode"]) for s in found["splits"]] == [
        (0, 3),
        (1, 2),
        (2, 1),
    ]
    mixed, *separate = found["splits"]
    # A chunk of 512 tokens takes more than the ITL's objective beside an answer.
    assert mixed["limit"].startswith("ITL p99")
    assert "steps that compute prompts hold up the answers" in mixed["limit"]
    best = max(separate, key=lambda s: s["goodput"]["requests_per_s"])
    assert found["verdict"][0].startswith(f"Best: {best['num_prefill']}P + {best['num_decode']}D")
    assert "Disaggregation is worth it" in found["verdict"][1]
    assert best["goodput"]["missed"] == []
    assert best["goodput"]["ttft_p99_ms"] <= 500 < best["above"]["ttft_p99_ms"]
    # For people the same, and with the same seed again.
    assert main(["advise", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-len(found["verdict"]) :] == found["verdict"]
    assert sum(line.startswith("| ") for line in lines) == 5
    assert answer(capsys, *flags) == found


def test_it_tells_what_a_rate_brings(
    capsys: pytest.CaptureFixture[str], profile: str, trace: str
) -> None:
    flags = [profile, trace, "--splits=0:1,1:1", *OBJECTIVES]
    found = answer(capsys, *flags, "--at-rate=0")
    rates = [split["result"]["requests_per_s"] for split in found["splits"]]
    assert rates == [found["trace_requests_per_s"]] * 2
    assert found["splits"][1]["remark"] == "meets the objectives"
    # What mixed workers compute at a time can be less than what was measured with.
    small = answer(capsys, *flags, "--at-rate=0", "--decode-max-num-batched-tokens=64")
    itls = [each["splits"][0]["result"]["itl_p99_ms"] for each in (found, small)]
    assert itls[1] < itls[0] / 2


def test_drawn_traces_follow_their_flags(capsys: pytest.CaptureFixture[str], profile: str) -> None:
    flags = ["--num-requests=50", "--prompt-tokens=100", "--output-tokens=uniform:2:4"]
    shared = ["--num-prefixes=1", "--prefix-tokens=1600"]
    found = [
        answer(capsys, profile, "--splits=0:1", "--at-rate=5", *flags, *more)["splits"][0]["result"]
        for more in ([], shared)
    ]
    # 1,600 tokens more, which only the first request computes.
    assert found[1]["ttft_p50_ms"] < found[0]["ttft_p50_ms"] * 1.5
    assert found[1]["ttft_p99_ms"] > found[0]["ttft_p99_ms"] * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers=0"], "workers is 0, must be 1 to 64"),
        (["--precision=nan"], "precision is nan, must be 0.001 to 1"),
        (["--at-rate=-1"], "at_rate is -1.0, must be a number of at least 0"),
        (["--itl-p99-ms=-1"], "itl_p99_ms is -1.0, must be a number above 0"),
        (["--ttft-p99-ms=0", "--itl-p99-ms=0"], "there is no objective"),
        (["--num-requests=1"], "num_requests is 1, must be 2 to 1000000"),
        (["--max-prefill-queue-tokens=-1"], "max_prefill_queue_tokens is -1, must be at least 0"),
        (["--decode-max-num-batched-tokens=0"], "max_num_batched_tokens is 0, must be 1 to 2^40"),
        (["--trace=/none"], "No such file"),
        (["--prompt-tokens=90000"], "does not fit in the KV blocks of a decode worker"),
    ],
)
def test_what_cannot_be_advised_is_refused(
    capsys: pytest.CaptureFixture[str], profile: str, flags: list[str], message: str
) -> None:
    assert main(["advise", profile, *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--splits=1:0", "'1:0' must be P:D with D above 0"),
        ("--splits=40:40", "more than 64 workers"),
        ("--output-tokens=x", "'x' is no distribution"),
        ("--routing-policy=session", "invalid choice"),
    ],
)
def test_bad_flags_are_usage_errors(
    capsys: pytest.CaptureFixture[str], flag: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        main(["advise", flag])
    assert message in capsys.readouterr().err


def test_it_wants_a_profile_and_a_trace_that_has_a_rate(
    capsys: pytest.CaptureFixture[str], profile: str, tmp_path: Path
) -> None:
    assert main(["advise"]) == 1
    assert "`pdserve advise profile` measures one" in capsys.readouterr().err
    path = tmp_path / "t"
    path.write_text('{"arrival_s": 1, "num_prompt_tokens": 1, "num_output_tokens": 1}\n' * 2)
    assert main(["advise", profile, f"--trace={path}"]) == 1
    assert "all requests of the trace arrive at once" in capsys.readouterr().err
