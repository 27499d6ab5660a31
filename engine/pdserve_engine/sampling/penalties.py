"""Presence, frequency and repetition penalties, as vLLM defines them."""

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.sampling.logits_rows import LogitsRows, Rows
from pdserve_kernels import KernelSet
from pdserve_kernels.sampling_batch import PenalizedTokens


class _SeenTokens:
    """The different tokens of one request, and how often each is among its output tokens."""

    __slots__ = ("_counts", "_places", "_strengths", "_token_ids")

    def __init__(
        self, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        self._strengths = params.presence_penalty, params.frequency_penalty
        self._places = {token_id: i for i, token_id in enumerate(dict.fromkeys(token_ids))}
        self._token_ids = np.array(tuple(self._places), dtype=np.int64)
        self._counts = np.zeros(len(self._places), dtype=np.float32)
        for token_id in token_ids[num_prompt_tokens:]:
            self.count(token_id)

    def __len__(self) -> int:
        return len(self._places)

    def count(self, token_id: int) -> None:
        """Take in one output token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            self._token_ids = np.concatenate((self._token_ids, np.zeros_like(self._token_ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._token_ids[place] = token_id
        self._counts[place] += 1

    def followed_by(self, token_ids: Sequence[int]) -> "_SeenTokens":
        """Return what will have been seen when these output tokens have come as well."""
        later = copy.copy(self)
        later._places = self._places.copy()
        later._token_ids, later._counts = self._token_ids.copy(), self._counts.copy()
        for token_id in token_ids:
            later.count(token_id)
        return later

    @property
    def token_ids(self) -> Rows:
        return self._token_ids[: len(self)]

    @property
    def reductions(self) -> npt.NDArray[np.float32]:
        """Return what presence and frequency penalty take from each token's logit."""
        presence, frequency = map(np.float32, self._strengths)
        counts = self._counts[: len(self)]
        reductions: npt.NDArray[np.float32] = frequency * counts + presence * (counts > 0)
        return reductions


class Penalties:
    """The penalties of the requests that ask for them, one row per request.

    They change the logits of seen tokens only: a step costs what the requests have of different
    tokens, whatever the vocabulary. Tokens are counted when they come, not anew in each step.
    """

    def __init__(self, *, max_num_seqs: int, kernels: KernelSet) -> None:
        self._kernels = kernels
        self._is_asked = np.zeros(max_num_seqs, dtype=np.bool_)
        self._repetition = np.ones(max_num_seqs, dtype=np.float32)
        self._seen: dict[int, _SeenTokens] = {}

    def add(
        self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> None:
        """Take in a request with the tokens it has so far: its prompt's, then its output's."""
        if not self.are_asked_by(params):
            return
        self._is_asked[row] = True
        self._repetition[row] = params.repetition_penalty
        self._seen[row] = _SeenTokens(params, token_ids, num_prompt_tokens)

    def remove(self, row: int) -> None:
        self._is_asked[row] = False
        self._seen.pop(row, None)

    def count(self, rows: Rows, tokens: Rows) -> None:
        """Take in an output token, int64 [n], for each of `rows`, int64 [n]; a row may be there
        several times.
        """
        for index in self._asking(rows):
            self._seen[int(rows[index])].count(int(tokens[index]))

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> None:
        """Penalise fp32 logits [n, vocab_size] of n rows in place."""
        indexes = self._asking(rows.batch_rows)
        if not indexes:
            return
        seen = [self._seen_before(rows, index) for index in indexes]
        sizes = [len(tokens) for tokens in seen]
        tokens = PenalizedTokens(
            rows=np.repeat(indexes, sizes),
            token_ids=np.concatenate([tokens.token_ids for tokens in seen]),
            repetition=self._repetition[rows.batch_rows[indexes]].repeat(sizes),
            reductions=np.concatenate([tokens.reductions for tokens in seen]),
        )
        self._kernels.penalize(logits, tokens)

    @staticmethod
    def are_asked_by(params: SamplingParams) -> bool:
        strengths = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        return strengths != (0.0, 0.0, 1.0)

    def are_asked_for(self, rows: Rows) -> bool:
        """Does one of the rows, int64 [n], ask for penalties?"""
        return bool(self._is_asked[rows].any())

    def _seen_before(self, rows: LogitsRows, index: int) -> _SeenTokens:
        seen = self._seen[int(rows.batch_rows[index])]
        assumed = rows.assumed.get(index)
        return seen if assumed is None else seen.followed_by(assumed)

    def _asking(self, rows: Rows) -> list[int]:
        """Return the indexes of those rows that have penalties."""
        indexes: list[int] = np.flatnonzero(self._is_asked[rows]).tolist()
        return indexes
