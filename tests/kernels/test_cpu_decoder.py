"""All layers in one call: the bits of the set's functions one by one, in any batch."""

import dataclasses

import pytest
import torch
from decoder_models import LENGTH, Chunk, Model, Shape, check_chunks

from pdserve_kernels import cpu, reference
from pdserve_kernels.cpu.decoder import FUNCTIONS
from pdserve_kernels.layer_functions import run_layer_by_layer
from pdserve_kernels.metadata import AttentionMetadata

pytestmark = pytest.mark.usefixtures("each_isa")


SHAPES = [
    pytest.param(Shape(head_dim=128), id="q and k norms"),
    pytest.param(Shape(has_bias=True, has_qk_norm=False, num_heads=6, intermediate=72), id="bias"),
    pytest.param(Shape(head_dim=80, hidden=100, num_kv_heads=4), id="odd sizes"),
    pytest.param(Shape(head_dim=96, windows=(None, 20, 20, None)), id="windows in two groups"),
    pytest.param(Shape(hidden=520, num_heads=8, num_kv_heads=1, head_dim=64), id="mqa"),
    pytest.param(Shape(num_heads=2, head_dim=256), id="large heads"),
]
# (What is rounded differently may choose other experts.)
WITH_EXPERTS = [
    *SHAPES,
    pytest.param(Shape(num_experts=5, windows=(None, 20, None)), id="experts"),
    pytest.param(Shape(num_experts=6, shared_size=200, has_bias=True), id="a shared expert"),
]


def with_padding(metadata: AttentionMetadata, num: int) -> AttentionMetadata:
    slots = torch.cat((metadata.slot_mapping, torch.full((num,), -1)))
    return dataclasses.replace(metadata, slot_mapping=slots)


WHOLE = [Chunk(0, 0, LENGTH)]
MIXED = [Chunk(2, 0, 1), Chunk(1, 0, 1), Chunk(0, 0, 33), Chunk(3, 0, 16)]
FEW = [Chunk(0, 0, 1), Chunk(3, 0, 3)]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("shape", WITH_EXPERTS)
def test_it_has_the_bits_of_its_parts_with_any_number_of_threads(shape, num_threads, set_threads):
    check_parts(Model(shape), num_threads, set_threads)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_quantized_experts_are_part_of_the_one_call(kind, set_threads):
    check_parts(Model(Shape(num_experts=5, shared_size=96), kind=kind), 2, set_threads)


def check_parts(model, num_threads, set_threads):
    packed = cpu.pack_decoder(model.decoder)
    assert packed.native is not None
    for chunks in (WHOLE, MIXED, FEW):
        hidden_states, positions, metadata = model.step(chunks)
        before, caches = hidden_states.clone(), [model.new_cache(), model.new_cache()]
        set_threads(1)
        composed = run_layer_by_layer(
            FUNCTIONS, model.decoder, hidden_states, positions, caches[0], metadata
        )
        set_threads(num_threads)
        fused = cpu.run_decoder(hidden_states, packed, positions, caches[1], metadata)
        assert fused.isfinite().all()
        assert torch.equal(fused, composed)
        assert torch.equal(*(cache.nan_to_num() for cache in caches))
        assert torch.equal(hidden_states, before)


@pytest.mark.parametrize("shape", WITH_EXPERTS)
def test_a_request_has_its_bits_in_any_batch_and_chunks(shape):
    model = Model(shape)
    check_chunks(model, cpu.pack_decoder(model.decoder))


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_as_near_to_fp32_as_the_reference_in_bf16(shape):
    outputs = []
    for kernels, dtype in (
        (cpu, torch.bfloat16),
        (reference, torch.bfloat16),
        (reference, torch.float32),
    ):
        model = Model(shape, kernels, dtype)
        hidden_states, positions, metadata = model.step(WHOLE)
        packed, cache = kernels.pack_decoder(model.decoder), model.new_cache()
        outputs.append(kernels.run_decoder(hidden_states, packed, positions, cache, metadata))
    *outputs, expected = outputs
    our_error, their_error = ((output - expected).square().mean().sqrt() for output in outputs)
    assert our_error < 1.2 * their_error
    assert our_error < 0.05 * expected.square().mean().sqrt()


def test_padding_rows_are_computed_apart_and_not_written():
    model = Model(Shape())
    packed = cpu.pack_decoder(model.decoder)
    hidden_states, positions, (metadata,) = model.step(MIXED)
    plain = cpu.run_decoder(
        hidden_states, packed, positions, cache := model.new_cache(), [metadata]
    )
    padded_cache = model.new_cache()
    padded = cpu.run_decoder(
        torch.cat((hidden_states, hidden_states[:5])),
        packed,
        torch.cat((positions, positions[:5])),
        padded_cache,
        [with_padding(metadata, 5)],
    )
    assert torch.equal(padded[:-5], plain)
    assert torch.equal(cache.nan_to_num(), padded_cache.nan_to_num())


def test_caches_in_other_formats_and_weights_in_other_dtypes_run_layer_by_layer():
    model = Model(Shape())
    packed = cpu.pack_decoder(model.decoder)
    hidden_states, positions, metadata = model.step(MIXED, block_size=8)
    small_blocks = cpu.run_decoder(hidden_states, packed, positions, model.new_cache(8), metadata)
    expected = run_layer_by_layer(
        FUNCTIONS, model.decoder, hidden_states, positions, model.new_cache(8), metadata
    )
    assert torch.equal(small_blocks, expected)
    in_fp32 = Model(Shape(), dtype=torch.float32)
    packed = cpu.pack_decoder(in_fp32.decoder)
    assert packed.native is None
    hidden_states, positions, metadata = in_fp32.step(MIXED)
    output = cpu.run_decoder(hidden_states, packed, positions, in_fp32.new_cache(), metadata)
    assert output.dtype == torch.float32


def test_what_does_not_fit_is_refused_before_anything_is_read():
    model = Model(Shape())
    packed, cache = cpu.pack_decoder(model.decoder), model.new_cache()
    hidden_states, positions, metadata = model.step(MIXED)
    cases = {
        "positions:": (hidden_states, positions[1:], cache, metadata),
        "hidden_states": (hidden_states[:, 1:], positions, cache, metadata),
        "hidden_states is": (hidden_states.float(), positions, cache, metadata),
        "a block's heads": (hidden_states, positions, cache[:, :1], metadata),
        "2 KV groups": (hidden_states, positions, cache, metadata * 2),
        "a layer is in slot 1": (hidden_states, positions, cache[:, :, :1], metadata),
        "positions are 0 to 200,": (hidden_states, with_last(positions, 200), cache, metadata),
        "positions are -1 to": (hidden_states, with_last(positions, -1), cache, metadata),
    }
    for message, (states, at, kv_cache, groups) in cases.items():
        with pytest.raises(ValueError, match=message):
            cpu.run_decoder(states, packed, at, kv_cache, groups)
    assert cache.isnan().all()


def with_last(indices: torch.Tensor, value: int) -> torch.Tensor:
    return torch.cat((indices[:-1], indices.new_tensor([value])))


def test_metadata_that_points_out_of_the_cache_is_refused_before_anything_is_written():
    model = Model(Shape())
    packed, cache = cpu.pack_decoder(model.decoder), model.new_cache()
    hidden_states, positions, (metadata,) = model.step(MIXED)
    slots, table = metadata.slot_mapping, metadata.block_table
    beyond = table.clone()
    beyond[2, 2] = len(cache)  # the last of the three blocks of a request of 33 tokens
    cases = {
        "slot_mapping of group 0": {"slot_mapping": with_last(slots, 0)[1:]},
        "slot_mapping is torch.int32": {"slot_mapping": slots.int()},
        rf"slots are .* to {16 * len(cache)}, must be in \[-1, {16 * len(cache)}\)": {
            "slot_mapping": with_last(slots, 16 * len(cache))
        },
        "slots are -2 to": {"slot_mapping": with_last(slots, -2)},
        "a request has 201": {"seq_lens_host": (201, 1, 1, 1)},
        "block_table and positions go to 32": {"block_table": table[:, :2]},
        r"block_table is \[3, 40\], must have 4 rows": {"block_table": table[1:]},
        f"blocks are 0 to {len(cache)}, must be": {"block_table": beyond},
        "blocks are -1 to": {"block_table": beyond.clamp_max(-1)},
        r"query_start_loc is \[1, .*on the host \[0,": {
            "query_start_loc": metadata.query_start_loc + 1
        },
        r"query_start_loc is \[0, 1\]": {"query_start_loc": metadata.query_start_loc[:2]},
        r"seq_lens is \[2, 2, 34, 17\], .* \[1, 1, 33, 16\]": {"seq_lens": metadata.seq_lens + 1},
    }
    for message, changes in cases.items():
        group = dataclasses.replace(metadata, **changes)
        with pytest.raises(ValueError, match=message):
            cpu.run_decoder(hidden_states, packed, positions, cache, [group])
    assert cache.isnan().all()


def test_what_follows_a_request_s_last_block_may_be_anything():
    model = Model(Shape())
    packed = cpu.pack_decoder(model.decoder)
    hidden_states, positions, (metadata,) = model.step(MIXED)
    table = metadata.block_table.clone()
    for row, length in enumerate(metadata.seq_lens_host):
        table[row, -(-length // 16) :] = -(2**31) if row else 2**31 - 1
    plain, other = (
        cpu.run_decoder(hidden_states, packed, positions, model.new_cache(), [group])
        for group in (metadata, dataclasses.replace(metadata, block_table=table))
    )
    assert torch.equal(plain, other)
