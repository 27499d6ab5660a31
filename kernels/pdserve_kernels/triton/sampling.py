"""Choosing tokens on CUDA: the reference's torch ops, over the linear and the masks of this set."""

import torch

from pdserve_kernels import reference
from pdserve_kernels.reference.sampling import count_nans
from pdserve_kernels.sampling_batch import Argmax, SamplingBatch
from pdserve_kernels.triton.linear import LinearWeight, linear
from pdserve_kernels.triton.masks import mask_logits

__all__ = ["argmax", "count_nans", "linear_argmax", "sample"]


def argmax(logits: torch.Tensor, *, mask: torch.Tensor | None = None) -> Argmax:
    """See the reference."""
    return reference.argmax(mask_logits(logits, mask))


def linear_argmax(
    x: torch.Tensor, packed: LinearWeight, *, mask: torch.Tensor | None = None
) -> Argmax:
    """See the reference."""
    return argmax(linear(x, packed), mask=mask)


def sample(
    logits: torch.Tensor, batch: SamplingBatch, *, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """See the reference."""
    return reference.sample(mask_logits(logits, mask), batch)
