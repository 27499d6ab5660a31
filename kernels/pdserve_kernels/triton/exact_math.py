# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""`pdserve_kernels.exact_math` on CUDA, step by step.

Kernels that call these are launched with enable_fp_fusion=False: a fused multiply-add rounds once.
"""

import triton
import triton.language as tl

from pdserve_kernels import exact_math

MANTISSA_BITS = tl.constexpr(exact_math.MANTISSA_BITS)
SQRT_HALF_BITS = tl.constexpr(exact_math.SQRT_HALF_BITS)
LN_2 = tl.constexpr(exact_math.LN_2)
LN_2_HIGH = tl.constexpr(exact_math.LN_2_HIGH)
LN_2_LOW = tl.constexpr(exact_math.LN_2_LOW)
LOG2_E = tl.constexpr(exact_math.LOG2_E)
LOWEST_EXPONENT = tl.constexpr(exact_math.LOWEST_EXPONENT)
FIXED_POINT_ONE = tl.constexpr(exact_math.FIXED_POINT_ONE)
L0, L1, L2, L3, L4, L5, L6, L7 = (tl.constexpr(c) for c in exact_math.LOG_COEFFICIENTS)
E0, E1, E2, E3, E4 = (tl.constexpr(c) for c in exact_math.EXP_COEFFICIENTS)
# Added to a small number and taken off again, it leaves the nearest integer, even if halfway.
ROUNDER = tl.constexpr(1.5 * 2.0**exact_math.MANTISSA_BITS)


@triton.jit
def log(x):
    exponent, fraction = _split(x)
    return _log1p(fraction) + exponent * LN_2


@triton.jit
def log_of_complement(u):
    exponent, fraction = _split(1.0 - u)
    fraction = tl.where(exponent == 0.0, -u, fraction)
    return _log1p(fraction) + exponent * LN_2


@triton.jit
def exp_to_fixed_point(x):
    x = tl.maximum(x, LOWEST_EXPONENT)
    exponent = x * LOG2_E + ROUNDER - ROUNDER
    rest = x - exponent * LN_2_HIGH - exponent * LN_2_LOW
    series = (((rest * E0 + E1) * rest + E2) * rest + E3) * rest + E4
    series = series * rest * rest + rest + 1.0
    power = ((exponent.to(tl.int32) + 127) << MANTISSA_BITS).to(tl.float32, bitcast=True)
    return (series * power * FIXED_POINT_ONE).to(tl.int64)


@triton.jit
def _split(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> MANTISSA_BITS
    mantissa = (bits - (exponent << MANTISSA_BITS)).to(tl.float32, bitcast=True)
    return exponent.to(tl.float32), mantissa - 1.0


@triton.jit
def _log1p(f):
    square = f * f
    series = (((f * L0 + L1) * f + L2) * f + L3) * f + L4
    series = ((series * f + L5) * f + L6) * f + L7
    return series * f * square - square * 0.5 + f
