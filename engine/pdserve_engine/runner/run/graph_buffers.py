"""The CUDA graphs of steps: for which sizes there are some, and what each reads and writes."""

from typing import NamedTuple

import numpy as np
import torch

from pdserve_kernels.triton.linears.step_lora import lora_fields
from pdserve_kernels.triton.sampling.device_batch import sampling_fields
from pdserve_kernels.triton.staging import Arrays, Field, Layout, pinned

# There are graphs of decodes for these numbers of requests and for multiples of the last one, and
# graphs of steps with chunks of prompts for these numbers of tokens; what is larger computes for
# longer than it takes to launch.
SMALL_BATCHES = (1, 2, 4, 8)
CHUNK_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512)


class StepKind(NamedTuple):
    """What steps differ in that a graph cannot leave open."""

    # One token for each request, and a row of logits for each token.
    is_decode: bool
    # Some row has an adapter. The two kernels for each linear, which would end at once in a step
    # without one, still take about a microsecond each: so there are graphs without them.
    has_lora: bool = False


class StepSizes(NamedTuple):
    """What a step's arrays have room for."""

    num_tokens: int
    num_reqs: int
    num_rows: int
    num_groups: int
    table_width: int
    # The tiles of rows that have adapters.
    num_lora_tiles: int = 0

    def layout(self) -> Layout:
        """Return where a step's inputs lie. The last may be copied in part."""
        int64, int32 = np.int64, np.int32
        tokens, rows, reqs = (self.num_tokens,), (self.num_rows,), (self.num_reqs,)
        fields = {
            "token_ids": Field(int64, tokens),
            "token_rows": Field(int64, tokens),
            "token_positions": Field(int64, tokens),
            "slot_mappings": Field(int64, (self.num_groups, *tokens)),
            "query_start_loc": Field(int32, (self.num_reqs + 1,)),
            "seq_lens": Field(int32, reqs),
            "hidden_rows": Field(int64, rows),
            "batch_rows": Field(int64, rows),
            **sampling_fields(self.num_rows),
            **lora_fields(self.num_lora_tiles),
            "table_size": Field(int32, (2,)),
            "tables": Field(int32, (self.num_groups * self.num_reqs * self.table_width,)),
        }
        return Layout(fields)


class RecordedDraw(NamedTuple):
    """What draws tokens from hidden states. Steps whose logits are looked at draw without it."""

    graph: torch.cuda.CUDAGraph
    # The results of the last replay, see Drawn.
    results: torch.Tensor


class StepGraph:
    """A step of up to as many tokens and requests, recorded."""

    def __init__(self, sizes: StepSizes, device: torch.device) -> None:
        self.sizes = sizes
        # What is launched depends on whether there are decodes and chunks, not on how long.
        last = sizes.num_tokens - sizes.num_reqs + 1
        self.query_lens = (1,) * (sizes.num_reqs - 1) + (last,)
        self.layout = sizes.layout()
        self.buffer = torch.empty(self.layout.num_bytes, dtype=torch.uint8, device=device)
        self.views = self.layout.views(self.buffer)
        # What the arrays hold behind those of the requests that there are.
        self.padding = torch.zeros(self.layout.num_bytes, dtype=torch.uint8)
        self.num_fixed_bytes = self.layout.start_of("tables")
        shape = (sizes.num_groups, sizes.num_reqs, sizes.table_width)
        self.block_tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self.forward = torch.cuda.CUDAGraph()
        # [num_tokens, hidden_size]: of the last replay.
        self.hidden_states: torch.Tensor
        # By whether some row has a filter: then all logits are looked at several times.
        self.draws: dict[bool, RecordedDraw] = {}

    def fill(self, arrays: Arrays) -> None:
        """Write a step's inputs, arrays [...] by their names and in the dtypes of
        `StepSizes.layout`, to where it reads them; enqueues only.
        """
        num_reqs, num_tokens = len(arrays["seq_lens"]), len(arrays["token_ids"])
        num_bytes = self.num_fixed_bytes + arrays["tables"].nbytes
        host = pinned(self.layout.num_bytes, self.buffer.device)
        host.numpy()[: self.num_fixed_bytes] = self.padding.numpy()[: self.num_fixed_bytes]
        # They begin behind the last token: kernels look for a token's request by halves.
        no_requests = np.full(self.sizes.num_reqs - num_reqs, num_tokens)
        query_start_loc = np.append(arrays["query_start_loc"], no_requests)
        self.layout.fill(host, {**arrays, "query_start_loc": query_start_loc})
        self.buffer[:num_bytes].copy_(host[:num_bytes], non_blocking=True)


def graph_sizes(max_num_seqs: int) -> list[tuple[int, int]]:
    """Return how many tokens and requests graphs have room for, of steps of up to max_num_seqs
    requests; the largest come first: the others fit into their memory.
    """
    decodes = [(size, size) for size in _batch_sizes(max_num_seqs)]
    # A chunk has two tokens at least. With room for two requests a graph launches what is for
    # single tokens, too, which a prompt's may be.
    max_reqs = max(2, max_num_seqs)
    chunks = [(size, min(size - 1, max_reqs)) for size in CHUNK_TOKENS]
    return sorted(decodes + chunks, reverse=True)


def _batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes that have graphs, ascending."""
    step = SMALL_BATCHES[-1]
    sizes = {*SMALL_BATCHES, *range(step, max_num_seqs, step), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)
