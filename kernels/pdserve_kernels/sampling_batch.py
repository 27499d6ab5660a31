"""What the sampling kernels are told and return."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

# Smaller ones are as good as greedy, and could overflow the scaled logits.
MIN_TEMPERATURE = 1e-5
# Tokens of a word of a mask.
MASK_BITS = 32


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

    def divisors(self) -> npt.NDArray[np.float32]:
        """Return what a random row's logits are divided by, fp32 [n]."""
        divisors: npt.NDArray[np.float32] = np.maximum(
            self.temperature, np.float32(MIN_TEMPERATURE)
        )
        return divisors

    def log_min_p(self) -> npt.NDArray[np.float32]:
        """Return how far below its row's highest a scaled logit may lie, fp32 [n]; -inf is no
        limit.
        """
        with np.errstate(divide="ignore"):
            return np.log(self.min_p.astype(np.float64)).astype(np.float32)

    def select(self, rows: npt.NDArray[np.int64]) -> "SamplingBatch":
        """Return what these rows, int64 [m], ask for."""
        return SamplingBatch(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seeds=self.seeds[rows],
            positions=self.positions[rows],
        )


class PenalizedTokens(NamedTuple):
    """m tokens of some rows of logits, none of them twice in a row, and what each is penalised by.
    All arrays are [m], on the host.
    """

    rows: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    repetition: npt.NDArray[np.float32]
    # What presence and frequency take off.
    reductions: npt.NDArray[np.float32]


class LogprobTerms(NamedTuple):
    """A token's logprob is its logit - highest - log(total / FIXED_POINT_ONE).

    All are on the logits' device. Of a row with NaN the highest is NaN, the rest may be anything.
    """

    # [n] fp32
    highest: torch.Tensor
    # [n] int64: the sum of exp(logit - highest) in fixed point, at least 1.
    totals: torch.Tensor
    # [n] int64: 1 + the number of tokens with a higher logit than the chosen one.
    ranks: torch.Tensor


class Argmax(NamedTuple):
    """The best token of each of n rows, the lowest id among equals, and the row's health."""

    # [n] int64 on the logits' device; any valid id for a row with NaN.
    token_ids: torch.Tensor
    # [n] int64 on the logits' device: of the tokens that are allowed.
    num_nans: torch.Tensor
    # [n] fp32 on the logits' device: the token's logit, -inf where none is allowed; any for a row
    # with NaN.
    values: torch.Tensor


class Sampled(NamedTuple):
    """The chosen token of each of n rows, and what it was chosen by."""

    # [n] int64 on the logits' device.
    token_ids: torch.Tensor
    # [n] fp32 on the logits' device: the highest of what is compared, the logit of a greedy row,
    # else the scaled logit with its noise.
    values: torch.Tensor


def combine_argmax(parts: Sequence[Argmax], first_ids: Sequence[int]) -> Argmax:
    """Return the argmax of rows of which each part has seen the logits from its first id on.

    Parts are in the order of their ids, so that the lowest id wins among equals. A row that has NaN
    in any part gets any valid id, as it does from one argmax.
    """
    ids = torch.stack(
        [part.token_ids + first for part, first in zip(parts, first_ids, strict=True)]
    )
    values, best = torch.stack([part.values for part in parts]).max(0)
    return Argmax(
        token_ids=ids.gather(0, best[None])[0],
        num_nans=torch.stack([part.num_nans for part in parts]).sum(0),
        values=values,
    )


def num_mask_words(vocab_size: int) -> int:
    """Return how many int32 a mask has for each row."""
    return -(-vocab_size // MASK_BITS)


def check_mask(mask: torch.Tensor, shape: Sequence[int], device: torch.device) -> None:
    """Raise ValueError unless the mask is int32 [n, ceil(vocab_size / 32)] on this device, of
    logits of this shape.
    """
    expected = (shape[0], num_mask_words(shape[1]))
    if mask.dtype != torch.int32 or mask.shape != expected or mask.device != device:
        raise ValueError(
            f"the mask is {mask.dtype} {list(mask.shape)} on {mask.device}; logits {list(shape)} "
            f"take torch.int32 {list(expected)} on {device}"
        )
