"""The C++ linear on every instruction set: close to fp64, and each row by itself."""

import random

import pytest
import torch
import torch.nn.functional as F

from pdserve_kernels import cpu, reference

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


@pytest.mark.parametrize("seed", range(40))
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
