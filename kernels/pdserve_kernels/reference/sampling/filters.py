"""min-p, top-k and top-p as vLLM defines them, as one threshold per request on the scaled logits.

A token is kept when its logit reaches the threshold, so tokens that tie with the last kept one are
kept too and no result depends on how a sort breaks ties.
"""

from typing import NamedTuple

import torch

from pdserve_kernels.exact_math import exp_to_fixed_point

FIRST_WIDTH = 256
WIDENING = 16


class Filters(NamedTuple):
    """What m requests ask for, on the device of their logits."""

    # [m, 1] int64; vocab size where there is no limit.
    top_k: torch.Tensor
    # [m, 1] float64; 1 where there is no limit.
    top_p: torch.Tensor
    # [m, 1] float32; -inf where there is no limit.
    log_min_p: torch.Tensor
    # Host facts, to avoid waiting for the device: the largest top_k below the vocab size, or 0.
    largest_top_k: int
    has_top_p: bool


class Candidates(NamedTuple):
    """The tokens a request may get: [m, k] logits, -inf where filtered out, and vocab ids."""

    logits: torch.Tensor
    vocab_ids: torch.Tensor


def find_candidates(scaled: torch.Tensor, filters: Filters) -> Candidates:
    """Filter temperature-scaled logits, fp32 [m, vocab]: min-p, then top-k, then top-p over what is
    left.

    Only as many of the largest logits are looked at as it takes to find every request's threshold.
    """
    vocab_size = scaled.shape[1]
    width = max(FIRST_WIDTH, 2 * filters.largest_top_k)
    while True:
        width = min(width, vocab_size)
        values, vocab_ids = scaled.topk(width)
        threshold = _find_threshold(scaled, values, filters)
        # All tokens at or above the threshold are in sight once a token below it is, or one that
        # is banned.
        is_complete = (values[:, -1:] < threshold) | values[:, -1:].isneginf()
        if width == vocab_size or bool(is_complete.all()):
            return Candidates(values.masked_fill(values < threshold, -torch.inf), vocab_ids)
        width *= WIDENING


def _find_threshold(scaled: torch.Tensor, values: torch.Tensor, filters: Filters) -> torch.Tensor:
    threshold = values[:, :1] + filters.log_min_p
    if filters.largest_top_k:
        last = (filters.top_k - 1).clamp(max=values.shape[1] - 1)
        is_limited = filters.top_k < scaled.shape[1]
        kth = values.gather(1, last).masked_fill(~is_limited, -torch.inf)
        threshold = torch.maximum(threshold, kth)
    if filters.has_top_p:
        threshold = torch.maximum(threshold, _nucleus(scaled, values, threshold, filters.top_p))
    return threshold


def _nucleus(
    scaled: torch.Tensor, values: torch.Tensor, threshold: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    highest = values[:, :1]
    total = _weigh(scaled, highest, threshold).sum(1, keepdim=True)
    weights = _weigh(values, highest, threshold)
    weight_before = weights.cumsum(1) - weights
    # A token is in the nucleus when those before it do not reach top_p.
    num_kept = (weight_before < top_p * total).sum(1, keepdim=True)
    smallest_kept = values.gather(1, (num_kept - 1).clamp(min=0))
    return smallest_kept.masked_fill(top_p >= 1.0, -torch.inf)


def _weigh(logits: torch.Tensor, highest: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    return exp_to_fixed_point(logits - highest).masked_fill_(logits < threshold, 0)
