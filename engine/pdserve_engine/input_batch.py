"""The runner's memory of the requests it knows, in arrays with one row per request."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve_common.engine_types import SamplingParams
from pdserve_engine.core.sched_output import NewRequestData
from pdserve_engine.sampling.sampler import SamplingBatch

Rows = npt.NDArray[np.int64]


class InputBatch:
    """Token ids, block tables and sampling parameters of up to max_num_seqs requests.

    A request keeps its row from `add` to `remove`; a step's order is a list of rows, so nothing
    is moved.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_blocks = -(-max_model_len // block_size)
        self._rows: dict[str, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))
        # Zeroed memory takes no space until it is written. One more column than max_model_len: the
        # token sampled at the last position is known, though it will never be computed.
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._num_blocks = [0] * max_num_seqs
        self._temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs, dtype=np.float64)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self._seeds = np.zeros(max_num_seqs, dtype=np.int64)
        # Rows whose end tokens are banned until so many output tokens are there.
        self._min_tokens: dict[int, int] = {}
        self._end_token_ids: dict[int, tuple[int, ...]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def row_of(self, request_id: str) -> int:
        return self._rows[request_id]

    def add(self, request: NewRequestData) -> None:
        """Take in a request the batch does not know."""
        assert request.request_id not in self._rows, request.request_id
        row = self._free_rows.pop()
        self._rows[request.request_id] = row
        num_tokens = len(request.all_token_ids)
        self.token_ids[row, :num_tokens] = request.all_token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.append_blocks(row, request.block_ids)
        self._set_sampling(row, request.sampling_params, request.seed, request.eos_token_id)

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ones (never scheduled here) are ignored."""
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        self.block_table[row, : self._num_blocks[row]] = 0
        self._num_blocks[row] = 0
        self._min_tokens.pop(row, None)
        self._end_token_ids.pop(row, None)
        self._free_rows.append(row)

    def append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        assert len(block_ids) == 1, f"{len(block_ids)} KV cache groups, the runner has 1"
        start = self._num_blocks[row]
        end = start + len(block_ids[0])
        self.block_table[row, start:end] = block_ids[0]
        self._num_blocks[row] = end

    def append_tokens(self, rows: Rows, tokens: npt.NDArray[np.int64]) -> None:
        """Add one sampled token to each of `rows`."""
        self.token_ids[rows, self.num_tokens[rows]] = tokens
        self.num_tokens[rows] += 1

    def sampling_batch(self, rows: Rows) -> SamplingBatch:
        """Describe how to choose the next token of `rows`."""
        positions = self.num_tokens[rows] - self.num_prompt_tokens[rows]
        return SamplingBatch(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seeds=self._seeds[rows],
            # The router sends each of a request's n continuations as a request with its own seed.
            branches=np.zeros(len(rows), dtype=np.int64),
            positions=positions,
            banned=self._banned(rows, positions) if self._min_tokens else (),
        )

    def _banned(self, rows: Rows, positions: Rows) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return tuple(
            (i, self._end_token_ids[row])
            for i, row in enumerate(rows.tolist())
            if positions[i] < self._min_tokens.get(row, 0)
        )

    def _set_sampling(
        self, row: int, params: SamplingParams, seed: int, eos_token_id: int | None
    ) -> None:
        self._temperature[row] = params.temperature
        self._top_k[row] = max(params.top_k, 0)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        # The key is 64 bits; arrays are signed.
        self._seeds[row] = np.uint64(seed & 0xFFFFFFFFFFFFFFFF).astype(np.int64)
        end_token_ids = params.stop_token_ids
        if eos_token_id is not None:
            end_token_ids = (*end_token_ids, eos_token_id)
        if params.min_tokens and end_token_ids:
            self._min_tokens[row] = params.min_tokens
            self._end_token_ids[row] = end_token_ids
