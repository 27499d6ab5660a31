"""The kernels in torch ops: what Triton is tested against, and what a CPU runs."""

from pdserve_kernels.reference.attention import paged_attention
from pdserve_kernels.reference.cache import reshape_and_cache
from pdserve_kernels.reference.layers import (
    fused_add_rms_norm,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from pdserve_kernels.reference.linear import (
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
