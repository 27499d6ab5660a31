"""Products with quantized weights in Triton against fp64: on a GPU, or interpreted if
TRITON_INTERPRET=1.
"""

from dataclasses import replace

import pytest
import torch
from integer_weights import KINDS, exact, make_fp8_weight, make_weight

from support.samples import sampled
from support.triton_kernels import (
    DEVICE,
    DTYPES,
    ON_GPU_OR_INTERPRETED,
    assert_close,
    on_device,
)

pytestmark = [*ON_GPU_OR_INTERPRETED, pytest.mark.usefixtures("fp8_of_gpus")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", sampled([1, 20, 65], 20))
def test_linears_of_integers_agree_with_fp64(kernels, dtype, kind, num_rows):
    for rows, columns in ((70, 200), (20, 1100)):
        weight = replace(make_weight(rows, columns, *kind), dtype=dtype)
        bias = torch.randn(rows).to(dtype)
        x = torch.randn(num_rows, columns).to(dtype) * columns**-0.5
        packed = kernels.pack_linear(on_device(weight), bias.to(DEVICE))
        out = kernels.linear(x.to(DEVICE), packed)
        expected = x.double() @ exact(weight).T + bias.double()
        assert_close(out, expected.to(dtype), dtype)
        sums = kernels.linear_sums(x.to(DEVICE), packed)
        assert_close(sums.double(), expected - bias.double(), dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_linears_of_some_inputs_of_integers_agree_with_fp64(kernels, kind):
    """A rank's part, which is no memory of its own."""
    whole = replace(make_weight(70, 768, *kind), dtype=torch.float32)
    part = whole.columns(slice(384, 768))
    x = torch.randn(3, 384) * 384**-0.5
    out = kernels.linear(x.to(DEVICE), kernels.pack_linear(on_device(part)))
    expected = x.double() @ exact(whole)[:, 384:].T
    assert_close(out, expected.float(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [None, 128])
@pytest.mark.parametrize("num_rows", sampled([1, 20, 65, 300], 20, 65))
def test_linears_of_fp8_agree_with_fp64(kernels, dtype, group_size, num_rows):
    """Products of 16 bits are exact; their sums and the scales' products are rounded in fp32, and
    the output once.
    """
    for rows, columns in ((70, 200), (20, 2308)):  # the inputs of the second are split
        weight = replace(make_fp8_weight(rows, columns, group_size), dtype=dtype)
        bias = torch.randn(rows).to(dtype)
        x = torch.randn(num_rows, columns).to(dtype)
        packed = kernels.pack_linear(on_device(weight), bias.to(DEVICE))
        products = x.double() @ exact(weight).T
        magnitude = x.double().abs() @ exact(weight).T.abs() + bias.double().abs()
        info = torch.finfo(dtype)
        for linear, expected in (
            (kernels.linear, products + bias.double()),
            (kernels.linear_sums, products),
        ):
            out = linear(x.to(DEVICE), packed).cpu().double()
            rounded = info.eps * expected.abs().clamp(min=info.smallest_normal)
            assert ((out - expected).abs() <= rounded + columns * 2.0**-24 * magnitude).all()


@pytest.mark.parametrize("group_size", [None, 128, 384])
def test_linears_of_some_inputs_of_fp8_agree_with_fp64(kernels, group_size):
    """A rank's part, which is no memory of its own."""
    whole = replace(make_fp8_weight(70, 768, group_size), dtype=torch.float32)
    packed = kernels.pack_linear(on_device(whole.columns(slice(384, 768))))
    x = torch.randn(3, 384) * 384**-0.5
    expected = x.double() @ exact(whole)[:, 384:].T
    assert_close(kernels.linear(x.to(DEVICE), packed), expected.float(), torch.float32)
    assert kernels.linear(x[:0].to(DEVICE), packed).shape == (0, 70)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [None, 128])
def test_fp8_becomes_the_dense_weight_of_the_reference(dtype, group_size):
    from pdserve_kernels.triton.linears.quantized import dequantize, pack_quantized

    weight = replace(make_fp8_weight(70, 300, group_size), dtype=dtype)
    dense = dequantize(pack_quantized(on_device(weight), None))
    assert torch.equal(dense.cpu(), weight.dequantize())


def test_groups_of_fp8_that_tiles_would_cut_are_refused(kernels):
    with pytest.raises(ValueError, match="group_size is 96, must be a multiple of 128 or a whole"):
        kernels.pack_linear(on_device(make_fp8_weight(4, 200, 96)))
