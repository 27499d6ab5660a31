"""The kernels in Triton, for CUDA. Contracts are those of `pdserve_kernels.reference`.

Every kernel is enqueued on the current stream and none synchronises. Nothing is tuned at run time:
two replicas must compute the same.
"""

from pdserve_kernels.triton.attention import paged_attention
from pdserve_kernels.triton.cache import reshape_and_cache
from pdserve_kernels.triton.layers import (
    fused_add_rms_norm,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from pdserve_kernels.triton.linear import (
    LinearWeight,
    is_row_independent,
    linear,
    pack_linear,
)

__all__ = [
    "LinearWeight",
    "fused_add_rms_norm",
    "is_row_independent",
    "linear",
    "pack_linear",
    "paged_attention",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
]
