"""The draft model in a rank: after each step it guesses what the model will say next.

It computes what it lacks of the batch's tokens, in one pass, then one token after the other of all
requests at once. It samples with the noise that the model will have at the same position: then two
models that think alike also choose alike (strict checking; Daliri et al., 2024, "Coupling without
Communication and Drafter-Invariant Speculative Decoding").
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from pdserve_engine.kv.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.models.base import ForwardInputs, Model
from pdserve_engine.request.sched_output import DraftPrefill, ModelRunnerOutput, SchedulerOutput
from pdserve_engine.runner.draft.draft_kv import BlockIds, DraftKV, Progress
from pdserve_engine.runner.run.input_batch import InputBatch
from pdserve_engine.sampling.logits_rows import LogitsRows, Rows
from pdserve_kernels.metadata import AttentionMetadata


class DraftModel(NamedTuple):
    """A loaded draft model, and the shape of its KV pool."""

    model: Model
    spec: KVCacheSpec


@dataclass(slots=True, kw_only=True)
class _Chunk:
    """Tokens start to end of a request, and how many drafts are wanted behind them."""

    progress: Progress
    token_ids: Rows
    block_ids: BlockIds
    end: int
    # The request of the batch that has this row.
    request_id: str | None = None
    row: int = -1
    num_drafts: int = 0
    drafts: list[int] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.progress.num_computed_tokens

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class Drafter:
    """A draft model on the CPU and its KV, beside the batch of the runner that it belongs to.

    Not thread-safe: the runner's thread owns it.
    """

    def __init__(
        self,
        model: Any,
        kv_cache: KVCache,
        batch: InputBatch,
        *,
        max_num_batched_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`kv_cache` has a block more for each row of the batch, behind those of the pool: drafts
        that are behind a request's last block are computed there, and not kept.
        """
        self.model = model
        self.kv_cache = kv_cache
        self._batch = batch
        self._clock = clock
        self._max_num_batched_tokens = max_num_batched_tokens
        self._block_size = kv_cache.spec.block_size
        self._num_blocks = kv_cache.num_blocks - batch.max_num_seqs
        self._kv = DraftKV(self._num_blocks, self._block_size)
        # By row: which of its requests it is about, and how far that is.
        self._rows: dict[int, tuple[int, Progress]] = {}

    def forget(self) -> None:
        """The pool's content is lost."""
        self._kv.forget()
        self._rows.clear()

    @torch.inference_mode()
    def draft(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput
    ) -> ModelRunnerOutput:
        """Compute what the step's budget leaves; return the step's output with drafts, at most
        num_draft_tokens of each request, and none of those that are not caught up.
        """
        started = self._clock()
        budget = self._max_num_batched_tokens - scheduler_output.total_num_scheduled_tokens
        chunks = [self._prefill(prefill) for prefill in scheduler_output.draft_prefills]
        chunks = [chunk for chunk in chunks if chunk.num_tokens > 0]
        budget -= sum(chunk.num_tokens for chunk in chunks)
        chunks += self._cut(self._running(scheduler_output, output), budget)
        if not chunks:
            return output
        # Decodes, which are those with one token, go first.
        chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
        self._compute(chunks)
        drafts = {
            chunk.request_id: tuple(chunk.drafts)
            for chunk in chunks
            if chunk.request_id is not None and chunk.drafts
        }
        duration_s = self._clock() - started
        return dataclasses.replace(output, draft_token_ids=drafts, drafting_s=duration_s)

    # ---- what there is to compute

    def _prefill(self, prefill: DraftPrefill) -> _Chunk:
        progress = Progress()
        token_ids = np.array(prefill.token_ids, dtype=np.int64)
        block_ids = np.array(prefill.block_ids, dtype=np.int32)
        self._kv.catch_up(progress, token_ids, block_ids)
        num_full = len(progress.keys) * self._block_size
        end = min(progress.num_computed_tokens + prefill.num_tokens, num_full)
        return _Chunk(progress=progress, token_ids=token_ids, block_ids=block_ids, end=end)

    def _running(
        self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput
    ) -> Iterable[_Chunk]:
        """Yield what is missing of each of the step's requests."""
        for request_id, sampled in zip(output.request_ids, output.sampled_token_ids, strict=True):
            row = self._batch.row_of(request_id)
            token_ids = self._batch.token_ids[row, : self._batch.num_tokens[row]]
            block_ids = self._batch.block_ids(row)
            progress = self._progress(row)
            self._kv.catch_up(progress, token_ids, block_ids)
            asked = scheduler_output.num_draft_tokens.get(request_id, 0)
            # The last draft is only chosen: it needs no position.
            num_drafts = min(asked, self._batch.max_model_len - len(token_ids) + 1)
            if sampled and num_drafts <= 0:
                continue  # it catches up when it is to have drafts again
            chunk = _Chunk(
                progress=progress,
                token_ids=token_ids,
                block_ids=block_ids,
                end=len(token_ids),
                request_id=request_id,
                row=row,
                num_drafts=num_drafts if sampled else 0,
            )
            if not chunk.num_drafts:
                chunk.end = min(chunk.end, len(block_ids) * self._block_size)
            if chunk.num_tokens > 0:
                yield chunk

    def _progress(self, row: int) -> Progress:
        generation = int(self._batch.generations[row])
        known = self._rows.get(row)
        if known is None or known[0] != generation:
            known = self._rows[row] = generation, Progress()
        return known[1]

    def _cut(self, chunks: Iterable[_Chunk], budget: int) -> list[_Chunk]:
        """Return what the budget is enough for, of those that lack least first."""
        kept = []
        for chunk in sorted(chunks, key=lambda chunk: chunk.num_tokens):
            if budget <= 0:
                break
            if chunk.num_tokens > budget:
                chunk.end, chunk.num_drafts = chunk.start + budget, 0
                own = len(chunk.block_ids) * self._block_size
                chunk.end = min(chunk.end, own)
            budget -= chunk.num_tokens
            kept.append(chunk)
        return kept

    # ---- computing

    def _compute(self, chunks: Sequence[_Chunk]) -> None:
        tables = self._tables(chunks)
        counts = np.array([chunk.num_tokens for chunk in chunks])
        ends = np.array([chunk.end for chunk in chunks])
        token_ids = np.concatenate([chunk.token_ids[chunk.start : chunk.end] for chunk in chunks])
        hidden_states = self._forward(token_ids, ends, counts, tables)
        drafting = np.flatnonzero([chunk.num_drafts > 0 for chunk in chunks])
        hidden_states = hidden_states[torch.from_numpy(counts.cumsum()[drafting] - 1)]
        while len(drafting):
            active = [chunks[i] for i in drafting.tolist()]
            for chunk, draft in zip(active, self._choose(active, hidden_states), strict=True):
                chunk.drafts.append(draft)
            drafting = drafting[[len(chunk.drafts) < chunk.num_drafts for chunk in active]]
            if len(drafting):
                last = np.array([chunks[i].drafts[-1] for i in drafting.tolist()])
                ends[drafting] += 1
                ones = np.ones_like(drafting)
                hidden_states = self._forward(last, ends[drafting], ones, tables[drafting])
        for chunk in chunks:
            # The last draft was only chosen.
            self._kv.store(chunk.progress, chunk.block_ids, chunk.end, chunk.drafts[:-1])

    def _tables(self, chunks: Sequence[_Chunk]) -> BlockIds:
        """Return [len(chunks), n] block ids; behind those of a request of the batch its spare one:
        drafts are fewer than a block's tokens.
        """
        num_blocks = [-(-(chunk.end + chunk.num_drafts) // self._block_size) for chunk in chunks]
        tables = np.zeros((len(chunks), max(num_blocks)), dtype=np.int32)
        for table, chunk, count in zip(tables, chunks, num_blocks, strict=True):
            own = chunk.block_ids[:count]
            table[: len(own)] = own
            table[len(own) : count] = self._num_blocks + chunk.row
        return tables

    def _forward(self, token_ids: Rows, ends: Rows, counts: Rows, tables: BlockIds) -> torch.Tensor:
        """Compute the last counts[i] tokens before ends[i] of each sequence; those with one token
        come first. Return states [len(token_ids), hidden_size].
        """
        query_start_loc = np.zeros(len(counts) + 1, dtype=np.int32)
        counts.cumsum(out=query_start_loc[1:])
        first = ends - query_start_loc[1:]
        positions = np.arange(len(token_ids)) + first.repeat(counts)
        blocks, offsets = np.divmod(positions, self._block_size)
        sequences = np.arange(len(counts)).repeat(counts)
        slots = tables[sequences, blocks].astype(np.int64) * self._block_size + offsets
        metadata = AttentionMetadata(
            query_start_loc=torch.from_numpy(query_start_loc),
            seq_lens=torch.from_numpy(ends.astype(np.int32)),
            block_table=torch.from_numpy(tables),
            slot_mapping=torch.from_numpy(slots),
            query_lens_host=tuple(counts.tolist()),
            seq_lens_host=tuple(ends.tolist()),
            num_decodes=int((counts == 1).sum()),
        )
        states: torch.Tensor = self.model.forward(
            ForwardInputs(
                token_ids=torch.from_numpy(token_ids),
                positions=torch.from_numpy(positions),
                kv_cache=self.kv_cache.tensor,
                metadata=(metadata,),
            )
        )
        return states

    def _choose(self, chunks: Sequence[_Chunk], hidden_states: torch.Tensor) -> list[int]:
        """Return the next draft of each chunk as the model's sampler would choose it."""
        batch = self._batch
        rows = batch.next_rows(np.array([chunk.row for chunk in chunks]))
        num_assumed = np.array([len(chunk.drafts) for chunk in chunks])
        assumed = {i: tuple(chunk.drafts) for i, chunk in enumerate(chunks) if chunk.drafts}
        rows = LogitsRows(rows.batch_rows, rows.positions + num_assumed, assumed)
        if batch.sampling.is_greedy(rows):
            best = self.model.choose_greedily(hidden_states)
            token_ids: Rows = best.token_ids.numpy()
        else:
            logits = self.model.compute_logits(hidden_states)
            token_ids = batch.sampling.sample_drafts(logits, rows, batch.output_token_ids)
        chosen: list[int] = token_ids.tolist()
        return chosen
