"""Which slot of a device's table each LoRA adapter of a runner has."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pdserve_engine.sampling.logits_rows import Rows
from pdserve_kernels.triton.linears.lora import PackedAdapter
from pdserve_kernels.triton.linears.step_lora import (
    NONE,
    AdapterTable,
    LoraColumns,
    StepLora,
    lora_columns,
)


class AdapterSlots:
    """Owned by the thread that launches steps: the table's order is that of its stream."""

    def __init__(self, count: int, *, num_layers: int, max_rank: int, device: torch.device) -> None:
        """See AdapterTable."""
        self.count = count
        self._table = AdapterTable(count, num_layers=num_layers, max_rank=max_rank, device=device)
        # By digest.
        self._slots: dict[str, int] = {}
        self._free = list(range(count))

    def add(self, digest: str, adapter: PackedAdapter) -> None:
        """Give an adapter a slot; the engine's pool holds no more of them than there are."""
        if digest not in self._slots:
            self._slots[digest] = self._free.pop()
        self._table.write(self._slots[digest], adapter)

    def remove(self, digest: str) -> None:
        """Take it back; no-op if it has none. Steps that are launched already have read it by the
        time that somebody else's entry is there.
        """
        slot = self._slots.pop(digest, None)
        if slot is not None:
            self._table.clear(slot)
            self._free.append(slot)

    def columns(self, digests: Sequence[str | None], query_lens: Rows) -> LoraColumns:
        """Return a step's tiles, as `lora_fields` names them, given each request's adapter and
        number of tokens, int64 [num_reqs]. Raises KeyError for an adapter that has no slot.
        """
        slots = [NONE if digest is None else self._slots[digest] for digest in digests]
        return lora_columns(np.array(slots, dtype=np.int64).repeat(query_lens))

    def on_device(self, views: Mapping[str, torch.Tensor]) -> StepLora:
        """Return a step's tiles, given the arrays of a layout with `lora_fields`, int32 [tiles,
        TILE_ROWS] and [tiles].
        """
        return StepLora.of(views, self._table)
