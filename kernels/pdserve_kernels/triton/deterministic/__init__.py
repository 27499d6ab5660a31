"""The kernels of `pdserve_kernels.triton` but for those in which a row's bits depend on the batch:
products and attention. What they cost is not measured.
"""

import torch

from pdserve_kernels.triton import shared
from pdserve_kernels.triton.decoder import DecoderFunctions, make_run_decoder
from pdserve_kernels.triton.deterministic.split_attention import paged_attention
from pdserve_kernels.triton.deterministic.tree_linear import (
    linear,
    linear_argmax,
    linear_lora,
    linear_of_ranks,
    linear_silu_mul,
    linear_sums,
    pack_linear,
)
from pdserve_kernels.triton.shared import *  # noqa: F403

__all__ = [
    *shared.__all__,
    "is_row_independent",
    "is_shard_independent",
    "linear",
    "linear_argmax",
    "linear_lora",
    "linear_silu_mul",
    "linear_sums",
    "pack_linear",
    "paged_attention",
    "run_decoder",
]

run_decoder = make_run_decoder(DecoderFunctions(linear, linear_of_ranks, paged_attention))


def is_row_independent(dtype: torch.dtype) -> bool:
    """True: each kernel has one tile for any number of rows, and sums in one order."""
    del dtype
    return True


def is_shard_independent(dtype: torch.dtype) -> bool:
    """True: an output's bits depend on no other output, and inputs are summed as `groups.NUM_SUMS`
    says.
    """
    del dtype
    return True
