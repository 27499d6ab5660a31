"""The runner of a model that pools: a prompt's end brings a vector, and no token."""

from typing import Any

import torch

from pdserve_engine.kv.kv_cache import KVCache
from pdserve_engine.models.base import Model
from pdserve_engine.pooling.pooler import PoolingMetadata, finish, make_pooling
from pdserve_engine.request.sched_output import ModelRunnerOutput
from pdserve_engine.runner.model_runner import ModelRunner, StepPlan


class PoolingRunner(ModelRunner):
    """One whose requests all have pooling parameters."""

    def __init__(self, model: Model, kv_cache: KVCache, *, max_num_seqs: int, **more: Any) -> None:
        super().__init__(model, kv_cache, max_num_seqs=max_num_seqs, **more)
        assert model.config.pooler is not None
        self._pooler = model.config.pooler
        self._pooling = make_pooling(
            self._pooler,
            max_num_seqs=max_num_seqs,
            hidden_size=model.config.hidden_size,
            device=model.device,
        )

    def _compute(self, plan: StepPlan) -> ModelRunnerOutput:
        metadata = PoolingMetadata(
            plan.rows,
            plan.starts,
            plan.query_lens,
            plan.seq_lens,
            self.input_batch.num_prompt_tokens[plan.rows],
        )
        vectors = self._pooling.pool(self._forward(plan), metadata)
        if self._pooler.num_labels and len(vectors):
            vectors = self.model.compute_logits(vectors.to(self.model.config.dtype))
        outputs: dict[str, tuple[float, ...]] = {}
        num_nans: dict[str, int] = {}
        for index, vector in zip(metadata.complete.tolist(), vectors, strict=True):
            request_id = plan.request_ids[index]
            outputs[request_id], num_nans[request_id] = self._finish(vector, int(plan.rows[index]))
        self._synchronize()
        return ModelRunnerOutput(
            request_ids=plan.request_ids,
            sampled_token_ids=((),) * len(plan.request_ids),
            pooler_outputs=outputs,
            num_nans_in_logits={request_id: num for request_id, num in num_nans.items() if num},
        )

    def _finish(self, vector: torch.Tensor, row: int) -> tuple[tuple[float, ...], int]:
        """Return a row's answer, and how many of its numbers are NaN."""
        params = self.input_batch.pooling_params[row]
        assert params is not None, "the worker refuses requests without"
        answer = finish(vector, self._pooler, params)
        return tuple(answer.tolist()), int(answer.isnan().sum())
