"""Whole engines that decode: steps against the bytes of weights and KV, and how long the GPU waits
between kernels.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from gpu.bench import Bench
from gpu.engines import BenchEngine
from gpu.shapes import Cost, Shape
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# Kernels that a record names.
NUM_LONGEST = 12


def run(bench: Bench) -> None:
    """See the module."""
    for shape in (bench.large, bench.small):
        bench.attempt(_model, shape)


def _model(bench: Bench, shape: Shape) -> None:
    batches = bench.sizes.decode_batches[shape.name]
    settings = {"max_num_seqs": max(batches), "max_num_batched_tokens": 8192}
    with BenchEngine(bench, shape, **settings) as engine:
        bench.record(f"{shape.name} loaded", s=engine.load_s)
        for batch in batches:
            bench.attempt(_batch, engine, batch)
            engine.stop()


def _batch(bench: Bench, engine: BenchEngine, batch: int) -> None:
    sizes, cost = bench.sizes, Cost.of(engine.shape)
    num_steps = sizes.num_steps
    engine.start(batch, sizes.context, 3 * num_steps + sizes.num_profiled_steps + batch + 100)
    # All have their first token, and some more: what is compiled or captured on the way is.
    engine.run(8 * batch)
    while len(engine.num_tokens) < batch:
        engine.run(batch)
    context = statistics.mean(engine.num_tokens.values())
    started = time.perf_counter()
    count = engine.run(num_steps * batch)
    elapsed_s = time.perf_counter() - started
    step_s = elapsed_s / (count / batch)
    num_bytes = cost.weight_bytes + batch * (context + num_steps / 2) * cost.kv_bytes_per_token
    name = f"decode {engine.shape.name} batch {batch}, context {context:.0f}"
    bench.record(
        name,
        ms_per_step=step_s * 1e3,
        tokens_per_s=count / elapsed_s,
        share_of_copy=num_bytes / bench.limits.copy / step_s,
    )
    if bench.is_cuda:
        busy = _profile_steps(lambda: engine.run(sizes.num_profiled_steps * batch) / batch)
        bench.record(
            f"{name}, profiled",
            gpu_ms_per_step=busy.busy_s * 1e3,
            idle_share=1 - busy.busy_s / step_s,
            kernels_per_step=busy.num_kernels,
            kernels=busy.longest,
        )


class Busy(NamedTuple):
    """What a profile says of a step."""

    busy_s: float
    num_kernels: float
    # The kernels that take longest: microseconds and launches.
    longest: dict[str, str]


def _profile_steps(run_steps: Callable[[], float]) -> Busy:
    """Run steps, whose number `run_steps` returns, and see when the GPU did something."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        num_steps = run_steps()
        torch.cuda.synchronize()
    spans: list[tuple[float, float]] = []
    # By kernel, microseconds and launches.
    total: dict[str, tuple[float, int]] = {}
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            start, end = event.time_range.start, event.time_range.end
            spans.append((start, end))
            us, count = total.get(event.name, (0.0, 0))
            total[event.name] = (us + end - start, count + 1)
    if not spans:
        raise RuntimeError("the profile has no kernels")
    longest = sorted(total.items(), key=lambda item: -item[1][0])[:NUM_LONGEST]
    return Busy(
        busy_s=_union(spans) / 1e6 / num_steps,
        num_kernels=len(spans) / num_steps,
        longest={
            name[:70]: f"{us / num_steps:.1f} us in {count / num_steps:.1f}"
            for name, (us, count) in longest
        },
    )


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """How long at least one of the spans lasts."""
    total, covered = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total
