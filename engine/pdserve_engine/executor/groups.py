"""The group that the ranks of one engine make."""

from pdserve_engine.executor.messages import GroupPlace
from pdserve_kernels.distributed_group import DistributedGroup
from pdserve_kernels.groups import Group


def join_group(place: GroupPlace) -> Group | None:
    """Return the group, once all its ranks have come; None for a rank alone."""
    if place.size == 1:
        return None
    return DistributedGroup(place.store_path, rank=place.rank, size=place.size)
