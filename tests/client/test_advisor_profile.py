"""Cost profiles: what is fitted to what was measured, and files that are none."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_client.advisor.cost_profile import CostProfile, load_profile, save_profile
from pdserve_client.advisor.least_squares import fit
from pdserve_client.advisor.profiler import (
    DecodeSample,
    Plan,
    Probe,
    batch_sizes,
    fit_decode,
    fit_prefill,
    fit_transfer,
    prompt_lengths,
    sample_of,
)
from support.advisor import HANDOFF, STEP, a_profile

CHUNK = 512


@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3), st.integers(0, 99))
def test_coefficients_are_found_again(coefficients: list[float], seed: int) -> None:
    rng = random.Random(seed)
    rows = [(1.0, rng.uniform(0, 10), rng.uniform(0, 100)) for _ in range(12)]
    values = [sum(c * x for c, x in zip(coefficients, row, strict=True)) for row in rows]
    found = fit(rows, values)
    assert found.coefficients == pytest.approx(coefficients, rel=1e-3, abs=1e-3)
    assert found.max_error < 1e-6


def test_none_is_negative_and_errors_are_told() -> None:
    # Falls with x: the best that may be is a constant.
    found = fit([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [3.0, 2.0, 1.5])
    assert found.coefficients[1] == 0.0
    assert found.max_error > 0.1
    # Columns that say the same.
    assert fit([(1.0, 2.0), (2.0, 4.0)], [3.0, 6.0]).max_error == pytest.approx(0.0)


def probe(num_tokens: int) -> Probe:
    """As the machine of `STEP` and `HANDOFF` would answer."""
    num_chunks = -(-num_tokens // CHUNK)
    prefill_s = num_chunks * STEP.prefill_base_s + STEP.prefill_s(num_tokens, 0)
    transfer_s = num_chunks * HANDOFF.chunk_s + num_tokens * HANDOFF.token_s
    metrics = pb2.RequestMetrics(
        prefill_ns=round(prefill_s * 1e9), kv_transfer_ns=round(transfer_s * 1e9)
    )
    return Probe(num_tokens, 0.0, [prefill_s], metrics)


def test_a_machine_is_measured_as_it_is() -> None:
    probes = [probe(length) for length in prompt_lengths(4000) * 2]
    prefill = STEP.prefill_base_s, STEP.prompt_token_s, STEP.prompt_pair_s
    assert fit_prefill(probes, CHUNK).coefficients == pytest.approx(prefill, rel=1e-3)
    transfer = HANDOFF.chunk_s, HANDOFF.token_s
    assert fit_transfer(probes, CHUNK).coefficients == pytest.approx(transfer, rel=1e-3)
    samples = [
        DecodeSample(rows, rows * context, STEP.decode_base_s + STEP.decode_s(rows, rows * context))
        for rows in batch_sizes(48)
        for context in (32, 2000)
    ]
    decode = STEP.decode_base_s, STEP.row_s, STEP.context_token_s
    assert fit_decode(samples).coefficients == pytest.approx(decode, rel=1e-3)


def test_only_steps_with_the_whole_batch_count() -> None:
    def stream(begin: float, num: int, step_s: float) -> Probe:
        times = [begin, *(begin + 1.0 + step_s * i for i in range(num))]
        return Probe(100, 0.0, times, pb2.RequestMetrics())

    # Slow while alone, from 0 to 6 s; both from the second's second token at 6 s on.
    first = stream(0.0, 6, 1.0)._replace(
        token_times=[float(t) for t in range(7)] + [6 + 0.1 * i for i in range(1, 21)]
    )
    sample = sample_of([first, stream(5.0, 20, 0.1)])
    assert sample is not None
    assert (sample.num_rows, sample.step_s) == (2, pytest.approx(0.1, rel=0.06))
    # Prompts, the first's 7 and the second's 2 tokens, and half of what comes then.
    assert sample.num_context_tokens == pytest.approx(200 + 7 + 2 + 19, abs=1)
    assert sample_of([stream(0.0, 9, 0.1), stream(5.0, 9, 0.1)]) is None


def test_what_is_measured_covers_its_range() -> None:
    assert prompt_lengths(100) == [16, 24, 36, 54, 81, 100]
    assert batch_sizes(12) == [1, 2, 4, 8, 12]
    assert batch_sizes(1) == [1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_prompt_tokens": 10}, "max_prompt_tokens is 10, must be at least 64"),
        ({"repeats": 0}, "repeats is 0, must be at least 1"),
        ({"timeout_s": float("inf")}, "timeout_s is inf, must be a number above 0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**change)


@pytest.mark.parametrize(
    "profile",
    [a_profile(residuals={"prefill": [0.1, 0.2]}), a_profile(handoff=None, prefill_worker=None)],
)
def test_a_profile_is_read_as_it_was_written(tmp_path: Path, profile: CostProfile) -> None:
    path = tmp_path / "profile.json"
    save_profile(profile, path)
    assert load_profile(path) == profile


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 2, "version must be 1"),
        (("model",), 3, "model must be text"),
        (("overhead_s",), -1, "overhead_s is -1, must be a number from 0 to 3600"),
        (("overhead_s",), float("nan"), "overhead_s is nan, must be"),
        (("overhead_s",), 10**400, "overhead_s is 1000"),
        (("step",), [], "step must be an object"),
        (("step", "row_s"), "1", "step.row_s is '1', must be a number"),
        (("step", "row_s"), None, "step.row_s is None, must be a number"),
        (("step", "row_s"), True, "step.row_s is True, must be a number"),
        (("decode_worker", "block_size"), 1.5, "decode_worker.block_size is 1.5, must be"),
        (("decode_worker", "num_blocks"), 0, "decode_worker.num_blocks is 0, must be 1 to"),
        (("prefill_worker", "block_size"), 32, "prefill_worker.block_size must be that of"),
        (("handoff",), None, "handoff and prefill_worker must be there together"),
        (("residuals",), {"x": [1]}, "residuals.x must be a list of 2 numbers"),
    ],
)
def test_a_profile_with_a_bad_field_is_refused(
    tmp_path: Path, path: tuple[str, ...], value: object, message: str
) -> None:
    file = tmp_path / "profile.json"
    save_profile(a_profile(), file)
    values = json.loads(file.read_text())
    part = values
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"profile.json: {message}"):
        load_profile(file)


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "[]", "\xff", " " * (2**20 + 1)])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"not JSON|version must be|bytes, must be at most"):
        load_profile(file)
