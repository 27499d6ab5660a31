"""The head of a model over several ranks: rank 0 samples, the others compute their part of what it
asks for.

All ranks have the same states behind the last layer, and each the logits of its own part of the
vocabulary. Rank 0 says what it needs of them, as often as it likes, and at the end which tokens
there are: what depends on a request's parameters, or on time, is decided there alone.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from pdserve_engine.models.base import ModelPart
from pdserve_engine.models.shard import vocab_share
from pdserve_engine.sampling.logits_rows import Rows
from pdserve_kernels.groups import Group
from pdserve_kernels.sampling_batch import (
    MASK_BITS,
    Argmax,
    SamplingBatch,
    combine_argmax,
    num_mask_words,
)


class _Ask(IntEnum):
    """What rank 0 wants of the others."""

    # Logits of some rows of states.
    LOGITS = 1
    # The best token of some rows of states, or the best that a mask allows.
    ARGMAX = 2
    MASKED_ARGMAX = 3
    # The same, of logits with noise.
    SAMPLE = 4
    MASKED_SAMPLE = 5
    # The step is over, with so many tokens.
    TOKENS = 6
    # The step has failed.
    FAILED = 7


class StepTokens(NamedTuple):
    """What a step has brought."""

    # [num_requests] int64: how many tokens each request got.
    counts: Rows
    # [counts.sum()] int64
    token_ids: Rows


class ShardedHead:
    """The head of all ranks' vocabulary, as rank 0 sees it."""

    def __init__(self, part: ModelPart) -> None:
        """`part` is rank 0's."""
        self._part = part
        self._group = _group_of(part)
        self.config = part.config

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """See `models.base.Model`."""
        hidden_rows = self._ask(_Ask.LOGITS, hidden_rows)
        parts = _gather_logits(self._part, self._part.compute_logits(hidden_rows))
        return _join_logits(parts, self.config.vocab_size)

    def choose_greedily(
        self, hidden_rows: torch.Tensor, *, mask: torch.Tensor | None = None
    ) -> Argmax:
        """See `models.base.Model`."""
        hidden_rows = self._ask(_Ask.ARGMAX if mask is None else _Ask.MASKED_ARGMAX, hidden_rows)
        return self._best_of_all(hidden_rows, None, mask)

    def sample(
        self, hidden_rows: torch.Tensor, batch: SamplingBatch, *, mask: torch.Tensor | None = None
    ) -> Argmax:
        """Return the token that `sample` of the kernel sets chooses for each row, none of which has
        a filter.
        """
        hidden_rows = self._ask(_Ask.SAMPLE if mask is None else _Ask.MASKED_SAMPLE, hidden_rows)
        self._group.broadcast(_to_numbers(batch))
        return self._best_of_all(hidden_rows, batch, mask)

    def _best_of_all(
        self, hidden_rows: torch.Tensor, batch: SamplingBatch | None, mask: torch.Tensor | None
    ) -> Argmax:
        if mask is not None:
            self._group.broadcast(mask)
        best = _best_of_part(self._part, hidden_rows, batch, mask)
        return gather_best(self._part, best)

    def tell_tokens(self, tokens: StepTokens) -> None:
        """End the step on the other ranks."""
        self._say(_Ask.TOKENS, len(tokens.token_ids))
        for array in tokens:
            self._group.broadcast(torch.from_numpy(array))

    def tell_failure(self) -> None:
        """End the step on the other ranks: it has failed here."""
        self._say(_Ask.FAILED, 0)

    def _ask(self, ask: _Ask, hidden_rows: torch.Tensor) -> torch.Tensor:
        """Have the other ranks compute something of these rows, which are returned as they see
        them.
        """
        hidden_rows = hidden_rows.contiguous()
        self._say(ask, len(hidden_rows))
        self._group.broadcast(hidden_rows)
        return hidden_rows

    def _say(self, ask: _Ask, count: int) -> None:
        self._group.broadcast(torch.tensor([ask, count]))


def follow(part: ModelPart, num_requests: int) -> StepTokens:
    """On another rank than 0, behind `forward`: answer rank 0 until the step is over.

    Raises RuntimeError if it has failed there.
    """
    group = _group_of(part)
    while True:
        said = torch.empty(2, dtype=torch.int64)
        group.broadcast(said)
        ask, count = said.tolist()
        if ask == _Ask.TOKENS:
            return StepTokens(_receive(group, num_requests), _receive(group, count))
        if ask == _Ask.FAILED:
            raise RuntimeError("the step has failed on rank 0")
        config = part.config
        rows = torch.empty(count, config.hidden_size, dtype=config.dtype, device=part.device)
        group.broadcast(rows)
        if ask == _Ask.LOGITS:
            _gather_logits(part, part.compute_logits(rows))
            continue
        batch = mask = None
        if ask in (_Ask.SAMPLE, _Ask.MASKED_SAMPLE):
            numbers = torch.empty(3, count, dtype=torch.int64)
            group.broadcast(numbers)
            batch = _from_numbers(numbers)
        if ask in (_Ask.MASKED_ARGMAX, _Ask.MASKED_SAMPLE):
            num_words = num_mask_words(config.vocab_size)
            mask = torch.empty(count, num_words, dtype=torch.int32, device=part.device)
            group.broadcast(mask)
        gather_best(part, _best_of_part(part, rows, batch, mask))


def gather_logits(part: ModelPart, logits: torch.Tensor) -> torch.Tensor:
    """Return all logits [n, vocab_size], given each rank's own [n, k], in their dtype."""
    return _join_logits(_gather_logits(part, logits), part.config.vocab_size)


def gather_best(part: ModelPart, best: Argmax) -> Argmax:
    """Return the best token of the vocabulary, given that of each rank's part of it, numbered
    within the part.
    """
    group = _group_of(part)
    # In one message: the bits of a value as a number.
    bits = best.values.view(torch.int32).long()
    gathered = group.gather(torch.stack((best.token_ids, best.num_nans, bits)))
    parts = [Argmax(ids, nans, bits.int().view(torch.float32)) for ids, nans, bits in gathered]
    share = vocab_share(part.config.vocab_size, group.size)
    return combine_argmax(parts, [rank * share for rank in range(len(parts))])


def _gather_logits(part: ModelPart, logits: torch.Tensor) -> torch.Tensor:
    """Return all ranks' logits [size, n, vocab_share]; the last rank's end in zeros."""
    group = _group_of(part)
    missing = vocab_share(part.config.vocab_size, group.size) - logits.shape[1]
    return group.gather(F.pad(logits, (0, missing)).contiguous())


def _group_of(part: ModelPart) -> Group:
    assert part.group is not None
    return part.group


def _join_logits(parts: torch.Tensor, vocab_size: int) -> torch.Tensor:
    logits = parts.transpose(0, 1).reshape(parts.shape[1], -1)
    return logits[:, :vocab_size].contiguous()


def _best_of_part(
    part: ModelPart,
    hidden_rows: torch.Tensor,
    batch: SamplingBatch | None,
    mask: torch.Tensor | None,
) -> Argmax:
    """Return the best token of this rank's part of the vocabulary, numbered within it; of a batch
    the one that it would choose.
    """
    if mask is not None:
        first, end = part.vocabulary.start, part.vocabulary.stop
        mask = mask[:, first // MASK_BITS : num_mask_words(end)].contiguous()
    if batch is None:
        return part.choose_greedily(hidden_rows, mask=mask)
    return part.sample_part(hidden_rows, batch, mask=mask)


def _to_numbers(batch: SamplingBatch) -> torch.Tensor:
    """Return what a batch without filters says, [3, n] int64; of temperatures the bits."""
    temperature = batch.temperature.astype(np.float32).view(np.int32)
    return torch.from_numpy(np.stack((temperature, batch.seeds, batch.positions)).astype(np.int64))


def _from_numbers(numbers: torch.Tensor) -> SamplingBatch:
    temperature, seeds, positions = numbers.numpy()
    count = len(seeds)
    return SamplingBatch(
        temperature=temperature.astype(np.int32).view(np.float32),
        top_k=np.zeros(count, dtype=np.int64),
        top_p=np.ones(count),
        min_p=np.zeros(count, dtype=np.float32),
        seeds=seeds,
        positions=positions,
    )


def _receive(group: Group, count: int) -> Rows:
    numbers = torch.empty(count, dtype=torch.int64)
    group.broadcast(numbers)
    return np.asarray(numbers)
