"""The groups that the ranks of one engine make: how they are laid out, and how one is joined.

Ranks are numbered stage by stage.
"""

from pathlib import Path

from pdserve_engine.executor.messages import GroupPlace, RankPlace
from pdserve_kernels.distributed_group import DistributedGroup
from pdserve_kernels.groups import Group


def place_ranks(
    tensor_parallel_size: int, pipeline_parallel_size: int, folder: Path
) -> list[RankPlace]:
    """Return where each rank is; groups meet by files in the folder."""
    size, num_stages = tensor_parallel_size, pipeline_parallel_size

    def place(rank: int, group_size: int, name: str) -> GroupPlace:
        return GroupPlace(rank, group_size, None, 0, str(folder / name))

    return [
        RankPlace(
            rank=stage * size + part,
            stage=stage,
            num_stages=num_stages,
            tensor_parallel=place(part, size, f"stage-{stage}") if size > 1 else None,
            before=place(1, 2, f"behind-{stage - 1}-{part}") if stage > 0 else None,
            after=place(0, 2, f"behind-{stage}-{part}") if stage + 1 < num_stages else None,
        )
        for stage in range(num_stages)
        for part in range(size)
    ]


def join_group(place: GroupPlace | None) -> Group | None:
    """Return the group, once all of it have come; None for no place."""
    if place is None:
        return None
    return DistributedGroup(place.store_path, rank=place.rank, size=place.size)
