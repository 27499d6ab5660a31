"""Time the C++ kernels for CPUs beside oneDNN and this machine's limits, call by call in turn.

Prints Markdown. The fastest call of each counts, so that other load on the machine matters little.
Weights are taken in turn and together exceed the caches, as those of a model do. Of two bounds, the
time to read the weights and the time to multiply at the full rate, the larger is the limit.
"""

import argparse
import ctypes
import itertools
from collections.abc import Sequence

import torch
from cpu_limits import DOT_FLOPS, DOTS, Kernel, fastest, load_limits

from pdserve_kernels import cpu

# [out_features, in_features] of a 0.6B model with a small vocabulary.
LAYER = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
HEAD = {"lm_head": (32000, 1024)}
NUM_LAYERS = 28
COLD_BYTES = 2**28


class Weights:
    """Weights of one shape, packed by us and for oneDNN, and calls that take the next of them."""

    def __init__(self, shape: tuple[int, int], count: int) -> None:
        self.shape, self.count = shape, count
        weight = (torch.randn(shape) * 0.05).bfloat16()
        pack = torch.ops.mkldnn._reorder_linear_weight
        self.packed = [cpu.pack_linear(weight) for _ in range(count)]
        self.packed_by_onednn = [pack(weight.clone(), 8) for _ in range(count)]

    @property
    def num_bytes(self) -> int:
        return self.packed[0].panels.nbytes

    def kernels(self, rows: int, limits: ctypes.CDLL) -> dict[str, Kernel]:
        x = torch.randn(rows, self.shape[1]).bfloat16()
        # One cycle for both, or one would find in the cache what the other has just read.
        ours, theirs = itertools.cycle(self.packed), itertools.cycle(self.packed_by_onednn)
        onednn = torch.ops.mkldnn._linear_pointwise
        return {
            "ours": lambda: cpu.linear(x, next(ours)),
            "oneDNN": lambda: onednn(x, next(theirs), None, "none", [], ""),
            "read": lambda: limits.read_bytes(next(ours).panels.data_ptr(), self.num_bytes),
        }


def bench_linear(args: argparse.Namespace, limits: ctypes.CDLL) -> None:
    print("| linear | rows | µs | oneDNN's time / ours | limit / ours | GB/s | GFLOP/s |")
    print("|---|---|---|---|---|---|---|")
    for name, shape in (LAYER | HEAD).items():
        weights = Weights(shape, -(-COLD_BYTES // (2 * shape[0] * shape[1])))
        for rows in args.rows:
            report(name, rows, [weights], weights.kernels(rows, limits), limits, args)


def bench_whole_model(args: argparse.Namespace, limits: ctypes.CDLL) -> None:
    """All linears of a decode step, one after the other."""
    layers = [Weights(shape, NUM_LAYERS) for shape in LAYER.values()]
    head = [Weights(shape, 1) for shape in HEAD.values()]
    for rows in (rows for rows in args.rows if rows <= 64):
        steps = [weights.kernels(rows, limits) for weights in layers * NUM_LAYERS + head]

        def run(kernel: str, steps: list[dict[str, Kernel]] = steps) -> None:
            for step in steps:
                step[kernel]()

        names = {name: lambda name=name: run(name) for name in steps[0]}
        report("whole model", rows, layers * NUM_LAYERS + head, names, limits, args)


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
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    limits = load_limits()
    bench_linear(args, limits)
    bench_whole_model(args, limits)


if __name__ == "__main__":
    main()
