"""Runs the model on what the scheduler chose: builds a step's tensors, computes, samples."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pdserve_common.engine_types import LogprobsLists
from pdserve_engine.grammar.manager import TokenMasks
from pdserve_engine.grammar.vocabulary import Encode
from pdserve_engine.kv.kv_cache import KVCache
from pdserve_engine.models.base import ForwardInputs, Model
from pdserve_engine.request.sched_output import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from pdserve_engine.runner.drafter import Drafter, DraftModel
from pdserve_engine.runner.encoder_cache import EncoderCache, StepEmbeds
from pdserve_engine.runner.input_batch import InputBatch
from pdserve_engine.sampling.logits_rows import LogitsRows, Rows
from pdserve_engine.sampling.logprobs import compute_logprobs
from pdserve_engine.sampling.processors import NO_PROCESSORS, LogitsProcessorFactory
from pdserve_engine.sampling.state import (
    NO_LOGPROBS,
    SampledTokens,
    SamplingState,
    errors_of_masks,
)
from pdserve_kernels.lora import LoraSegment
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.sampling_batch import Argmax

# Prompts that ask for logprobs have the logits of so many rows in memory at a time, and so many
# numbers (64 MiB).
MAX_PROMPT_LOGITS_ROWS = 256
MAX_PROMPT_LOGITS = 1 << 24
NO_DRAFTS: Mapping[str, tuple[int, ...]] = MappingProxyType({})


class StepPlan(NamedTuple):
    """One forward pass as arrays: its requests, those with one token first, and its tokens."""

    request_ids: tuple[str, ...]
    rows: Rows
    # Of each request: its first token in the step, how many follow, and how many there are then.
    starts: Rows
    query_lens: Rows
    seq_lens: Rows
    # Of each token: its request's row, and its position in that request.
    token_rows: Rows
    positions: Rows
    logits_rows: LogitsRows
    # [len(logits_rows)]: the hidden row that each is made from.
    hidden_rows: Rows


class ModelRunner:
    """One model, one KV pool and the state of every request that was scheduled and has not ended.

    Not thread-safe: the engine thread owns it.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        logits_processors: Mapping[str, LogitsProcessorFactory] = NO_PROCESSORS,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        # By digest, as the model's `pack_adapter` made them. They outlive the model in a sleep.
        self._adapters: dict[str, Any] = {}
        self.drafter: Drafter | None = None
        self.encoder_cache = EncoderCache()
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._device = model.device
        self._block_size = kv_cache.spec.block_size
        self.input_batch = InputBatch(
            self._make_sampling(max_num_seqs, logits_processors),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=self._block_size,
            num_groups=len(kv_cache.spec.groups),
        )

    def use_draft_model(self, draft: DraftModel, max_num_batched_tokens: int) -> Drafter:
        """Have a draft model, with a pool of its own, guess what comes behind each step, which has
        at most so many tokens. On the CPU.
        """
        num_blocks = self.kv_cache.num_blocks + self._max_num_seqs
        pool = KVCache(draft.spec, num_blocks=num_blocks, device=self._device)
        self.drafter = Drafter(
            draft.model, pool, self.input_batch, max_num_batched_tokens=max_num_batched_tokens
        )
        return self.drafter

    def use_grammar_drafts(self, encode: Encode) -> None:
        """Tell behind each step what grammars force, cut into tokens."""
        self.input_batch.sampling.grammars.encode = encode

    def _make_sampling(
        self, max_num_seqs: int, logits_processors: Mapping[str, LogitsProcessorFactory]
    ) -> SamplingState:
        return SamplingState(
            max_num_seqs=max_num_seqs,
            vocab_size=self.model.config.vocab_size,
            device=self._device,
            logits_processors=logits_processors,
        )

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> AsyncModelRunnerOutput:
        """Compute the scheduled tokens; sample for requests whose last known token was among them.

        When the output is there, the device has finished: the KV of this step may be announced.
        """
        self._update_state(scheduler_output)
        output = self._with_forced(self._execute(scheduler_output))
        if self.drafter is None:
            return output
        return self.drafter.draft(scheduler_output, output)

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        scheduled = self._without_late(scheduler_output.num_scheduled_tokens)
        if not scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        drafts = scheduler_output.scheduled_spec_decode_tokens
        return self._compute(self._plan(scheduled, drafts))

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

    def _compute(self, plan: StepPlan) -> ModelRunnerOutput:
        hidden_states = self._forward(plan)
        prompt_logprobs = self._prompt_logprobs(plan, hidden_states)
        if len(plan.logits_rows):
            return self._sample(plan, hidden_states, prompt_logprobs)
        return self._output_without_tokens(plan, prompt_logprobs)

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        """Return the hidden states [num_tokens, hidden_size] of a step."""
        return self.model.forward(self._make_inputs(plan))

    def reserve_adapters(self, count: int, max_rank: int) -> None:
        """Steps may have so many adapters, of ranks up to max_rank. Comes before `capture_graphs`.
        Nothing to do here.
        """

    def add_adapter(self, digest: str, adapter: Any) -> None:
        """Have an adapter, as the model's `pack_adapter` made it, for the steps that follow."""
        self._adapters[digest] = adapter

    def remove_adapter(self, digest: str) -> None:
        """Forget an adapter, if it is there; no step that follows has it."""
        self._adapters.pop(digest, None)

    def warm_up(self) -> None:
        """Launch each kernel that `capture_graphs` does not, and requests may need: some devices
        compile it at its first launch. Nothing here.
        """

    def capture_graphs(self) -> None:
        """Record what a device can replay. Nothing here."""

    def release_graphs(self) -> None:
        """Forget what was recorded: memory that it reads is about to go. All steps are over."""

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
        if not self._may_be_late():
            return num_scheduled_tokens
        batch = self.input_batch
        rows = batch.rows_of(list(num_scheduled_tokens))
        has_token = batch.num_computed_tokens[rows] < batch.num_tokens[rows]
        return dict(itertools.compress(num_scheduled_tokens.items(), has_token.tolist()))

    def _may_be_late(self) -> bool:
        return self.input_batch.sampling.grammars.num_rows > 0

    def _plan(
        self,
        num_scheduled_tokens: dict[str, int],
        drafts: Mapping[str, tuple[int, ...]] = NO_DRAFTS,
    ) -> StepPlan:
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
        return StepPlan(
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

    def _make_inputs(self, plan: StepPlan) -> ForwardInputs:
        pictures = self._gather_embeds(plan)
        return ForwardInputs(
            token_ids=self._to_device(self.input_batch.token_ids[plan.token_rows, plan.positions]),
            positions=self._to_device(plan.positions),
            kv_cache=self.kv_cache.tensor,
            metadata=self._build_metadata(plan),
            lora=self._lora_segments(plan),
            mm_embeds=None if pictures is None else pictures.embeds,
            mm_rows=None if pictures is None else self._to_device(pictures.rows),
        )

    def _gather_embeds(self, plan: StepPlan) -> StepEmbeds | None:
        return self.encoder_cache.gather(
            self.input_batch, plan.rows, plan.starts, plan.query_lens, plan.seq_lens
        )

    def _lora_segments(self, plan: StepPlan) -> Sequence[LoraSegment]:
        """Return which tokens have which adapter; neighbours with the same one are one segment."""
        found: list[LoraSegment] = []
        if not self._adapters:
            return found
        for row, begin, length in zip(
            plan.rows.tolist(), plan.starts.tolist(), plan.query_lens.tolist(), strict=True
        ):
            digest = self.input_batch.adapters[row]
            if digest is None:
                continue
            adapter, end = self._adapters[digest], begin + length
            if found and found[-1].end == begin and found[-1].adapter is adapter:
                begin = found.pop().begin
            found.append(LoraSegment(begin, end, adapter))
        return found

    def _build_metadata(self, plan: StepPlan) -> tuple[AttentionMetadata, ...]:
        """Describe the step to each KV group: they differ in where their blocks are."""
        max_blocks = -(-int(plan.seq_lens.max()) // self._block_size)
        query_start_loc = np.zeros(len(plan.rows) + 1, dtype=np.int32)
        plan.query_lens.cumsum(out=query_start_loc[1:])
        describe = partial(
            AttentionMetadata,
            query_start_loc=self._to_device(query_start_loc),
            seq_lens=self._to_device(plan.seq_lens.astype(np.int32)),
            query_lens_host=tuple(plan.query_lens.tolist()),
            seq_lens_host=tuple(plan.seq_lens.tolist()),
            num_decodes=int((plan.query_lens == 1).sum()),
        )
        tables = self.input_batch.block_tables
        return tuple(
            describe(
                block_table=self._to_device(table[plan.rows, :max_blocks]),
                slot_mapping=self._to_device(slots),
            )
            for table, slots in zip(tables, self._slot_mappings(plan), strict=True)
        )

    def _slot_mappings(self, plan: StepPlan) -> Iterator[Rows]:
        """Yield where each token's KV goes, for each KV group."""
        blocks, offsets = np.divmod(plan.positions, self._block_size)
        for table in self.input_batch.block_tables:
            yield table[plan.token_rows, blocks].astype(np.int64) * self._block_size + offsets

    def _sample(
        self,
        plan: StepPlan,
        hidden_states: torch.Tensor,
        prompt_logprobs: dict[str, LogprobsLists],
    ) -> ModelRunnerOutput:
        hidden_rows, rows = self._to_device(plan.hidden_rows), plan.logits_rows
        masks = self.input_batch.sampling.take_masks(rows)
        if masks is not None and masks.late:
            on_time = np.setdiff1d(np.arange(len(rows)), masks.late)
            masks, rows = masks.select(on_time.tolist()), rows.select(on_time)
            hidden_rows = hidden_rows[self._to_device(on_time)]
        if not len(rows):
            return self._output_without_tokens(plan, prompt_logprobs)
        if len(hidden_rows) < len(hidden_states):
            hidden_states = hidden_states[hidden_rows]
        sampled = self._choose(hidden_states, rows, masks).accepted()
        self.input_batch.append_tokens(sampled.rows, sampled.token_ids)
        return by_request(plan, sampled, prompt_logprobs)

    def _output_without_tokens(
        self, plan: StepPlan, prompt_logprobs: dict[str, LogprobsLists]
    ) -> ModelRunnerOutput:
        self._synchronize()
        return ModelRunnerOutput(
            request_ids=plan.request_ids,
            sampled_token_ids=((),) * len(plan.request_ids),
            prompt_logprobs=prompt_logprobs,
        )

    def _choose(
        self, hidden_states: torch.Tensor, rows: LogitsRows, masks: TokenMasks | None
    ) -> SampledTokens:
        """Return a token for each of `rows`, whose hidden states are [n, hidden_size]."""
        batch = self.input_batch
        if batch.sampling.is_greedy(rows):
            mask = None if masks is None else self._to_device(masks.bitmask)
            return sampled_of(self.model.choose_greedily(hidden_states, mask=mask), rows, masks)
        logits = self.model.compute_logits(hidden_states)
        return batch.sampling.sample(logits, rows, batch.output_token_ids, masks)

    def _prompt_logprobs(
        self, plan: StepPlan, hidden_states: torch.Tensor
    ) -> dict[str, LogprobsLists]:
        """Score the prompt tokens that follow the computed ones, for the requests that ask."""
        logprobs: dict[str, LogprobsLists] = {}
        num_top = self.input_batch.sampling.num_prompt_logprobs[plan.rows]
        for index in np.flatnonzero(num_top != NO_LOGPROBS).tolist():
            targets = self.input_batch.prompt_targets(
                int(plan.rows[index]), int(plan.query_lens[index])
            )
            if len(targets):
                start = int(plan.starts[index])
                logprobs[plan.request_ids[index]] = self._score(
                    hidden_states[start : start + len(targets)], targets, int(num_top[index])
                )
        return logprobs

    def _score(self, hidden_states: torch.Tensor, targets: Rows, num_top: int) -> LogprobsLists:
        """Return the logprobs of `targets`; logits are in memory for some rows at a time only."""
        max_rows = MAX_PROMPT_LOGITS // self.model.config.vocab_size
        step = max(1, min(max_rows, MAX_PROMPT_LOGITS_ROWS))
        chosen = self._to_device(targets)
        pieces = (
            compute_logprobs(
                self.model.compute_logits(hidden_states[start : start + step]),
                chosen[start : start + step],
                num_top,
            )
            for start in range(0, len(targets), step)
        )
        return LogprobsLists.join(pieces)

    def _to_device(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def sampled_of(best: Argmax, rows: LogitsRows, masks: TokenMasks | None) -> SampledTokens:
    """Return the tokens of rows of which nothing else is asked. Waits for the device."""
    token_ids, num_nans = best.token_ids.cpu().numpy(), best.num_nans.cpu().numpy()
    return SampledTokens(rows, token_ids, {}, errors_of_masks(masks, token_ids), num_nans)


def by_request(
    plan: StepPlan, sampled: SampledTokens, prompt_logprobs: dict[str, LogprobsLists]
) -> ModelRunnerOutput:
    """Return what was sampled, for each request of the plan."""
    if np.array_equal(sampled.rows.batch_rows, plan.rows):  # one token each
        request_ids: Sequence[str] = plan.request_ids
        sampled_token_ids: tuple[tuple[int, ...], ...] = tuple(zip(sampled.token_ids.tolist()))
    else:
        names = dict(zip(plan.rows.tolist(), plan.request_ids, strict=True))
        request_ids = [names[row] for row in sampled.rows.batch_rows.tolist()]
        token_ids: dict[str, tuple[int, ...]] = dict.fromkeys(plan.request_ids, ())
        for request_id, token_id in zip(request_ids, sampled.token_ids.tolist(), strict=True):
            token_ids[request_id] += (token_id,)
        sampled_token_ids = tuple(token_ids.values())
    logprobs: dict[str, LogprobsLists] = {}
    for i, lists in sampled.logprobs.items():
        known = logprobs.get(request_ids[i])
        logprobs[request_ids[i]] = lists if known is None else known + lists
    return ModelRunnerOutput(
        request_ids=plan.request_ids,
        sampled_token_ids=sampled_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        errors={request_ids[i]: error for i, error in sampled.errors.items()},
        num_nans_in_logits={
            request_ids[i]: int(sampled.num_nans[i])
            for i in np.flatnonzero(sampled.num_nans).tolist()
        },
    )
