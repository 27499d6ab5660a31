"""Random weights of 4 and 8 bits, of all kinds."""

import pytest
import torch

from pdserve_kernels.fp8 import FP8, FP8_MAX
from pdserve_kernels.reference.quantization import QuantizedWeight

# bits, group_size, dtype of scales, has zeros
KINDS = [
    pytest.param((8, None, torch.float32, False), id="int8"),
    pytest.param((8, 64, torch.bfloat16, True), id="int8 asymmetric"),
    pytest.param((4, 32, torch.bfloat16, False), id="int4 by 32"),
    pytest.param((4, 128, torch.float32, False), id="int4 by 128"),
    pytest.param((4, 128, torch.bfloat16, True), id="int4 asymmetric"),
    pytest.param((4, 6, torch.float32, True), id="int4 by 6"),
]


def make_weight(rows, columns, bits, group_size, scale_dtype, has_zeros):
    """All integers of the range are there, also those that rounding never makes."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    group_size = group_size or columns + columns % 2
    grid = (rows, -(-columns // group_size))
    return QuantizedWeight(
        values=torch.randint(low, high, (rows, columns), dtype=torch.int8),
        scales=(torch.rand(grid) / high).to(scale_dtype),
        zeros=torch.randint(low, high, grid, dtype=torch.int8) if has_zeros else None,
        bits=bits,
        group_size=group_size,
        dtype=torch.bfloat16,
    )


def make_fp8_weight(rows, columns, group_size=None):
    """All numbers of FP8 are there; a group None is a whole row."""
    group_size = group_size or columns + columns % 2
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 0x7F) != 0x7F]  # those are NaN
    return QuantizedWeight(
        values=numbers[torch.randint(len(numbers), (rows, columns))].view(FP8),
        scales=torch.rand(rows, -(-columns // group_size)) / FP8_MAX,
        zeros=None,
        bits=8,
        group_size=group_size,
        dtype=torch.bfloat16,
    )


def exact(weight):
    """The weight in fp64, entry by entry."""
    group = torch.arange(weight.shape[1]) // weight.group_size
    zeros = 0 if weight.zeros is None else weight.zeros.double()[:, group]
    return (weight.values.double() - zeros) * weight.scales.double()[:, group]
