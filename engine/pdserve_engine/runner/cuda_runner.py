"""The runner on CUDA: a step's launches do not wait for the step before, and small steps replay
graphs, as a step has some 300 launches, which take longer than decoding does.

What was sampled stays on the device, where the next step finds it; its copy arrives on the host
while that one runs. A step that needs to see tokens before it samples (penalties, grammars,
logprobs and the like) waits, and runs as on a CPU.
"""

import itertools
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from pdserve_engine.kv.kv_cache import KVCache
from pdserve_engine.models.base import ForwardInputs, Model
from pdserve_engine.request.sched_output import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from pdserve_engine.runner.model_runner import (
    ModelRunner,
    StepPlan,
    by_request,
)
from pdserve_engine.sampling.logits_rows import LogitsRows, Rows
from pdserve_engine.sampling.state import SampledTokens
from pdserve_kernels.lora import LoraSegment
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.triton.device_batch import (
    DeviceSamplingBatch,
    has_filter,
    sampling_columns,
    sampling_fields,
)
from pdserve_kernels.triton.inputs import spread_block_tables
from pdserve_kernels.triton.sampling import sample_staged
from pdserve_kernels.triton.staging import Field, Layout, pinned

logger = logging.getLogger(__name__)

# Of a token that the step before has sampled: it is on the device only.
ON_DEVICE = -1
# There are graphs of decodes for these numbers of requests and for multiples of the last one, and
# graphs of steps with chunks of prompts for these numbers of tokens; what is larger computes for
# longer than it takes to launch.
SMALL_BATCHES = (1, 2, 4, 8)
CHUNK_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512)


class _Kind(NamedTuple):
    """What steps differ in that a graph cannot leave open."""

    # One token for each request, and a row of logits for each token.
    is_decode: bool
    # Some row may have a filter, and all logits are looked at.
    is_filtered: bool


class _Sizes(NamedTuple):
    """What a step's arrays have room for."""

    num_tokens: int
    num_reqs: int
    num_rows: int
    num_groups: int
    table_width: int

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
            "table_size": Field(int32, (2,)),
            "tables": Field(int32, (self.num_groups * self.num_reqs * self.table_width,)),
        }
        return Layout(fields)


class _Launched:
    """A step whose results are on their way to the host."""

    def __init__(self, plan: StepPlan, generations: Rows, results: torch.Tensor | None) -> None:
        """results are int64 [2, n] or wider: the token of each of n rows of logits, and its NaN."""
        self.plan = plan
        self.generations = generations
        self._results: torch.Tensor | None = None
        if results is not None:
            host = pinned(results.nbytes, results.device).view(results.dtype).view(results.shape)
            host.copy_(results, non_blocking=True)
            self._results = host[:, : len(plan.logits_rows)]
        self._is_over: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._is_over.record()

    def is_over(self) -> bool:
        return bool(self._is_over.query())

    def token_ids(self) -> Rows:
        """Wait for the tokens of `plan.logits_rows`."""
        self._is_over.synchronize()
        assert self._results is not None
        return self._results[0].numpy()

    def get_output(self) -> ModelRunnerOutput:
        """See AsyncModelRunnerOutput."""
        plan = self.plan
        self._is_over.synchronize()
        if self._results is None:
            return ModelRunnerOutput(
                request_ids=plan.request_ids, sampled_token_ids=((),) * len(plan.request_ids)
            )
        token_ids, num_nans = self._results.numpy()
        return by_request(plan, SampledTokens(plan.logits_rows, token_ids, {}, {}, num_nans), {})


class _Graph:
    """A step of up to as many tokens and requests, recorded."""

    def __init__(self, sizes: _Sizes, device: torch.device) -> None:
        self.sizes = sizes
        self.layout = sizes.layout()
        self.buffer = torch.empty(self.layout.num_bytes, dtype=torch.uint8, device=device)
        self.views = self.layout.views(self.buffer)
        # What the arrays hold behind those of the requests that there are.
        self.padding = torch.zeros(self.layout.num_bytes, dtype=torch.uint8)
        self.num_fixed_bytes = self.layout.start_of("tables")
        shape = (sizes.num_groups, sizes.num_reqs, sizes.table_width)
        self.block_tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self.graph = torch.cuda.CUDAGraph()
        # [2, n] int64: of the last replay.
        self.results: torch.Tensor


class CudaModelRunner(ModelRunner):
    """See ModelRunner. All calls come on one thread; results may be waited for on another."""

    # Is there less to do where no row has a filter? Then there are graphs for that, too.
    _tells_filters_apart = False

    def __init__(self, model: Model, kv_cache: KVCache, **sizes: Any) -> None:
        """Takes what ModelRunner takes."""
        super().__init__(model, kv_cache, **sizes)
        self._max_blocks = -(-self._max_model_len // self._block_size)
        self._num_groups = len(kv_cache.spec.groups)
        # By the batch's rows, what was sampled last; one more for what pads a graph's batch.
        self._last_token_ids = torch.zeros(
            self._max_num_seqs + 1, dtype=torch.int64, device=model.device
        )
        self._launched: deque[_Launched] = deque()
        # Of each kind from small to large.
        self._graphs: dict[_Kind, list[_Graph]] = {}

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> AsyncModelRunnerOutput:
        """See ModelRunner; returns before the device has finished."""
        self._apply_launched(wait=False)
        self._update_state(scheduler_output)
        scheduled = self._without_late(scheduler_output.num_scheduled_tokens)
        if not scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        plan = self._plan(scheduled)
        if self._batch.sampling.looks_back(plan.rows):
            self._apply_launched(wait=True)
            return self._compute(plan)
        return self._launch(plan)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Record decodes of all batch sizes; the first replays of a size would compile kernels and
        allocate memory. Takes seconds, with a bar. No-op for models that cannot be recorded.
        """
        if self._graphs or not self.model.can_be_captured:
            return
        decodes = [(size, size) for size in _batch_sizes(self._max_num_seqs)]
        # A chunk has two tokens at least.
        chunks = [(size, min(size - 1, self._max_num_seqs)) for size in CHUNK_TOKENS]
        pool = torch.cuda.graph_pool_handle()
        graphs: dict[_Kind, list[_Graph]] = {}
        # The largest first: the others fit into its memory.
        sizes = sorted(decodes + chunks, reverse=True)
        filters = (True, False) if self._tells_filters_apart else (True,)
        for (num_tokens, num_reqs), is_filtered in tqdm(
            list(itertools.product(sizes, filters)), desc="capturing steps", unit="graph"
        ):
            kind = _Kind(num_tokens == num_reqs, is_filtered)
            graph = self._capture(num_tokens, num_reqs, kind, pool)
            graphs.setdefault(kind, []).insert(0, graph)
        self._graphs = graphs

    def release_graphs(self) -> None:
        """Forget them: memory that they read is about to go. All steps are over."""
        self._apply_launched(wait=True)
        self._graphs.clear()

    def _capture(self, num_tokens: int, num_reqs: int, kind: _Kind, pool: Any) -> _Graph:
        sizes = _Sizes(num_tokens, num_reqs, num_reqs, self._num_groups, self._max_blocks)
        # What is launched depends on whether there are decodes and chunks, not on how long.
        query_lens = (1,) * (num_reqs - 1) + (num_tokens - num_reqs + 1,)
        graph = _Graph(sizes, self._device)
        graph.layout.fill(graph.padding, self._padding(sizes))
        graph.buffer.copy_(graph.padding)

        def run() -> torch.Tensor:
            spread_block_tables(
                graph.views["tables"], graph.views["table_size"], graph.block_tables
            )
            results = self._run(graph.views, graph.block_tables, query_lens, kind)
            assert results is not None
            return results

        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            run()  # compiles, and initialises libraries
        torch.cuda.current_stream(self._device).wait_stream(stream)
        # Other threads, a transport's say, may go on calling CUDA.
        with torch.cuda.graph(graph.graph, pool=pool, capture_error_mode="thread_local"):
            graph.results = run()
        return graph

    def _launch(self, plan: StepPlan) -> AsyncModelRunnerOutput:
        rows = plan.logits_rows
        kind = _Kind(
            is_decode=len(plan.positions) == len(plan.rows) == len(rows),
            is_filtered=not self._tells_filters_apart or self._has_filter(rows),
        )
        lora = self._lora_segments(plan) if self.adapters else ()
        # Which adapters there are is not recorded.
        graph = None if lora else self._graph_for(plan, kind)
        if graph is None:
            results = self._run_eagerly(plan, lora, kind)
        else:
            results = self._replay(plan, graph)
        launched = _Launched(plan, self._batch.generations[rows.batch_rows], results)
        self._launched.append(launched)
        if len(rows):
            self._batch.append_placeholders(rows, ON_DEVICE)
        return launched

    def _has_filter(self, rows: LogitsRows) -> bool:
        batch = self._batch.sampling.describe(rows)
        return has_filter(batch, self.model.config.vocab_size)

    def _graph_for(self, plan: StepPlan, kind: _Kind) -> _Graph | None:
        """Return the smallest graph with room for a step."""
        num_tokens, num_reqs = len(plan.positions), len(plan.rows)
        for graph in self._graphs.get(kind, ()):
            if num_tokens <= graph.sizes.num_tokens and num_reqs <= graph.sizes.num_reqs:
                return graph
        return None

    def _replay(self, plan: StepPlan, graph: _Graph) -> torch.Tensor:
        arrays, num_reqs = self._arrays(plan), len(plan.rows)
        num_fixed = graph.num_fixed_bytes
        num_bytes = num_fixed + arrays["tables"].nbytes
        host = pinned(graph.layout.num_bytes, self._device)
        host.numpy()[:num_fixed] = graph.padding.numpy()[:num_fixed]
        arrays["query_start_loc"] = np.append(
            arrays["query_start_loc"], np.full(graph.sizes.num_reqs - num_reqs, num_reqs)
        )
        graph.layout.fill(host, arrays)
        graph.buffer[:num_bytes].copy_(host[:num_bytes], non_blocking=True)
        graph.graph.replay()
        return graph.results

    def _run_eagerly(
        self, plan: StepPlan, lora: Sequence[LoraSegment], kind: _Kind
    ) -> torch.Tensor | None:
        num_reqs, width = len(plan.rows), -(-int(plan.seq_lens.max()) // self._block_size)
        sizes = _Sizes(
            len(plan.positions), num_reqs, len(plan.logits_rows), self._num_groups, width
        )
        views = sizes.layout().to_device(self._arrays(plan), self._device)
        tables = views["tables"].view(self._num_groups, num_reqs, width)
        query_lens = tuple(plan.query_lens.tolist())
        return self._run(views, tables, query_lens, kind, lora)

    def _run(
        self,
        views: Mapping[str, torch.Tensor],
        block_tables: torch.Tensor,
        query_lens: tuple[int, ...],
        kind: _Kind,
        lora: Sequence[LoraSegment] = (),
    ) -> torch.Tensor | None:
        """Compute a step from its arrays on the device; enqueues only."""
        ids, seen = views["token_ids"], self._last_token_ids[views["token_rows"]]
        inputs = ForwardInputs(
            token_ids=torch.where(ids == ON_DEVICE, seen, ids),
            positions=views["token_positions"],
            kv_cache=self.kv_cache.tensor,
            metadata=tuple(
                AttentionMetadata(
                    query_start_loc=views["query_start_loc"],
                    seq_lens=views["seq_lens"],
                    block_table=table,
                    slot_mapping=slot_mapping,
                    query_lens_host=query_lens,
                    seq_lens_host=(0,) * len(query_lens),  # not looked at by this set's kernels
                    num_decodes=sum(length == 1 for length in query_lens),
                )
                for table, slot_mapping in zip(block_tables, views["slot_mappings"], strict=True)
            ),
            lora=lora,
        )
        hidden_states = self.model.forward(inputs)
        if not len(views["batch_rows"]):
            return None
        if not kind.is_decode:
            hidden_states = hidden_states[views["hidden_rows"]]
        batch = DeviceSamplingBatch.of(views)
        results = self._sample_on_device(hidden_states, batch, kind.is_filtered)
        self._last_token_ids[views["batch_rows"]] = results[0]
        return results

    def _sample_on_device(
        self, hidden_rows: torch.Tensor, batch: DeviceSamplingBatch, is_filtered: bool
    ) -> torch.Tensor:
        """Return int64 [2, n]: the tokens of the hidden rows, and the NaN in their logits; enqueues
        only.
        """
        logits = self.model.compute_logits(hidden_rows)
        return sample_staged(logits, batch, is_filtered=is_filtered)

    def _arrays(self, plan: StepPlan) -> dict[str, npt.NDArray[np.generic]]:
        """Return a step's inputs by their names in `_Sizes.layout`."""
        batch, rows = self._batch, plan.logits_rows
        width = -(-int(plan.seq_lens.max()) // self._block_size)
        query_start_loc = np.zeros(len(plan.rows) + 1, dtype=np.int32)
        plan.query_lens.cumsum(out=query_start_loc[1:])
        return {
            "token_ids": batch.token_ids[plan.token_rows, plan.positions],
            "token_rows": plan.token_rows,
            "token_positions": plan.positions,
            "slot_mappings": np.stack(list(self._slot_mappings(plan))),
            "query_start_loc": query_start_loc,
            "seq_lens": plan.seq_lens.astype(np.int32),
            "hidden_rows": plan.hidden_rows,
            "batch_rows": rows.batch_rows,
            **sampling_columns(batch.sampling.describe(rows)),
            "table_size": np.array((len(plan.rows), width), dtype=np.int32),
            "tables": batch.block_tables[:, plan.rows, :width].ravel(),
        }

    def _padding(self, sizes: _Sizes) -> dict[str, npt.NDArray[np.generic]]:
        """Return what stands for no token and no request; zeros where it may be anything."""
        nobody = self._max_num_seqs
        return {
            "token_rows": np.full(sizes.num_tokens, nobody),
            "slot_mappings": np.full((sizes.num_groups, sizes.num_tokens), -1),
            "batch_rows": np.full(sizes.num_rows, nobody),
            "top_p": np.ones(sizes.num_rows),
            "log_min_p": np.full(sizes.num_rows, -np.inf),
        }

    def _apply_launched(self, *, wait: bool) -> None:
        """Write what has been sampled to the batch: all of it with `wait`, else what is there."""
        batch = self._batch
        while self._launched and (wait or self._launched[0].is_over()):
            launched = self._launched.popleft()
            rows = launched.plan.logits_rows
            if len(rows):
                is_there = batch.generations[rows.batch_rows] == launched.generations
                kept = np.flatnonzero(is_there)
                batch.replace_placeholders(rows.select(kept), launched.token_ids()[kept])


def _batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes that have graphs, ascending."""
    step = SMALL_BATCHES[-1]
    sizes = {*SMALL_BATCHES, *range(step, max_num_seqs, step), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)
