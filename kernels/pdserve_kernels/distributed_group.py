"""Groups over torch.distributed: of CPUs where there is no compiled library, and of GPUs."""

import datetime
from typing import Any

import torch
from torch import distributed

from pdserve_kernels.groups import tree_sum

# torch's own timeout is 10 to 30 minutes.
TIMEOUT_S = 60.0

# Its classes are not typed.
_distributed: Any = distributed


class DistributedGroup:
    """Implements `groups.Group` over gloo. A process may be in several."""

    def __init__(
        self, store_path: str, *, rank: int, size: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        """The ranks find each other by a file that does not exist yet, of their own."""
        self.rank, self.size = rank, size
        self._failure: str | None = None
        # Not one of torch.distributed's own groups, of which there is one world for a process.
        store = _distributed.FileStore(store_path, size)
        timeout = datetime.timedelta(seconds=timeout_s)
        self._backend = self._make_backend(store, timeout)

    def sum_rows(self, partial: torch.Tensor) -> torch.Tensor:
        """See `groups.Group`. gloo's own sum would add in another order."""
        return tree_sum(list(self.gather(partial)))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """See `groups.Group`."""
        parts = part.new_empty(self.size, *part.shape)
        self._do("_allgather_base", parts.view(-1), part.view(-1))
        return parts

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See `groups.Group`."""
        self._do("broadcast", tensor, 0)

    def close(self) -> None:
        """See `groups.Group`."""
        del self._backend

    def _make_backend(self, store: Any, timeout: datetime.timedelta) -> Any:
        return _distributed.ProcessGroupGloo(store, self.rank, self.size, timeout)

    def _do(self, name: str, *args: object) -> None:
        # Where a rank is lost some of gloo's calls would still return.
        if self._failure is not None:
            raise RuntimeError(self._failure)
        try:
            getattr(self._backend, name)(*args).wait()
        except RuntimeError as error:
            self._failure = str(error)
            raise


class DeviceGroup(DistributedGroup):
    """Implements `groups.Group` between GPUs, one a rank, over NCCL.

    Calls are enqueued on the current stream, and a CUDA graph may record them. A rank that does not
    come fails the process within a minute, or, where a graph is replayed, hangs the step.
    """

    def __init__(
        self,
        store_path: str,
        *,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`device` is this rank's. On the CPU the group is one over gloo, for tests."""
        self._device = device
        super().__init__(store_path, rank=rank, size=size, timeout_s=timeout_s)

    def sum_rows(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors [m, n], of any one float dtype, in place. The order
        is the library's, equal on all ranks.
        """
        self._do("allreduce", partial)
        return partial

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See `groups.Group`. A tensor of the host is waited for."""
        on_device = tensor.to(self._device)
        super().broadcast(on_device)
        if on_device is not tensor:
            tensor.copy_(on_device)

    def _make_backend(self, store: Any, timeout: datetime.timedelta) -> Any:
        if self._device.type == "cpu":
            return super()._make_backend(store, timeout)
        return _distributed.ProcessGroupNCCL(store, self.rank, self.size, timeout)
