"""Choosing tokens on CUDA: the reference's torch ops, over the linear of this set."""

import torch

from pdserve_kernels.reference.sampling import argmax, count_nans, sample
from pdserve_kernels.sampling_batch import Argmax
from pdserve_kernels.triton.linear import LinearWeight, linear

__all__ = ["argmax", "count_nans", "linear_argmax", "sample"]


def linear_argmax(x: torch.Tensor, packed: LinearWeight) -> Argmax:
    """See the reference."""
    return argmax(linear(x, packed))
