"""Runs the model on what the scheduler chose: builds a step's tensors, computes, samples."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pdserve_engine.core.sched_output import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ModelRunnerOutput,
    SchedulerOutput,
)
from pdserve_engine.input_batch import InputBatch, Rows
from pdserve_engine.kv_cache import KVCache
from pdserve_engine.models.llama import LlamaModel
from pdserve_engine.sampling.sampler import sample
from pdserve_kernels.metadata import AttentionMetadata


class _Step(NamedTuple):
    """One forward pass: its requests, those with one token first, and their tensors."""

    request_ids: tuple[str, ...]
    rows: Rows
    token_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    # Indexes into request_ids of those that get a token, and the hidden row each gets it from.
    sampled: npt.NDArray[np.int64]
    logits_rows: torch.Tensor


class ModelRunner:
    """One model, one KV pool and the state of every request that was scheduled and has not ended.

    Not thread-safe: the engine thread owns it.
    """

    def __init__(self, model: LlamaModel, kv_cache: KVCache, *, max_num_seqs: int) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._device = model.device
        self._block_size = kv_cache.spec.block_size
        self._batch = InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=model.config.max_model_len,
            block_size=self._block_size,
        )

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens; sample for requests whose last known token was among them.

        Returns after the device has finished, so the KV of this step may be announced.
        """
        self._update_state(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        step = self._prepare(scheduler_output.num_scheduled_tokens)
        hidden_states = self.model.forward(
            step.token_ids, step.positions, self.kv_cache.tensor, step.metadata
        )
        if not len(step.sampled):
            self._synchronize()
            return ModelRunnerOutput(
                request_ids=step.request_ids, sampled_token_ids=((),) * len(step.request_ids)
            )
        return self._sample(step, hidden_states)

    def _update_state(self, scheduler_output: SchedulerOutput) -> None:
        batch = self._batch
        for request_id in scheduler_output.finished_req_ids:
            batch.remove(request_id)
        for request_id in scheduler_output.preempted_req_ids:
            batch.remove(request_id)
        for request in scheduler_output.scheduled_new_reqs:
            batch.add(request)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, block_ids, num_computed_tokens in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            row = batch.row_of(request_id)
            batch.num_computed_tokens[row] = num_computed_tokens
            if block_ids is not None:
                batch.append_blocks(row, block_ids)

    def _prepare(self, num_scheduled_tokens: dict[str, int]) -> _Step:
        batch = self._batch
        # Decodes, which are the requests with one token, go first; the sort is stable.
        scheduled = sorted(num_scheduled_tokens.items(), key=_is_chunk)
        request_ids = tuple(request_id for request_id, _ in scheduled)
        rows = np.array([batch.row_of(request_id) for request_id in request_ids], dtype=np.int64)
        query_lens = np.array([count for _, count in scheduled], dtype=np.int64)
        ends = query_lens.cumsum()
        num_computed = batch.num_computed_tokens[rows]
        seq_lens = num_computed + query_lens
        num_known = batch.num_tokens[rows]
        assert (seq_lens <= num_known).all(), "scheduled past the last known token"

        # Of each token: its request's row, and its position in that request.
        token_rows = rows.repeat(query_lens)
        positions = np.arange(ends[-1]) + (num_computed - ends + query_lens).repeat(query_lens)
        sampled = np.flatnonzero(seq_lens == num_known)
        return _Step(
            request_ids=request_ids,
            rows=rows,
            token_ids=self._to_device(batch.token_ids[token_rows, positions]),
            positions=self._to_device(positions),
            metadata=self._build_metadata(rows, query_lens, seq_lens, token_rows, positions),
            sampled=sampled,
            logits_rows=self._to_device(ends[sampled] - 1),
        )

    def _build_metadata(
        self, rows: Rows, query_lens: Rows, seq_lens: Rows, token_rows: Rows, positions: Rows
    ) -> AttentionMetadata:
        block_table, block_size = self._batch.block_table, self._block_size
        max_blocks = -(-int(seq_lens.max()) // block_size)
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        query_lens.cumsum(out=query_start_loc[1:])
        block_ids = block_table[token_rows, positions // block_size].astype(np.int64)
        return AttentionMetadata(
            query_start_loc=self._to_device(query_start_loc),
            seq_lens=self._to_device(seq_lens.astype(np.int32)),
            block_table=self._to_device(block_table[rows, :max_blocks]),
            slot_mapping=self._to_device(block_ids * block_size + positions % block_size),
            query_lens_host=tuple(query_lens.tolist()),
            seq_lens_host=tuple(seq_lens.tolist()),
            num_decodes=int((query_lens == 1).sum()),
        )

    def _sample(self, step: _Step, hidden_states: torch.Tensor) -> ModelRunnerOutput:
        if len(step.logits_rows) < len(hidden_states):
            hidden_states = hidden_states[step.logits_rows]
        logits = self.model.compute_logits(hidden_states)
        # One NaN makes a row's maximum NaN.
        has_nan = logits.amax(-1).isnan()
        num_nans = logits.isnan().sum(-1).tolist() if bool(has_nan.any()) else []
        rows = step.rows[step.sampled]
        tokens = sample(logits, self._batch.sampling_batch(rows)).cpu().numpy()
        self._batch.append_tokens(rows, tokens)

        sampled_token_ids: list[tuple[int, ...]] = [()] * len(step.request_ids)
        sampled = step.sampled.tolist()
        for index, token in zip(sampled, tokens.tolist(), strict=True):
            sampled_token_ids[index] = (token,)
        return ModelRunnerOutput(
            request_ids=step.request_ids,
            sampled_token_ids=tuple(sampled_token_ids),
            num_nans_in_logits={
                step.request_ids[i]: n for i, n in zip(sampled, num_nans, strict=False) if n
            },
        )

    def _to_device(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _is_chunk(scheduled: tuple[str, int]) -> bool:
    return scheduled[1] > 1
