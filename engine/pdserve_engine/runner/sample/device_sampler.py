"""Sampling on the device, without the host seeing a token: what a CUDA graph records.

All ranks of a group know what requests ask for, and compute a step that is launched ahead to its
end, the same on each: they exchange the best token of each part of the vocabulary, or for rows with
filters all logits. In a step that looks back rank 0 leads, as on the CPU.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from pdserve_engine.models.base import Model, ModelPart
from pdserve_engine.models.config import PoolerConfig
from pdserve_engine.runner.run.input_batch import InputBatch
from pdserve_engine.runner.sample.sharded_head import gather_best, gather_logits
from pdserve_engine.sampling.logits_rows import LogitsRows, Rows
from pdserve_kernels.sampling_batch import num_mask_words
from pdserve_kernels.triton.sampling.device_batch import DeviceSamplingBatch
from pdserve_kernels.triton.sampling.sample import sample_part_staged, sample_staged


class Drawn(NamedTuple):
    """What was drawn from n rows of logits, on the device."""

    # int64 [2, n]: the tokens, and the NaN in each row.
    results: torch.Tensor
    # [n, vocab_size]; of several ranks perhaps this one's part.
    logits: torch.Tensor


class DeviceSampler(Protocol):
    """Chooses tokens on the device, for steps that need nothing of the host."""

    @property
    def can_draw(self) -> bool:
        """Is there a step without the host at all?"""

    def looks_back(self, batch_rows: Rows) -> bool:
        """Must the step of the rows, int64 [n], sample on the host, or score a prompt, which waits
        for the device?
        """

    def warm_up(self, model: Any, hidden_rows: torch.Tensor) -> None:
        """Launch all that may be launched to sample, given hidden rows [n, hidden_size] in the
        model's own dtype.
        """

    def sample(
        self, model: Any, hidden_rows: torch.Tensor, batch: DeviceSamplingBatch, is_filtered: bool
    ) -> Drawn:
        """Choose tokens of hidden rows [n, hidden_size] in the model's dtype; enqueues only."""


class WholeSampler:
    """Of a model that one rank has."""

    can_draw = True

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch

    def looks_back(self, batch_rows: Rows) -> bool:
        """See DeviceSampler."""
        batch = self._batch
        return batch.sampling.looks_back(batch_rows) or batch.scores_prompts(batch_rows)

    def warm_up(self, model: Model, hidden_rows: torch.Tensor) -> None:
        """See DeviceSampler."""
        self._batch.sampling.warm_up(model.compute_logits(hidden_rows)[:1])

    def sample(
        self, model: Model, hidden_rows: torch.Tensor, batch: DeviceSamplingBatch, is_filtered: bool
    ) -> Drawn:
        """See DeviceSampler."""
        logits = model.compute_logits(hidden_rows)
        return Drawn(sample_staged(logits, batch, is_filtered=is_filtered), logits)


class PartSampler:
    """Of a rank's part of the vocabulary, the same on each rank."""

    can_draw = True

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch
        self._whole = WholeSampler(batch)

    def looks_back(self, batch_rows: Rows) -> bool:
        """See DeviceSampler. Only rank 0 has use for all logits."""
        has_logprobs = self._batch.sampling.asks_for_logprobs(batch_rows)
        return has_logprobs or self._whole.looks_back(batch_rows)

    def warm_up(self, model: ModelPart, hidden_rows: torch.Tensor) -> None:
        """See DeviceSampler."""
        sampling = self._batch.sampling
        logits = model.compute_logits(hidden_rows)
        # All ranks' together.
        sampling.warm_up(logits.new_zeros(1, model.config.vocab_size))
        zero = np.zeros(1, dtype=np.int64)
        batch = sampling.describe(LogitsRows(zero, zero))
        num_words = num_mask_words(logits.shape[1])
        mask = torch.zeros(1, num_words, dtype=torch.int32, device=logits.device)
        for each in (None, mask):
            model.choose_greedily(hidden_rows[:1], mask=each)
            model.sample_part(hidden_rows[:1], batch, mask=each)

    def sample(
        self,
        model: ModelPart,
        hidden_rows: torch.Tensor,
        batch: DeviceSamplingBatch,
        is_filtered: bool,
    ) -> Drawn:
        """See DeviceSampler."""
        logits = model.compute_logits(hidden_rows)
        if is_filtered:
            logits = gather_logits(model, logits)
            return Drawn(sample_staged(logits, batch), logits)
        drawn = sample_part_staged(logits, batch, first_id=model.vocabulary.start)
        best = gather_best(model, drawn)
        return Drawn(torch.stack((best.token_ids, best.num_nans)), logits)


class NoDraws:
    """Of a model that pools: each step waits for its vectors, and for the steps before it."""

    can_draw = False

    def __init__(self, pooler: PoolerConfig) -> None:
        self._has_labels = pooler.num_labels > 0

    def looks_back(self, batch_rows: Rows) -> bool:
        """See DeviceSampler."""
        return True

    def warm_up(self, model: Model, hidden_rows: torch.Tensor) -> None:
        """See DeviceSampler."""
        if self._has_labels:
            model.compute_logits(hidden_rows)

    def sample(
        self, model: Model, hidden_rows: torch.Tensor, batch: DeviceSamplingBatch, is_filtered: bool
    ) -> Drawn:
        """See DeviceSampler."""
        raise AssertionError("there are no tokens to draw")
