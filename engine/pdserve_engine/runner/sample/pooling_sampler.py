"""What a model that pools makes of hidden states: a prompt's end brings a vector, and no token."""

from typing import Any

import torch

from pdserve_engine.models.config import ModelConfig
from pdserve_engine.pooling.pooler import PoolingMetadata, finish, make_pooling
from pdserve_engine.request.sched_output import ModelRunnerOutput
from pdserve_engine.runner.run.input_batch import InputBatch
from pdserve_engine.runner.run.step_arrays import StepArrays
from pdserve_engine.runner.sample.sampler import Forward, synchronize


class PoolingSampler:
    """Of requests that all have pooling parameters."""

    may_be_late = False

    def __init__(self, config: ModelConfig, batch: InputBatch, device: torch.device) -> None:
        assert config.pooler is not None
        self._config = config
        self._pooler = config.pooler
        self._batch = batch
        self._device = device
        self._pooling = make_pooling(
            config.pooler,
            max_num_seqs=batch.max_num_seqs,
            hidden_size=config.hidden_size,
            device=device,
        )

    def compute(self, model: Any, step: StepArrays, forward: Forward) -> ModelRunnerOutput:
        """See Sampler."""
        metadata = PoolingMetadata(
            step.rows,
            step.starts,
            step.query_lens,
            step.seq_lens,
            self._batch.num_prompt_tokens[step.rows],
        )
        vectors = self._pooling.pool(forward(step), metadata)
        if self._pooler.num_labels and len(vectors):
            vectors = model.compute_logits(vectors.to(self._config.dtype))
        outputs: dict[str, tuple[float, ...]] = {}
        num_nans: dict[str, int] = {}
        for index, vector in zip(metadata.complete.tolist(), vectors, strict=True):
            request_id = step.request_ids[index]
            outputs[request_id], num_nans[request_id] = self._finish(vector, int(step.rows[index]))
        synchronize(self._device)
        return ModelRunnerOutput(
            request_ids=step.request_ids,
            sampled_token_ids=((),) * len(step.request_ids),
            pooler_outputs=outputs,
            num_nans_in_logits={request_id: num for request_id, num in num_nans.items() if num},
        )

    def _finish(self, vector: torch.Tensor, row: int) -> tuple[tuple[float, ...], int]:
        """Return a row's answer, and how many of its numbers are NaN."""
        answer = finish(vector, self._pooler, self._batch.pooling_params[row])
        return tuple(answer.tolist()), int(answer.isnan().sum())
