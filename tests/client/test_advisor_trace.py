"""Traces: what is read of others' files, what is refused, what is drawn."""

import json
import math
import random
import statistics
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_client.advisor import trace as trace_module
from pdserve_client.advisor.trace import (
    Trace,
    TraceError,
    TraceRequest,
    draw_trace,
    parse_lengths,
    read_trace,
)

OWN = {"arrival_s": 1.5, "num_prompt_tokens": 40, "num_output_tokens": 3}
# Two lines as https://github.com/kvcache-ai/Mooncake publishes them.
MOONCAKE = [
    {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 30535, "input_length": 700, "output_length": 26, "hash_ids": [46, 57]},
]


def write(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_our_own_format(tmp_path: Path) -> None:
    shared = {"prefix_id": "system", "num_prefix_tokens": 33}
    path = write(
        tmp_path / "t", OWN, "", OWN | shared | {"arrival_s": 0.5}, OWN | shared | {"ttft_ms": 3}
    )
    trace = read_trace(path)
    first, second, third = trace.requests
    # In order, from 0 on; whole units of 16 tokens are shared.
    assert [r.arrival_s for r in trace.requests] == [0.0, 1.0, 1.0]
    assert first.prefix == third.prefix
    assert [len(r.prefix) for r in trace.requests] == [2, 0, 2]
    assert (second.num_prompt_tokens, second.num_output_tokens) == (40, 3)


def test_the_format_of_mooncake(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t", *MOONCAKE))
    second = TraceRequest(pytest.approx(3.053), 700, 26, (46, 57))
    assert trace == Trace((TraceRequest(0.0, 1100, 52, (46, 47, 48)), second), 512)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (OWN | {"arrival_s": -1}, "arrival_s is -1, must be a number from 0"),
        (OWN | {"arrival_s": True}, "arrival_s is True, must be a number from 0"),
        (OWN | {"arrival_s": "1"}, "arrival_s is '1', must be a number from 0"),
        (OWN | {"arrival_s": 10**400}, "arrival_s is 10{40}"),
        ('{"arrival_s": NaN}', "not JSON: NaN is no number"),
        (
            '{"arrival_s": 1e999, "num_prompt_tokens": 1, "num_output_tokens": 1}',
            "arrival_s is inf",
        ),
        (OWN | {"num_prompt_tokens": 0}, "num_prompt_tokens is 0, must be an integer from 1"),
        (OWN | {"num_prompt_tokens": 2.0}, "num_prompt_tokens is 2.0, must be an integer"),
        (OWN | {"num_output_tokens": 2**23}, "num_output_tokens is 8388608, must be"),
        ({"arrival_s": 1.0}, "num_prompt_tokens is missing, must be an integer"),
        (OWN | {"prefix_id": 1, "num_prefix_tokens": 41}, "num_prefix_tokens is 41, must be"),
        (OWN | {"prefix_id": []}, r"prefix_id is \[\], must be an integer or text"),
        ("[1]", r"it is \[1\], must be a JSON object"),
        ("{", "not JSON: Expecting property name"),
        ("[" * 100_000, "not JSON: "),
        ('{"arrival_s": ' + "1" * 5000 + "}", "not JSON: Exceeds the limit"),
        (" " * (2**20 + 1), "the line is longer than 1048576 bytes"),
    ],
)
def test_a_bad_line_is_refused_by_its_number_and_field(
    tmp_path: Path, line: object, message: str
) -> None:
    path = write(tmp_path / "t", OWN, line)
    with pytest.raises(TraceError, match=f"/t:2: {message}"):
        read_trace(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash_ids": [1.5]}, "hash_ids is .*, must be a list of integers"),
        ({"hash_ids": [1] * 701}, "hash_ids has 701 entries, must have at most input_length"),
        ({"output_length": 0}, "output_length is 0, must be an integer from 1"),
    ],
)
def test_a_bad_line_of_mooncake_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(TraceError, match=f"/t:2: {message}"):
        read_trace(write(tmp_path / "t", MOONCAKE[0], MOONCAKE[1] | change))


def test_files_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t", OWN, OWN, OWN)
    with pytest.raises(TraceError, match="it has 0 requests, must have at least 2"):
        read_trace(write(tmp_path / "empty", ""))
    monkeypatch.setattr(trace_module, "MAX_REQUESTS", 2)
    with pytest.raises(TraceError, match="/t:3: the trace has more than 2 requests"):
        read_trace(path)
    monkeypatch.setattr(trace_module, "MAX_FILE_BYTES", 10)
    with pytest.raises(TraceError, match="bytes, must be at most 10"):
        read_trace(path)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(first: bytes, second: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(first + b"\n" + second)
        file.flush()
        with pytest.raises(TraceError):
            read_trace(Path(file.name))


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "x", "1:2", "uniform:1", "uniform:5:2", "lognormal:100:11", "lognormal:nan:1", ""],
)
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no distribution|must be|LOW is above HIGH"):
        parse_lengths(text)


def test_lengths_have_their_means() -> None:
    rng = random.Random(0)
    assert {parse_lengths("7").draw(rng) for _ in range(9)} == {7}
    assert {parse_lengths("uniform:2:4").draw(rng) for _ in range(99)} == {2, 3, 4}
    drawn = [parse_lengths("lognormal:500:0.5").draw(rng) for _ in range(20_000)]
    assert math.isclose(statistics.mean(drawn), 500, rel_tol=0.02)
    assert math.isclose(statistics.stdev(drawn), 250, rel_tol=0.05)


def test_a_trace_is_drawn_by_its_seed_and_stretched_to_a_rate() -> None:
    def drawn(seed: int) -> Trace:
        return draw_trace(
            num_requests=300,
            rate=3.0,
            prompt_tokens=parse_lengths("100"),
            output_tokens=parse_lengths("uniform:1:9"),
            num_prefixes=2,
            prefix_tokens=48,
            seed=seed,
        )

    trace = drawn(1)
    assert trace == drawn(1) != drawn(2)
    assert {r.num_prompt_tokens for r in trace.requests} == {148}
    assert len({r.prefix for r in trace.requests}) == 2
    assert math.isclose(trace.at_rate(7.0).rate, 7.0)
    assert [r.prefix for r in trace.at_rate(7.0).requests] == [r.prefix for r in trace.requests]
