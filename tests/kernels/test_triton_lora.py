"""Adapters on CUDA: on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1."""

import random

import numpy as np
import pytest
import rank_bodies
import torch
from adapters import make_adapter, make_parts
from decoder_models import Chunk, Model, Shape

from pdserve_kernels import reference
from pdserve_kernels.groups import NUM_SUMS
from pdserve_kernels.lora import LoraRows, LoraSegment
from support.ranks import Devices, run_ranks
from support.triton_kernels import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    ON_GPU_OR_INTERPRETED,
    TOLERANCE,
    assert_close,
    on_device,
)

# Of an adapter in each slot.
RANKS = (3, 8, 14)

pytestmark = ON_GPU_OR_INTERPRETED


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_features", [60, 1500])
def test_adapters_add_what_merged_weights_do(kernels, dtype, in_features):
    sizes, num_rows = [(70, True), (34, False), (140, True)], 60
    weight = torch.randn(244, in_features).to(dtype) * in_features**-0.5
    x = torch.randn(num_rows, in_features).to(dtype)
    packed = kernels.pack_linear(weight.to(DEVICE))
    parts = [make_parts(sizes, in_features, rank, dtype, seed=rank) for rank in (5, 40)]
    adapters = [kernels.pack_lora(each, packed) for each in parts]
    rows = [LoraRows(1, 40, adapters[0]), LoraRows(45, 46, adapters[1]), LoraRows(46, 60, None)]
    out = kernels.linear_lora(x.to(DEVICE), packed, rows)
    base = kernels.linear(x.to(DEVICE), packed)
    alone = [0, *range(40, 45), *range(46, 60)]
    assert torch.equal(out[alone], base[alone])
    for (begin, end, _), of_adapter in zip(rows, parts, strict=False):
        merged = weight.double()
        for part in of_adapter:
            change = part.scale * part.b.double() @ part.a.double()
            merged[part.first_output : part.first_output + len(part.b)] += change
        expected = x[begin:end].double() @ merged.T
        assert_close(out[begin:end].double(), expected, dtype)
        # Whatever neighbours it has.
        for row in (begin, end - 1):
            one = LoraRows(0, 1, adapters[of_adapter is parts[1]])
            by_itself = kernels.linear_lora(x[row : row + 1].to(DEVICE), packed, [one])
            assert_close(by_itself[0].double(), expected[row - begin], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decoder_with_adapters_agrees_with_the_reference(kernels, dtype):
    outputs = []
    for module, place in ((reference, lambda value: value), (kernels, on_device)):
        model = Model(Shape(head_dim=64), module, dtype)
        model.decoder = place(model.decoder)
        states, positions, metadata = model.step([Chunk(1, 0, 1), Chunk(0, 0, 33), Chunk(2, 0, 9)])
        first, second = (make_adapter(module, model, rank, dtype) for rank in (8, 20))
        lora = [LoraSegment(0, 1, first), LoraSegment(34, 43, second)]
        inputs = (positions, model.new_cache(), metadata)
        packed = module.pack_decoder(model.decoder)
        outputs.append(module.run_decoder(place(states), packed, *map(place, inputs), lora).cpu())
    # Of two layers; each rounds as often as a kernel does.
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=4 * TOLERANCE[dtype])


class Table:
    """Adapters of a decoder of one layer, in slots, and what each row of a linear gets of them."""

    def __init__(self, kernels, dtype):
        from pdserve_kernels.triton.linears.step_lora import AdapterTable

        model = Model(Shape(hidden=160, head_dim=64, windows=(None,)), kernels, dtype)
        model.decoder = on_device(model.decoder)
        self.table = AdapterTable(
            len(RANKS) + 1, num_layers=1, max_rank=16, device=torch.device(DEVICE)
        )
        # The first slot is free.
        self.adapters = [make_adapter(kernels, model, rank, dtype) for rank in RANKS]
        for slot, adapter in enumerate(self.adapters, 1):
            self.table.write(slot, adapter)

    def linear(self, slots, *, num_tiles=None):
        """`slots` are the rows'. With num_tiles there are as many, as in a graph."""
        from pdserve_kernels.triton.linears.step_lora import (
            NONE,
            StepLora,
            lora_columns,
            lora_fields,
        )
        from pdserve_kernels.triton.staging import Layout

        columns = lora_columns(np.array(slots))
        layout = Layout(lora_fields(num_tiles or len(columns["lora_slots"])))
        host = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        for view in layout.views(host).values():
            view.fill_(NONE)
        layout.fill(host, columns)
        return StepLora.of(layout.views(host.to(DEVICE)), self.table).of_linear(0, "qkv")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_its_bits_among_any_others(kernels, dtype):
    from pdserve_kernels.triton.linears.step_lora import NONE, max_num_tiles

    rng, table = random.Random(0), Table(kernels, dtype)
    # Two tiles of one.
    slots = [NONE, 0, 1, 2, 3, *(rng.choice([NONE, 0, 1, 2, 2, 2, 2, 2, 3]) for _ in range(31))]
    x = torch.randn(len(slots), 160).to(dtype).to(DEVICE)
    base = torch.randn(len(slots), 512).to(dtype).to(DEVICE)
    out = base.clone()
    table.linear(slots, num_tiles=max_num_tiles(40, 4)).add(out, x)
    for row in (*range(5), 20, len(slots) - 1):
        alone = base[row : row + 1].clone()
        table.linear([slots[row]]).add(alone, x[row : row + 1])
        assert torch.equal(out[row : row + 1], alone)
        assert torch.equal(alone, base[row : row + 1]) == (slots[row] in (NONE, 0))


def test_a_slot_is_another_adapter_s_once_it_is_written(kernels):
    table = Table(kernels, torch.float32)
    x, base = torch.randn(3, 160).to(DEVICE), torch.zeros(3, 512).to(DEVICE)
    linear = table.linear([2, 1, 2])

    def added():
        out = base.clone()
        linear.add(out, x)  # a graph that is replayed has nothing else
        return out

    before = added()
    table.table.write(2, table.adapters[0])
    assert torch.equal(added()[1], before[1])
    expected = base.clone()
    table.linear([1, 1, 1]).add(expected, x)
    assert torch.equal(added(), expected)
    table.table.clear(2)
    assert torch.equal(added()[[0, 2]], base[[0, 2]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 8])
def test_ranks_that_have_a_part_of_the_inputs_shrink_to_the_same_bits(kernels, dtype, size):
    parts = make_parts([(70, True), (30, True)], 1600, 5, dtype)
    x = torch.randn(5, 1600).to(dtype)

    def shrunk(rank, size):
        mine = [part._replace(a=part.a.chunk(size, 1)[rank]) for part in parts]
        share = x.chunk(size, 1)[rank].contiguous().to(DEVICE)
        packed = kernels.pack_linear(torch.zeros(100, share.shape[1], dtype=dtype).to(DEVICE))
        weight = kernels.pack_lora(mine, packed)
        return linear_of(weight, num_rows=5).shrink(share, NUM_SUMS // size)

    assert torch.equal(torch.cat([shrunk(rank, size) for rank in range(size)]), shrunk(0, 1))


def linear_of(weight, num_rows):
    """What all rows get of one adapter's part of a linear."""
    from pdserve_kernels.triton.linears.lora import TILE_ROWS, LinearLora

    rows = torch.full((1, TILE_ROWS), -1, dtype=torch.int32)
    rows[0, :num_rows] = torch.arange(num_rows)
    return LinearLora(
        rows=rows.to(DEVICE),
        slots=torch.zeros(1, dtype=torch.int32).to(DEVICE),
        table=torch.tensor([weight.fields()]).to(DEVICE),
        num_ranks=len(weight.a),
    )


@pytest.mark.skipif(not INTERPRETED, reason="ranks meet over gloo")
@pytest.mark.parametrize("is_deterministic", [True, False])
def test_ranks_bring_the_states_of_one(is_deterministic):
    """To the bit, with deterministic kernels."""
    shape = Shape(hidden=64, intermediate=64, windows=(None,))
    chunks = [Chunk(1, 0, 1), Chunk(0, 0, 4), Chunk(2, 0, 3)]
    args = (shape, chunks, (8, None, 3), is_deterministic)
    expected = rank_bodies.run_triton(None, *args)
    tolerance = 0 if is_deterministic else 2e-5
    for states in run_ranks(Devices(2), rank_bodies.run_triton, *args):
        np.testing.assert_allclose(states, expected, rtol=tolerance, atol=tolerance)
    without = rank_bodies.run_triton(None, shape, chunks, (None,) * 3, is_deterministic)
    assert np.array_equal(expected[0], without[0])
    assert not np.array_equal(expected[1:], without[1:])
