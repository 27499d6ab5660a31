"""Time each kernel for one layer and set it against a plain torch bound measured in the same run.

Prints milliseconds (the fastest call, so that other load on the machine matters little); the shapes
are those of a 0.6B Llama-family model unless told otherwise.
"""

import argparse
import platform
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import pdserve_kernels
from pdserve_kernels.metadata import AttentionMetadata

BLOCK_SIZE = 16


def measure(function: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Milliseconds of the fastest call."""
    best, end = float("inf"), time.perf_counter() + seconds
    function()
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def make_metadata(
    query_lens: list[int],
    seq_lens: list[int],
    num_decodes: int,
    device: str,
    block_size: int = BLOCK_SIZE,
) -> AttentionMetadata:
    """Describe requests whose blocks lie anywhere."""
    blocks = [-(-length // block_size) for length in seq_lens]
    ids = torch.randperm(sum(blocks), dtype=torch.int32)
    table = torch.zeros(len(seq_lens), max(blocks), dtype=torch.int32)
    for row, (own, part) in enumerate(zip(blocks, ids.split(blocks), strict=True)):
        table[row, :own] = part
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.arange(sum(query_lens), device=device),
        query_lens_host=tuple(query_lens),
        seq_lens_host=tuple(seq_lens),
        num_decodes=num_decodes,
    )


def bench_attention(
    args: argparse.Namespace, kernels, query_lens, seq_lens, num_decodes, window=None
) -> float:
    """One layer's time; layers are taken in turn, so that the cache is as cold as in a model."""
    metadata = make_metadata(query_lens, seq_lens, num_decodes, args.device)
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in seq_lens)
    layers = args.layers
    shape = (num_blocks, args.kv_heads, layers, 2, BLOCK_SIZE, args.head_dim)
    kv_cache = torch.zeros(shape, dtype=args.dtype, device=args.device).normal_()
    query = torch.randn(sum(query_lens), args.heads, args.head_dim).to(kv_cache)

    def step() -> None:
        for layer in range(layers):
            kernels.paged_attention(
                query, kv_cache, layer, metadata, args.head_dim**-0.5, window=window
            )

    return measure(step, query.device, args.seconds) / layers


def report(name: str, milliseconds: float, bound: float, of_what: str) -> None:
    print(f"{name:<34}{milliseconds:9.3f} ms {bound:9.3f} ms  {of_what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", type=lambda name: getattr(torch, name))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=3072)
    parser.add_argument("--layers", type=int, default=4, help="layers in the attention's cache")
    parser.add_argument("--seconds", type=float, default=0.5, help="per measurement")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device(args.device)
    kernels = pdserve_kernels.select(device)
    print(f"{platform.processor() or platform.machine()}, {args.threads} threads, {args.dtype}")

    cases = [(1, 128, None), (8, 128, None), (32, 128, None), (1, 2048, None), (8, 2048, None)]
    for batch, context, window in [*cases, (8, 2048, 512)]:
        elapsed = bench_attention(args, kernels, [1] * batch, [context] * batch, batch, window)
        shape = (2, batch, window or context, args.kv_heads, args.head_dim)
        kv = torch.ones(shape, dtype=args.dtype, device=device)
        copy = torch.empty_like(kv)
        bound = measure(lambda kv=kv, copy=copy: copy.copy_(kv), device, args.seconds)
        name = f"decode {batch} x {context}" + (f", window {window}" if window else "")
        report(name, elapsed, bound, "copying its visible K and V once")
    for tokens in (512, 2048):
        elapsed = bench_attention(args, kernels, [tokens], [tokens], 0)
        shape = (1, args.heads, tokens, args.head_dim)
        q = torch.randn(shape).to(device, args.dtype)
        bound = measure(
            lambda q=q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
            device,
            args.seconds,
        )
        report(f"prefill {tokens}", elapsed, bound, "torch's SDPA, dense K and V")
    weight = torch.randn(2 * args.intermediate, args.hidden).to(device, args.dtype)
    packed = kernels.pack_linear(weight)
    gain = torch.ones(args.hidden, dtype=args.dtype, device=device)
    for rows in (1, 8, 32, 512):
        x = torch.randn(rows, args.hidden).to(device, args.dtype)
        elapsed = measure(lambda x=x: kernels.linear(x, packed), device, args.seconds)
        bound = measure(lambda x=x: F.linear(x, weight), device, args.seconds)
        report(f"linear {rows} x {args.hidden} x {len(weight)}", elapsed, bound, "F.linear")
        elapsed = measure(lambda x=x: kernels.rms_norm(x, gain, 1e-6), device, args.seconds)
        bound = measure(lambda x=x: x.clone(), device, args.seconds)
        report(f"rms_norm {rows} x {args.hidden}", elapsed, bound, "copying x")
        x = torch.randn(rows, 2 * args.intermediate).to(device, args.dtype)
        elapsed = measure(lambda x=x: kernels.silu_and_mul(x), device, args.seconds)
        bound = measure(
            lambda x=x: F.silu(x[:, : args.intermediate]).mul_(x[:, args.intermediate :]),
            device,
            args.seconds,
        )
        report(f"silu_and_mul {rows} x {args.intermediate}", elapsed, bound, "F.silu and mul_")


if __name__ == "__main__":
    main()
