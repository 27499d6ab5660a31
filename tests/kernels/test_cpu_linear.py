"""The C++ linear on every instruction set: close to fp64, and each row by itself."""

import random

import pytest
import torch
import torch.nn.functional as F

from pdserve_kernels import cpu, reference
from pdserve_kernels.groups import NUM_SUMS, tree_sum
from support.samples import seeds

# Fewer, as many and more than a tile and a block of rows have, and what lies between.
ROW_COUNTS = [*range(71), 129, 192, 193, 400]

pytestmark = pytest.mark.usefixtures("each_isa")


def bf16(*shape):
    return torch.randn(shape).to(torch.bfloat16)


def assert_near(actual, x, weight, bias=None):
    """Within a rounding to bf16 and what the sums in fp32 lose."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    size_of_terms = F.linear(x.double().abs(), weight.double().abs())
    allowed = 2.0**-8 * exact.abs() + 2.0**-20 * size_of_terms
    excess = (actual.double() - exact).abs() - allowed
    assert (excess <= 0).all(), excess.max()


@pytest.mark.parametrize("seed", seeds(40))
def test_any_shape(seed):
    torch.manual_seed(seed)
    choose = random.Random(seed).choice
    rows = choose([0, 1, 2, 5, 6, 7, 8, 12, 13, 64, 70, 129, 193])
    in_features = choose([1, 2, 7, 8, 33, 64, 300, 1023, 1024, 1030, 2111])
    out_features = choose([1, 15, 16, 63, 64, 65, 100, 128, 320])
    weight, x = bf16(out_features, in_features), bf16(rows, in_features)
    bias = bf16(out_features) * 30 if seed % 2 else None
    assert_near(cpu.linear(x, cpu.pack_linear(weight, bias)), x, weight, bias)


@pytest.mark.parametrize(("out_features", "in_features"), [(192, 64), (100, 1025), (65, 3072)])
def test_a_row_has_the_same_bits_in_any_batch_and_for_any_number_of_threads(
    set_threads, out_features, in_features
):
    torch.manual_seed(0)
    packed = cpu.pack_linear(bf16(out_features, in_features), bf16(out_features))
    x = bf16(ROW_COUNTS[-1], in_features)
    set_threads(1)
    together = cpu.linear(x, packed)
    for threads in (1, 2, 5):
        set_threads(threads)
        for count in ROW_COUNTS:
            assert torch.equal(cpu.linear(x[:count], packed), together[:count]), count
            last = len(x) - count
            assert torch.equal(cpu.linear(x[last:], packed), together[last:]), count


def test_neither_nan_nor_inf_reaches_another_row():
    weight, x = bf16(64, 33), bf16(9, 33)
    expected = cpu.linear(x, cpu.pack_linear(weight))
    x[4], x[7, 0] = float("nan"), float("inf")
    actual = cpu.linear(x, cpu.pack_linear(weight))
    assert actual[4].isnan().all()
    assert not actual[7].isfinite().any()
    others = [0, 1, 2, 3, 5, 6, 8]
    assert torch.equal(actual[others], expected[others])


def test_takes_any_strides_and_leading_dimensions():
    weight, x, bias = bf16(96, 300), bf16(3, 4, 600), bf16(192)[::2]
    expected = cpu.linear(x[..., ::2].contiguous(), cpu.pack_linear(weight, bias.contiguous()))
    assert expected.shape == (3, 4, 96)
    wide = F.pad(weight, (5, 7))
    for strided in (wide[:, 5:305], weight.T.contiguous().T, weight.repeat(2, 1)[:96]):
        assert torch.equal(cpu.linear(x[..., ::2], cpu.pack_linear(strided, bias)), expected)
    one_row = cpu.linear(x[0, 0, ::2], cpu.pack_linear(weight, bias))
    assert torch.equal(one_row, expected[0, 0])


def test_a_large_weight_lies_on_huge_pages_and_does_not_need_its_source():
    weight, x = bf16(1100, 1024), bf16(2, 1024)  # 2.3 MB, not a whole number of pages
    packed = cpu.pack_linear(weight)
    assert packed.panels.data_ptr() % 2**21 == 0
    copy = weight.clone()
    weight.zero_()
    assert_near(cpu.linear(x, packed), x, copy)


@pytest.mark.parametrize("rows", [0, 1, 6, 7, 40, 193, 400])
@pytest.mark.parametrize(("half", "in_features"), [(64, 128), (704, 256), (100, 1026), (1, 3)])
def test_silu_mul_has_the_bits_of_linear_and_silu_and_mul(half, in_features, rows):
    torch.manual_seed(rows)
    weight, bias = bf16(2 * half, in_features), bf16(2 * half)
    x = bf16(rows, in_features) * 0.3
    packed = cpu.pack_linear(weight, bias, num_parts=2)
    gate_up = cpu.linear(x, packed)
    assert torch.equal(gate_up, cpu.linear(x, cpu.pack_linear(weight, bias)))
    fused = cpu.linear_silu_mul(x, packed)
    # torch's exp may lie a unit of fp32 away, which now and then changes a rounding.
    gate, up = gate_up.double().chunk(2, -1)
    assert fused.shape == (rows, half)
    exact = gate * torch.sigmoid(gate) * up
    assert ((fused.double() - exact).abs() <= 2.01 * 2.0**-8 * exact.abs() + 1e-30).all()
    assert (fused == reference.silu_and_mul(gate_up)).float().mean() > 0.99 or rows == 0


def test_other_dtypes_go_to_the_reference():
    weight, bias, x = torch.randn(20, 33), torch.randn(20), torch.randn(4, 33)
    packed = cpu.pack_linear(weight, bias, num_parts=2)
    expected = reference.linear(x, reference.pack_linear(weight, bias))
    assert torch.equal(cpu.linear(x, packed), expected)
    assert torch.equal(cpu.linear_silu_mul(x, packed), reference.silu_and_mul(expected))
    assert cpu.is_row_independent(torch.bfloat16)
    assert cpu.is_row_independent(torch.float32) == reference.is_row_independent(torch.float32)


def test_refuses_what_does_not_fit():
    packed = cpu.pack_linear(bf16(20, 33))
    with pytest.raises(ValueError, match="x has 32 features; the weight takes 33"):
        cpu.linear(bf16(2, 32), packed)
    with pytest.raises(TypeError, match=r"x is torch\.float32 on cpu"):
        cpu.linear(torch.randn(2, 33), packed)
    with pytest.raises(ValueError, match="the weight has 1 parts; gate and up are 2"):
        cpu.linear_silu_mul(bf16(2, 33), packed)
    with pytest.raises(ValueError, match=r"weight is \[0, 33\] on cpu"):
        cpu.pack_linear(bf16(0, 33))
    with pytest.raises(ValueError, match="num_parts is 3; it must divide 20 outputs"):
        cpu.pack_linear(bf16(20, 33), num_parts=3)
    with pytest.raises(ValueError, match=r"bias is torch\.bfloat16 \[19\]"):
        cpu.pack_linear(bf16(20, 33), bf16(19))


def with_bias(sums, bias):
    return (sums if bias is None else sums + bias.float()).to(torch.bfloat16)


@pytest.mark.parametrize("seed", seeds(30))
def test_a_product_in_eight_sums_is_the_tree_of_its_parts(seed):
    torch.manual_seed(seed)
    choose = random.Random(seed).choice
    rows, out_features = random.Random(seed).randint(1, 200), choose([1, 63, 64, 65, 128, 320])
    in_features = 16 * choose([1, 2, 5, 16, 64, 65, 128, 192])
    weight, x = bf16(out_features, in_features), bf16(rows, in_features)
    bias = bf16(out_features) * 30 if seed % 2 else None
    whole = cpu.pack_linear(weight, bias, num_sums=NUM_SUMS)
    columns = in_features // NUM_SUMS
    slices = zip(x.split(columns, 1), weight.split(columns, 1), strict=True)
    parts = [cpu.linear_sums(part, cpu.pack_linear(cut)) for part, cut in slices]
    assert torch.equal(cpu.linear_sums(x, whole), tree_sum(parts))
    assert torch.equal(cpu.linear(x, whole), with_bias(tree_sum(parts), bias))
    assert_near(cpu.linear(x, whole), x, weight, bias)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("in_features", [64, 1040, 3072])
def test_ranks_with_a_part_of_the_inputs_bring_the_bits_of_one(size, in_features):
    weight = bf16(100, in_features)
    whole = cpu.pack_linear(weight, num_sums=NUM_SUMS)
    columns = in_features // size
    ranks = [cpu.pack_linear(cut, num_sums=NUM_SUMS // size) for cut in weight.split(columns, 1)]
    for rows in (1, 2, 7, 50, 193, 200):
        x = bf16(rows, in_features)
        inputs = zip(x.split(columns, 1), ranks, strict=True)
        total = tree_sum([cpu.linear_sums(part, rank) for part, rank in inputs])
        assert torch.equal(total, cpu.linear_sums(x, whole))


def test_a_row_in_eight_sums_has_the_same_bits_in_any_batch(set_threads):
    weight, x = bf16(100, 2064), bf16(ROW_COUNTS[-1], 2064)
    packed = cpu.pack_linear(weight, num_sums=NUM_SUMS)
    together = cpu.linear_sums(x, packed)
    for threads in (1, 2, 5):
        set_threads(threads)
        for count in ROW_COUNTS[1::9]:
            assert torch.equal(cpu.linear_sums(x[:count], packed), together[:count])
            assert torch.equal(cpu.linear_sums(x[-count:], packed), together[-count:])


def test_sums_of_other_dtypes_are_the_reference_s():
    weight, bias, x = torch.randn(20, 48), torch.randn(20), torch.randn(2, 4, 48)
    packed = cpu.pack_linear(weight, bias, num_sums=2)
    sums = cpu.linear_sums(x, packed)
    assert sums.shape == (2, 4, 20)
    torch.testing.assert_close(sums + bias, cpu.linear(x, packed))


def test_the_reference_s_sums_are_not_rounded_to_bf16():
    weight, bias, x = bf16(40, 256), bf16(40), bf16(5, 256)
    sums = reference.linear_sums(x, reference.pack_linear(weight, bias))
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums, F.linear(x.double(), weight.double()).float())


def test_it_says_whose_bits_depend_on_the_shards():
    assert cpu.is_shard_independent(torch.bfloat16)
    assert not cpu.is_shard_independent(torch.float32)
    assert not reference.is_shard_independent(torch.bfloat16)


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_refuses_sums_that_are_not_equal_parts(kernels):
    for num_sums, in_features in ((3, 48), (16, 64), (8, 40), (2, 33), (0, 16)):
        message = f"num_sums is {num_sums}; it must be .* cut {in_features} inputs"
        with pytest.raises(ValueError, match=message):
            kernels.pack_linear(bf16(20, in_features), num_sums=num_sums)
