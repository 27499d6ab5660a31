"""The kernels of `pdserve_kernels.triton` but for attention, which is FlashAttention 3's (Shah et
al. 2024, arXiv:2407.08608), if that is installed. It has not run on a GPU yet.

Its `flash_attn_with_kvcache` reads lengths and block tables on the device, so a CUDA graph replays
it, and takes pages by their strides, so it reads our pool as it lies.
"""

import functools
from collections.abc import Callable
from importlib.metadata import version

import torch

from pdserve_kernels.kv_scales import NO_SCALES, KVScales
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.triton import shared
from pdserve_kernels.triton.attention import check_attention
from pdserve_kernels.triton.decoder import DecoderFunctions, make_run_decoder
from pdserve_kernels.triton.linears.linear import (
    is_row_independent,
    is_shard_independent,
    linear,
    linear_lora,
    linear_of_ranks,
    linear_silu_mul,
    linear_sums,
    pack_linear,
)
from pdserve_kernels.triton.sampling.sample import linear_argmax
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

DISTRIBUTION = "flash_attn_3"
DTYPES = (torch.bfloat16, torch.float16)
# Those of Hopper: the one architecture that it is written for.
CAPABILITY = (9, 0)
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8


def check_support(capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> None:
    """Raise ValueError, which says what is missing, unless FlashAttention 3 is installed and runs
    on a GPU of this compute capability with heads of this size. Pages may have any size.
    """
    try:
        _flash_attn_with_kvcache()
    except ImportError as error:
        raise ValueError(
            f"FlashAttention 3 cannot be imported ({error}): install {DISTRIBUTION}, for this "
            "torch and CUDA, from a wheel or from hopper/ of github.com/Dao-AILab/flash-attention"
        ) from error
    if capability != CAPABILITY:
        raise ValueError(
            f"this GPU has compute capability {capability[0]}.{capability[1]}, must have "
            f"{CAPABILITY[0]}.{CAPABILITY[1]} (Hopper)"
        )
    if dtype not in DTYPES:
        raise ValueError(f"the model's dtype is {dtype}, must be one of {DTYPES}")
    if head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_STEP:
        raise ValueError(
            f"the model's head_dim is {head_dim}, must be a multiple of {HEAD_DIM_STEP} up to "
            f"{MAX_HEAD_DIM}"
        )


def vendor_version() -> str:
    """Return the version that is installed: bits may depend on it."""
    return version(DISTRIBUTION)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    metadata: AttentionMetadata,
    scale: float,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    scales: KVScales = NO_SCALES,
) -> torch.Tensor:
    """Causal GQA attention over the paged cache; see the reference's contract. But with a window,
    blocks before it are read where they lie in one tile with those within: they may be stale but
    have to be finite. A cache in FP8 is refused.
    """
    check_attention(query, kv_cache, window, softcap, scales)
    if kv_cache.dtype != query.dtype:
        raise ValueError(f"kv_cache is {kv_cache.dtype}, must be {query.dtype}")
    # [num_blocks, block_size, num_kv_heads, head_dim]
    keys, values = (kv_cache[:, :, layer, which].transpose(1, 2) for which in (0, 1))
    has_chunks = max(metadata.query_lens_host) > 1
    output = _flash_attn_with_kvcache()(
        query,
        keys,
        values,
        cache_seqlens=metadata.seq_lens,
        page_table=metadata.block_table,
        cu_seqlens_q=metadata.query_start_loc,
        # A bound. A graph is replayed with chunks that are longer than the host's numbers say.
        max_seqlen_q=len(query) if has_chunks else 1,
        softmax_scale=scale,
        causal=True,
        # How far a token sees to the left and to the right, itself not counted; -1 is no limit.
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap,
    )
    num_tokens = sum(metadata.query_lens_host)
    if num_tokens < len(query):
        output[num_tokens:].zero_()
    return output


run_decoder = make_run_decoder(DecoderFunctions(linear, linear_of_ranks, paged_attention))


@functools.cache
def _flash_attn_with_kvcache() -> Callable[..., torch.Tensor]:
    """Import it: this module is there without it."""
    from flash_attn_interface import flash_attn_with_kvcache

    attend: Callable[..., torch.Tensor] = flash_attn_with_kvcache
    return attend
