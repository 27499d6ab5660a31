"""The kernels in torch ops: what the others are tested against, and what a CPU runs
for which none could be compiled.
"""

from pdserve_kernels.reference.attention import paged_attention
from pdserve_kernels.reference.cache import kv_tile_format, reshape_and_cache
from pdserve_kernels.reference.decoder import pack_decoder, run_decoder
from pdserve_kernels.reference.layers import (
    fused_add_rms_norm,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from pdserve_kernels.reference.linear import (
    LinearWeight,
    is_row_independent,
    is_shard_independent,
    is_thread_independent,
    linear,
    linear_silu_mul,
    linear_sums,
    pack_linear,
)
from pdserve_kernels.reference.lora import linear_lora, pack_adapter, pack_lora
from pdserve_kernels.reference.moe import fused_moe, pack_moe
from pdserve_kernels.reference.sampling.logprobs import logprob_terms
from pdserve_kernels.reference.sampling.penalties import penalize
from pdserve_kernels.reference.sampling.sample import (
    argmax,
    count_nans,
    linear_argmax,
    sample,
    sample_part,
)

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
