"""A group over gloo, torch.distributed's for CPUs: where there is no compiled library."""

import datetime
from typing import Any

import torch
from torch import distributed

from pdserve_kernels.groups import tree_sum


class DistributedGroup:
    """Implements `groups.Group`. A process may be in several."""

    def __init__(self, store_path: str, *, rank: int, size: int, timeout_s: float = 60.0) -> None:
        """The ranks find each other by a file that does not exist yet, of their own. Without a
        timeout torch would wait for half an hour.
        """
        self.rank, self.size = rank, size
        self._failure: str | None = None
        # Not one of torch.distributed's own groups, of which there is one world for a process.
        untyped: Any = distributed
        store = untyped.FileStore(store_path, size)
        timeout = datetime.timedelta(seconds=timeout_s)
        self._gloo = untyped.ProcessGroupGloo(store, rank, size, timeout)

    def sum_rows(self, partial: torch.Tensor) -> torch.Tensor:
        """See `groups.Group`. gloo's own sum would add in another order."""
        return tree_sum(list(self.gather(partial)))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """See `groups.Group`."""
        parts = part.new_empty(self.size, *part.shape)
        self._do("allgather", list(parts), part)
        return parts

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See `groups.Group`."""
        self._do("broadcast", tensor, 0)

    def close(self) -> None:
        """See `groups.Group`."""
        del self._gloo

    def _do(self, name: str, *args: object) -> None:
        # Where a rank is lost some of gloo's calls would still return.
        if self._failure is not None:
            raise RuntimeError(self._failure)
        try:
            getattr(self._gloo, name)(*args).wait()
        except RuntimeError as error:
            self._failure = str(error)
            raise
