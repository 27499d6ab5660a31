"""A decoder that several processes share: the bits of one."""

import itertools
import random

import numpy as np
import pytest
import rank_bodies
from decoder_models import LENGTH, NUM_REQUESTS, Chunk, Shape

from support.ranks import Ranks, SharedMemory, run_ranks
from support.samples import sampled

SHAPES = [
    pytest.param(Shape(num_heads=8, num_kv_heads=4, intermediate=384), id="norms"),
    pytest.param(
        Shape(
            hidden=100,
            num_heads=4,
            num_kv_heads=4,
            head_dim=64,
            intermediate=256,
            has_bias=True,
            has_qk_norm=False,
            windows=(None, 20),
        ),
        id="biases and a window",
    ),
]


def random_steps(seed):
    """Batches of decodes and chunks until all requests are done."""
    generator = random.Random(seed)
    done, steps = [0] * NUM_REQUESTS, []
    while min(done) < LENGTH:
        chunks = [
            Chunk(request, start, min(LENGTH, start + generator.choice([1, 1, 2, 17, 40])))
            for request, start in enumerate(done)
            if start < LENGTH and generator.random() < 0.7
        ]
        chunks.sort(key=lambda c: c.end - c.start > 1)
        for chunk in chunks:
            done[chunk.request] = chunk.end
        steps += [chunks] if chunks else []
    return steps


def assert_equal_to_one(
    meeting, shape, kind, *, num_threads=1, is_compiled=True, seed=0, lora_ranks=()
):
    steps, size = random_steps(seed), meeting.size
    body, rest = rank_bodies.run_steps, (shape, kind, steps)
    ranks = run_ranks(meeting, body, *rest, num_threads, is_compiled, lora_ranks)
    outputs, cache = body(None, *rest, 1, True, lora_ranks)
    for rank, (others, part) in enumerate(ranks):
        for ours, theirs in zip(outputs, others, strict=True):
            assert np.array_equal(ours, theirs)
        assert np.array_equal(np.split(cache, size, 1)[rank], part)


@pytest.mark.parametrize(
    ("kind", "size"),
    sampled(
        itertools.product(("bf16", "int8", "int4"), (2, 4)), ("bf16", 4), ("int8", 2), ("int4", 4)
    ),
)
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_have_the_bits_of_one(shape, kind, size):
    # A slot takes some rows: larger steps go in pieces.
    assert_equal_to_one(SharedMemory(size, 16384), shape, kind, seed=size)


@pytest.mark.parametrize("shape", SHAPES)
def test_so_they_have_with_several_threads_each(shape):
    assert_equal_to_one(SharedMemory(2, 4096), shape, "bf16", num_threads=3)


@pytest.mark.parametrize("slots", ["of less than a row", "that the C++ does not know"])
@pytest.mark.parametrize("shape", SHAPES)
def test_so_they_have_where_functions_run_one_by_one(shape, slots):
    meeting = SharedMemory(2, 256) if slots == "of less than a row" else rank_bodies.OtherRanks(2)
    assert_equal_to_one(meeting, shape, "bf16", is_compiled=False)


# Of each request; some rows have none, and 64 do not fit the smallest slots.
LORA_RANKS = (8, None, 64, 3)


@pytest.mark.parametrize(
    ("size", "kind", "num_threads"),
    sampled(
        [(2, "bf16", 1), (2, "bf16", 3), (4, "int8", 1), (4, "int4", 1)],
        (2, "bf16", 3),
        (4, "int4", 1),
    ),
)
@pytest.mark.parametrize("shape", SHAPES)
def test_adapters_have_the_bits_of_one_rank(shape, size, kind, num_threads):
    meeting = SharedMemory(size, 4096)
    assert_equal_to_one(
        meeting, shape, kind, num_threads=num_threads, seed=size, lora_ranks=LORA_RANKS
    )


@pytest.mark.parametrize(
    "slots", ["of less than a row with its ranks", "that the C++ does not know"]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_so_have_adapters_where_functions_run_one_by_one(shape, slots):
    is_compiled = slots == "of less than a row with its ranks"
    meeting = SharedMemory(2, 448) if is_compiled else rank_bodies.OtherRanks(2)
    assert_equal_to_one(meeting, shape, "bf16", is_compiled=is_compiled, lora_ranks=LORA_RANKS)


@pytest.mark.parametrize("num_threads", sampled([1, 3], 3))
def test_a_rank_that_is_lost_fails_the_step_of_the_others(num_threads):
    meeting = SharedMemory(4, timeout_s=8.0)  # on a busy machine they load apart
    shape, steps = Shape(num_heads=8, num_kv_heads=4, intermediate=384), random_steps(0)
    body = rank_bodies.lose_one_in_a_decoder
    with Ranks(meeting, body, shape, steps, num_threads) as ranks:
        ranks.results([0, 1, 2])
