"""Choosing the next token of each request: greedy, or Gumbel-max over the filtered logits.

A request's token depends on its own logits and parameters only, to the bit, never on its
neighbours, the device or the kernel set.
"""

import numpy as np
import numpy.typing as npt
import torch

from pdserve_kernels.reference.linear import LinearWeight, linear
from pdserve_kernels.reference.sampling.filters import Filters, find_candidates
from pdserve_kernels.reference.sampling.gumbel import gumbel_noise, gumbel_noise_at
from pdserve_kernels.reference.sampling.masks import mask_logits
from pdserve_kernels.sampling_batch import Argmax, Sampled, SamplingBatch


def argmax(logits: torch.Tensor, *, mask: torch.Tensor | None = None) -> Argmax:
    """Return the best token of each row of logits [n, vocab_size], its logit, and how many NaN the
    row has.

    Masks are those of `mask_logits`. What is not allowed is not looked at; a row that allows
    nothing gets any valid id.
    """
    logits = mask_logits(logits, mask)
    token_ids = logits.argmax(-1)
    values = logits.gather(1, token_ids[:, None])[:, 0].float()
    return Argmax(token_ids, count_nans(logits), values)


def linear_argmax(
    x: torch.Tensor, packed: LinearWeight, *, mask: torch.Tensor | None = None
) -> Argmax:
    """Return argmax(linear(x, packed), mask=mask) for x [n, in_features]."""
    return argmax(linear(x, packed), mask=mask)


def count_nans(logits: torch.Tensor) -> torch.Tensor:
    """Return the number of NaN in each row of logits [n, vocab_size]: [n] int64."""
    # One NaN makes a row's maximum NaN, which is cheaper to see.
    is_nan = logits.amax(-1).isnan()
    return logits.isnan().sum(-1) if bool(is_nan.any()) else is_nan.long()


def sample(
    logits: torch.Tensor, batch: SamplingBatch, *, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return one token id per row, [n] int64, ties going to the lowest id.

    logits are [n, vocab_size], of any float dtype; all is computed in fp32. -inf is never chosen if
    the row has anything else; a row with NaN gets any valid id. Masks are those of `mask_logits`: a
    token that is not allowed counts as -inf, so a row that allows nothing gets any valid id, and
    who made the mask has to see to it. Filters are min-p, then top-k, then top-p over what is left;
    tokens that tie with the last kept one are kept. The noise is that of `gumbel.py`, the
    arithmetic that of `exact_math.py`.
    """
    logits = mask_logits(logits, mask).float()
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
            tokens[index] = _sample_random(logits[index], batch.select(rows))
    return tokens


def sample_part(
    logits: torch.Tensor,
    batch: SamplingBatch,
    *,
    first_id: int,
    mask: torch.Tensor | None = None,
) -> Sampled:
    """Return of logits [n, k] of the tokens from first_id on, a multiple of 4, the one that would
    win among them, numbered within them. No row has a filter: of several parts of a vocabulary the
    highest value, with the lowest id, is then the token that `sample` chooses of the whole.
    """
    logits = mask_logits(logits, mask).float()
    device = logits.device
    divisors = np.where(batch.temperature != 0, batch.divisors(), np.float32(1))
    values = logits / torch.from_numpy(divisors).to(device).unsqueeze(1)
    noise = gumbel_noise(
        torch.from_numpy(batch.seeds).to(device),
        torch.from_numpy(batch.positions).to(device),
        vocab_size=logits.shape[1],
        first_id=first_id,
    )
    noise[torch.from_numpy(batch.temperature == 0).to(device)] = 0
    token_ids = noise.add_(values).argmax(-1)
    return Sampled(token_ids, noise.gather(1, token_ids[:, None])[:, 0])


def _has_filter(batch: SamplingBatch, vocab_size: int) -> npt.NDArray[np.bool_]:
    has_top_k = (batch.top_k > 0) & (batch.top_k < vocab_size)
    return has_top_k | (batch.top_p < 1.0) | (batch.min_p > 0.0)


def _sample_random(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    device, vocab_size = logits.device, logits.shape[1]
    seeds = torch.from_numpy(batch.seeds).to(device)
    positions = torch.from_numpy(batch.positions).to(device)
    scaled = logits / torch.from_numpy(batch.divisors()).to(device).unsqueeze(1)
    if not _has_filter(batch, vocab_size).any():
        noise = gumbel_noise(seeds, positions, vocab_size=vocab_size)
        return noise.add_(scaled).argmax(-1)
    candidates = find_candidates(scaled, build_filters(batch, vocab_size, device))
    noise = gumbel_noise_at(seeds, positions, vocab_ids=candidates.vocab_ids)
    perturbed = noise.add_(candidates.logits)
    is_best = perturbed == perturbed.amax(1, keepdim=True)
    # Candidates are in order of their logits, so the lowest id among equals has to be looked for.
    # With NaN logits nothing equals the best: any valid id will do, the caller sees the NaN.
    lowest = candidates.vocab_ids.masked_fill(~is_best, vocab_size).amin(1)
    return lowest.clamp_(max=vocab_size - 1)


def build_filters(batch: SamplingBatch, vocab_size: int, device: torch.device) -> Filters:
    """Return what the rows of a batch are filtered by, on the device of their logits."""
    is_limited = (batch.top_k > 0) & (batch.top_k < vocab_size)

    def column(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(device).unsqueeze(1)

    return Filters(
        top_k=column(np.where(is_limited, batch.top_k, vocab_size)),
        top_p=column(batch.top_p),
        log_min_p=column(batch.log_min_p()),
        largest_top_k=int(batch.top_k[is_limited].max(initial=0)),
        has_top_p=bool((batch.top_p < 1.0).any()),
    )
