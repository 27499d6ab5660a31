"""Ranks that tell each other tensors: the contract of `groups.Group`, for every implementation."""

import functools
import os
import signal

import pytest
import rank_bodies
import torch

from pdserve_kernels.cpu.shared_group import SharedGroup
from pdserve_kernels.groups import tree_sum
from support.ranks import Devices, Gloo, Ranks, SharedMemory, num_shared_memories, run_ranks
from support.samples import sampled

# What makes a meeting of so many ranks.
MEETINGS = [pytest.param(SharedMemory, id="shared memory"), pytest.param(Gloo, id="gloo")]
SHAPES = [(1,), (1, 1024), (3, 17), (2, 0), (64, 33), (5000,)]  # the last exceed a slot


@pytest.mark.parametrize("size", sampled([1, 2, 4, 8], 1, 8))
@pytest.mark.parametrize("meet", MEETINGS)
def test_all_ranks_get_the_sum_of_the_tree_and_what_others_have(meet, size):
    results = run_ranks(meet(size), rank_bodies.call_all, SHAPES)
    assert results == [(rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", sampled([2, 4], 4))
def test_ranks_on_gpus_get_one_sum_and_what_others_have(size):
    run_ranks(Devices(size), rank_bodies.call_as_on_gpus, SHAPES)


@pytest.mark.parametrize("factor", sampled([1, 5], 1))
@pytest.mark.parametrize("meet", MEETINGS)
def test_calls_stay_in_step_whoever_dawdles(meet, factor):
    num_calls = factor * (400 if meet is Gloo else 2_000)
    run_ranks(meet(4), rank_bodies.call_at_random, num_calls)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("meet", MEETINGS)
def test_a_rank_that_does_not_come_fails_the_others_in_time(meet, sign):
    timeout_s = 4.0
    with Ranks(meet(4, timeout_s=timeout_s), rank_bodies.lose_one, sign, timeout_s) as ranks:
        for waited in ranks.results([0, 1, 2]):
            assert waited < 10 * timeout_s  # on a busy machine; it would wait for ever


def test_shared_memory_is_waited_for_as_long_as_it_says_and_leaves_nothing():
    before = num_shared_memories()
    fd = SharedGroup.create_memory(2, 64)
    group = SharedGroup(fd, rank=1, size=2, slot_bytes=64, timeout_s=0.3)
    os.close(fd)
    assert num_shared_memories() > before
    with pytest.raises(RuntimeError, match=r"rank 0 of 2 did not come within 0\.3 s"):
        group.gather(torch.zeros(3))
    group.close()
    group.close()
    with pytest.raises(RuntimeError, match="the group is closed"):
        group.sum_rows(torch.zeros(3))
    assert num_shared_memories() == before


def test_shared_memory_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="size is 3; it must be 1, 2, 4 or 8"):
        SharedGroup.create_memory(3, 64)
    with pytest.raises(ValueError, match="slot_bytes is 100; it must be a multiple of 64"):
        SharedGroup.create_memory(2, 100)
    fd = SharedGroup.create_memory(1, 64)
    join = functools.partial(SharedGroup, fd, slot_bytes=64)
    with pytest.raises(ValueError, match="rank is 2; it must be one of 2"):
        join(rank=2, size=2)
    with pytest.raises(ValueError, match="mmap length is greater than file size"):
        join(rank=0, size=8)
    group = join(rank=0, size=1)
    os.close(fd)
    with pytest.raises(TypeError, match=r"partial sums are torch\.bfloat16"):
        group.sum_rows(torch.zeros(2).bfloat16())
    with pytest.raises(ValueError, match=r"strides \(2,\), must be dense"):
        group.broadcast(torch.zeros(4)[::2])


def test_a_tree_takes_neighbours_first():
    numbers = [2.0**-24, 1.0, 2.0**-24, 2.0**-24, 1.0, -1.0, 2.0**-30, 0.0]
    a, b, c, d, e, f, g, h = (torch.tensor([number]) for number in numbers)
    expected = ((a + b) + (c + d)) + ((e + f) + (g + h))
    assert torch.equal(tree_sum([a, b, c, d, e, f, g, h]), expected)
    with pytest.raises(ValueError, match="zip"):
        tree_sum([a, b, c])
