"""Masks: one bit for each token of a row of logits, set where the token may be chosen."""

import torch

from pdserve_kernels.sampling_batch import MASK_BITS, check_mask


def mask_logits(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return logits [n, vocab_size] with -inf for the tokens that are not allowed.

    mask is int32 [n, ceil(vocab_size / 32)] on their device: bit i of word w is token 32 w + i, and
    those past the vocabulary mean nothing. None allows all. Raises ValueError.
    """
    if mask is None:
        return logits
    check_mask(mask, logits.shape, logits.device)
    bits = torch.arange(MASK_BITS, dtype=torch.int32, device=mask.device)
    is_allowed = (mask.unsqueeze(-1) >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    return logits.masked_fill(~is_allowed, -torch.inf)
