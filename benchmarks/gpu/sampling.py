"""Choosing tokens of a large vocabulary, against a copy's time for reading the logits once.

As engines' graphs replay it: what requests ask for is on the device already.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu.bench import Bench
from gpu.cases import Case, record_case
from gpu.measure import Call

from pdserve_kernels import select
from pdserve_kernels.sampling_batch import SamplingBatch

ROWS = (1, 64, 256)
VOCAB_SIZE = 151_936
TINY_VOCAB_SIZE = 1000
# Standard deviations of logits: some hundred tokens have nearly all of the weight, or all a share.
PEAKED, FLAT = 5.0, 1.0


class _Kind(NamedTuple):
    """What requests ask for, of which logits."""

    name: str
    std: float
    wanted: dict[str, Any]


KINDS = (
    _Kind("greedy", PEAKED, {"temperature": 0.0}),
    _Kind("temperature", PEAKED, {}),
    _Kind("top-k 50", PEAKED, {"top_k": 50}),
    _Kind("top-p 0.95, peaked", PEAKED, {"top_p": 0.95}),
    _Kind("top-k 50, top-p 0.95, peaked", PEAKED, {"top_k": 50, "top_p": 0.95}),
    _Kind("top-p 0.999, flat", FLAT, {"top_p": 0.999}),
    _Kind("top-k 100000, top-p 0.999, flat", FLAT, {"top_k": 100_000, "top_p": 0.999}),
    _Kind("min-p 1e-5, flat", FLAT, {"min_p": 1e-5}),
)


def run(bench: Bench) -> None:
    """See the module."""
    vocab_size = VOCAB_SIZE if bench.is_cuda else TINY_VOCAB_SIZE
    for rows in ROWS:
        bench.attempt(_argmax, rows, vocab_size)
        for kind in KINDS:
            bench.attempt(_sample, rows, vocab_size, kind)


def _argmax(bench: Bench, rows: int, vocab_size: int) -> None:
    kernels, logits = select(bench.device), bench.normal(rows, vocab_size)
    record_case(bench, Case("argmax", lambda: kernels.argmax(logits), logits.nbytes), rows)


def _sample(bench: Bench, rows: int, vocab_size: int, kind: _Kind) -> None:
    # In the dtype in which models make them.
    logits, batch = bench.normal(rows, vocab_size, std=kind.std), _batch(rows, kind.wanted)
    call = functools.partial(select(bench.device).sample, logits, batch)
    captured = _staged(logits, batch) if bench.is_cuda else None
    record_case(bench, Case(f"sample, {kind.name}", call, logits.nbytes, captured), rows)


def _batch(rows: int, wanted: dict[str, Any]) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.full(rows, wanted.get("temperature", 1.0), dtype=np.float32),
        top_k=np.full(rows, wanted.get("top_k", 0), dtype=np.int64),
        top_p=np.full(rows, wanted.get("top_p", 1.0), dtype=np.float64),
        min_p=np.full(rows, wanted.get("min_p", 0.0), dtype=np.float32),
        seeds=np.arange(rows, dtype=np.int64),
        positions=np.arange(rows, dtype=np.int64),
    )


def _staged(logits: torch.Tensor, batch: SamplingBatch) -> Call:
    """Return a call that samples with the batch on the device already, as in the graphs of engines:
    a graph cannot have its copy out of memory that is pinned for the time of the call.
    """
    from pdserve_kernels.triton.sampling.device_batch import DeviceSamplingBatch, has_filter
    from pdserve_kernels.triton.sampling.sample import sample_staged

    staged = DeviceSamplingBatch.stage(batch, logits.device)
    is_filtered = has_filter(batch, logits.shape[1])
    return functools.partial(sample_staged, logits, staged, is_filtered=is_filtered)
