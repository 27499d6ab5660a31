"""Log-probabilities of chosen tokens and of the most likely ones, from the model's own logits.

All values are those of a row alone, to the bit: sums are of integers, and ties among the most
likely tokens go to the lowest id.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from pdserve_common.types.engine import LogprobsLists
from pdserve_engine.sampling.logits_rows import Rows
from pdserve_kernels import select
from pdserve_kernels.exact_math import FIXED_POINT_ONE

# Logits looked at in one piece, which takes some 30 bytes for each. On the CPU it should stay in a
# core's cache; on other devices fewer and larger pieces are better.
MAX_LOGITS_AT_ONCE_ON_CPU = 1 << 18
MAX_LOGITS_AT_ONCE = 1 << 22
ID_BITS = 32
ID_MASK = (1 << ID_BITS) - 1
# All but the sign of a float's bits.
MAGNITUDE_MASK = 0x7FFFFFFF


class LogprobsTerms(NamedTuple):
    """What the log-probabilities of n positions are made of, on a device."""

    # [n, 1 + num_top] int64: the chosen token, then the top ones.
    token_ids: torch.Tensor
    # [n, 1 + num_top] float64: how far each token's logit is below the row's highest.
    relative: torch.Tensor
    # [n] int64: the sum of exp of all relative logits, in multiples of 1 / FIXED_POINT_ONE.
    totals: torch.Tensor
    # [n] int64: of the chosen tokens.
    ranks: torch.Tensor

    def to_lists(self) -> LogprobsLists:
        """Waits for the device."""
        # One by one on the host: vectors of logarithms may differ in their last bits by position.
        log_totals = [math.log(total / FIXED_POINT_ONE) for total in self.totals.tolist()]
        return LogprobsLists(
            logprob_token_ids=tuple(map(tuple, self.token_ids.tolist())),
            logprobs=tuple(
                tuple(value - log_total for value in values)
                for values, log_total in zip(self.relative.tolist(), log_totals, strict=True)
            ),
            sampled_token_ranks=tuple(self.ranks.tolist()),
        )


class RowLogprobs(NamedTuple):
    """The log-probabilities of some rows of logits, on their way."""

    # [n]: the rows' indexes, and how many of the top tokens each asks for.
    indexes: Rows
    num_top: Rows
    # The terms of the rows in their order, all with as many tokens as some row asks for.
    terms: tuple[LogprobsTerms, ...]

    def by_index(self) -> dict[int, LogprobsLists]:
        """Return one position of each row. Waits for the device."""
        lists = LogprobsLists.join(terms.to_lists() for terms in self.terms)
        asked = zip(self.indexes.tolist(), self.num_top.tolist(), strict=True)
        return {
            index: narrow(lists[i : i + 1], num_top) for i, (index, num_top) in enumerate(asked)
        }


def compute_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> LogprobsLists:
    """Return log_softmax of logits [n, vocab_size] for the chosen [n] int64 and the top tokens.

    There are n positions of 1 + num_top entries each. A rank is 1 + the number of tokens that are
    more likely. All is computed in fp32. Logprobs of a row with NaN are NaN. Waits for the device.
    """
    pieces = launch_logprobs(logits, chosen, num_top)
    return LogprobsLists.join(terms.to_lists() for terms in pieces)


def launch_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, num_top: int
) -> Iterator[LogprobsTerms]:
    """Yield what `compute_logprobs` returns of logits [n, vocab_size], of any float dtype, and
    chosen tokens, int64 [n], piece by piece, one after the other; enqueues only.
    """
    is_cpu = logits.device.type == "cpu"
    max_logits = MAX_LOGITS_AT_ONCE_ON_CPU if is_cpu else MAX_LOGITS_AT_ONCE
    step = max(1, max_logits // logits.shape[1])
    for start in range(0, len(logits), step):
        piece, ids = logits[start : start + step], chosen[start : start + step]
        yield _compute(piece.float(), ids, num_top)


def narrow(lists: LogprobsLists, num_top: int) -> LogprobsLists:
    """Return the chosen tokens and only the num_top most likely ones of each position."""
    return LogprobsLists(
        logprob_token_ids=tuple(ids[: 1 + num_top] for ids in lists.logprob_token_ids),
        logprobs=tuple(values[: 1 + num_top] for values in lists.logprobs),
        sampled_token_ranks=lists.sampled_token_ranks,
    )


def _compute(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> LogprobsTerms:
    terms = select(logits.device).logprob_terms(logits, chosen)
    token_ids = torch.cat((chosen[:, None], _top_ids(logits, num_top)), dim=1)
    relative = logits.gather(1, token_ids).double() - terms.highest[:, None]
    return LogprobsTerms(token_ids, relative, terms.totals, terms.ranks)


def _top_ids(logits: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return the ids [n, num_top] of the largest logits, largest first, ties by the lowest id."""
    num_top = min(num_top, logits.shape[1])
    ids = torch.arange(logits.shape[1], device=logits.device)
    bits = logits.contiguous().view(torch.int32)
    # As integers, the bits of negative floats are in descending order: turn them round.
    order = bits ^ ((bits >> 31) & MAGNITUDE_MASK)
    keys = (order.long() << ID_BITS) - ids
    return keys.topk(num_top, dim=1).values.neg_() & ID_MASK
