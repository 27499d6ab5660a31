"""What the ranks of a test do, importable in their processes."""

import os
import random
import signal
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from adapters import make_adapter, segments
from decoder_models import Model

from pdserve_kernels import cpu
from pdserve_kernels.groups import Group, tree_sum
from support.interpreted import prepare_interpreter
from support.ranks import SharedMemory


@dataclass
class OtherRanks(SharedMemory):
    """Ranks in a group that the C++ does not know."""

    def __call__(self, rank: int) -> Group:
        return OtherGroup(super().__call__(rank))


class OtherGroup:
    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self.sum_rows, self.close = group.sum_rows, group.close


def random_rows(rank, seed, shape):
    """What a rank contributes: of many sizes, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)


def check_sum(group, seed, shape):
    parts = [random_rows(rank, seed, shape) for rank in range(group.size)]
    partial = parts[group.rank].clone()
    assert torch.equal(group.sum_rows(partial), tree_sum(parts))
    assert torch.equal(partial, parts[group.rank])


def check_gather(group, seed, shape):
    parts = [random_rows(rank, seed, shape).to(torch.bfloat16) for rank in range(group.size)]
    assert torch.equal(group.gather(parts[group.rank]), torch.stack(parts))


def check_broadcast(group, seed, shape):
    tensor = random_rows(group.rank, seed, shape).to(torch.int64)
    group.broadcast(tensor)
    assert torch.equal(tensor, random_rows(0, seed, shape).to(torch.int64))


CALLS = (check_sum, check_gather, check_broadcast)


def call_all(group, shapes):
    for seed, shape in enumerate(shapes):
        for call in CALLS:
            call(group, seed, shape)
    return group.rank, group.size


def call_as_on_gpus(group, shapes):
    """What NCCL has no order of its own for: sums may differ from the tree's, not between ranks."""
    for seed, shape in enumerate(shapes):
        check_gather(group, seed, shape)
        check_broadcast(group, seed, shape)
        parts = [random_rows(rank, seed, shape) for rank in range(group.size)]
        total = group.sum_rows(parts[group.rank].clone())
        torch.testing.assert_close(total, tree_sum(parts))
        gathered = group.gather(total)
        assert all(torch.equal(other, total) for other in gathered)


def call_at_random(group, count):
    """The same calls in all ranks, each of which dawdles when it likes."""
    common, own = random.Random(0), random.Random(group.rank)
    for seed in range(count):
        if own.random() < 0.01:
            time.sleep(own.random() * 1e-3)
        common.choice(CALLS)(group, seed % 50, (common.randint(1, 40),))


def lose_one(group, sign, timeout_s):
    """The last rank ends or stops in the midst of it; return how long another waits for it."""
    for seed in range(20):
        check_sum(group, seed, (3, 50))
    if group.rank == group.size - 1:
        os.kill(os.getpid(), sign)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        group.sum_rows(torch.zeros(3, 50))
    waited = time.monotonic() - start
    # It stays failed, and says so at once.
    with pytest.raises(RuntimeError):
        group.broadcast(torch.zeros(1))
    assert time.monotonic() - start < waited + timeout_s
    return waited


def lose_one_in_a_decoder(group, shape, steps, num_threads):
    torch.set_num_threads(num_threads)
    model = Model(shape, group=group)
    packed, cache = cpu.pack_decoder(model.decoder), model.new_cache()
    hidden_states, positions, metadata = model.step(steps[0])
    cpu.run_decoder(hidden_states, packed, positions, cache, metadata)
    if group.rank == group.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"rank {group.size - 1} of {group.size} did not"):
            cpu.run_decoder(hidden_states, packed, positions, cache, metadata)
    group.close()
    with pytest.raises(RuntimeError, match="the group is closed"):
        cpu.run_decoder(hidden_states, packed, positions, cache, metadata)


def run_steps(group, shape, kind, steps, num_threads, is_compiled, lora_ranks=()):
    """Return the states of all steps, as bits, and the KV that is then in the cache. `lora_ranks`
    are those of each request's adapter.
    """
    torch.set_num_threads(num_threads)
    model = Model(shape, kind=kind, group=group)
    packed, cache = cpu.pack_decoder(model.decoder), model.new_cache()
    adapters = [rank and make_adapter(cpu, model, rank) for rank in lora_ranks]
    assert (packed.native is not None) == is_compiled
    outputs = []
    for chunks in steps:
        hidden_states, positions, metadata = model.step(chunks)
        lora = segments(chunks, adapters) if adapters else ()
        output = cpu.run_decoder(hidden_states, packed, positions, cache, metadata, lora)
        outputs.append(bits_of(output))
    return outputs, bits_of(cache)


def run_triton(group, shape, chunks, lora_ranks, is_deterministic):
    """Return the states of a step with Triton's kernels, interpreted."""
    from pdserve_kernels import triton
    from pdserve_kernels.triton import deterministic

    prepare_interpreter()
    kernels = deterministic if is_deterministic else triton
    model = Model(shape, kernels, torch.float32, group=group)
    adapters = [rank and make_adapter(kernels, model, rank, torch.float32) for rank in lora_ranks]
    hidden_states, positions, metadata = model.step(chunks)
    packed, lora = kernels.pack_decoder(model.decoder), segments(chunks, adapters)
    cache = model.new_cache()
    return kernels.run_decoder(hidden_states, packed, positions, cache, metadata, lora).numpy()


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy()
