"""The runner's memory of the requests it knows, in arrays with one row per request."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve_common.types.engine import MultiModalFeatureSpec
from pdserve_common.types.pooling_params import PoolingParams
from pdserve_engine.request.sched_output import NewRequestData
from pdserve_engine.sampling.logits_rows import LogitsRows, Rows
from pdserve_engine.sampling.state import NO_LOGPROBS, SamplingState


class InputBatch:
    """Token ids and block tables of up to max_num_seqs requests; `sampling` has their parameters.

    A request keeps its row from `add` to `remove`; a step's order is a list of rows, so nothing
    is moved.
    """

    def __init__(
        self,
        sampling: SamplingState,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int = 1,
    ) -> None:
        self.sampling = sampling
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        max_blocks = -(-max_model_len // block_size)
        self._rows: dict[str, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))
        # Zeroed memory takes no space until it is written. One more column than max_model_len: the
        # token sampled at the last position is known, though it will never be computed.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        # Per KV group; a request's tables are equally long in all of them.
        self.block_tables = np.zeros((num_groups, max_num_seqs, max_blocks), dtype=np.int32)
        self._num_blocks = [0] * max_num_seqs
        # The digest of each request's LoRA adapter.
        self.adapters: list[str | None] = [None] * max_num_seqs
        # The pictures of each request, in the order of its prompt.
        self.mm_features: list[tuple[MultiModalFeatureSpec, ...]] = [()] * max_num_seqs
        # By row, of requests that are pooled.
        self.pooling_params: dict[int, PoolingParams] = {}
        # How many requests have had the row.
        self.generations = np.zeros(max_num_seqs, dtype=np.int64)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def row_of(self, request_id: str) -> int:
        return self._rows[request_id]

    def rows_of(self, request_ids: Sequence[str]) -> Rows:
        """Return the rows [n] int64 of n requests."""
        return np.fromiter(map(self._rows.__getitem__, request_ids), np.int64, len(request_ids))

    def add(self, request: NewRequestData) -> None:
        """Take in a request the batch does not know."""
        assert request.request_id not in self._rows, request.request_id
        row = self._free_rows.pop()
        self._rows[request.request_id] = row
        self.generations[row] += 1
        num_tokens = len(request.all_token_ids)
        self.token_ids[row, :num_tokens] = request.all_token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.adapters[row] = request.adapter
        self.mm_features[row] = request.mm_features
        if request.pooling_params is not None:
            self.pooling_params[row] = request.pooling_params
        self.append_blocks(row, request.block_ids)
        self.sampling.add(row, request)

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ones (never scheduled here) are ignored."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        self.block_tables[:, row, : self._num_blocks[row]] = 0
        self._num_blocks[row] = 0
        self.pooling_params.pop(row, None)
        self.sampling.remove(row)
        self._free_rows.append(row)

    def append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Extend the row's table in every KV group, by equally many blocks."""
        start = self._num_blocks[row]
        end = start + len(block_ids[0])
        # Kernels may load through a null block's entry, though not use what they load: any block
        # will do.
        for table, ids in zip(self.block_tables, block_ids, strict=True):
            table[row, start:end] = [max(block_id, 0) for block_id in ids]
        self._num_blocks[row] = end

    def block_ids(self, row: int) -> npt.NDArray[np.int32]:
        """Return a view of the row's table in the first KV group, int32 [num_blocks]."""
        return self.block_tables[0, row, : self._num_blocks[row]]

    def next_rows(self, batch_rows: Rows) -> LogitsRows:
        """Return one row of logits for each of `batch_rows`, int64 [n]: of the token behind all it
        has.
        """
        positions = self.num_tokens[batch_rows] - self.num_prompt_tokens[batch_rows]
        return LogitsRows(batch_rows, positions)

    def next_rows_with_drafts(
        self, batch_rows: Rows, drafts: Sequence[tuple[int, ...]]
    ) -> LogitsRows:
        """As `next_rows` of `batch_rows`, int64 [n], and for each of the drafts of each row one
        more, which assumes it and those before it. They are put in as tokens that do not count.
        """
        counts = np.array([1 + len(token_ids) for token_ids in drafts])
        rows = self.next_rows_behind(batch_rows, counts)
        assumed: dict[int, tuple[int, ...]] = {}
        index = 0
        for row, token_ids in zip(batch_rows.tolist(), drafts, strict=True):
            first = self.num_tokens[row]
            self.token_ids[row, first : first + len(token_ids)] = token_ids
            assumed |= {index + i: token_ids[:i] for i in range(1, 1 + len(token_ids))}
            index += 1 + len(token_ids)
            if token_ids:
                self.sampling.grammars.look_ahead(row, token_ids)
        return LogitsRows(rows.batch_rows, rows.positions, assumed)

    def next_rows_behind(self, batch_rows: Rows, counts: Rows) -> LogitsRows:
        """Return so many rows of logits, int64 [n], for each of `batch_rows`, int64 [n]: of the
        tokens behind all it has, one after the other.
        """
        rows = self.next_rows(batch_rows.repeat(counts))
        first = counts.cumsum() - counts
        positions = rows.positions + np.arange(len(rows)) - first.repeat(counts)
        return LogitsRows(rows.batch_rows, positions)

    def scores_prompts(self, batch_rows: Rows) -> bool:
        """Does the next step bring log-probabilities of a prompt that one of the rows, int64 [n],
        asks for?
        """
        is_asked = self.sampling.num_prompt_logprobs[batch_rows] != NO_LOGPROBS
        # The first token has none.
        has_some = self.num_computed_tokens[batch_rows] + 1 < self.num_prompt_tokens[batch_rows]
        return bool((is_asked & has_some).any())

    def append_tokens(self, rows: LogitsRows, token_ids: Rows) -> None:
        """Add the tokens that were sampled for `rows`, int64 [n], which count."""
        self._append(rows, token_ids)
        self.sampling.append_tokens(rows.batch_rows, token_ids)

    def append_placeholders(self, rows: LogitsRows, placeholder: int) -> None:
        """Add for each of `rows` a token that is known on the device only. Its sampling must not
        look at tokens.
        """
        self._append(rows, np.full(len(rows), placeholder))

    def replace_placeholders(self, rows: LogitsRows, token_ids: Rows) -> None:
        """Put in the tokens that were sampled, int64 [n]."""
        self.token_ids[rows.batch_rows, self._columns(rows)] = token_ids

    def set_uncomputed(self, row: int, token_ids: Sequence[int]) -> None:
        """Say which output tokens the row has that are not computed."""
        first = max(self.num_computed_tokens[row], self.num_prompt_tokens[row])
        end = first + len(token_ids)
        self.token_ids[row, first:end] = token_ids
        self.num_tokens[row] = max(end, self.num_tokens[row])

    def _append(self, rows: LogitsRows, token_ids: Rows) -> None:
        columns = self._columns(rows)
        self.token_ids[rows.batch_rows, columns] = token_ids
        # Among several tokens of a request the last one decides.
        self.num_tokens[rows.batch_rows] = columns + 1

    def _columns(self, rows: LogitsRows) -> Rows:
        columns: Rows = self.num_prompt_tokens[rows.batch_rows] + rows.positions
        return columns

    def output_token_ids(self, row: int) -> Rows:
        """Return a view of the row's tokens behind its prompt, int64 [num_output_tokens]."""
        return self.token_ids[row, self.num_prompt_tokens[row] : self.num_tokens[row]]

    def prompt_targets(self, row: int, num_scheduled: int) -> Rows:
        """Return a view of the prompt tokens, int64 [n], that follow those computed in this step,
        each being what the model should say at its predecessor.
        """
        first = self.num_computed_tokens[row] + 1
        end = min(first + num_scheduled, self.num_prompt_tokens[row])
        return self.token_ids[row, first:end]
