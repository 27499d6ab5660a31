"""The kernels of `pdserve_kernels.triton` but for those in which a row's bits depend on the batch:
products and attention. What they cost is not measured.
"""

import torch

from pdserve_kernels.triton.cache import kv_tile_format, reshape_and_cache
from pdserve_kernels.triton.decoder import DecoderFunctions, make_run_decoder, pack_decoder
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
from pdserve_kernels.triton.layers import (
    fused_add_rms_norm,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)
from pdserve_kernels.triton.linear import is_thread_independent
from pdserve_kernels.triton.logprobs import logprob_terms
from pdserve_kernels.triton.lora import pack_adapter, pack_lora
from pdserve_kernels.triton.moe import fused_moe, pack_moe
from pdserve_kernels.triton.penalties import penalize
from pdserve_kernels.triton.sampling import argmax, count_nans, sample, sample_part

__all__ = [
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
