"""A rank without a model, over a memory that tells whose KV is read.

A block's memory holds a number for each of its tokens, made of all tokens up to it, and DEAD when
nobody can ask for it any more. So every step can check what it is about to read: where that is
wrong, its token and its KV are wrong as well.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdserve_engine.request.sched_output import ModelRunnerOutput, SchedulerOutput
from support.scripted_engine import BLOCK_SIZE, next_token

DEAD = -1


def kv_of(token_ids: Sequence[int]) -> list[int]:
    """What the cache holds for each token."""
    return list(itertools.accumulate(token_ids, lambda kv, t: hash((kv, t)) >> 2, initial=7))[1:]


@dataclass(eq=False)
class Known:
    """A request as the rank knows it."""

    token_ids: list[int]
    num_computed: int
    tables: tuple[list[int], ...]


class ModelledRank:
    """Checks the KV that a step reads, and writes what it computes."""

    # Of a token that was sampled from wrong KV.
    wrong_token = DEAD

    def __init__(self, memory: Any, windows: tuple[int | None, ...]) -> None:
        """`memory` is int64 [blocks, BLOCK_SIZE]; `windows` are those of the KV groups."""
        self._memory, self._windows = memory, windows
        self._known: dict[str, Known] = {}

    @property
    def num_known(self) -> int:
        return len(self._known)

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.update(step)
        return self.compute(step)

    def watch(self, request_id: str, is_right: bool) -> None:
        """Hear whether a step of a request reads what it should."""

    def update(self, step: SchedulerOutput) -> None:
        """Take what the step says of its requests."""
        for request_id in step.finished_req_ids | step.preempted_req_ids:
            self._known.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            tables = tuple(list(ids) for ids in new.block_ids)
            known = Known(list(new.all_token_ids), new.num_computed_tokens, tables)
            self._known[new.request_id] = known
        cached = step.scheduled_cached_reqs
        for request_id, block_ids, num_computed in zip(
            cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            assert self._known[request_id].num_computed == num_computed
            for table, ids in zip(self._known[request_id].tables, block_ids or (), strict=False):
                table.extend(ids)

    def compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Read and write the KV of the step's tokens."""
        drafts = step.scheduled_spec_decode_tokens
        sampled = [
            self._compute(r, n, drafts.get(r, ())) for r, n in step.num_scheduled_tokens.items()
        ]
        return ModelRunnerOutput(
            request_ids=tuple(step.num_scheduled_tokens), sampled_token_ids=tuple(sampled)
        )

    def _compute(
        self, request_id: str, num_tokens: int, drafts: tuple[int, ...]
    ) -> tuple[int, ...]:
        known = self._known[request_id]
        start, end = known.num_computed, known.num_computed + num_tokens
        kv = kv_of([*known.token_ids, *drafts])
        is_right = True
        for table, window in zip(known.tables, self._windows, strict=True):
            is_right &= self._reads_right(table, window, start, kv)
            for i in range(start, end):
                self._memory[table[i // BLOCK_SIZE], i % BLOCK_SIZE] = kv[i] if is_right else DEAD
        self.watch(request_id, is_right)
        known.num_computed = end - len(drafts)
        if known.num_computed < len(known.token_ids):
            return ()
        sampled: list[int] = []
        for draft in (*drafts, None):
            token = next_token([*known.token_ids, *sampled])
            sampled.append(token if is_right else self.wrong_token)
            if sampled[-1] != draft:
                break
        known.token_ids += sampled
        known.num_computed += len(sampled) - 1
        return tuple(sampled)

    def _reads_right(self, table: list[int], window: int | None, start: int, kv: list[int]) -> bool:
        seen = range(0 if window is None else max(0, start - window + 1), start)
        found = [self._memory[table[i // BLOCK_SIZE], i % BLOCK_SIZE] for i in seen]
        return found == [kv[i] for i in seen]
