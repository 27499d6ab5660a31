"""Time the C++ kernels for CPUs beside others and this machine's limits, call by call in turn.

The others are oneDNN in bf16, for attention the reference set, for experts transformers' own loop.
Prints Markdown. The fastest call of each counts, so that other load on the machine matters little.
Weights, and layers of a KV cache, are taken in turn and together exceed the caches, as those of a
model do. Of two bounds, the time to read what has to be read and the time to multiply at the full
rate, the larger is the limit.
"""

import argparse
import ctypes
import itertools
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from cpu_limits import DOT_FLOPS, DOTS, Kernel, fastest, load_limits

from pdserve_kernels import cpu, name_of, reference
from pdserve_kernels.cpu.memory import empty_on_huge_pages
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.reference.moe import route
from pdserve_kernels.reference.quantization import QuantizedWeight, quantize
from pdserve_kernels.sampling_batch import MASK_BITS, SamplingBatch, num_mask_words

# [out_features, in_features] of a 0.6B model with a small vocabulary.
LAYER = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
HEAD = {"lm_head": (32000, 1024)}
# Of Qwen3-30B-A3B, a quarter of its experts: hidden_size, moe_intermediate_size, experts, top_k.
EXPERTS = (2048, 768, 32, 8)
# Bits and group size of integer weights, as `--quantization` makes them.
QUANTIZATIONS: dict[str, tuple[int, int | None]] = {"int8": (8, None), "int4": (4, 32)}
# Of a large vocabulary, for masks, and how many tokens these allow; None is no mask.
MASKED_HEAD = (151_936, 1024)
ALLOWED_TOKENS = (None, 1000, 64, 5)
# Logits of a large vocabulary, by how far they spread, and what is asked of them.
SPREADS = {"normal, deviation 3": 3.0, "deviation 1": 1.0, "within 1/64": 1e-3, "all equal": 0.0}
FILTERS: dict[str, tuple[int, float]] = {
    "none": (0, 1.0),
    "top-k 50": (50, 1.0),
    "top-p 0.95": (0, 0.95),
    "top-k 100,000": (100_000, 1.0),
    "and top-p 0.999": (100_000, 0.999),
}
NUM_LAYERS = 28
COLD_BYTES = 2**28
# Of the same model's attention.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
# Query tokens and all tokens of each request.
BATCHES = {
    "decode 1 x 64": [(1, 64)],
    "decode 1 x 512": [(1, 512)],
    "decode 1 x 2048": [(1, 2048)],
    "decode 8 x 128": [(1, 128)] * 8,
    "decode 32 x 128": [(1, 128)] * 32,
    "prefill 8 x 128": [(128, 128)] * 8,
    "prefill 1 x 2048": [(2048, 2048)],
    "prefill 256 of 2048": [(256, 2048)],
}


class Weights:
    """Weights of one shape, packed by us and for oneDNN, and calls that take the next of them.

    `kind` is bf16 or one of QUANTIZATIONS; oneDNN's are always bf16. `count`: enough by default for
    none to be in a cache when its turn comes again.
    """

    def __init__(self, shape: tuple[int, int], kind: str = "bf16", count: int | None = None):
        self.shape = shape
        dense = (torch.randn(shape) * 0.05).bfloat16()
        weight = dense if kind == "bf16" else quantized(dense, kind)
        first = cpu.pack_linear(weight)
        assert isinstance(first, cpu.LinearWeight)
        self.num_bytes = sum(tensor.nbytes for tensor in read_of(first))
        more = range(1, count or -(-COLD_BYTES // self.num_bytes))
        self.packed = [first, *(cpu.pack_linear(weight) for _ in more)]
        pack = torch.ops.mkldnn._reorder_linear_weight
        dense_count = count or -(-COLD_BYTES // dense.nbytes)
        self.packed_by_onednn = [pack(dense.clone(), 8) for _ in range(dense_count)]

    def kernels(self, rows: int, limits: ctypes.CDLL) -> dict[str, Kernel]:
        x = torch.randn(rows, self.shape[1]).bfloat16()
        # One cycle for both, or one would find in the cache what the other has just read.
        ours, theirs = itertools.cycle(self.packed), itertools.cycle(self.packed_by_onednn)
        onednn = torch.ops.mkldnn._linear_pointwise
        return {
            "ours": lambda: cpu.linear(x, next(ours)),
            "oneDNN": lambda: onednn(x, next(theirs), None, "none", [], ""),
            "read": lambda: [
                limits.read_bytes(tensor.data_ptr(), tensor.nbytes)
                for tensor in read_of(next(ours))
            ],
        }


def quantized(weight: torch.Tensor, kind: str) -> QuantizedWeight:
    bits, group_size = QUANTIZATIONS[kind]
    return quantize(weight, bits=bits, group_size=group_size)


def read_of(packed: cpu.LinearWeight) -> Sequence[torch.Tensor]:
    """What a product has to read of a weight."""
    panels = packed.panels
    return (panels,) if isinstance(panels, torch.Tensor) else (panels.values, panels.scales)


def bench_linear(args: argparse.Namespace, limits: ctypes.CDLL) -> None:
    print("| linear | weights | rows | µs | oneDNN's time / ours | limit / ours | GB/s | GFLOP/s |")
    print("|---|---|---|---|---|---|---|---|")
    for (name, shape), kind in itertools.product((LAYER | HEAD).items(), ("bf16", *QUANTIZATIONS)):
        weights = Weights(shape, kind)
        for rows in args.rows:
            kernels = weights.kernels(rows, limits)
            report(f"{name} | {kind}", rows, [weights], kernels, limits, args)


def bench_whole_model(args: argparse.Namespace, limits: ctypes.CDLL) -> None:
    """All linears of a decode step, one after the other."""
    layers = [Weights(shape, count=NUM_LAYERS) for shape in LAYER.values()]
    head = [Weights(shape, count=1) for shape in HEAD.values()]
    for rows in (rows for rows in args.rows if rows <= 64):
        steps = [weights.kernels(rows, limits) for weights in layers * NUM_LAYERS + head]

        def run(kernel: str, steps: list[dict[str, Kernel]] = steps) -> None:
            for step in steps:
                step[kernel]()

        names = {name: lambda name=name: run(name) for name in steps[0]}
        report("whole model | bf16", rows, layers * NUM_LAYERS + head, names, limits, args)


class Experts:
    """The experts of a layer, as we have them and as transformers does."""

    def __init__(self) -> None:
        hidden, size, self.num_experts, self.top_k = EXPERTS
        self.router = (torch.randn(self.num_experts, hidden) * 0.05).bfloat16()
        self.gate_up = (torch.randn(self.num_experts, 2 * size, hidden) * 0.05).bfloat16()
        self.down = (torch.randn(self.num_experts, hidden, size) * 0.05).bfloat16()
        mlps = zip(self.gate_up, self.down, strict=True)
        packed = cpu.pack_moe(self.router, mlps, top_k=self.top_k, renormalize=True)
        assert isinstance(packed, cpu.moe.MoeWeight)
        self.packed = packed
        self.weights_of_expert = 3 * hidden * size

    def used_by(self, x: torch.Tensor) -> list[int]:
        """Return the ids of the experts that rows have."""
        _, ids = route(x @ self.router.T, self.top_k, renormalize=True)
        return sorted(set(ids.flatten().tolist()))

    def loop(self, x: torch.Tensor) -> torch.Tensor:
        """What transformers' Qwen3MoeExperts does, expert by expert."""
        shares = torch.softmax((x @ self.router.T).float(), dim=-1)
        shares, ids = torch.topk(shares, self.top_k, dim=-1)
        shares = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for expert in sorted(set(ids.flatten().tolist())):
            rows, places = torch.where(ids == expert)
            gate, up = F.linear(x[rows], self.gate_up[expert]).chunk(2, dim=-1)
            brought = F.linear(F.silu(gate) * up, self.down[expert])
            out.index_add_(0, rows, brought * shares[rows, places, None])
        return out

    def read(self, used: Sequence[int], limits: ctypes.CDLL) -> None:
        for weights in (self.packed.gate_up, self.packed.down):
            for expert in used:
                for tensor in read_of(weights[expert]):
                    limits.read_bytes(tensor.data_ptr(), tensor.nbytes)


def bench_experts(args: argparse.Namespace, limits: ctypes.CDLL) -> None:
    print(
        "| rows | experts used | µs | transformers' loop / ours | limit / ours | GB/s | GFLOP/s |"
    )
    print("|---|---|---|---|---|---|---|")
    experts = Experts()
    for rows in (rows for rows in args.rows if rows in (1, 8, 64)):
        x = torch.randn(rows, EXPERTS[0]).bfloat16()
        used = experts.used_by(x)
        kernels: dict[str, Kernel] = {
            "ours": lambda x=x: cpu.fused_moe(x, experts.packed),  # type: ignore[misc]
            "loop": lambda x=x: experts.loop(x),  # type: ignore[misc]
            "read": lambda used=used: experts.read(used, limits),  # type: ignore[misc]
            "dots": lambda: limits.dot_pairs(DOTS),
        }
        best = fastest(kernels, args.seconds)
        flops = 2 * rows * experts.top_k * experts.weights_of_expert
        limit = max(best["read"], flops * best["dots"] / (args.threads * DOTS * DOT_FLOPS))
        ours, num_bytes = best["ours"], 2 * len(used) * experts.weights_of_expert
        print(
            f"| {rows} | {len(used)} | {ours * 1e6:.0f} | {best['loop'] / ours:.2f} "
            f"| {limit / ours:.2f} | {num_bytes / ours / 1e9:.1f} | {flops / ours / 1e9:.0f} |",
            flush=True,
        )


def bench_attention(args: argparse.Namespace, limits: ctypes.CDLL) -> None:
    """One layer, a part of all: so that the cache is as cold as in a model."""
    print("| attention | µs | reference's time / ours | limit / ours | GB/s | GFLOP/s |")
    print("|---|---|---|---|---|---|")
    for name, requests in BATCHES.items():
        metadata = make_metadata(requests)
        blocks = metadata.block_table.numel()
        num_layers = NUM_LAYERS if metadata.num_decodes else 2
        shape = torch.Size((blocks, NUM_KV_HEADS, num_layers, 2, BLOCK_SIZE, HEAD_DIM))
        kv_cache = empty_on_huge_pages(shape.numel(), torch.bfloat16).view(shape).normal_()
        query = torch.randn(sum(metadata.query_lens_host), NUM_HEADS, HEAD_DIM).bfloat16()
        kernels = {
            name_of(kernel_set): attention_kernel(kernel_set, query, kv_cache, metadata)
            for kernel_set in (cpu, reference)
        }
        num_bytes = sum(metadata.seq_lens_host) * NUM_KV_HEADS * HEAD_DIM * 4
        seen = sum(query_len * (2 * length - query_len + 1) // 2 for query_len, length in requests)
        flops = 4 * NUM_HEADS * HEAD_DIM * seen
        report_attention(name, kernels, num_layers, num_bytes, flops, limits, args)


def attention_kernel(
    kernel_set: ModuleType,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
) -> Kernel:
    """A call that attends to all layers. (In which order a set has a tile's numbers is all one.)"""

    def attend() -> None:
        for layer in range(kv_cache.shape[2]):
            kernel_set.paged_attention(query, kv_cache, layer, metadata, HEAD_DIM**-0.5)

    return attend


def make_metadata(requests: Sequence[tuple[int, int]]) -> AttentionMetadata:
    """Requests (query tokens, all tokens), in random blocks."""
    query_lens, seq_lens = zip(*requests, strict=True)
    num_blocks = -(-max(seq_lens) // BLOCK_SIZE)
    blocks = torch.randperm(len(requests) * num_blocks, dtype=torch.int32)
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=blocks.view(len(requests), num_blocks),
        slot_mapping=torch.arange(sum(query_lens)),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
        num_decodes=len(requests) if set(query_lens) == {1} else 0,
    )


def report_attention(
    name: str,
    kernels: dict[str, Kernel],
    num_layers: int,
    num_bytes: int,
    flops: int,
    limits: ctypes.CDLL,
    args: argparse.Namespace,
) -> None:
    memory = empty_on_huge_pages(COLD_BYTES, torch.uint8).fill_(1)
    others: dict[str, Kernel] = {
        "dots": lambda: limits.dot_pairs(DOTS),
        "read": lambda: limits.read_bytes(memory.data_ptr(), COLD_BYTES),
    }
    best = fastest(kernels | others, args.seconds)
    peak = args.threads * DOTS * DOT_FLOPS / best["dots"]
    limit = max(best["read"] * num_bytes / COLD_BYTES, flops / peak)
    ours, theirs = (best[name_of(which)] / num_layers for which in (cpu, reference))
    print(
        f"| {name} | {ours * 1e6:.0f} | {theirs / ours:.2f} | {limit / ours:.2f} "
        f"| {num_bytes / ours / 1e9:.1f} | {flops / ours / 1e9:.0f} |",
        flush=True,
    )


def bench_masks(args: argparse.Namespace) -> None:
    """The head and the choice of a token, where each row allows some tokens only."""
    print("| allowed tokens | rows | greedy, with the head: µs | of all | drawn: µs | of all |")
    print("|---|---|---|---|---|---|")
    head = cpu.pack_linear((torch.randn(MASKED_HEAD) * 0.05).bfloat16())
    for rows in (rows for rows in args.rows if rows in (1, 8, 32)):
        x = torch.randn(rows, MASKED_HEAD[1]).bfloat16()
        kernels = mask_kernels(x, head, cpu.linear(x, head))
        best = fastest(kernels, args.seconds)
        for count in ALLOWED_TOKENS:
            greedy, drawn = best[f"greedy {count}"], best[f"drawn {count}"]
            print(
                f"| {count or 'all'} | {rows} | {greedy * 1e6:.0f} "
                f"| {greedy / best['greedy None']:.3f} | {drawn * 1e6:.0f} "
                f"| {drawn / best['drawn None']:.3f} |",
                flush=True,
            )


def mask_kernels(
    x: torch.Tensor, head: cpu.LinearWeight, logits: torch.Tensor
) -> dict[str, Kernel]:
    n = len(x)
    batch = sampling_batch(n)
    kernels: dict[str, Kernel] = {}
    for count in ALLOWED_TOKENS:
        mask = None if count is None else random_mask(n, count)
        kernels[f"greedy {count}"] = lambda mask=mask: cpu.linear_argmax(x, head, mask=mask)
        kernels[f"drawn {count}"] = lambda mask=mask: cpu.sample(logits, batch, mask=mask)
    return kernels


def sampling_batch(n: int, top_k: int = 0, top_p: float = 1.0) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.ones(n, dtype=np.float32),
        top_k=np.full(n, top_k),
        top_p=np.full(n, top_p),
        min_p=np.zeros(n, dtype=np.float32),
        seeds=np.arange(n),
        positions=np.zeros(n, dtype=np.int64),
    )


def bench_filters(args: argparse.Namespace) -> None:
    """Draws from logits that spread and logits that crowd."""
    print("| logits | rows | " + ", µs | ".join(FILTERS) + ", µs |")
    print("|---" * (2 + len(FILTERS)) + "|")
    for (name, spread), dtype, rows in itertools.product(
        SPREADS.items(), (torch.bfloat16, torch.float32), (1, 8)
    ):
        logits = (torch.randn(rows, MASKED_HEAD[0]) * spread + 1.0).to(dtype)
        best = fastest(filter_kernels(logits), args.seconds)
        cells = " | ".join(f"{best[filters] * 1e6:.0f}" for filters in FILTERS)
        print(f"| {name}, {str(dtype)[6:]} | {rows} | {cells} |", flush=True)


def filter_kernels(logits: torch.Tensor) -> dict[str, Kernel]:
    batches = {name: sampling_batch(len(logits), *wanted) for name, wanted in FILTERS.items()}
    return {
        name: lambda batch=batch: cpu.sample(logits, batch)  # type: ignore[misc]
        for name, batch in batches.items()
    }


def random_mask(num_rows: int, count: int) -> torch.Tensor:
    """Each row allows `count` tokens of its own, anywhere in the vocabulary."""
    bits = np.zeros((num_rows, num_mask_words(MASKED_HEAD[0]) * MASK_BITS), dtype=np.uint8)
    for row in bits:
        row[torch.randperm(MASKED_HEAD[0])[:count].numpy()] = 1
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def report(
    name: str,
    rows: int,
    weights: Sequence[Weights],
    kernels: dict[str, Kernel],
    limits: ctypes.CDLL,
    args: argparse.Namespace,
) -> None:
    best = fastest({**kernels, "dots": lambda: limits.dot_pairs(DOTS)}, args.seconds)
    flops = sum(2 * rows * w.shape[0] * w.shape[1] for w in weights)
    peak = args.threads * DOTS * DOT_FLOPS / best["dots"]
    limit = max(best["read"], flops / peak)
    ours = best["ours"]
    print(
        f"| {name} | {rows} | {ours * 1e6:.0f} | {best['oneDNN'] / ours:.2f} | {limit / ours:.2f} "
        f"| {sum(w.num_bytes for w in weights) / ours / 1e9:.1f} | {flops / ours / 1e9:.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="per line of a table")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 512])
    kinds = ("linear", "model", "experts", "attention", "masks", "filters")
    parser.add_argument("--only", nargs="+", choices=kinds)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    limits = load_limits()
    benchmarks = {
        "linear": lambda: bench_linear(args, limits),
        "model": lambda: bench_whole_model(args, limits),
        "experts": lambda: bench_experts(args, limits),
        "attention": lambda: bench_attention(args, limits),
        "masks": lambda: bench_masks(args),
        "filters": lambda: bench_filters(args),
    }
    for name in args.only or benchmarks:
        benchmarks[name]()


if __name__ == "__main__":
    main()
