"""What a model gets of a step, made of the batch's arrays."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pdserve_engine.kv.kv_cache import KVCache
from pdserve_engine.models.base import ForwardInputs
from pdserve_engine.runner.run.encoder_cache import EncoderCache, StepEmbeds
from pdserve_engine.runner.run.input_batch import InputBatch
from pdserve_engine.runner.run.step_arrays import StepArrays
from pdserve_engine.sampling.logits_rows import Rows
from pdserve_kernels.lora import LoraSegment
from pdserve_kernels.metadata import AttentionMetadata


class StepInputs:
    """Reads the batch, the pictures and the adapters that there are."""

    def __init__(
        self,
        batch: InputBatch,
        kv_cache: KVCache,
        encoder_cache: EncoderCache,
        device: torch.device,
    ) -> None:
        self.batch = batch
        self.kv_cache = kv_cache
        self.device = device
        # By digest, as the model's `pack_adapter` made them. They outlive the model in a sleep.
        self.adapters: dict[str, Any] = {}
        self._encoder_cache = encoder_cache
        self._block_size = kv_cache.spec.block_size

    def build(self, step: StepArrays) -> ForwardInputs:
        """Return all of a step's inputs, on the device."""
        pictures = self.gather_embeds(step)
        return ForwardInputs(
            token_ids=self.to_device(self.batch.token_ids[step.token_rows, step.positions]),
            positions=self.to_device(step.positions),
            kv_cache=self.kv_cache.tensor,
            metadata=self._build_metadata(step),
            lora=self.lora_segments(step),
            mm_embeds=None if pictures is None else pictures.embeds,
            mm_rows=None if pictures is None else self.to_device(pictures.rows),
        )

    def gather_embeds(self, step: StepArrays) -> StepEmbeds | None:
        return self._encoder_cache.gather(
            self.batch, step.rows, step.starts, step.query_lens, step.seq_lens
        )

    def lora_segments(self, step: StepArrays) -> Sequence[LoraSegment]:
        """Return which tokens have which adapter; neighbours with the same one are one segment."""
        found: list[LoraSegment] = []
        if not self.adapters:
            return found
        for row, begin, length in zip(
            step.rows.tolist(), step.starts.tolist(), step.query_lens.tolist(), strict=True
        ):
            digest = self.batch.adapters[row]
            if digest is None:
                continue
            adapter, end = self.adapters[digest], begin + length
            if found and found[-1].end == begin and found[-1].adapter is adapter:
                begin = found.pop().begin
            found.append(LoraSegment(begin, end, adapter))
        return found

    def _build_metadata(self, step: StepArrays) -> tuple[AttentionMetadata, ...]:
        """Describe the step to each KV group: they differ in where their blocks are."""
        max_blocks = -(-int(step.seq_lens.max()) // self._block_size)
        query_start_loc = np.zeros(len(step.rows) + 1, dtype=np.int32)
        step.query_lens.cumsum(out=query_start_loc[1:])
        describe = partial(
            AttentionMetadata,
            query_start_loc=self.to_device(query_start_loc),
            seq_lens=self.to_device(step.seq_lens.astype(np.int32)),
            query_lens_host=tuple(step.query_lens.tolist()),
            seq_lens_host=tuple(step.seq_lens.tolist()),
            num_decodes=int((step.query_lens == 1).sum()),
        )
        tables = self.batch.block_tables
        return tuple(
            describe(
                block_table=self.to_device(table[step.rows, :max_blocks]),
                slot_mapping=self.to_device(slots),
            )
            for table, slots in zip(tables, self.slot_mappings(step), strict=True)
        )

    def slot_mappings(self, step: StepArrays) -> Iterator[Rows]:
        """Yield where each token's KV goes, int64 [num_tokens], for each KV group."""
        blocks, offsets = np.divmod(step.positions, self._block_size)
        for table in self.batch.block_tables:
            yield table[step.token_rows, blocks].astype(np.int64) * self._block_size + offsets

    def to_device(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        """Return the array [...] on the device, in its shape and dtype."""
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)
