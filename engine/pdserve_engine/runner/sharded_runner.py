"""The runners of a model over several ranks: of tensor parallelism rank 0's, and those that follow
it; of a pipeline those of the stages before the last.
"""

from collections.abc import Mapping

import numpy as np
import torch

from pdserve_engine.grammar.manager import TokenMasks
from pdserve_engine.models.llama import LlamaModel
from pdserve_engine.request.sched_output import ModelRunnerOutput, NewRequestData
from pdserve_engine.runner.model_runner import ModelRunner, StepPlan, sampled_of
from pdserve_engine.runner.sharded_model import ShardedModel, StepTokens, follow
from pdserve_engine.sampling.logits_rows import LogitsRows, Rows
from pdserve_engine.sampling.processors import LogitsProcessorFactory
from pdserve_engine.sampling.state import DUMMY_TOKEN_ID, SampledTokens, SamplingState


class LeaderRunner(ModelRunner):
    """Rank 0's."""

    model: ShardedModel

    def _compute(self, plan: StepPlan) -> ModelRunnerOutput:
        try:
            output = super()._compute(plan)
        except Exception:  # whatever a model raises: the others wait for word of it
            self.model.tell_failure()
            raise
        sampled = output.sampled_token_ids
        counts = np.array([len(tokens) for tokens in sampled], dtype=np.int64)
        token_ids = np.array([token for tokens in sampled for token in tokens], dtype=np.int64)
        self.model.tell_tokens(StepTokens(counts, token_ids))
        return output

    def _choose(
        self, hidden_states: torch.Tensor, rows: LogitsRows, masks: TokenMasks | None
    ) -> SampledTokens:
        sampling = self.input_batch.sampling
        if sampling.is_greedy(rows) or not sampling.is_unfiltered(rows):
            return super()._choose(hidden_states, rows, masks)
        mask = None if masks is None else self._to_device(masks.bitmask)
        batch = sampling.describe(rows)
        return sampled_of(self.model.sample(hidden_states, batch, mask=mask), rows, masks)


class FollowerRunner(ModelRunner):
    """Any other rank's."""

    model: LlamaModel

    def _make_sampling(
        self, max_num_seqs: int, logits_processors: Mapping[str, LogitsProcessorFactory]
    ) -> SamplingState:
        return _no_sampling(self.model, max_num_seqs)

    def _may_be_late(self) -> bool:
        return True  # rank 0 knows

    def _compute(self, plan: StepPlan) -> ModelRunnerOutput:
        self._forward(plan)
        assert self.model.group is not None
        counts, token_ids = follow(self.model, self.model.group, len(plan.request_ids))
        self.input_batch.append_tokens(
            self.input_batch.next_rows_behind(plan.rows, counts), token_ids
        )
        pieces = np.split(token_ids, counts.cumsum()[:-1])
        return ModelRunnerOutput(
            request_ids=plan.request_ids,
            sampled_token_ids=tuple(tuple(piece.tolist()) for piece in pieces),
        )


class StageRunner(ModelRunner):
    """That of a stage before the last: hands states on, and hears of tokens with later steps."""

    model: LlamaModel

    def _make_sampling(
        self, max_num_seqs: int, logits_processors: Mapping[str, LogitsProcessorFactory]
    ) -> SamplingState:
        return _no_sampling(self.model, max_num_seqs)

    def _compute(self, plan: StepPlan) -> ModelRunnerOutput:
        self.model.forward(self._make_inputs(plan))
        # What nobody looks at, but for the scheduler of a warm-up.
        sampled = np.isin(plan.rows, plan.logits_rows.batch_rows)
        return ModelRunnerOutput(
            request_ids=plan.request_ids,
            sampled_token_ids=tuple((DUMMY_TOKEN_ID,) if any_ else () for any_ in sampled),
        )


def _no_sampling(model: LlamaModel, max_num_seqs: int) -> SamplingState:
    return _NoSampling(
        max_num_seqs=max_num_seqs, vocab_size=model.config.vocab_size, device=model.device
    )


class _NoSampling(SamplingState):
    """Of a rank that does not sample."""

    def add(self, row: int, request: NewRequestData) -> None:
        pass

    def remove(self, row: int) -> None:
        pass

    def append_tokens(self, batch_rows: Rows, token_ids: Rows) -> None:
        pass
