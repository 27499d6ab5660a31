"""exp and log with the same bits everywhere: on every device, in every kernel set, in any batch.

They are made of additions, multiplications and integer operations only, each of which IEEE 754
rounds in one way. Library functions differ by device, by instruction set and even by where in an
array a number lies. `cpu/csrc/exact_math.h` is the same arithmetic, step by step.

Coefficients are minimax fits of our own: 6e-9 relative error for log, 3e-9 for exp, so that fp32
rounding decides the last bits.
"""

import math

import torch

MANTISSA_BITS = 23
# sqrt(1/2): mantissas are taken from [SQRT_HALF, 2 SQRT_HALF), so that log(1) needs no exponent.
SQRT_HALF_BITS = 0x3F3504F3
LN_2 = math.log(2.0)
# P in log1p(f) = f - f^2 / 2 + f^3 P(f), for f in [-0.293, 0.415); the highest power first.
LOG_COEFFICIENTS = (
    -0.07636317610740662,
    0.12763658165931702,
    -0.13160501420497894,
    0.14201503992080688,
    -0.16623300313949585,
    0.20001235604286194,
    -0.250008225440979,
    0.3333333134651184,
)
LOG2_E = 1.0 / LN_2
# log(2) in two parts; the first has so few bits that its small multiples are exact.
LN_2_HIGH = 0.693359375
LN_2_LOW = -2.12194440e-4
# Q in exp(r) = 1 + r + r^2 Q(r), for |r| <= log(2) / 2; the highest power first.
EXP_COEFFICIENTS = (
    0.001381455920636654,
    0.008368735201656818,
    0.04166838899254799,
    0.1666652113199234,
    0.4999999403953552,
)
# exp(0) in the fixed point that probabilities are added in: integer sums are the same in any order.
FIXED_POINT_ONE = 2.0**40
# exp of anything lower is 0 in fixed point.
LOWEST_EXPONENT = -30.0


def log(x: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm of x, positive, normal fp32 numbers [...], to some 2e-7
    relative, as fp32.
    """
    exponent, fraction = _split(x)
    return _log1p(fraction).add_(exponent * LN_2)


def log_of_complement(u: torch.Tensor) -> torch.Tensor:
    """Return log(1 - u) of fp32 u [...] in (0, 1), to some 2e-7 relative, however small u is."""
    exponent, fraction = _split(1.0 - u)
    # Where no exponent is taken out, u itself says more than 1 - u does.
    fraction = torch.where(exponent == 0, -u, fraction)
    return _log1p(fraction).add_(exponent * LN_2)


def exp_to_fixed_point(x: torch.Tensor) -> torch.Tensor:
    """Return exp of fp32 x [...] <= 0 in multiples of 1 / FIXED_POINT_ONE, rounded down, as int64
    [...].
    """
    x = x.clamp(min=LOWEST_EXPONENT)
    exponent = x.mul(LOG2_E).round_()
    rest = x.sub_(exponent * LN_2_HIGH).sub_(exponent * LN_2_LOW)
    series = _evaluate(EXP_COEFFICIENTS, rest).mul_(rest).mul_(rest).add_(rest).add_(1.0)
    power = ((exponent.int() + 127) << MANTISSA_BITS).view(torch.float32)
    return series.mul_(power).mul_(FIXED_POINT_ONE).long()


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e, f) as fp32 with x = 2^e (1 + f); x is positive and normal."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> MANTISSA_BITS
    mantissa = (bits - (exponent << MANTISSA_BITS)).view(torch.float32)
    return exponent.float(), mantissa - 1.0


def _log1p(f: torch.Tensor) -> torch.Tensor:
    square = f * f
    series = _evaluate(LOG_COEFFICIENTS, f).mul_(f).mul_(square)
    return series.sub_(square.mul_(0.5)).add_(f)


def _evaluate(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    """Horner's scheme. Multiplies and adds stay apart: not every machine has a fused one."""
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result.mul_(x).add_(coefficient)
    return result
