"""Choosing the next token of each request: greedy, or Gumbel-max over the filtered logits.

A request's token depends on its own logits and parameters only, to the bit, never on its
neighbours.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pdserve_engine.sampling.filters import Filters, find_candidates
from pdserve_engine.sampling.gumbel import gumbel_noise, gumbel_noise_at

# Smaller ones are as good as greedy, and could overflow the scaled logits.
MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """How to choose the next token of n requests. All arrays are [n], on the host."""

    temperature: npt.NDArray[np.float32]  # 0 is greedy
    top_k: npt.NDArray[np.int64]  # 0 is no limit
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.int64]
    # Index of the token among the request's output tokens.
    positions: npt.NDArray[np.int64]


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Return one token id per row, [n] int64, ties going to the lowest id.

    logits are fp32 [n, vocab_size]; -inf is never chosen if the row has anything else.
    """
    random_rows = np.flatnonzero(batch.temperature)
    if not len(random_rows):
        return logits.argmax(-1)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(random_rows) < len(logits):
        tokens = logits.argmax(-1)
    is_filtered = _has_filter(batch, logits.shape[1])[random_rows]
    for rows in (random_rows[is_filtered], random_rows[~is_filtered]):
        if len(rows):
            index = torch.from_numpy(rows).to(logits.device)
            tokens[index] = _sample_random(logits[index], batch, rows)
    return tokens


def _has_filter(batch: SamplingBatch, vocab_size: int) -> npt.NDArray[np.bool_]:
    has_top_k = (batch.top_k > 0) & (batch.top_k < vocab_size)
    return has_top_k | (batch.top_p < 1.0) | (batch.min_p > 0.0)


def _sample_random(
    logits: torch.Tensor, batch: SamplingBatch, rows: npt.NDArray[np.int64]
) -> torch.Tensor:
    device, vocab_size = logits.device, logits.shape[1]
    seeds = torch.from_numpy(batch.seeds[rows]).to(device)
    positions = torch.from_numpy(batch.positions[rows]).to(device)
    temperature = np.maximum(batch.temperature[rows], np.float32(MIN_TEMPERATURE))
    scaled = logits / torch.from_numpy(temperature).to(device).unsqueeze(1)
    if not _has_filter(batch, vocab_size)[rows].any():
        noise = gumbel_noise(seeds, positions, vocab_size=vocab_size)
        return noise.add_(scaled).argmax(-1)
    filters = _build_filters(batch, rows, vocab_size, device)
    candidates = find_candidates(scaled, filters)
    noise = gumbel_noise_at(seeds, positions, vocab_ids=candidates.vocab_ids)
    perturbed = noise.add_(candidates.logits)
    is_best = perturbed == perturbed.amax(1, keepdim=True)
    # Candidates are in order of their logits, so the lowest id among equals has to be looked for.
    # With NaN logits nothing equals the best: any valid id will do, the caller sees the NaN.
    lowest = candidates.vocab_ids.masked_fill(~is_best, vocab_size).amin(1)
    return lowest.clamp_(max=vocab_size - 1)


def _build_filters(
    batch: SamplingBatch, rows: npt.NDArray[np.int64], vocab_size: int, device: torch.device
) -> Filters:
    top_k, top_p = batch.top_k[rows], batch.top_p[rows]
    is_limited = (top_k > 0) & (top_k < vocab_size)
    with np.errstate(divide="ignore"):
        log_min_p = np.log(batch.min_p[rows])

    def column(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device).unsqueeze(1)

    return Filters(
        top_k=column(np.where(is_limited, top_k, vocab_size)),
        top_p=column(top_p),
        log_min_p=column(log_min_p),
        largest_top_k=int(top_k[is_limited].max(initial=0)),
        has_top_p=bool((top_p < 1.0).any()),
    )
