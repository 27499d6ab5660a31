"""What it costs on the CPU that a row's bits do not depend on its batch: one engine with our packed
linears, one with torch's own on the same weights, in turns.

    python benchmarks/bench_exact.py [--model DIR] [--dtypes bfloat16 float32] [--threads N]

Prints prefill and decode of both and their ratios, for each batch x prompt; above 1 exactness costs
nothing. Norms, activations and attention are the exact ones in both: there are no others. With
torch's linears the layers run one call at a time, not all in one.
"""

import argparse
import statistics
from pathlib import Path
from unittest.mock import patch

import torch
from machine import describe
from make_model import DEFAULT_MODEL, make_model
from pdserve_offline import PdserveEngine
from peers.offline import Case, run_case
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_engine.assemble import LoadedEngine, load_engine
from pdserve_engine.config import EngineConfig
from pdserve_kernels import cpu, reference

SHAPES = ((1, 64), (1, 512), (8, 128), (32, 128))


def main() -> None:
    """Run all shapes and print a Markdown table."""
    args = _parse_args()
    if args.model == DEFAULT_MODEL:
        make_model(args.model)
    print(describe("torch"))
    print(f"{args.model.name}, {args.threads} thread(s), medians of {args.rounds} rounds\n")
    print("| dtype, B x P | exact tok/s, ms | plain tok/s, ms | prefill ratio | decode ratio |")
    print("|---|---|---|---|---|")
    for dtype in args.dtypes:
        exact = _load(args, dtype)
        assert exact.info.determinism == "exact", f"{dtype} is not exact on this machine"
        with (
            patch.object(cpu, "pack_linear", plain_linear),
            patch.object(reference, "pack_linear", plain_linear),
        ):
            plain = _load(args, dtype)
        for shape in SHAPES:
            _report(args, dtype, shape, exact, plain)
        exact.close()
        plain.close()


def plain_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, **_: int
) -> reference.LinearWeight:
    """In place of pack_linear: a weight that goes to F.linear as it is, whatever its parts."""
    return reference.LinearWeight(
        weight=weight.detach(),
        bias=bias,
        out_features=weight.shape[0],
        in_features=weight.shape[1],
        is_packed=False,
    )


def _report(
    args: argparse.Namespace,
    dtype: str,
    shape: tuple[int, int],
    exact: LoadedEngine,
    plain: LoadedEngine,
) -> None:
    runs = [
        [measure(engine, Case(*shape, args.steps)) for engine in (exact, plain)]
        for _ in range(args.rounds)
    ]
    (rate, ms), (plain_rate, plain_ms) = (
        [statistics.median(values) for values in zip(*results, strict=True)]
        for results in zip(*runs, strict=True)
    )
    print(
        f"| {dtype} {shape[0]} x {shape[1]} | {rate:.0f}, {ms:.2f} "
        f"| {plain_rate:.0f}, {plain_ms:.2f} | {rate / plain_rate:.2f} | {plain_ms / ms:.2f} |",
        flush=True,
    )


def measure(engine: LoadedEngine, case: Case) -> tuple[float, float]:
    """Return (prefill tokens/s, median decode step in ms)."""
    times = run_case(PdserveEngine(engine.core), case)
    rate = case.batch * case.prompt_len / times.prefill_s
    return rate, statistics.median(times.step_s) * 1e3


def _load(args: argparse.Namespace, dtype: str) -> LoadedEngine:
    config = EngineConfig(
        model=str(args.model),
        dtype=dtype,
        num_threads=args.threads,
        kv_connector="none",
        kv_cache_memory_mib=args.kv_cache_memory_mib,
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    metrics = KVTransferMetrics(CollectorRegistry())
    return load_engine(config, role="decode", engine_id="bench", metrics=metrics)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="the default is made")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="%(default)s")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="per shape (%(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="decode steps (%(default)s)")
    parser.add_argument("--kv-cache-memory-mib", type=int, default=1536, help="of each engine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
