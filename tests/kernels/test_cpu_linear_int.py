"""The C++ linear of integer weights: close to fp64, and each row by itself."""

import dataclasses
import random

import pytest
import torch
import torch.nn.functional as F
from integer_weights import KINDS, exact, make_weight

from pdserve_kernels import cpu, reference
from pdserve_kernels.groups import tree_sum
from pdserve_kernels.reference.quantization import quantize
from support.samples import seeds

ROW_COUNTS = [*range(1, 14), 64, 129, 193]
pytestmark = pytest.mark.usefixtures("each_isa")


def bf16(*shape):
    return torch.randn(shape).to(torch.bfloat16)


def assert_near(actual, x, weight, bias=None):
    """Within a rounding to bf16 and what the sums in fp32 lose."""
    expected = F.linear(x.double(), weight, None if bias is None else bias.double())
    size_of_terms = F.linear(x.double().abs(), weight.abs())
    excess = (
        (actual.double() - expected).abs() - 2.0**-8 * expected.abs() - 2.0**-20 * size_of_terms
    )
    assert (excess <= 0).all(), excess.max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(6))
def test_any_shape(kind, seed):
    torch.manual_seed(seed)
    choose = random.Random(f"{seed}").choice
    rows = choose([0, 1, 2, 6, 7, 13, 64, 193])
    in_features = choose([1, 2, 33, 64, 300, 1023, 1024, 2111])
    out_features = choose([1, 16, 63, 64, 65, 100, 320])
    weight, x = make_weight(out_features, in_features, *kind), bf16(rows, in_features)
    bias = bf16(out_features) * 30 if seed % 2 else None
    assert_near(cpu.linear(x, cpu.pack_linear(weight, bias)), x, exact(weight), bias)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_gets_the_same_bits_in_any_batch_with_any_threads(kind, set_threads):
    torch.manual_seed(0)
    packed = cpu.pack_linear(make_weight(200, 300, *kind), bf16(200))
    x = bf16(ROW_COUNTS[-1], 300)
    together = cpu.linear(x, packed)
    for threads in (1, 2):
        set_threads(threads)
        for count in ROW_COUNTS:
            assert torch.equal(cpu.linear(x[:count], packed), together[:count]), count
            assert torch.equal(cpu.linear(x[-count:], packed), together[-count:]), count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [64, 100])
def test_gate_and_up_in_one_pass_are_what_they_are_one_by_one(kind, part):
    torch.manual_seed(0)
    weight, bias, x = make_weight(2 * part, 96, *kind), bf16(2 * part), bf16(9, 96)
    packed = cpu.pack_linear(weight, bias, num_parts=2)
    gate_up = cpu.linear(x, packed)
    assert torch.equal(gate_up, cpu.linear(x, cpu.pack_linear(weight, bias)))
    assert torch.equal(cpu.linear_silu_mul(x, packed), cpu.silu_and_mul(gate_up))


def cut_columns(weight, columns):
    """The weight in pieces of so many inputs, cut between groups or within the only one."""
    for first in range(0, weight.shape[1], columns):
        groups = slice(0, 1)
        if weight.scales.shape[1] > 1:
            assert columns % weight.group_size == 0
            groups = slice(first // weight.group_size, (first + columns) // weight.group_size)
        yield dataclasses.replace(
            weight,
            values=weight.values[:, first : first + columns],
            scales=weight.scales[:, groups],
            zeros=None if weight.zeros is None else weight.zeros[:, groups],
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 6, 7, 50, 193, 200])
def test_a_product_in_eight_sums_is_the_tree_of_its_parts(kind, rows):
    torch.manual_seed(rows)
    columns = (kind[1] or 66) * random.Random(rows).randint(1, 3)
    weight, bias = make_weight(100, 8 * columns, *kind), bf16(100)
    x = bf16(rows, 8 * columns)
    whole = cpu.pack_linear(weight, bias, num_sums=8)
    assert_near(cpu.linear(x, whole), x, exact(weight), bias)
    for size in (2, 4, 8):
        of_rank = columns * 8 // size
        ranks = [cpu.pack_linear(cut, num_sums=8 // size) for cut in cut_columns(weight, of_rank)]
        inputs = zip(x.split(of_rank, 1), ranks, strict=True)
        total = tree_sum([cpu.linear_sums(part, rank) for part, rank in inputs])
        assert torch.equal(total, cpu.linear_sums(x, whole))
        assert torch.equal((total + bias.float()).to(torch.bfloat16), cpu.linear(x, whole))


@pytest.mark.parametrize("kind", KINDS)
def test_sums_that_end_within_a_group_share_its_scale(kind):
    torch.manual_seed(0)
    weight, x = make_weight(70, 16 * 9, *kind), bf16(9, 16 * 9)
    packed = cpu.pack_linear(weight, num_sums=8)
    assert_near(cpu.linear(x, packed), x, exact(weight))


def test_greedy_tokens_are_chosen_from_an_integer_lm_head():
    torch.manual_seed(0)
    packed = cpu.pack_linear(quantize(bf16(1000, 64), bits=8, group_size=None))
    x = bf16(5, 64)
    assert torch.equal(cpu.linear_argmax(x, packed).token_ids, cpu.linear(x, packed).argmax(-1))


@pytest.mark.parametrize(("bits", "bytes_per_weight"), [(8, 1.0), (4, 0.5)])
def test_integers_take_no_more_memory_than_their_bits(bits, bytes_per_weight):
    packed = cpu.pack_linear(quantize(bf16(1024, 512), bits=bits, group_size=32)).panels
    assert packed.values.nbytes == 1024 * 512 * bytes_per_weight
    assert packed.scales.nbytes == 1024 * 512 / 32 * packed.scales.itemsize


def test_in_fp32_the_dequantized_weight_is_used():
    torch.manual_seed(0)
    weight, x = quantize(torch.randn(40, 64), bits=4, group_size=32), torch.randn(3, 64)
    packed = cpu.pack_linear(weight)
    assert isinstance(packed, reference.LinearWeight)
    torch.testing.assert_close(cpu.linear(x, packed), F.linear(x, weight.dequantize()))


def test_a_bias_of_another_dtype_or_size_is_refused():
    weight = quantize(bf16(40, 64), bits=8, group_size=None)
    for bias in (torch.zeros(40), bf16(39)):
        with pytest.raises(ValueError, match="bias is"):
            cpu.pack_linear(weight, bias)
