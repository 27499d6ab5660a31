"""What all of Triton's sets have in common."""

from pdserve_kernels.triton.cache import kv_tile_format, reshape_and_cache
from pdserve_kernels.triton.decoder import pack_decoder
from pdserve_kernels.triton.layers import (
    fused_add_rms_norm,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from pdserve_kernels.triton.linears.linear import is_thread_independent
from pdserve_kernels.triton.linears.lora import pack_adapter, pack_lora
from pdserve_kernels.triton.moe import fused_moe, pack_moe
from pdserve_kernels.triton.sampling.logprobs import logprob_terms
from pdserve_kernels.triton.sampling.penalties import penalize
from pdserve_kernels.triton.sampling.sample import argmax, count_nans, sample, sample_part

__all__ = [
    "argmax",
    "count_nans",
    "fused_add_rms_norm",
    "fused_moe",
    "is_thread_independent",
    "kv_tile_format",
    "logprob_terms",
    "pack_adapter",
    "pack_decoder",
    "pack_lora",
    "pack_moe",
    "penalize",
    "reshape_and_cache",
    "rms_norm",
    "rotary_embedding",
    "sample",
    "sample_part",
    "silu_and_mul",
]
