"""Rounding to integers and back: how far a weight may move, and what is refused."""

import dataclasses

import pytest
import torch

from pdserve_kernels import reference
from pdserve_kernels.reference.quantization import QuantizedWeight, quantize, stack

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
