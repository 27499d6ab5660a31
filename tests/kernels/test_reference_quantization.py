"""Rounding to integers and back: how far a weight may move, and what is refused."""

import dataclasses

import pytest
import torch
from integer_weights import exact, make_fp8_weight

from pdserve_kernels import reference
from pdserve_kernels.fp8 import FP8, FP8_MAX
from pdserve_kernels.reference.quantization import QuantizedWeight, quantize, quantize_fp8, stack

SHAPES = [(1, 2), (5, 64), (3, 50), (130, 4096)]


def bf16(*shape):
    return torch.randn(shape).to(torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (8, 32), (4, 32), (4, 128)])
def test_no_weight_moves_by_more_than_half_a_step(shape, bits, group_size):
    torch.manual_seed(0)
    weight = bf16(*shape)
    quantized = quantize(weight, bits=bits, group_size=group_size)
    group = torch.arange(shape[1]) // quantized.group_size
    step = quantized.scales.double()[:, group]
    limit = 2 ** (bits - 1) - 1
    # A scale that was rounded down cannot reach the group's largest weight quite.
    slack = 2.0**-8 * limit * step if quantized.scales.dtype == torch.bfloat16 else 2.0**-16 * step
    moved = (quantized.values.double() * step - weight.double()).abs()
    assert (moved <= step / 2 + slack).all()
    assert quantized.values.abs().amax() == limit


def test_a_group_of_zeros_stays_zero():
    weight = torch.zeros(2, 64, dtype=torch.bfloat16)
    weight[0, 40] = 3.0
    quantized = quantize(weight, bits=4, group_size=32)
    assert torch.equal(quantized.dequantize()[1], weight[1])
    assert quantized.dequantize()[0, 40].item() == pytest.approx(3.0, rel=0.01)


def test_dequantized_weights_are_values_less_zeros_times_scales():
    weight = QuantizedWeight(
        values=torch.tensor([[-8, 7, 3, 0, 1]], dtype=torch.int8),
        scales=torch.tensor([[0.5, 2.0, 4.0]]),
        zeros=torch.tensor([[1, -8, 0]], dtype=torch.int8),
        bits=4,
        group_size=2,
        dtype=torch.float32,
    )
    assert weight.dequantize().tolist() == [[-4.5, 3.0, 22.0, 16.0, 4.0]]


def test_stacked_weights_are_their_rows():
    torch.manual_seed(0)
    parts = [quantize(bf16(rows, 64), bits=4, group_size=32) for rows in (3, 1, 4)]
    stacked = stack(parts).dequantize()
    assert torch.equal(stacked, torch.cat([part.dequantize() for part in parts]))
    with pytest.raises(ValueError, match="differ in bits"):
        stack([parts[0], quantize(bf16(2, 64), bits=8, group_size=32)])


def test_the_reference_multiplies_with_the_dequantized_weight():
    torch.manual_seed(0)
    weight, x = quantize(bf16(40, 64), bits=4, group_size=32), bf16(3, 64)
    dense = reference.pack_linear(weight.dequantize())
    assert torch.equal(
        reference.linear(x, reference.pack_linear(weight)), reference.linear(x, dense)
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bits", 3, "bits is 3, must be one of 4, 8"),
        ("group_size", 31, "group_size is 31, must be even"),
        ("values", torch.zeros(4, 64), r"values is torch.float32 \[4, 64\], must be int8"),
        ("scales", torch.zeros(4, 3), r"scales is .* \[4, 3\], must be .* \[4, 2\]"),
        ("scales", torch.zeros(4, 2).half(), "scales is torch.float16"),
        ("zeros", torch.zeros(2, 2, dtype=torch.int8), r"zeros is .*, must be int8 \[4, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused(field, value, message):
    weight = quantize(bf16(4, 64), bits=4, group_size=32)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(weight, **{field: value})


@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_is_the_nearest_number_that_there_is(shape):
    torch.manual_seed(0)
    weight = bf16(*shape)
    quantized = quantize_fp8(weight)
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    numbers = numbers[~numbers.isnan()].sort().values
    wanted = weight.double() / quantized.scales.double()
    above = torch.searchsorted(numbers, wanted).clamp(1, len(numbers) - 1)
    nearest = torch.minimum((numbers[above] - wanted).abs(), (wanted - numbers[above - 1]).abs())
    moved = (quantized.values.double() - wanted).abs()
    assert (moved <= nearest + 2.0**-23 * wanted.abs()).all()  # the quotient is rounded in fp32
    assert quantized.values.double().abs().amax() == FP8_MAX


def test_fp8_of_any_weight_is_finite():
    weight = torch.tensor([[0.0, 0.0], [1e-30, -3e-31], [3e38, 1.0], [-0.0, 2.0**-133]])
    for dtype in (torch.bfloat16, torch.float32):
        dense = quantize_fp8(weight.to(dtype)).dequantize()
        largest = weight.abs().amax(1, keepdim=True)
        assert ((dense.float() - weight).abs() <= 2.0**-4 * largest).all()


def test_parts_and_stacks_of_fp8_are_those_of_the_dense_weight():
    torch.manual_seed(0)
    weight = make_fp8_weight(6, 300, 128)
    dense = weight.dequantize()
    assert torch.equal(dense, exact(weight).float().to(torch.bfloat16))
    assert torch.equal(weight.rows(slice(1, 5)).dequantize(), dense[1:5])
    assert torch.equal(weight.columns(slice(128, 300)).dequantize(), dense[:, 128:])
    assert torch.equal(stack([weight, weight]).dequantize(), torch.cat((dense, dense)))
    with pytest.raises(ValueError, match="inputs 64 to 300 of 300 are not whole groups of 128"):
        weight.columns(slice(64, 300))
    with pytest.raises(ValueError, match="differ in bits, group_size, dtypes"):
        stack([quantize_fp8(bf16(2, 64)), quantize(bf16(2, 64), bits=8, group_size=None)])
    with pytest.raises(ValueError, match="which has 8 bits and no zeros"):
        dataclasses.replace(weight, bits=4)
