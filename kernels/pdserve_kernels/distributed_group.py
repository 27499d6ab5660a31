"""A group over gloo, torch.distributed's for CPUs: where there is no compiled library."""

import datetime
from typing import Any

import torch
from torch import distributed

from pdserve_kernels.groups import tree_sum

# torch's own is half an hour.
TIMEOUT = datetime.timedelta(seconds=60)


class DistributedGroup:
    """Implements `groups.Group`. A process may be in several."""

    def __init__(self, store_path: str, *, rank: int, size: int) -> None:
        """The ranks find each other by a file that does not exist yet, of their own."""
        self.rank, self.size = rank, size
        # Not one of torch.distributed's own groups, of which there is one world for a process.
        untyped: Any = distributed
        store = untyped.FileStore(store_path, size)
        self._gloo = untyped.ProcessGroupGloo(store, rank, size, TIMEOUT)

    def sum_rows(self, partial: torch.Tensor) -> torch.Tensor:
        """See `groups.Group`. gloo's own sum would add in another order."""
        return tree_sum(list(self.gather(partial)))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """See `groups.Group`."""
        parts = part.new_empty(self.size, *part.shape)
        self._gloo.allgather(list(parts), part).wait()
        return parts

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See `groups.Group`."""
        self._gloo.broadcast(tensor, 0).wait()

    def close(self) -> None:
        """See `groups.Group`."""
        del self._gloo
