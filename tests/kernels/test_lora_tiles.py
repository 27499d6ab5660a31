"""Rows of a step in tiles of one adapter each."""

import random

import numpy as np
import pytest

pytest.importorskip("triton")

from pdserve_kernels.triton.linears.lora import TILE_ROWS
from pdserve_kernels.triton.linears.step_lora import NONE, lora_columns, max_num_tiles
from support.samples import seeds


@pytest.mark.parametrize("seed", seeds(200))
def test_each_row_with_an_adapter_is_in_one_tile_of_its_adapter(seed: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.randint(1, 20)
    some = rng.sample(range(num_slots), rng.randint(1, num_slots))
    slots = [rng.choice([NONE, *some]) for _ in range(rng.randint(0, 300))]
    columns = lora_columns(np.array(slots, dtype=np.int64))
    rows, of_tiles = columns["lora_rows"], columns["lora_slots"]
    assert rows.shape == (len(of_tiles), TILE_ROWS)
    found = {}
    for tile, slot in zip(rows.tolist(), of_tiles.tolist(), strict=True):
        named = [row for row in tile if row != NONE]
        assert named
        assert slot != NONE
        found |= dict.fromkeys(named, slot)
    assert (rows != NONE).sum() == len(found)
    assert found == {row: slot for row, slot in enumerate(slots) if slot != NONE}
    assert len(of_tiles) <= max_num_tiles(len(slots), num_slots)


@pytest.mark.parametrize("num_slots", [1, 3, 16])
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 64, 65, 512])
def test_there_may_be_as_many_tiles(num_rows: int, num_slots: int) -> None:
    """One row of each adapter but the first, which has the rest."""
    slots = np.zeros(num_rows, dtype=np.int64)
    others = min(num_rows, num_slots) - 1
    slots[:others] = np.arange(1, num_slots)[:others]
    assert len(lora_columns(slots)["lora_slots"]) == max_num_tiles(num_rows, num_slots)
