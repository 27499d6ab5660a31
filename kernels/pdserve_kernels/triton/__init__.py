"""The kernels in Triton, for CUDA. Contracts are those of `pdserve_kernels.reference`.

Every kernel is enqueued on the current stream and none synchronises. Two replicas must compute the
same: nothing is tuned at run time, and launches say whether a multiplication and an addition are
fused, as versions of Triton differ in that.
"""

from pdserve_kernels.triton import shared
from pdserve_kernels.triton.attention import paged_attention
from pdserve_kernels.triton.decoder import run_decoder
from pdserve_kernels.triton.linears.linear import (
    LinearWeight,
    is_row_independent,
    is_shard_independent,
    linear,
    linear_lora,
    linear_silu_mul,
    linear_sums,
    pack_linear,
)
from pdserve_kernels.triton.sampling.sample import linear_argmax
from pdserve_kernels.triton.shared import *  # noqa: F403

__all__ = [
    *shared.__all__,
    "LinearWeight",
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
