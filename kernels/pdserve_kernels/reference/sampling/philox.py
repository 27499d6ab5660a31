"""Philox4x32-10, a counter-based random generator: each draw is a function of counter and key.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

import torch

MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
NUM_ROUNDS = 10
MASK = 0xFFFFFFFF

Words4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Words2 = tuple[torch.Tensor, torch.Tensor]


def philox4x32(counter: Words4, key: Words2) -> Words4:
    """Return four random words per counter.

    All words are int64 tensors [...] holding values in [0, 2^32), on one device, of shapes that
    broadcast. The result has the same bits on every device.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # Signed overflow wraps, so the product's 64 bits are right; & MASK drops what >> smears in.
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0 = ((product_1 >> 32) ^ c1 ^ k0) & MASK
        c2 = ((product_0 >> 32) ^ c3 ^ k1) & MASK
        c1, c3 = product_1 & MASK, product_0 & MASK
        k0, k1 = (k0 + WEYL_0) & MASK, (k1 + WEYL_1) & MASK
    return c0, c1, c2, c3


def split_seed(seed: torch.Tensor) -> Words2:
    """Return the low and high words, int64 [...], of int64 seeds [...]; a negative seed is its
    two's complement.
    """
    return seed & MASK, (seed >> 32) & MASK
