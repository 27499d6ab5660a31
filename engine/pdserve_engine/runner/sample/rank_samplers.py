"""Sampling where several processes run a model: rank 0 of a tensor-parallel group samples, the
others follow it; a stage before the last has nothing to sample.
"""

from typing import Any

import numpy as np
import torch

from pdserve_engine.grammar.manager import TokenMasks
from pdserve_engine.models.base import ModelPart
from pdserve_engine.request.sched_output import ModelRunnerOutput, NewRequestData
from pdserve_engine.runner.run.input_batch import InputBatch
from pdserve_engine.runner.run.step_arrays import StepArrays
from pdserve_engine.runner.sample.sampler import Forward, TokenSampler, sampled_of
from pdserve_engine.runner.sample.sharded_head import ShardedHead, StepTokens, follow
from pdserve_engine.sampling.logits_rows import LogitsRows, Rows
from pdserve_engine.sampling.state import DUMMY_TOKEN_ID, SampledTokens, SamplingState


class LeaderSampler(TokenSampler):
    """Rank 0's: says to the others what it needs of them, and at the end which tokens there are."""

    def compute(self, model: Any, step: StepArrays, forward: Forward) -> ModelRunnerOutput:
        """See Sampler."""
        head = self._head(model)
        try:
            output = super().compute(model, step, forward)
        except Exception:  # whatever a model raises: the others wait for word of it
            head.tell_failure()
            raise
        sampled = output.sampled_token_ids
        counts = np.array([len(tokens) for tokens in sampled], dtype=np.int64)
        token_ids = np.array([token for tokens in sampled for token in tokens], dtype=np.int64)
        head.tell_tokens(StepTokens(counts, token_ids))
        return output

    def _head(self, model: ModelPart) -> ShardedHead:
        return ShardedHead(model)

    def choose(
        self, head: Any, hidden_states: torch.Tensor, rows: LogitsRows, masks: TokenMasks | None
    ) -> SampledTokens:
        """See TokenSampler."""
        sampling = self._batch.sampling
        if sampling.is_greedy(rows) or not sampling.is_unfiltered(rows):
            return super().choose(head, hidden_states, rows, masks)
        mask = None if masks is None else self._to_device(masks.bitmask)
        return sampled_of(
            head.sample(hidden_states, sampling.describe(rows), mask=mask), rows, masks
        )


class FollowerSampler:
    """Any other rank's."""

    # Rank 0 knows.
    may_be_late = True

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch

    def compute(self, model: ModelPart, step: StepArrays, forward: Forward) -> ModelRunnerOutput:
        """See Sampler."""
        forward(step)
        counts, token_ids = follow(model, len(step.request_ids))
        self._batch.append_tokens(self._batch.next_rows_behind(step.rows, counts), token_ids)
        pieces = np.split(token_ids, counts.cumsum()[:-1])
        return ModelRunnerOutput(
            request_ids=step.request_ids,
            sampled_token_ids=tuple(tuple(piece.tolist()) for piece in pieces),
        )


class StageSampler:
    """That of a stage before the last, which hears of tokens with later steps."""

    may_be_late = False

    def compute(self, model: ModelPart, step: StepArrays, forward: Forward) -> ModelRunnerOutput:
        """See Sampler."""
        forward(step)
        # What nobody looks at, but for the scheduler of a warm-up.
        sampled = np.isin(step.rows, step.logits_rows.batch_rows)
        return ModelRunnerOutput(
            request_ids=step.request_ids,
            sampled_token_ids=tuple((DUMMY_TOKEN_ID,) if any_ else () for any_ in sampled),
        )


class NoSampling(SamplingState):
    """Of a rank that does not sample."""

    def add(self, row: int, request: NewRequestData) -> None:
        """See SamplingState."""

    def remove(self, row: int) -> None:
        """See SamplingState."""

    def append_tokens(self, batch_rows: Rows, token_ids: Rows) -> None:
        """See SamplingState."""
