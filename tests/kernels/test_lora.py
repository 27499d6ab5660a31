"""Adapters: each row gets what its own adds, whoever its neighbours are, and others get nothing."""

import random

import pytest
import torch
from adapters import make_adapter, make_parts, segments
from decoder_models import LENGTH, Chunk, Model, Shape, check_chunks

from pdserve_kernels import cpu, reference
from pdserve_kernels.cpu.decoder import FUNCTIONS
from pdserve_kernels.cpu.linear_int import PANEL
from pdserve_kernels.layer_functions import run_layer_by_layer
from pdserve_kernels.lora import LoraRows, LoraSegment
from support.samples import seeds

pytestmark = pytest.mark.usefixtures("each_isa")

SHAPES = [
    pytest.param(Shape(head_dim=128), id="q and k norms"),
    pytest.param(Shape(has_bias=True, has_qk_norm=False, num_heads=6, intermediate=72), id="bias"),
    pytest.param(Shape(head_dim=80, hidden=100, num_kv_heads=4), id="odd sizes"),
]
MIXED = [Chunk(2, 0, 1), Chunk(1, 0, 1), Chunk(0, 0, 33), Chunk(3, 0, 16)]
# Of each request.
RANKS = (8, None, 64, 3)


def adapters_of(kernels, model, dtype=torch.bfloat16):
    return [None if rank is None else make_adapter(kernels, model, rank, dtype) for rank in RANKS]


def panels_one_by_one(parts, packed):
    """For each panel: the first rank of those with outputs in it, and their rows of B."""
    outputs_of_part = packed.out_features // packed.num_parts
    found = []
    for start in range(0, packed.out_features, outputs_of_part):
        for first in range(start, start + outputs_of_part, PANEL):
            end = min(first + PANEL, start + outputs_of_part)
            rank, first_rank, rows = 0, 0, []
            for part in parts:
                for index in range(len(part.a)):
                    row = torch.zeros(PANEL, dtype=torch.bfloat16)
                    is_in = False
                    for output in range(first, end):
                        if 0 <= output - part.first_output < len(part.b):
                            row[output - first] = part.b[output - part.first_output, index]
                            is_in = True
                    if is_in:
                        first_rank = first_rank if rows else rank
                        rows.append(row)
                rank += len(part.a)
            found.append((first_rank, rows))
    return found


@pytest.mark.parametrize("seed", seeds(40))
def test_panels_are_packed_as_one_by_one(seed):
    rng = random.Random(seed)
    num_parts = rng.choice((1, 1, 2, 3))
    if num_parts == 1:
        sizes = [(rng.randint(1, 50), rng.random() < 0.8) for _ in range(rng.randint(1, 4))]
    else:
        sizes = [(rng.randint(1, 50), True)] * num_parts
    num_outputs = sum(size for size, _ in sizes)
    parts = make_parts(sizes, 24, rng.randint(1, 5), torch.bfloat16, seed=seed)
    weight = torch.randn(num_outputs, 24).bfloat16()
    packed = cpu.pack_linear(weight, num_parts=num_parts)
    lora = cpu.pack_lora(parts, packed)
    if not parts:
        assert lora is None
        return
    expected = panels_one_by_one(parts, packed)
    assert lora.panels[:, 1:].tolist() == [[first, len(rows)] for first, rows in expected]
    assert torch.equal(lora.b, torch.stack([row for _, rows in expected for row in rows]))
    row_bytes = PANEL * lora.b.element_size()
    starts = [sum(len(rows) for _, rows in expected[:index]) for index in range(len(expected))]
    for moved in (lora, lora.moved(torch.zeros(lora.num_elements, dtype=torch.bfloat16))):
        assert torch.equal(moved.b, lora.b)
        addresses = [(address - moved.b.data_ptr()) / row_bytes for address, *_ in moved.panels]
        assert addresses == starts


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_has_the_bits_of_its_parts_with_any_number_of_threads(
    shape, kind, num_threads, set_threads
):
    model = Model(shape, kind=kind)
    packed, adapters = cpu.pack_decoder(model.decoder), adapters_of(cpu, model)
    for chunks in (MIXED, MIXED[:2], [Chunk(2, 0, LENGTH)]):
        hidden_states, positions, metadata = model.step(chunks)
        lora = segments(chunks, adapters)
        set_threads(1)
        composed = run_layer_by_layer(
            FUNCTIONS, model.decoder, hidden_states, positions, model.new_cache(), metadata, lora
        )
        set_threads(num_threads)
        fused = cpu.run_decoder(hidden_states, packed, positions, model.new_cache(), metadata, lora)
        assert torch.equal(fused, composed)
        base = cpu.run_decoder(hidden_states, packed, positions, model.new_cache(), metadata)
        begin = 0
        for chunk in chunks:
            rows = slice(begin, begin + chunk.end - chunk.start)
            begin = rows.stop
            has_adapter = RANKS[chunk.request] is not None
            assert torch.equal(fused[rows], base[rows]) != has_adapter


@pytest.mark.parametrize("shape", SHAPES)
def test_a_request_has_its_bits_in_any_batch_and_chunks(shape):
    model = Model(shape)
    adapters = adapters_of(cpu, model)
    check_chunks(model, cpu.pack_decoder(model.decoder), lambda chunks: segments(chunks, adapters))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_the_product_with_merged_weights(kernels, dtype, has_bias):
    generator = torch.Generator().manual_seed(0)
    sizes, in_features, num_rows = [(70, True), (34, False), (40, True)], 60, 9
    weight = torch.randn(144, in_features, generator=generator).bfloat16() * in_features**-0.5
    bias = torch.randn(144, generator=generator).bfloat16() if has_bias else None
    x = torch.randn(num_rows, in_features, generator=generator).bfloat16()
    packed = kernels.pack_linear(weight.to(dtype), None if bias is None else bias.to(dtype))
    parts = [make_parts(sizes, in_features, rank, dtype, seed=rank) for rank in (8, 64)]
    first, second = (kernels.pack_lora(each, packed) for each in parts)
    out = kernels.linear_lora(x.to(dtype), packed, [LoraRows(1, 3, first), LoraRows(5, 9, second)])
    base = kernels.linear(x.to(dtype), packed)
    assert torch.equal(out[[0, 3, 4]], base[[0, 3, 4]])
    for rows, adapter in ((slice(1, 3), parts[0]), (slice(5, 9), parts[1])):
        merged = weight.double()
        for part in adapter:
            change = part.scale * part.b.double() @ part.a.double()
            merged[part.first_output : part.first_output + len(part.b)] += change
        expected = x[rows].double() @ merged.T + (0 if bias is None else bias.double())
        error = (out[rows].double() - expected).abs().max()
        scale = expected.abs().max()
        assert error / scale < (2.0**-7 if dtype == torch.bfloat16 else 1e-5)
        for row in range(rows.start, rows.stop):
            weight_of = first if rows.start == 1 else second
            alone = kernels.linear_lora(
                x[row : row + 1].to(dtype), packed, [LoraRows(0, 1, weight_of)]
            )
            assert torch.equal(alone[0], out[row])


def test_rows_that_a_step_does_not_have_are_refused():
    model = Model(Shape())
    packed, adapter = cpu.pack_decoder(model.decoder), make_adapter(cpu, model, 8)
    states, positions, metadata = model.step([Chunk(0, 0, 4)])
    for rows in ([(0, 5)], [(2, 2)], [(-1, 1)], [(0, 2), (1, 3)]):
        lora = [LoraSegment(*each, adapter) for each in rows]
        with pytest.raises(ValueError, match="lora has rows"):
            cpu.run_decoder(states, packed, positions, model.new_cache(), metadata, lora)
