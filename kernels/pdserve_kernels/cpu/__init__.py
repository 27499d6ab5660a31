"""The kernels in C++ for bf16 on x86, whose contracts are those of `pdserve_kernels.reference`.

Other dtypes go to the reference's functions. Calls return when done, run on torch's OpenMP threads
and release the GIL meanwhile. They raise KernelsUnavailable where there is no compiled library: ask
`library` first, as `pdserve_kernels.select` does.
"""

from pdserve_kernels.cpu.attention import paged_attention
from pdserve_kernels.cpu.cache import is_thread_independent, kv_tile_format, reshape_and_cache
from pdserve_kernels.cpu.decoder import pack_decoder, run_decoder
from pdserve_kernels.cpu.layers import (
    fused_add_rms_norm,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from pdserve_kernels.cpu.linear import (
    LinearWeight,
    is_row_independent,
    is_shard_independent,
    linear,
    linear_silu_mul,
    linear_sums,
    pack_linear,
)
from pdserve_kernels.cpu.lora import linear_lora, pack_adapter, pack_lora
from pdserve_kernels.cpu.moe import fused_moe, pack_moe
from pdserve_kernels.cpu.sampling import (
    argmax,
    count_nans,
    linear_argmax,
    sample,
    sample_part,
)
from pdserve_kernels.reference.sampling.logprobs import logprob_terms
from pdserve_kernels.reference.sampling.penalties import penalize

__all__ = [
    "LinearWeight",
    "argmax",
    "count_nans",
    "fused_add_rms_norm",
    "fused_moe",
    "is_row_independent",
    "is_shard_independent",
    "is_thread_independent",
    "kv_tile_format",
    "linear",
    "linear_argmax",
    "linear_lora",
    "linear_silu_mul",
    "linear_sums",
    "logprob_terms",
    "pack_adapter",
    "pack_decoder",
    "pack_linear",
    "pack_lora",
    "pack_moe",
    "paged_attention",
    "penalize",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "run_decoder",
    "sample",
    "sample_part",
    "silu_and_mul",
]
