"""Which rows of a step have which adapter, as the kernels of `lora.py` read it on the device.

Rows with one adapter are put together in tiles, as vLLM sorts a step's tokens by their adapters: so
rows of several requests read its weights once, and a step has few tiles, whoever is in it. What a
CUDA graph has recorded launches a program for each tile that there may be; one that is empty ends
at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pdserve_kernels.lora import LINEARS, LoraRows, LoraSegment
from pdserve_kernels.triton.linears.lora import (
    BLOCK_RANKS,
    NUM_FIELDS,
    TILE_ROWS,
    LinearLora,
    PackedAdapter,
)
from pdserve_kernels.triton.staging import Field, Layout

# Stands for a row without an adapter, an empty tile, and a slot of a tile that has no row.
NONE = -1
# How many linears of a checkpoint lie side by side in each of LINEARS, with their ranks.
_NUM_PARTS = (3, 1, 2, 1)

Integers = npt.NDArray[np.integer]
LoraColumns = dict[str, npt.NDArray[np.generic]]


class AdapterTable:
    """The adapters that steps may have, by slot, at an address that does not change.

    Entries are written on the current stream, which has to be that of the steps: what was launched
    there before has read the old ones, what comes behind reads the new ones. torch's allocator
    gives an adapter's memory out again in that order, too. So a slot, and the memory that it points
    to, may go to another adapter while steps with the old one run.
    """

    def __init__(
        self, num_slots: int, *, num_layers: int, max_rank: int, device: torch.device
    ) -> None:
        """No linear of a checkpoint may have more ranks than max_rank."""
        shape = (num_slots, num_layers, len(LINEARS), NUM_FIELDS)
        self.entries = torch.zeros(shape, dtype=torch.int64, device=device)
        self.num_ranks = tuple(_padded(parts * max_rank) for parts in _NUM_PARTS)

    def write(self, slot: int, adapter: PackedAdapter) -> None:
        """Have a slot stand for an adapter, whose memory has to stay until it is cleared."""
        self.entries[slot].copy_(adapter.table, non_blocking=True)

    def clear(self, slot: int) -> None:
        """Have it stand for none: rows that name it get nothing."""
        self.entries[slot].zero_()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLora:
    """The rows of a step that have adapters, on the device."""

    # int32 [tiles, TILE_ROWS], in any order, and [tiles]; NONE where there is nothing.
    rows: torch.Tensor
    slots: torch.Tensor
    # int64 [slots, layers, linears, NUM_FIELDS]
    entries: torch.Tensor
    # The ranks of each of LINEARS: no adapter has more.
    num_ranks: tuple[int, ...]

    @classmethod
    def of(cls, views: Mapping[str, torch.Tensor], table: AdapterTable) -> "StepLora":
        """Return what a layout with `lora_fields` says, int32 [tiles, TILE_ROWS] and [tiles], whose
        slots are the table's.
        """
        return cls(
            rows=views["lora_rows"],
            slots=views["lora_slots"],
            entries=table.entries,
            num_ranks=table.num_ranks,
        )

    @classmethod
    def of_segments(
        cls, segments: Sequence[LoraSegment], device: torch.device
    ) -> "StepLora | None":
        """Return the same of adapters that are in no table; None if there are no segments."""
        if not segments:
            return None
        rows, slots = _staged_segments(segments, device)
        num_ranks = max(segment.adapter.num_ranks for segment in segments)
        return cls(
            rows=rows,
            slots=slots,
            entries=torch.stack([segment.adapter.table for segment in segments]),
            num_ranks=(num_ranks,) * len(LINEARS),
        )

    def of_linear(self, layer: int, name: str) -> LinearLora:
        """Return what there is for one of a layer's LINEARS."""
        index = LINEARS.index(name)
        return LinearLora(
            rows=self.rows,
            slots=self.slots,
            table=self.entries[:, layer, index],
            num_ranks=self.num_ranks[index],
        )


def lora_fields(num_tiles: int) -> dict[str, Field]:
    """Return a step's tiles as fields of a layout."""
    return {
        "lora_rows": Field(np.int32, (num_tiles, TILE_ROWS)),
        "lora_slots": Field(np.int32, (num_tiles,)),
    }


def lora_columns(slots: Integers) -> LoraColumns:
    """Return the tiles of a step's rows by their names, int32 [tiles, TILE_ROWS] and [tiles]; slots
    is [rows], NONE without adapter.
    """
    order = slots.argsort(kind="stable")
    order = order[np.count_nonzero(slots == NONE) :]
    found, counts = np.unique(slots[order], return_counts=True)
    num_tiles = -(-counts // TILE_ROWS)
    # What is missing to whole tiles before each slot's rows.
    gaps = (num_tiles * TILE_ROWS - counts).cumsum() - (num_tiles * TILE_ROWS - counts)
    rows = np.full(num_tiles.sum() * TILE_ROWS, NONE, dtype=np.int32)
    rows[np.arange(len(order)) + gaps.repeat(counts)] = order
    return {
        "lora_rows": rows.reshape(-1, TILE_ROWS),
        "lora_slots": found.repeat(num_tiles).astype(np.int32),
    }


def max_num_tiles(num_rows: int, num_slots: int) -> int:
    """Return how many tiles so many rows take at most: where as many adapters as there are have
    tiles that are not full.
    """
    num_adapters = min(num_rows, num_slots)
    return num_adapters + (num_rows - num_adapters) // TILE_ROWS


def add_rows(out: torch.Tensor, x: torch.Tensor, rows: Sequence[LoraRows]) -> torch.Tensor:
    """Add to out [n, out_features] what adapters add to a linear of x [n, in_features], of one
    dtype; return it.
    """
    found = [each for each in rows if each.weight is not None]
    if found:
        table = torch.tensor([each.weight.fields() for each in found], dtype=torch.int64)
        tiles, slots = _staged_segments(found, x.device)
        num_ranks = max(len(each.weight.a) for each in found)
        step = LinearLora(rows=tiles, slots=slots, table=table.to(x.device), num_ranks=num_ranks)
        step.add(out, x)
    return out


def _staged_segments(
    segments: Sequence[LoraSegment | LoraRows], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tiles of segments, each of which has a slot of its own."""
    slots = np.full(max(each.end for each in segments), NONE)
    for index, each in enumerate(segments):
        slots[each.begin : each.end] = index
    columns = lora_columns(slots)
    views = Layout(lora_fields(len(columns["lora_slots"]))).to_device(columns, device)
    return views["lora_rows"], views["lora_slots"]


def _padded(num_ranks: int) -> int:
    return -(-num_ranks // BLOCK_RANKS) * BLOCK_RANKS
