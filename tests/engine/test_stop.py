"""Loops at the end of an answer: which ones end it, and what it costs to look."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve_common.types.sampling_params import RepetitionDetectionParams, SamplingParams
from pdserve_engine.request.request import Request, RequestStatus
from pdserve_engine.request.stop import check_stop
from support.requests import held_request

PROMPT = (1, 1, 1, 1)


class Watched(list[int]):
    """Counts the elements that are read."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found


def request_of(output: list[int], detection: RepetitionDetectionParams) -> tuple[Request, Watched]:
    params = SamplingParams(ignore_eos=True, repetition_detection=detection)
    request = held_request(prompt=PROMPT, params=params, max_model_len=1 << 20)
    request._all_token_ids = token_ids = Watched([*PROMPT, *output])
    return request, token_ids


def is_loop(output: list[int], detection: RepetitionDetectionParams) -> bool:
    """By definition."""
    sizes = range(detection.min_pattern_size, detection.max_pattern_size + 1)
    return any(
        output[-size * detection.min_count :] == output[-size:] * detection.min_count
        for size in sizes
        if size * detection.min_count <= len(output)
    )


@given(
    pattern=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    times=st.integers(1, 8),
    first=st.lists(st.integers(1, 3), max_size=10),
    min_size=st.integers(1, 5),
    num_sizes=st.integers(1, 6),
    min_count=st.integers(2, 5),
)
def test_an_answer_that_ends_in_copies_of_a_pattern_is_a_loop(
    pattern: list[int],
    times: int,
    first: list[int],
    min_size: int,
    num_sizes: int,
    min_count: int,
) -> None:
    output = [*first, *pattern * times]
    detection = RepetitionDetectionParams(
        min_pattern_size=min_size, max_pattern_size=min_size + num_sizes - 1, min_count=min_count
    )
    status = check_stop(request_of(output, detection)[0])
    assert (status is RequestStatus.FINISHED_REPETITION) == is_loop(output, detection)


LONG = 40_000
MANY = 1024
RANDOM = random.Random(0).choices(range(2, 1000), k=LONG)


@pytest.mark.parametrize(
    ("output", "detection", "max_read"),
    [
        (RANDOM, RepetitionDetectionParams(max_pattern_size=MANY), 3 * MANY),
        (RANDOM, RepetitionDetectionParams(max_pattern_size=MANY, min_count=39), 3 * MANY),
        # Nearly a loop, for many sizes.
        (
            [*RANDOM, *[1] * 19_000],
            RepetitionDetectionParams(
                min_pattern_size=MANY // 2, max_pattern_size=MANY, min_count=39
            ),
            3 * (MANY + LONG),
        ),
        (RANDOM, RepetitionDetectionParams(max_pattern_size=MANY, min_count=1 << 31), 3),
    ],
)
def test_looking_for_loops_mostly_reads_a_token_for_each_size_and_never_one_again_for_each(
    output: list[int], detection: RepetitionDetectionParams, max_read: int
) -> None:
    request, token_ids = request_of(output, detection)
    assert check_stop(request) is None
    assert token_ids.num_read <= max_read
