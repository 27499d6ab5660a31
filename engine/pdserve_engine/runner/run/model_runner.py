"""Runs the model on what the scheduler chose: builds a step's arrays, computes, samples."""

import dataclasses
import itertools
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from pdserve_engine.grammar.vocabulary import Encode
from pdserve_engine.kv.kv_cache import KVCache
from pdserve_engine.models.base import Model
from pdserve_engine.request.sched_output import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from pdserve_engine.runner.draft.drafter import Drafter, DraftModel
from pdserve_engine.runner.run.encoder_cache import EncoderCache
from pdserve_engine.runner.run.input_batch import InputBatch
from pdserve_engine.runner.run.step_arrays import StepArrays
from pdserve_engine.runner.run.stepper import Stepper
from pdserve_engine.runner.sample.sampler import Sampler

NO_DRAFTS: Mapping[str, tuple[int, ...]] = MappingProxyType({})


class ModelRunner:
    """One model, one KV pool and the state of every request that was scheduled and has not ended.

    What differs between devices and ranks are its parts (`make_runner.py`): the stepper runs the
    model, the sampler makes outputs. Not thread-safe: all calls come on the engine thread, but
    what `execute_model` returns may be waited for on another.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        *,
        batch: InputBatch,
        encoder_cache: EncoderCache,
        stepper: Stepper,
        sampler: Sampler,
    ) -> None:
        # None while it sleeps.
        self.model = model
        self.kv_cache = kv_cache
        self.input_batch = batch
        self.encoder_cache = encoder_cache
        self.stepper = stepper
        self.sampler = sampler
        self.drafter: Drafter | None = None

    def use_draft_model(self, draft: DraftModel, max_num_batched_tokens: int) -> Drafter:
        """Have a draft model, with a pool of its own, guess what comes behind each step, which has
        at most so many tokens. On the CPU.
        """
        num_blocks = self.kv_cache.num_blocks + self.input_batch.max_num_seqs
        pool = KVCache(draft.spec, num_blocks=num_blocks, device=self.model.device)
        self.drafter = Drafter(
            draft.model, pool, self.input_batch, max_num_batched_tokens=max_num_batched_tokens
        )
        return self.drafter

    def use_grammar_drafts(self, encode: Encode) -> None:
        """Tell behind each step what grammars force, cut into tokens."""
        self.input_batch.sampling.grammars.encode = encode

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> AsyncModelRunnerOutput:
        """Compute the scheduled tokens; sample for requests whose last known token was among them.

        When the output is there, the device has finished: the KV of this step may be announced.
        """
        self.stepper.begin()
        self._update_state(scheduler_output)
        scheduled = self._without_late(scheduler_output.num_scheduled_tokens)
        output = EMPTY_MODEL_RUNNER_OUTPUT
        if scheduled:
            drafts = scheduler_output.scheduled_spec_decode_tokens
            step = self._arrays(scheduled, drafts)
            launched = None if drafts else self.stepper.launch(self.model, step)
            if launched is not None:
                return launched
            forward = partial(self.stepper.forward, self.model)
            output = self._with_forced(self.sampler.compute(self.model, step, forward))
        if self.drafter is None:
            return output
        return self.drafter.draft(scheduler_output, output)

    def _with_forced(self, output: ModelRunnerOutput) -> ModelRunnerOutput:
        """Add what grammars force behind the step's tokens."""
        grammars = self.input_batch.sampling.grammars
        if grammars.encode is None or not grammars.num_rows:
            return output
        found = zip(output.request_ids, output.sampled_token_ids, strict=True)
        rows = {self.input_batch.row_of(request_id): request_id for request_id, ids in found if ids}
        forced = grammars.forced(list(rows))
        if not forced:
            return output
        by_id = {rows[row]: token_ids for row, token_ids in forced.items()}
        return dataclasses.replace(output, forced_token_ids=by_id)

    def reserve_adapters(self, count: int, max_rank: int) -> None:
        """See Stepper."""
        self.stepper.reserve_adapters(self.model, count, max_rank)

    def add_adapter(self, digest: str, adapter: Any) -> None:
        """See Stepper."""
        self.stepper.add_adapter(digest, adapter)

    def remove_adapter(self, digest: str) -> None:
        """See Stepper."""
        self.stepper.remove_adapter(digest)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """See Stepper."""
        self.stepper.warm_up(self.model)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """See Stepper."""
        self.stepper.capture_graphs(self.model)

    def release_graphs(self) -> None:
        """See Stepper."""
        self.stepper.release_graphs()

    def close(self) -> None:
        """End the threads that match grammars, and give the draft model's pool back."""
        self.input_batch.sampling.grammars.close()
        if self.drafter is not None:
            self.drafter.kv_cache.close()

    def _update_state(self, scheduler_output: SchedulerOutput) -> None:
        batch = self.input_batch
        for request_id in scheduler_output.finished_req_ids:
            batch.remove(request_id)
        for request_id in scheduler_output.preempted_req_ids:
            batch.remove(request_id)
        for request in scheduler_output.scheduled_new_reqs:
            batch.add(request)
        cached = scheduler_output.scheduled_cached_reqs
        batch.num_computed_tokens[batch.rows_of(cached.request_ids)] = cached.num_computed_tokens
        for request_id, block_ids in zip(cached.request_ids, cached.new_block_ids, strict=True):
            if block_ids is not None:
                batch.append_blocks(batch.row_of(request_id), block_ids)
        for request_id, token_ids in zip(cached.request_ids, cached.new_token_ids, strict=False):
            batch.set_uncomputed(batch.row_of(request_id), token_ids)
        self.encoder_cache.update(scheduler_output, self.model)

    def _without_late(self, num_scheduled_tokens: dict[str, int]) -> dict[str, int]:
        """Leave out requests that got no token in the step before, though this one was planned to
        compute it.
        """
        if not self.sampler.may_be_late:
            return num_scheduled_tokens
        batch = self.input_batch
        rows = batch.rows_of(list(num_scheduled_tokens))
        has_token = batch.num_computed_tokens[rows] < batch.num_tokens[rows]
        return dict(itertools.compress(num_scheduled_tokens.items(), has_token.tolist()))

    def _arrays(
        self,
        num_scheduled_tokens: dict[str, int],
        drafts: Mapping[str, tuple[int, ...]] = NO_DRAFTS,
    ) -> StepArrays:
        batch = self.input_batch
        request_ids = tuple(num_scheduled_tokens)
        query_lens = np.fromiter(num_scheduled_tokens.values(), np.int64, len(request_ids))
        is_chunk = query_lens > 1
        if is_chunk.any():
            # Decodes, which are the requests with one token, go first.
            order = is_chunk.argsort(kind="stable")
            query_lens = query_lens[order]
            request_ids = tuple(map(request_ids.__getitem__, order.tolist()))
        rows = batch.rows_of(request_ids)
        ends = query_lens.cumsum()
        num_computed = batch.num_computed_tokens[rows]
        seq_lens = num_computed + query_lens
        num_known = batch.num_tokens[rows]
        if drafts:
            num_known += [len(drafts.get(request_id, ())) for request_id in request_ids]
        assert (seq_lens <= num_known).all(), "scheduled past the last known token"
        sampled = np.flatnonzero(seq_lens == num_known)
        if drafts:
            ids = [drafts.get(request_ids[i], ()) for i in sampled.tolist()]
            logits_rows = batch.next_rows_with_drafts(rows[sampled], ids)
            last = zip(ends[sampled].tolist(), map(len, ids), strict=True)
            hidden_rows = np.concatenate([np.arange(end - 1 - k, end) for end, k in last])
        else:
            logits_rows, hidden_rows = batch.next_rows(rows[sampled]), ends[sampled] - 1
        first = num_computed - ends + query_lens
        return StepArrays(
            request_ids=request_ids,
            rows=rows,
            starts=ends - query_lens,
            query_lens=query_lens,
            seq_lens=seq_lens,
            token_rows=rows.repeat(query_lens),
            positions=np.arange(ends[-1]) + first.repeat(query_lens),
            logits_rows=logits_rows,
            hidden_rows=hidden_rows,
        )
