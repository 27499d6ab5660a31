"""exp and log whose bits do not depend on what else is in the batch."""

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

# At least the widest vector any CPU kernel works on, in floats.
ALIGNMENT = 64
MANTISSA_BITS = 23
MANTISSA_MASK = (1 << MANTISSA_BITS) - 1
ONE_BITS = 127 << MANTISSA_BITS
# exp(0) in the fixed point that probabilities are added in: integer sums are the same in any order.
FIXED_POINT_ONE = 2.0**40

InPlace = Callable[[torch.Tensor], torch.Tensor]


def by_row(x: torch.Tensor, *functions: InPlace) -> torch.Tensor:
    """Return x [n, k] with the elementwise in-place functions applied; x itself is not changed.

    CPU kernels may compute the tail of an array, or the border between two threads' parts, by other
    instructions than its body. So each row is padded to full vectors and gets a call of its own.
    """
    is_cpu = x.device.type == "cpu"
    padded = F.pad(x, (0, -x.shape[1] % ALIGNMENT)) if is_cpu else x.clone()
    for part in padded if is_cpu else (padded,):
        for function in functions:
            function(part)
    return padded[:, : x.shape[1]]


def log_(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive, normal fp32 numbers, in place.

    torch.log on the CPU is MKL's, which wakes all threads for a few hundred numbers and promises
    the same bits for the same alignment only. log1p is not.
    """
    bits = x.view(torch.int32)
    exponent = (bits - ONE_BITS) >> MANTISSA_BITS
    # The mantissa m in [1, 2) replaces x: log(x) is exponent * log(2) + log1p(m - 1), m - 1 exact.
    bits.bitwise_and_(MANTISSA_MASK).bitwise_or_(ONE_BITS)
    return x.sub_(1.0).log1p_().add_(exponent * math.log(2.0))


def exp_to_fixed_point(x: torch.Tensor) -> torch.Tensor:
    """Return exp of x [n, k] <= 0 in multiples of 1 / FIXED_POINT_ONE, as int64."""
    return (by_row(x, torch.Tensor.exp_).double() * FIXED_POINT_ONE).long()
