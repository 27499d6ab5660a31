"""The groups that the ranks of one engine make: how they are laid out, and how one is joined.

Ranks are numbered stage by stage.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import torch

from pdserve_engine.executor.messages import GroupRank, RankSpec
from pdserve_kernels.cpu.compiled import library
from pdserve_kernels.cpu.isa import KernelsUnavailable
from pdserve_kernels.cpu.shared_group import SharedGroup
from pdserve_kernels.distributed_group import DeviceGroup, DistributedGroup
from pdserve_kernels.groups import Group

# What is larger goes in pieces.
MAX_SLOT_BYTES = 4 << 20
LINE = 64


@contextmanager
def placed_ranks(
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    folder: Path,
    *,
    largest_bytes: int,
    is_on_cpu: bool = True,
) -> Iterator[list[RankSpec]]:
    """Yield where each rank is. Groups meet in memory, which the ranks inherit before this ends, or
    on GPUs and where there is no compiled library by files in the folder. What they tell each other
    is `largest_bytes` at most, mostly.
    """
    size, num_stages = tensor_parallel_size, pipeline_parallel_size
    slot_bytes = -(-min(largest_bytes, MAX_SLOT_BYTES) // LINE) * LINE
    has_memory = is_on_cpu and _has_library()
    memories: list[int] = []

    def make_group(group_size: int, name: str) -> list[GroupRank]:
        memory_fd = SharedGroup.create_memory(group_size, slot_bytes) if has_memory else None
        if memory_fd is not None:
            memories.append(memory_fd)
        path = str(folder / name)
        return [
            GroupRank(rank, group_size, memory_fd, slot_bytes, path) for rank in range(group_size)
        ]

    try:
        within = [make_group(size, f"stage-{stage}") for stage in range(num_stages) if size > 1]
        between = [
            [make_group(2, f"behind-{stage}-{part}") for part in range(size)]
            for stage in range(num_stages - 1)
        ]
        yield [
            RankSpec(
                rank=stage * size + part,
                stage=stage,
                num_stages=num_stages,
                tensor_parallel=within[stage][part] if within else None,
                before=between[stage - 1][part][1] if stage > 0 else None,
                after=between[stage][part][0] if stage + 1 < num_stages else None,
            )
            for stage in range(num_stages)
            for part in range(size)
        ]
    finally:
        for memory_fd in memories:
            os.close(memory_fd)


def memories_of(spec: RankSpec) -> list[int]:
    """Return the descriptors that a rank has to inherit."""
    groups = (getattr(spec, field.name) for field in fields(spec))
    found = (group.memory_fd for group in groups if isinstance(group, GroupRank))
    return [memory_fd for memory_fd in found if memory_fd is not None]


def join_group(spec: GroupRank | None, device: torch.device) -> Group | None:
    """Return the group for tensors of a rank's device; None for none."""
    if spec is None:
        return None
    if device.type == "cuda":
        return DeviceGroup(spec.store_path, rank=spec.rank, size=spec.size, device=device)
    if spec.memory_fd is None:
        return DistributedGroup(spec.store_path, rank=spec.rank, size=spec.size)
    return SharedGroup(spec.memory_fd, rank=spec.rank, size=spec.size, slot_bytes=spec.slot_bytes)


def _has_library() -> bool:
    try:
        library()
    except KernelsUnavailable:
        return False
    return True
