"""Paged attention of one layer, ours and FlashAttention 3's if it is installed, against the copy's
bandwidth and the matrix rate; torch's SDPA on dense keys and values.
"""

import itertools

import torch
from bench_kernels import make_metadata
from gpu.bench import Bench
from gpu.measure import Call
from gpu.shapes import BLOCK_SIZE, Shape, attention_flops
from torch.nn.functional import scaled_dot_product_attention

from pdserve_kernels import KernelSet, select

# Query and sequence lengths, and how many are decodes.
Lens = tuple[list[int], list[int], int]


def run(bench: Bench) -> None:
    """See the module."""
    for shape in (bench.large, bench.small):
        for requests, context in bench.sizes.decode_attention:
            bench.attempt(_decode, shape, requests, context)
        for requests, length in bench.sizes.prefill_attention:
            bench.attempt(_prefill, shape, requests, length)


def _decode(bench: Bench, shape: Shape, requests: int, context: int) -> None:
    num_bytes = 2 * 2 * requests * context * shape.num_key_value_heads * shape.head_dim
    lens = ([1] * requests, [context] * requests, requests)
    # All layers in one graph: their keys and values are no longer cached when it starts again.
    num_layers = shape.num_hidden_layers
    attend = _paged_attention(bench, select(bench.device), shape, *lens)
    timing = bench.clock.measure_replays(attend, num_calls=num_layers)
    del attend  # and its pool
    theirs = _flash_attn(bench, shape, lens, num_layers, num_bytes / bench.limits.copy)
    sdpa_s = bench.clock.measure_replays(_sdpa(bench, shape, requests, 1, context)).device_s
    bench.record(
        f"decode {shape.name} {requests} x {context}",
        us=timing.device_s * 1e6,
        host_us=timing.host_s * 1e6,
        share_of_copy=num_bytes / timing.device_s / bench.limits.copy,
        **theirs,
        sdpa_us=sdpa_s * 1e6,
        sdpa_share=num_bytes / sdpa_s / bench.limits.copy,
    )


def _prefill(bench: Bench, shape: Shape, requests: int, length: int) -> None:
    flops = requests * attention_flops(shape, length)
    lens = ([length] * requests, [length] * requests, 0)
    attend = _paged_attention(bench, select(bench.device), shape, *lens)
    timing = bench.clock.measure_replays(attend)
    del attend
    theirs = _flash_attn(bench, shape, lens, 1, flops / bench.limits.matrix)
    sdpa_s = bench.clock.measure_replays(_sdpa(bench, shape, requests, length, length)).device_s
    bench.record(
        f"prefill {shape.name} {requests} x {length}",
        us=timing.device_s * 1e6,
        host_us=timing.host_s * 1e6,
        share_of_matrix=flops / timing.device_s / bench.limits.matrix,
        **theirs,
        sdpa_us=sdpa_s * 1e6,
        sdpa_share=flops / sdpa_s / bench.limits.matrix,
    )


def _flash_attn(
    bench: Bench, shape: Shape, lens: Lens, num_calls: int, least_s: float
) -> dict[str, float]:
    """Return what a record says of FlashAttention 3, of which `least_s` is the least it can take;
    nothing where it does not run.
    """
    if not bench.is_cuda:
        return {}
    from pdserve_kernels.triton import flash_attn

    capability = torch.cuda.get_device_capability(bench.device)
    try:
        flash_attn.check_support(capability, torch.bfloat16, shape.head_dim)
    except ValueError as error:
        print(f"  next: without FlashAttention 3: {error}", flush=True)
        return {}
    attend = _paged_attention(bench, flash_attn, shape, *lens)
    device_s = bench.clock.measure_replays(attend, num_calls=num_calls).device_s
    return {"flash_attn_us": device_s * 1e6, "flash_attn_share": least_s / device_s}


def _paged_attention(
    bench: Bench,
    kernels: KernelSet,
    shape: Shape,
    query_lens: list[int],
    seq_lens: list[int],
    num_decodes: int,
) -> Call:
    """Return a call that attends in one layer, another one each time."""
    layers = shape.num_hidden_layers
    metadata = make_metadata(query_lens, seq_lens, num_decodes, str(bench.device), BLOCK_SIZE)
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in seq_lens)
    kv_cache = bench.normal(
        num_blocks, shape.num_key_value_heads, layers, 2, BLOCK_SIZE, shape.head_dim
    )
    query = bench.normal(sum(query_lens), shape.num_attention_heads, shape.head_dim)
    numbers = itertools.cycle(range(layers))
    scale = shape.head_dim**-0.5
    return lambda: kernels.paged_attention(query, kv_cache, next(numbers), metadata, scale)


def _sdpa(bench: Bench, shape: Shape, requests: int, query_len: int, context: int) -> Call:
    def heads(num_heads: int, length: int) -> torch.Tensor:
        return bench.normal(requests, num_heads, length, shape.head_dim)

    query = heads(shape.num_attention_heads, query_len)
    key, value = (heads(shape.num_key_value_heads, context) for _ in range(2))
    return lambda: scaled_dot_product_attention(
        query, key, value, is_causal=query_len > 1, enable_gqa=True
    )
