"""Whole prompts through an engine, in chunks of several sizes, against the matrix rate."""

from gpu.bench import Bench
from gpu.engines import BenchEngine
from gpu.shapes import Cost, attention_flops


def run(bench: Bench) -> None:
    """See the module."""
    for chunk in bench.sizes.chunks:
        bench.attempt(_prompts, chunk)


def _prompts(bench: Bench, chunk: int) -> None:
    shape, (batch, length) = bench.large, bench.sizes.prefill
    flops = batch * length * Cost.of(shape).flops_per_token
    flops += batch * shape.num_hidden_layers * attention_flops(shape, length)
    with BenchEngine(bench, shape, max_num_seqs=64, max_num_batched_tokens=chunk) as engine:
        elapsed_s = engine.time_requests(batch, length, 1)
    bench.record(
        f"prefill {shape.name} {batch} x {length}, chunks of {chunk}",
        s=elapsed_s,
        tokens_per_s=batch * length / elapsed_s,
        share_of_matrix=flops / elapsed_s / bench.limits.matrix,
    )
