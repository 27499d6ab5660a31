# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The noise of `pdserve_kernels.reference.sampling.gumbel` on CUDA. Triton's philox is
Philox4x32-10.
"""

import triton
import triton.language as tl

from pdserve_kernels.reference.sampling import gumbel
from pdserve_kernels.triton.exact_math import log, log_of_complement

LARGEST_UNIFORM = tl.constexpr(gumbel.LARGEST_UNIFORM)


@triton.jit
def gumbel_noise(seed, position, first, N: tl.constexpr):
    """fp32 noise [N] of the vocab ids from `first` on; it and N are multiples of 4."""
    counter = first // 4 + tl.arange(0, N // 4)
    zero = counter * 0
    # Vocab id 4 c + w is word w of counter c.
    w0, w1, w2, w3 = tl.philox(seed, counter, zero + position.to(tl.int32), zero, zero)
    bits = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * (2.0**-32), LARGEST_UNIFORM)
    return -log(-log_of_complement(uniform))
