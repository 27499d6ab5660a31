"""Log-probabilities of chosen tokens and of the most likely ones, from the model's own logits.

All values are those of a row alone, to the bit: sums are of integers, and ties among the most
likely tokens go to the lowest id.
"""

import math

import torch

from pdserve_common.engine_types import LogprobsLists
from pdserve_kernels.exact_math import FIXED_POINT_ONE, exp_to_fixed_point

# Logits looked at in one piece, which takes some 30 bytes for each. On the CPU it should stay in a
# core's cache; on other devices fewer and larger pieces are better.
MAX_LOGITS_AT_ONCE_ON_CPU = 1 << 18
MAX_LOGITS_AT_ONCE = 1 << 22
ID_BITS = 32
ID_MASK = (1 << ID_BITS) - 1
# All but the sign of a float's bits.
MAGNITUDE_MASK = 0x7FFFFFFF


def compute_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> LogprobsLists:
    """Return log_softmax of logits [n, vocab_size] for the chosen [n] int64 and the top tokens.

    There are n positions of 1 + num_top entries each. A rank is 1 + the number of tokens that are
    more likely. All is computed in fp32. Logprobs of a row with NaN are NaN. Waits for the device.
    """
    is_cpu = logits.device.type == "cpu"
    max_logits = MAX_LOGITS_AT_ONCE_ON_CPU if is_cpu else MAX_LOGITS_AT_ONCE
    step = max(1, max_logits // logits.shape[1])
    pieces = (
        _compute(
            logits[start : start + step].float(),
            chosen[start : start + step].unsqueeze(1),
            num_top,
        )
        for start in range(0, len(logits), step)
    )
    return LogprobsLists.join(pieces)


def narrow(lists: LogprobsLists, num_top: int) -> LogprobsLists:
    """Return the chosen tokens and only the num_top most likely ones of each position."""
    return LogprobsLists(
        logprob_token_ids=tuple(ids[: 1 + num_top] for ids in lists.logprob_token_ids),
        logprobs=tuple(values[: 1 + num_top] for values in lists.logprobs),
        sampled_token_ranks=lists.sampled_token_ranks,
    )


def _compute(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> LogprobsLists:
    highest = logits.amax(1, keepdim=True)
    totals = exp_to_fixed_point(logits - highest).sum(1).clamp_(min=1)
    ranks = 1 + (logits > logits.gather(1, chosen)).sum(1)
    token_ids = torch.cat((chosen, _top_ids(logits, num_top)), dim=1)
    relative = (logits.gather(1, token_ids).double() - highest).tolist()
    # One by one on the host: vectors of logarithms may differ in their last bits by position.
    log_totals = [math.log(total / FIXED_POINT_ONE) for total in totals.tolist()]
    return LogprobsLists(
        logprob_token_ids=tuple(map(tuple, token_ids.tolist())),
        logprobs=tuple(
            tuple(value - log_total for value in values)
            for values, log_total in zip(relative, log_totals, strict=True)
        ),
        sampled_token_ranks=tuple(ranks.tolist()),
    )


def _top_ids(logits: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return the ids [n, num_top] of the largest logits, largest first, ties by the lowest id."""
    num_top = min(num_top, logits.shape[1])
    ids = torch.arange(logits.shape[1], device=logits.device)
    bits = logits.contiguous().view(torch.int32)
    # As integers, the bits of negative floats are in descending order: turn them round.
    order = bits ^ ((bits >> 31) & MAGNITUDE_MASK)
    keys = (order.long() << ID_BITS) - ids
    return keys.topk(num_top, dim=1).values.neg_() & ID_MASK
