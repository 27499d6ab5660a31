"""What processes that share a model tell each other within a step."""

from collections.abc import Sequence
from typing import Protocol

import torch

# Inputs of a product that is cut by inputs are summed in so many equal parts, which one binary tree
# adds up: so a model cut into 1, 2, 4 or 8 ranks brings the same bits ("Deterministic Inference
# across Tensor Parallel Sizes", arXiv:2511.17826).
NUM_SUMS = 8


class Group(Protocol):
    """The ranks of one model, this one among them. All of them make the same calls in the same
    order, from one thread; tensors are contiguous, of one shape and dtype on all ranks.

    Every call raises RuntimeError if a rank does not come within a minute. The group is useless
    then, and the process has to end.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum_rows(self, partial: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' fp32 [m, n], added as `tree_sum` does, on every rank; of a
        DeviceGroup see there.
        """
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return all ranks' parts, [size, *part.shape], on every rank. Any shape and dtype, the
        same on all ranks.
        """
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill the tensor, of any shape [...] and dtype, the same on all ranks, with that of rank
        0.
        """
        ...

    def close(self) -> None: ...


def check_num_sums(num_sums: int, in_features: int) -> None:
    """Raise ValueError unless so many inputs fall into so many sums of an even number each."""
    if num_sums not in (1, 2, 4, NUM_SUMS) or (num_sums > 1 and in_features % (2 * num_sums)):
        raise ValueError(
            f"num_sums is {num_sums}; it must be 1, 2, 4 or {NUM_SUMS}, "
            f"and cut {in_features} inputs into equal, even parts"
        )


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add 1, 2, 4 or 8 tensors of one shape [...] and dtype: neighbours first, then the sums of
    neighbours.
    """
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
