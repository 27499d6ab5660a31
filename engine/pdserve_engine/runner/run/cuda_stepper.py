"""Steps on CUDA: a step's launches do not wait for the step before, and small steps replay graphs,
as a step has some 300 launches, which take longer than decoding does.

What was sampled stays on the device, where the next step finds it; its copy arrives on the host
while that one runs. A step that needs to see tokens before it samples (penalties, grammars, drafts
and the like) waits once its forward pass is launched, and samples as on a CPU.
"""

import itertools
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from pdserve_engine.models.base import ForwardInputs, Model, StepAdapters
from pdserve_engine.request.sched_output import AsyncModelRunnerOutput
from pdserve_engine.runner.run.adapter_slots import AdapterSlots
from pdserve_engine.runner.run.encoder_cache import StepEmbeds
from pdserve_engine.runner.run.graph_buffers import (
    RecordedDraw,
    StepGraph,
    StepKind,
    StepSizes,
    graph_sizes,
)
from pdserve_engine.runner.run.launched import LaunchedStep
from pdserve_engine.runner.run.step_arrays import StepArrays
from pdserve_engine.runner.run.step_inputs import StepInputs
from pdserve_engine.runner.sample.device_sampler import DeviceSampler, Drawn
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.sampling_batch import SamplingBatch
from pdserve_kernels.triton.inputs import spread_block_tables
from pdserve_kernels.triton.linears.lora import TILE_ROWS
from pdserve_kernels.triton.linears.step_lora import (
    NONE,
    LoraColumns,
    StepLora,
    max_num_tiles,
)
from pdserve_kernels.triton.sampling.device_batch import (
    DeviceSamplingBatch,
    has_filter,
    sampling_columns,
)
from pdserve_kernels.triton.staging import Arrays

# Stands for a token that the step before has sampled: it is on the device only.
ON_DEVICE = -1
# A quantized head has kernels for so many rows of logits at most, and for more.
WARM_UP_ROWS = (16, 32, 64, 256, 512)


class CudaStepper:
    """Implements Stepper. All calls come on one thread."""

    def __init__(self, inputs: StepInputs, sampler: DeviceSampler) -> None:
        self._inputs = inputs
        self._sampler = sampler
        self._batch = batch = inputs.batch
        self._device = inputs.device
        self._block_size = inputs.kv_cache.spec.block_size
        self._max_blocks = -(-batch.max_model_len // self._block_size)
        self._num_groups = len(inputs.kv_cache.spec.groups)
        # By the batch's rows, what was sampled last; one more for what pads a graph's batch.
        self._last_token_ids = torch.zeros(
            batch.max_num_seqs + 1, dtype=torch.int64, device=inputs.device
        )
        self._launched: deque[LaunchedStep] = deque()
        # The graphs of each kind, from small to large.
        self.graphs: dict[StepKind, list[StepGraph]] = {}
        # Set for models that can be captured, if there are adapters.
        self._slots: AdapterSlots | None = None

    def begin(self) -> None:
        """See Stepper."""
        self.apply_launched(wait=False)

    def reserve_adapters(self, model: Model, count: int, max_rank: int) -> None:
        """See Stepper."""
        if model.can_be_captured:
            num_layers = model.config.num_layers
            self._slots = AdapterSlots(
                count, num_layers=num_layers, max_rank=max_rank, device=self._device
            )

    def add_adapter(self, digest: str, adapter: Any) -> None:
        """See Stepper."""
        assert self._slots is not None or not self.graphs, "graphs would leave it out"
        self._inputs.adapters[digest] = adapter
        if self._slots is not None:
            self._slots.add(digest, adapter)

    def remove_adapter(self, digest: str) -> None:
        """See Stepper."""
        if self._slots is not None:
            self._slots.remove(digest)
        self._inputs.adapters.pop(digest, None)

    def warm_up(self, model: Model) -> None:
        """See Stepper."""
        config = model.config
        for num_rows in WARM_UP_ROWS:
            shape = (num_rows, config.hidden_size)
            rows = torch.zeros(shape, dtype=config.dtype, device=self._device)
            self._sampler.warm_up(model, rows)
        if not self._is_recorded(model):
            self._warm_up_forward(model)

    def _is_recorded(self, model: Model) -> bool:
        return model.can_be_captured and self._sampler.can_draw

    def _warm_up_forward(self, model: Model) -> None:
        """Launch forward passes of the sizes that graphs have."""
        for num_tokens, num_reqs in graph_sizes(self._batch.max_num_seqs):
            kind = StepKind(num_tokens == num_reqs)
            self._run_graph(model, self._make_graph(num_tokens, num_reqs, kind), kind)

    def capture_graphs(self, model: Model) -> None:
        """Record decodes of all batch sizes; the first replays of a size would compile kernels and
        allocate memory. Takes seconds, with a bar. No-op for models that cannot be recorded.
        """
        if self.graphs or not self._is_recorded(model):
            return
        pool = torch.cuda.graph_pool_handle()
        graphs: dict[StepKind, list[StepGraph]] = {}
        loras = (True, False) if self._slots is not None else (False,)
        for (num_tokens, num_reqs), has_lora in tqdm(
            list(itertools.product(graph_sizes(self._batch.max_num_seqs), loras)),
            desc="capturing steps",
            unit="graph",
        ):
            kind = StepKind(num_tokens == num_reqs, has_lora)
            graph = self._make_graph(num_tokens, num_reqs, kind)
            self._capture(model, graph, kind, pool)
            graphs.setdefault(kind, []).insert(0, graph)
        self.graphs = graphs

    def release_graphs(self) -> None:
        """Forget them: memory that they read is about to go. All steps are over."""
        self.apply_launched(wait=True)
        self.graphs.clear()

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

    def _run_graph(self, model: Model, graph: StepGraph, kind: StepKind) -> torch.Tensor:
        """Return the hidden states [num_tokens, hidden_size] of what its buffer says."""
        spread_block_tables(graph.views["tables"], graph.views["table_size"], graph.block_tables)
        lora = self._tiles(graph.views) if kind.has_lora else ()
        return self._run(model, graph.views, graph.block_tables, graph.query_lens, lora)

    def _capture(self, model: Model, graph: StepGraph, kind: StepKind, pool: Any) -> None:
        """Record its forward pass and its draws."""

        def draw(*, is_filtered: bool) -> torch.Tensor:
            return self._draw(model, graph.views, graph.hidden_states, kind, is_filtered).results

        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # compiles, and initialises libraries
            graph.hidden_states = self._run_graph(model, graph, kind)
            for is_filtered in (False, True):
                draw(is_filtered=is_filtered)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        # Other threads, a transport's say, may go on calling CUDA.
        record = partial(torch.cuda.graph, pool=pool, capture_error_mode="thread_local")
        with record(graph.forward):
            graph.hidden_states = self._run_graph(model, graph, kind)
        for is_filtered in (False, True):
            recorded = torch.cuda.CUDAGraph()
            with record(recorded):
                results = draw(is_filtered=is_filtered)
            graph.draws[is_filtered] = RecordedDraw(recorded, results)

    def forward(self, model: Model, step: StepArrays) -> torch.Tensor:
        """See Stepper. Returns when the steps before are over and the batch has their tokens;
        this one's pass may still run.
        """
        kind = self._kind(step)
        arrays = self._model_arrays(step, kind)
        pictures = self._inputs.gather_embeds(step)
        graph = self._graph_for(step, kind) if pictures is None else None
        if graph is None:
            _, hidden_states = self._run_eagerly(model, step, kind, arrays, pictures)
        else:
            graph.fill(arrays)
            graph.forward.replay()
            hidden_states = graph.hidden_states[: len(step.positions)]
        self.apply_launched(wait=True)
        return hidden_states

    def launch(self, model: Model, step: StepArrays) -> AsyncModelRunnerOutput | None:
        """See Stepper."""
        if self._sampler.looks_back(step.rows):
            return None
        rows, kind = step.logits_rows, self._kind(step)
        batch = self._batch.sampling.describe(rows)
        is_filtered = has_filter(batch, model.config.vocab_size)
        arrays = {**self._model_arrays(step, kind), **self._sampling_arrays(step, batch)}
        pictures = self._inputs.gather_embeds(step)
        graph = self._graph_for(step, kind) if pictures is None else None
        views: Mapping[str, torch.Tensor]
        if graph is not None:
            graph.fill(arrays)
            graph.forward.replay()
            views, hidden_states = graph.views, graph.hidden_states
        else:
            views, hidden_states = self._run_eagerly(model, step, kind, arrays, pictures)
        results, logprobs = None, None
        has_logprobs = self._batch.sampling.asks_for_logprobs(rows.batch_rows)
        if len(rows) and graph is not None and not has_logprobs:
            graph.draws[is_filtered].graph.replay()
            results = graph.draws[is_filtered].results
        elif len(rows):
            # Graphs do not keep their logits: all of theirs would take gigabytes.
            results, logits = self._draw(model, views, hidden_states, kind, is_filtered)
            if has_logprobs:
                logprobs = self._batch.sampling.launch_logprobs(logits, rows, results[0])
        generations = self._batch.generations[rows.batch_rows]
        launched = LaunchedStep(step, generations, results, logprobs)
        self._launched.append(launched)
        if len(rows):
            self._batch.append_placeholders(rows, ON_DEVICE)
        return launched

    def _kind(self, step: StepArrays) -> StepKind:
        is_decode = len(step.positions) == len(step.rows) == len(step.logits_rows)
        return StepKind(is_decode, self._has_lora(step))

    def _has_lora(self, step: StepArrays) -> bool:
        """Does some row have an adapter that is in a slot?"""
        adapters = self._batch.adapters
        return self._slots is not None and any(adapters[row] for row in step.rows.tolist())

    def _lora_columns(self, step: StepArrays) -> LoraColumns:
        assert self._slots is not None
        digests = [self._batch.adapters[row] for row in step.rows.tolist()]
        return self._slots.columns(digests, step.query_lens)

    def _tiles(self, views: Mapping[str, torch.Tensor]) -> StepLora:
        assert self._slots is not None
        return self._slots.on_device(views)

    def _graph_for(self, step: StepArrays, kind: StepKind) -> StepGraph | None:
        """Return the smallest graph with room for a step, which has no pictures."""
        num_tokens, num_reqs = len(step.positions), len(step.rows)
        for graph in self.graphs.get(kind, ()):
            if num_tokens <= graph.sizes.num_tokens and num_reqs <= graph.sizes.num_reqs:
                return graph
        return None

    def _run_eagerly(
        self,
        model: Model,
        step: StepArrays,
        kind: StepKind,
        arrays: Arrays,
        pictures: StepEmbeds | None,
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """Return a step's inputs on the device and its hidden states; enqueues only."""
        num_reqs, width = len(step.rows), -(-int(step.seq_lens.max()) // self._block_size)
        sizes = StepSizes(
            num_tokens=len(step.positions),
            num_reqs=num_reqs,
            num_rows=len(arrays.get("batch_rows", ())),
            num_groups=self._num_groups,
            table_width=width,
            num_lora_tiles=len(arrays.get("lora_slots", ())),
        )
        views = sizes.layout().to_device(arrays, self._device)
        lora = self._tiles(views) if kind.has_lora else self._inputs.lora_segments(step)
        tables = views["tables"].view(self._num_groups, num_reqs, width)
        query_lens = tuple(step.query_lens.tolist())
        return views, self._run(model, views, tables, query_lens, lora, pictures)

    def _run(
        self,
        model: Model,
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
            kv_cache=self._inputs.kv_cache.tensor,
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
            mm_rows=None if pictures is None else self._inputs.to_device(pictures.rows),
        )
        return model.forward(inputs)

    def _draw(
        self,
        model: Model,
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
        drawn = self._sampler.sample(model, hidden_states, batch, is_filtered)
        self._last_token_ids[views["batch_rows"]] = drawn.results[0]
        return drawn

    def _model_arrays(self, step: StepArrays, kind: StepKind) -> Arrays:
        """Return what the model looks at, by its names in `StepSizes.layout`."""
        batch = self._batch
        width = -(-int(step.seq_lens.max()) // self._block_size)
        query_start_loc = np.zeros(len(step.rows) + 1, dtype=np.int32)
        step.query_lens.cumsum(out=query_start_loc[1:])
        return {
            "token_ids": batch.token_ids[step.token_rows, step.positions],
            "token_rows": step.token_rows,
            "token_positions": step.positions,
            "slot_mappings": np.stack(list(self._inputs.slot_mappings(step))),
            "query_start_loc": query_start_loc,
            "seq_lens": step.seq_lens.astype(np.int32),
            **(self._lora_columns(step) if kind.has_lora else {}),
            "table_size": np.array((len(step.rows), width), dtype=np.int32),
            "tables": batch.block_tables[:, step.rows, :width].ravel(),
        }

    def _sampling_arrays(self, step: StepArrays, batch: SamplingBatch) -> Arrays:
        """Return what draws look at, by its names in `StepSizes.layout`."""
        return {
            "hidden_rows": step.hidden_rows,
            "batch_rows": step.logits_rows.batch_rows,
            **sampling_columns(batch),
        }

    def _padding(self, sizes: StepSizes) -> Arrays:
        """Return what stands for no token and no request; zeros where it may be anything."""
        nobody = self._batch.max_num_seqs
        return {
            "token_rows": np.full(sizes.num_tokens, nobody),
            "slot_mappings": np.full((sizes.num_groups, sizes.num_tokens), -1),
            "batch_rows": np.full(sizes.num_rows, nobody),
            "top_p": np.ones(sizes.num_rows),
            "log_min_p": np.full(sizes.num_rows, -np.inf),
            "lora_rows": np.full((sizes.num_lora_tiles, TILE_ROWS), NONE),
            "lora_slots": np.full(sizes.num_lora_tiles, NONE),
        }

    def apply_launched(self, *, wait: bool) -> None:
        """Write what has been sampled to the batch: all of it with `wait`, else what is there."""
        batch = self._batch
        while self._launched and (wait or self._launched[0].is_over()):
            launched = self._launched.popleft()
            rows = launched.step.logits_rows
            if len(rows):
                is_there = batch.generations[rows.batch_rows] == launched.generations
                kept = np.flatnonzero(is_there)
                batch.replace_placeholders(rows.select(kept), launched.token_ids()[kept])
