"""What log-probabilities of a row of logits are made of, besides the logits."""

import torch

from pdserve_kernels.exact_math import exp_to_fixed_point
from pdserve_kernels.sampling_batch import LogprobTerms


def logprob_terms(logits: torch.Tensor, chosen: torch.Tensor) -> LogprobTerms:
    """Return the terms of fp32 logits [n, vocab_size] and of the chosen tokens, [n] int64.

    Sums are of integers: a row's are the same in any batch, on any device. Raises ValueError.
    """
    check_chosen(logits, chosen)
    highest = logits.amax(1)
    totals = exp_to_fixed_point(logits - highest[:, None]).sum(1).clamp_(min=1)
    ranks = 1 + (logits > logits.gather(1, chosen[:, None])).sum(1)
    return LogprobTerms(highest, totals, ranks)


def check_chosen(logits: torch.Tensor, chosen: torch.Tensor) -> None:
    """Raise ValueError unless these are fp32 logits [n, vocab_size] and a token of each row, int64
    [n].
    """
    is_readable = logits.dim() == 2 and logits.shape[1] > 0 and logits.dtype == torch.float32
    if not is_readable or chosen.dtype != torch.int64 or chosen.shape != logits.shape[:1]:
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)}, chosen tokens {chosen.dtype} "
            f"{list(chosen.shape)}; they must be torch.float32 [n, vocab_size] and torch.int64 [n]"
        )
