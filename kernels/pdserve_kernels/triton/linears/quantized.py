"""Weights of 4 and 8 bits on CUDA, whatever their numbers are."""

import torch

from pdserve_kernels.reference.quantization import QuantizedWeight
from pdserve_kernels.triton.linears.linear_fp8 import (
    Fp8LinearWeight,
    dequantize_fp8,
    linear_fp8,
    pack_fp8,
)
from pdserve_kernels.triton.linears.linear_int import (
    IntLinearWeight,
    dequantize_integers,
    linear_int,
    pack_integers,
)

QuantizedLinearWeight = IntLinearWeight | Fp8LinearWeight


def pack_quantized(weight: QuantizedWeight, bias: torch.Tensor | None) -> QuantizedLinearWeight:
    """Prepare a weight for `linear_quantized`, with a bias [out_features] in the weight's dtype;
    raises ValueError for groups that do not fit.
    """
    return pack_fp8(weight, bias) if weight.is_fp8 else pack_integers(weight, bias)


def linear_quantized(x: torch.Tensor, packed: QuantizedLinearWeight) -> torch.Tensor:
    """x [..., in_features] @ weight^T + bias -> [..., out_features], in x's dtype; fp32 sums."""
    if isinstance(packed, Fp8LinearWeight):
        return linear_fp8(x, packed)
    return linear_int(x, packed)


def dequantize(packed: QuantizedLinearWeight) -> torch.Tensor:
    """Return the dense weight [out_features, in_features], rounded to its dtype."""
    if isinstance(packed, Fp8LinearWeight):
        return dequantize_fp8(packed)
    return dequantize_integers(packed)
