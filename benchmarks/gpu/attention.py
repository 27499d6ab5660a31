"""Paged attention of one layer against the copy's bandwidth and the matrix rate; torch's SDPA on
dense keys and values.
"""

import itertools

import torch
from bench_kernels import make_metadata
from gpu.bench import Bench
from gpu.measure import Call
from gpu.shapes import BLOCK_SIZE, Shape, attention_flops
from torch.nn.functional import scaled_dot_product_attention

from pdserve_kernels import select


def run(bench: Bench) -> None:
    """See the module."""
    for shape in (bench.large, bench.small):
        for requests, context in bench.sizes.decode_attention:
            bench.attempt(_decode, shape, requests, context)
        for requests, length in bench.sizes.prefill_attention:
            bench.attempt(_prefill, shape, requests, length)


def _decode(bench: Bench, shape: Shape, requests: int, context: int) -> None:
    attend = _paged_attention(bench, shape, [1] * requests, [context] * requests, requests)
    # All layers in one graph: their keys and values are no longer cached when it starts again.
    timing = bench.clock.measure_replays(attend, num_calls=shape.num_hidden_layers)
    del attend  # and its pool
    num_bytes = 2 * 2 * requests * context * shape.num_key_value_heads * shape.head_dim
    sdpa_s = bench.clock.measure_replays(_sdpa(bench, shape, requests, 1, context)).device_s
    bench.record(
        f"decode {shape.name} {requests} x {context}",
        us=timing.device_s * 1e6,
        host_us=timing.host_s * 1e6,
        share_of_copy=num_bytes / timing.device_s / bench.limits.copy,
        sdpa_us=sdpa_s * 1e6,
        sdpa_share=num_bytes / sdpa_s / bench.limits.copy,
    )


def _prefill(bench: Bench, shape: Shape, requests: int, length: int) -> None:
    attend = _paged_attention(bench, shape, [length] * requests, [length] * requests, 0)
    timing = bench.clock.measure_replays(attend)
    del attend
    flops = requests * attention_flops(shape, length)
    sdpa_s = bench.clock.measure_replays(_sdpa(bench, shape, requests, length, length)).device_s
    bench.record(
        f"prefill {shape.name} {requests} x {length}",
        us=timing.device_s * 1e6,
        host_us=timing.host_s * 1e6,
        share_of_matrix=flops / timing.device_s / bench.limits.matrix,
        sdpa_us=sdpa_s * 1e6,
        sdpa_share=flops / sdpa_s / bench.limits.matrix,
    )


def _paged_attention(
    bench: Bench, shape: Shape, query_lens: list[int], seq_lens: list[int], num_decodes: int
) -> Call:
    """Return a call that attends in one layer, another one each time."""
    kernels, layers = select(bench.device), shape.num_hidden_layers
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
