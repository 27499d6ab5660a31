"""Repetition, presence and frequency penalties, as vLLM defines them."""

import torch

from pdserve_kernels.sampling_batch import PenalizedTokens


def penalize(logits: torch.Tensor, tokens: PenalizedTokens) -> None:
    """Penalise fp32 logits [n, vocab_size] in place, those of `tokens` only.

    A logit above 0 is divided by the token's repetition penalty, any other is multiplied; then its
    reduction is taken off. Raises ValueError for other dtypes.
    """
    check_penalized(logits)
    device = logits.device
    where = (
        torch.from_numpy(tokens.rows).to(device),
        torch.from_numpy(tokens.token_ids).to(device),
    )
    repetition = torch.from_numpy(tokens.repetition).to(device)
    values = logits[where]
    # Each operation is rounded by itself, so that the bits are the same wherever a row lies.
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[where] = values - torch.from_numpy(tokens.reductions).to(device)


def check_penalized(logits: torch.Tensor) -> None:
    """Raise ValueError unless these are logits to penalise, fp32 [n, vocab_size]."""
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)}; "
            "they must be torch.float32 [n, vocab_size]"
        )
