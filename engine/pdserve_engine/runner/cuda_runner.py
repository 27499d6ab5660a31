"""The runner on CUDA: a step's launches do not wait for the step before, and small steps replay
graphs, as a step has some 300 launches, which take longer than decoding does.

What was sampled stays on the device, where the next step finds it; its copy arrives on the host
while that one runs. A step that needs to see tokens before it samples (penalties, grammars, drafts
and the like) waits once its forward pass is launched, and samples as on a CPU.
"""

import itertools
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from pdserve_engine.kv.kv_cache import KVCache
from pdserve_engine.models.base import ForwardInputs, Model, StepAdapters
from pdserve_engine.request.sched_output import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    SchedulerOutput,
)
from pdserve_engine.runner.adapter_slots import AdapterSlots
from pdserve_engine.runner.cuda_graphs import (
    RecordedDraw,
    StepGraph,
    StepKind,
    StepSizes,
    graph_sizes,
)
from pdserve_engine.runner.encoder_cache import StepEmbeds
from pdserve_engine.runner.launched import LaunchedStep
from pdserve_engine.runner.model_runner import ModelRunner, StepPlan
from pdserve_engine.sampling.logits_rows import Rows
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.sampling_batch import SamplingBatch
from pdserve_kernels.triton.device_batch import (
    DeviceSamplingBatch,
    has_filter,
    sampling_columns,
)
from pdserve_kernels.triton.inputs import spread_block_tables
from pdserve_kernels.triton.lora import TILE_ROWS
from pdserve_kernels.triton.sampling import sample_staged
from pdserve_kernels.triton.staging import Arrays
from pdserve_kernels.triton.step_lora import (
    NONE,
    LoraColumns,
    StepLora,
    max_num_tiles,
)

# Of a token that the step before has sampled: it is on the device only.
ON_DEVICE = -1
# A quantized head has kernels for so many rows of logits at most, and for more.
WARM_UP_ROWS = (16, 32, 64, 256, 512)


class Drawn(NamedTuple):
    """What was drawn from n rows of logits, on the device."""

    # int64 [2, n]: the tokens, and the NaN in each row.
    results: torch.Tensor
    # [n, vocab_size]; of several ranks perhaps this one's part.
    logits: torch.Tensor


class CudaModelRunner(ModelRunner):
    """See ModelRunner. All calls come on one thread; results may be waited for on another."""

    def __init__(self, model: Model, kv_cache: KVCache, **sizes: Any) -> None:
        """Takes what ModelRunner takes."""
        super().__init__(model, kv_cache, **sizes)
        self._max_blocks = -(-self._max_model_len // self._block_size)
        self._num_groups = len(kv_cache.spec.groups)
        # By the batch's rows, what was sampled last; one more for what pads a graph's batch.
        self._last_token_ids = torch.zeros(
            self._max_num_seqs + 1, dtype=torch.int64, device=model.device
        )
        self._launched: deque[LaunchedStep] = deque()
        # Of each kind from small to large.
        self._graphs: dict[StepKind, list[StepGraph]] = {}
        # Of models that can be captured, if there are adapters.
        self._slots: AdapterSlots | None = None

    def reserve_adapters(self, count: int, max_rank: int) -> None:
        """See ModelRunner."""
        if self.model.can_be_captured:
            num_layers = self.model.config.num_layers
            self._slots = AdapterSlots(
                count, num_layers=num_layers, max_rank=max_rank, device=self._device
            )

    def add_adapter(self, digest: str, adapter: Any) -> None:
        """See ModelRunner."""
        assert self._slots is not None or not self._graphs, "graphs would leave it out"
        super().add_adapter(digest, adapter)
        if self._slots is not None:
            self._slots.add(digest, adapter)

    def remove_adapter(self, digest: str) -> None:
        """See ModelRunner."""
        if self._slots is not None:
            self._slots.remove(digest)
        super().remove_adapter(digest)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> AsyncModelRunnerOutput:
        """See ModelRunner; returns before the device has finished."""
        self._apply_launched(wait=False)
        self._update_state(scheduler_output)
        scheduled = self._without_late(scheduler_output.num_scheduled_tokens)
        if not scheduled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        drafts = scheduler_output.scheduled_spec_decode_tokens
        plan = self._plan(scheduled, drafts)
        if drafts or self._looks_back(plan.rows):
            return self._with_forced(self._compute(plan))
        return self._launch(plan)

    def _looks_back(self, batch_rows: Rows) -> bool:
        """Must the step sample on the host, or score a prompt, which waits for the device?"""
        batch = self.input_batch
        return batch.sampling.looks_back(batch_rows) or batch.scores_prompts(batch_rows)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """See ModelRunner."""
        config = self.model.config
        for num_rows in WARM_UP_ROWS:
            shape = (num_rows, config.hidden_size)
            self._warm_up_sampling(torch.zeros(shape, dtype=config.dtype, device=self._device))
        if not self.model.can_be_captured:
            self._warm_up_forward()

    def _warm_up_forward(self) -> None:
        """Launch forward passes of the sizes that graphs have."""
        for num_tokens, num_reqs in graph_sizes(self._max_num_seqs):
            kind = StepKind(num_tokens == num_reqs)
            self._run_graph(self._make_graph(num_tokens, num_reqs, kind), kind)

    def _warm_up_sampling(self, hidden_rows: torch.Tensor) -> None:
        """Launch all that may be launched to sample, given hidden rows [n, hidden_size]."""
        logits = self.model.compute_logits(hidden_rows)
        self.input_batch.sampling.warm_up(logits[:1])

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Record decodes of all batch sizes; the first replays of a size would compile kernels and
        allocate memory. Takes seconds, with a bar. No-op for models that cannot be recorded.
        """
        if self._graphs or not self.model.can_be_captured:
            return
        pool = torch.cuda.graph_pool_handle()
        graphs: dict[StepKind, list[StepGraph]] = {}
        loras = (True, False) if self._slots is not None else (False,)
        for (num_tokens, num_reqs), has_lora in tqdm(
            list(itertools.product(graph_sizes(self._max_num_seqs), loras)),
            desc="capturing steps",
            unit="graph",
        ):
            kind = StepKind(num_tokens == num_reqs, has_lora)
            graph = self._make_graph(num_tokens, num_reqs, kind)
            self._capture(graph, kind, pool)
            graphs.setdefault(kind, []).insert(0, graph)
        self._graphs = graphs

    def release_graphs(self) -> None:
        """Forget them: memory that they read is about to go. All steps are over."""
        self._apply_launched(wait=True)
        self._graphs.clear()

    def _make_graph(self, num_tokens: int, num_reqs: int, kind: StepKind) -> StepGraph:
        """Return one that has no requests yet, and is not recorded."""
        sizes = StepSizes(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            num_rows=num_reqs,
            num_groups=self._num_groups,
            table_width=self._max_blocks,
        )
        if kind.has_lora:
            assert self._slots is not None
            num_tiles = max_num_tiles(num_tokens, self._slots.count)
            sizes = sizes._replace(num_lora_tiles=num_tiles)
        graph = StepGraph(sizes, self._device)
        graph.layout.fill(graph.padding, self._padding(sizes))
        graph.buffer.copy_(graph.padding)
        return graph

    def _run_graph(self, graph: StepGraph, kind: StepKind) -> torch.Tensor:
        """Return the hidden states [num_tokens, hidden_size] of what its buffer says."""
        spread_block_tables(graph.views["tables"], graph.views["table_size"], graph.block_tables)
        lora = self._tiles(graph.views) if kind.has_lora else ()
        return self._run(graph.views, graph.block_tables, graph.query_lens, lora)

    def _capture(self, graph: StepGraph, kind: StepKind, pool: Any) -> None:
        """Record its forward pass and its draws."""

        def draw(*, is_filtered: bool) -> torch.Tensor:
            return self._draw(graph.views, graph.hidden_states, kind, is_filtered).results

        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # compiles, and initialises libraries
            graph.hidden_states = self._run_graph(graph, kind)
            for is_filtered in (False, True):
                draw(is_filtered=is_filtered)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        # Other threads, a transport's say, may go on calling CUDA.
        record = partial(torch.cuda.graph, pool=pool, capture_error_mode="thread_local")
        with record(graph.forward):
            graph.hidden_states = self._run_graph(graph, kind)
        for is_filtered in (False, True):
            recorded = torch.cuda.CUDAGraph()
            with record(recorded):
                results = draw(is_filtered=is_filtered)
            graph.draws[is_filtered] = RecordedDraw(recorded, results)

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        """See ModelRunner. Returns when the steps before are over and the batch has their tokens;
        this one's pass may still run.
        """
        kind = self._kind(plan)
        arrays = self._model_arrays(plan, kind)
        pictures = self._gather_embeds(plan)
        graph = self._graph_for(plan, kind) if pictures is None else None
        if graph is None:
            _, hidden_states = self._run_eagerly(plan, kind, arrays, pictures)
        else:
            graph.fill(arrays)
            graph.forward.replay()
            hidden_states = graph.hidden_states[: len(plan.positions)]
        self._apply_launched(wait=True)
        return hidden_states

    def _launch(self, plan: StepPlan) -> AsyncModelRunnerOutput:
        rows, kind = plan.logits_rows, self._kind(plan)
        batch = self.input_batch.sampling.describe(rows)
        is_filtered = has_filter(batch, self.model.config.vocab_size)
        arrays = {**self._model_arrays(plan, kind), **self._sampling_arrays(plan, batch)}
        pictures = self._gather_embeds(plan)
        graph = self._graph_for(plan, kind) if pictures is None else None
        views: Mapping[str, torch.Tensor]
        if graph is not None:
            graph.fill(arrays)
            graph.forward.replay()
            views, hidden_states = graph.views, graph.hidden_states
        else:
            views, hidden_states = self._run_eagerly(plan, kind, arrays, pictures)
        results, logprobs = None, None
        has_logprobs = self.input_batch.sampling.asks_for_logprobs(rows.batch_rows)
        if len(rows) and graph is not None and not has_logprobs:
            graph.draws[is_filtered].graph.replay()
            results = graph.draws[is_filtered].results
        elif len(rows):
            # Graphs do not keep their logits: all of theirs would take gigabytes.
            results, logits = self._draw(views, hidden_states, kind, is_filtered)
            if has_logprobs:
                logprobs = self.input_batch.sampling.launch_logprobs(logits, rows, results[0])
        generations = self.input_batch.generations[rows.batch_rows]
        launched = LaunchedStep(plan, generations, results, logprobs)
        self._launched.append(launched)
        if len(rows):
            self.input_batch.append_placeholders(rows, ON_DEVICE)
        return launched

    def _kind(self, plan: StepPlan) -> StepKind:
        is_decode = len(plan.positions) == len(plan.rows) == len(plan.logits_rows)
        return StepKind(is_decode, self._has_lora(plan))

    def _has_lora(self, plan: StepPlan) -> bool:
        """Does some row have an adapter that is in a slot?"""
        adapters = self.input_batch.adapters
        return self._slots is not None and any(adapters[row] for row in plan.rows.tolist())

    def _lora_columns(self, plan: StepPlan) -> LoraColumns:
        assert self._slots is not None
        digests = [self.input_batch.adapters[row] for row in plan.rows.tolist()]
        return self._slots.columns(digests, plan.query_lens)

    def _tiles(self, views: Mapping[str, torch.Tensor]) -> StepLora:
        assert self._slots is not None
        return self._slots.on_device(views)

    def _graph_for(self, plan: StepPlan, kind: StepKind) -> StepGraph | None:
        """Return the smallest graph with room for a step, which has no pictures."""
        num_tokens, num_reqs = len(plan.positions), len(plan.rows)
        for graph in self._graphs.get(kind, ()):
            if num_tokens <= graph.sizes.num_tokens and num_reqs <= graph.sizes.num_reqs:
                return graph
        return None

    def _run_eagerly(
        self, plan: StepPlan, kind: StepKind, arrays: Arrays, pictures: StepEmbeds | None
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """Return a step's inputs on the device and its hidden states; enqueues only."""
        num_reqs, width = len(plan.rows), -(-int(plan.seq_lens.max()) // self._block_size)
        sizes = StepSizes(
            num_tokens=len(plan.positions),
            num_reqs=num_reqs,
            num_rows=len(arrays.get("batch_rows", ())),
            num_groups=self._num_groups,
            table_width=width,
            num_lora_tiles=len(arrays.get("lora_slots", ())),
        )
        views = sizes.layout().to_device(arrays, self._device)
        lora = self._tiles(views) if kind.has_lora else self._lora_segments(plan)
        tables = views["tables"].view(self._num_groups, num_reqs, width)
        query_lens = tuple(plan.query_lens.tolist())
        return views, self._run(views, tables, query_lens, lora, pictures)

    def _run(
        self,
        views: Mapping[str, torch.Tensor],
        block_tables: torch.Tensor,
        query_lens: tuple[int, ...],
        lora: StepAdapters,
        pictures: StepEmbeds | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [num_tokens, hidden_size] of a step; enqueues only."""
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
            mm_embeds=None if pictures is None else pictures.embeds,
            mm_rows=None if pictures is None else self._to_device(pictures.rows),
        )
        return self.model.forward(inputs)

    def _draw(
        self,
        views: Mapping[str, torch.Tensor],
        hidden_states: torch.Tensor,
        kind: StepKind,
        is_filtered: bool,
    ) -> Drawn:
        """Draw a token for each row of logits, which the next step finds on the device too;
        enqueues only.
        """
        if not kind.is_decode:
            hidden_states = hidden_states[views["hidden_rows"]]
        batch = DeviceSamplingBatch.of(views)
        drawn = self._sample_on_device(hidden_states, batch, is_filtered)
        self._last_token_ids[views["batch_rows"]] = drawn.results[0]
        return drawn

    def _sample_on_device(
        self, hidden_rows: torch.Tensor, batch: DeviceSamplingBatch, is_filtered: bool
    ) -> Drawn:
        """Choose tokens of the hidden rows; enqueues only."""
        logits = self.model.compute_logits(hidden_rows)
        return Drawn(sample_staged(logits, batch, is_filtered=is_filtered), logits)

    def _model_arrays(self, plan: StepPlan, kind: StepKind) -> Arrays:
        """Return what the model looks at, by its names in `StepSizes.layout`."""
        batch = self.input_batch
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
            **(self._lora_columns(plan) if kind.has_lora else {}),
            "table_size": np.array((len(plan.rows), width), dtype=np.int32),
            "tables": batch.block_tables[:, plan.rows, :width].ravel(),
        }

    def _sampling_arrays(self, plan: StepPlan, batch: SamplingBatch) -> Arrays:
        """Return what draws look at, by its names in `StepSizes.layout`."""
        return {
            "hidden_rows": plan.hidden_rows,
            "batch_rows": plan.logits_rows.batch_rows,
            **sampling_columns(batch),
        }

    def _padding(self, sizes: StepSizes) -> Arrays:
        """Return what stands for no token and no request; zeros where it may be anything."""
        nobody = self._max_num_seqs
        return {
            "token_rows": np.full(sizes.num_tokens, nobody),
            "slot_mappings": np.full((sizes.num_groups, sizes.num_tokens), -1),
            "batch_rows": np.full(sizes.num_rows, nobody),
            "top_p": np.ones(sizes.num_rows),
            "log_min_p": np.full(sizes.num_rows, -np.inf),
            "lora_rows": np.full((sizes.num_lora_tiles, TILE_ROWS), NONE),
            "lora_slots": np.full(sizes.num_lora_tiles, NONE),
        }

    def _apply_launched(self, *, wait: bool) -> None:
        """Write what has been sampled to the batch: all of it with `wait`, else what is there."""
        batch = self.input_batch
        while self._launched and (wait or self._launched[0].is_over()):
            launched = self._launched.popleft()
            rows = launched.plan.logits_rows
            if len(rows):
                is_there = batch.generations[rows.batch_rows] == launched.generations
                kept = np.flatnonzero(is_there)
                batch.replace_placeholders(rows.select(kept), launched.token_ids()[kept])
