"""A group over torch.distributed: gloo on CPUs, where there is no compiled library."""

import datetime

import torch
from torch import distributed

from pdserve_kernels.groups import tree_sum

# torch's own is half an hour.
TIMEOUT = datetime.timedelta(seconds=60)


class DistributedGroup:
    """Implements `groups.Group`; one at a time in a process."""

    def __init__(self, store_path: str, *, rank: int, size: int) -> None:
        """The ranks find each other by a file that does not exist yet, in a folder of their own."""
        self.rank, self.size = rank, size
        store = distributed.FileStore(store_path, size)  # type: ignore[attr-defined]
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT
        )

    def sum_rows(self, partial: torch.Tensor) -> torch.Tensor:
        """See `groups.Group`. gloo's own sum would add in another order."""
        return tree_sum(list(self.gather(partial)))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """See `groups.Group`."""
        parts = part.new_empty(self.size, *part.shape)
        distributed.all_gather(list(parts), part)
        return parts

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See `groups.Group`."""
        distributed.broadcast(tensor, src=0)

    def close(self) -> None:
        """See `groups.Group`."""
        distributed.destroy_process_group()
