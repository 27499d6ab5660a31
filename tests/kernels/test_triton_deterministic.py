"""A row's bits depend on nothing but the row: on a GPU, or in Triton's interpreter if
TRITON_INTERPRET=1, as `test_triton_without_gpu.py` starts it.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from adapters import make_adapter
from decoder_models import Chunk, Model, Shape
from integer_weights import KINDS, exact, make_fp8_weight, make_weight

from pdserve_kernels import reference
from pdserve_kernels.groups import tree_sum
from pdserve_kernels.lora import LoraSegment
from support.interpreted import convert_fp8_as_gpus_do
from support.triton_kernels import DEVICE, INTERPRETED, ON_GPU_OR_INTERPRETED, on_device

# The interpreter's bf16 is not a GPU's.
DTYPES = [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# Positions of a part of a context here.
SPLIT = 128
LENGTHS = [1, 64, 65, 128, 300]
BATCHES = [
    pytest.param({"dtype": torch.float32}, id="gqa, fp32"),
    pytest.param({}, id="gqa"),
    pytest.param({"num_heads": 3, "num_kv_heads": 3, "head_dim": 80}, id="mha"),
    pytest.param({"num_heads": 7, "num_kv_heads": 1}, id="mqa"),
    pytest.param({"window": 100, "softcap": 5.0}, id="window and softcap"),
]

pytestmark = ON_GPU_OR_INTERPRETED


@pytest.fixture
def kernels(monkeypatch):
    from pdserve_kernels.triton import deterministic
    from pdserve_kernels.triton.deterministic import split_attention

    monkeypatch.setattr(split_attention, "SPLIT", SPLIT)
    return deterministic


def assert_close(actual, expected, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("wanted", BATCHES)
def test_attention_of_a_request_alone_and_in_a_batch(kernels, make_batch, dense_attention, wanted):
    query_lens, options = [1] * len(LENGTHS) + [70, 5], {"dtype": DTYPES[1]} | wanted
    batch = make_batch(query_lens, [*LENGTHS, 200, 30], num_decodes=len(LENGTHS), **options)
    dtype = options["dtype"]
    together = batch.on(DEVICE).attend(kernels.paged_attention)
    assert_close(together, dense_attention(batch).to(dtype), dtype)
    for request, expected in enumerate(together.split(query_lens)):
        alone = batch.only(request).on(DEVICE).attend(kernels.paged_attention)
        assert torch.equal(alone, expected), request


@pytest.mark.parametrize("wanted", BATCHES)
def test_attention_of_a_prompt_whole_in_chunks_and_by_single_tokens(kernels, make_batch, wanted):
    batch = make_batch([290], [290], num_decodes=0, **{"dtype": DTYPES[1]} | wanted)
    whole = batch.on(DEVICE).attend(kernels.paged_attention)
    for edges in ([0, 17, 21, 128, 290], [0, 130, 290]):
        for first, last in itertools.pairwise(edges):
            chunk = batch.only(0, first=first, last=last).on(DEVICE)
            assert torch.equal(chunk.attend(kernels.paged_attention), whole[first:last])
    for position in (0, 64, 100, 127, 128, 289):
        token = batch.only(0, first=position, last=position + 1).on(DEVICE)
        assert torch.equal(token.attend(kernels.paged_attention)[0], whole[position]), position


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "num_sums"), [(60, 1), (320, 8), (512, 4), (336, 2)])
def test_linears_of_any_number_of_rows(kernels, dtype, in_features, num_sums):
    weight = torch.randn(150, in_features).to(dtype) * in_features**-0.5
    bias, x = torch.randn(150).to(dtype), torch.randn(100, in_features).to(dtype)
    packed = kernels.pack_linear(weight.to(DEVICE), bias.to(DEVICE), num_sums=num_sums)
    together = kernels.linear(x.to(DEVICE), packed)
    assert_close(together, (x.double() @ weight.double().T + bias.double()).to(dtype), dtype)
    for count in (1, 17, 64, 65):
        assert torch.equal(kernels.linear(x[:count].to(DEVICE), packed), together[:count])
        assert torch.equal(kernels.linear(x[-count:].to(DEVICE), packed), together[-count:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_ranks_with_a_part_of_the_inputs_bring_the_bits_of_one(kernels, dtype, size):
    weight, x = torch.randn(70, 640).to(dtype), torch.randn(20, 640).to(dtype)
    whole = kernels.linear_sums(x.to(DEVICE), kernels.pack_linear(weight.to(DEVICE), num_sums=8))
    sums = [
        kernels.linear_sums(
            x_part.contiguous().to(DEVICE),
            kernels.pack_linear(part.contiguous().to(DEVICE), num_sums=8 // size),
        )
        for x_part, part in zip(x.chunk(size, 1), weight.chunk(size, 1), strict=True)
    ]
    assert torch.equal(tree_sum(sums), whole)
    # Nor does it matter how many outputs a rank has.
    half = kernels.pack_linear(weight[35:].to(DEVICE), num_sums=8)
    assert torch.equal(kernels.linear_sums(x.to(DEVICE), half), whole[:, 35:])


@pytest.mark.parametrize("kind", KINDS)
def test_linears_of_integers(kernels, kind):
    dtype = DTYPES[0]
    weight = replace(make_weight(70, 320, *kind), dtype=dtype)
    x = torch.randn(70, 320).to(dtype)
    packed = kernels.pack_linear(on_device(weight))
    together = kernels.linear(x.to(DEVICE), packed)
    assert_close(together.double() / 320, x.double() @ exact(weight).T / 320, dtype)
    for count in (1, 16, 65):
        assert torch.equal(kernels.linear(x[:count].to(DEVICE), packed), together[:count])


@pytest.mark.parametrize("group_size", [None, 128])
def test_linears_of_fp8_whole_and_of_ranks(kernels, group_size, monkeypatch):
    if INTERPRETED:
        convert_fp8_as_gpus_do(monkeypatch)
    dtype = DTYPES[1]
    weight = replace(make_fp8_weight(70, 1024, group_size), dtype=dtype)
    x = torch.randn(70, 1024).to(dtype) / 32
    packed = kernels.pack_linear(on_device(weight), num_sums=8)
    together = kernels.linear(x.to(DEVICE), packed)
    expected = x.double() @ weight.dequantize().double().T
    assert_close(together, expected.to(dtype), dtype)
    for count in (1, 16, 65):
        assert torch.equal(kernels.linear(x[:count].to(DEVICE), packed), together[:count])
    halves = [slice(0, 512), slice(512, 1024)]
    sums = [
        kernels.linear_sums(
            x[:, half].contiguous().to(DEVICE),
            kernels.pack_linear(on_device(weight.columns(half)), num_sums=4),
        )
        for half in halves
    ]
    assert torch.equal(tree_sum(sums), kernels.linear_sums(x.to(DEVICE), packed))


@pytest.mark.parametrize(("num_experts", "shared_size"), [(0, 0), (5, 0), (5, 100)])
def test_a_decoder_brings_a_request_s_bits_whatever_its_neighbours_and_chunks(
    kernels, num_experts, shared_size
):
    dtype = DTYPES[1]
    shape = Shape(head_dim=64, windows=(None, 40), num_experts=num_experts, shared_size=shared_size)
    model = Model(shape, kernels, dtype)
    model.decoder = on_device(model.decoder)
    adapter = make_adapter(kernels, model, 8, dtype)
    packed = kernels.pack_decoder(model.decoder)

    def run(*steps):
        """Each step is chunks; return what those of request 0, which has an adapter, bring."""
        cache, outputs = model.new_cache().to(DEVICE), []
        for chunks in steps:
            inputs = on_device(model.step(chunks))
            states, positions, metadata = inputs
            begins = list(itertools.accumulate((c.end - c.start for c in chunks), initial=0))
            mine = next(i for i, chunk in enumerate(chunks) if chunk.request == 0)
            own = (begins[mine], begins[mine + 1])
            lora = [LoraSegment(*own, adapter)]
            found = kernels.run_decoder(states, packed, positions, cache, metadata, lora)
            outputs.append(found[slice(*own)])
        return torch.cat(outputs)

    whole = run([Chunk(0, 0, 49)])
    other = [Chunk(2, 0, 1), Chunk(1, 0, 1), Chunk(0, 0, 30), Chunk(3, 0, 40)]
    decodes = [[Chunk(1, i - 46, i - 45), Chunk(0, i, i + 1)] for i in range(47, 49)]
    others = run(other, [Chunk(0, 30, 47)], *decodes)
    assert torch.equal(others, whole)
    plain = Model(shape, reference, dtype)
    states, positions, metadata = plain.step([Chunk(0, 0, 49)])
    lora = [LoraSegment(0, 49, make_adapter(reference, plain, 8, dtype))]
    expected = reference.run_decoder(
        states, reference.pack_decoder(plain.decoder), positions, plain.new_cache(), metadata, lora
    )
    torch.testing.assert_close(whole.cpu(), expected, rtol=0, atol=8 * TOLERANCE[dtype])
