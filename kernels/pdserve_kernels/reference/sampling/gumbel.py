"""Gumbel noise as a pure function of (seed, output position, vocab id).

argmax(logits + noise) is then a sample of softmax(logits), and the same one in any batch, on any
worker and after any restart.
"""

import torch
from torch import Tensor

from pdserve_kernels.exact_math import log, log_of_complement
from pdserve_kernels.reference.sampling.philox import Words4, philox4x32, split_seed

WORDS_PER_COUNTER = 4
# On the CPU this many counters are drawn at once that their words stay in a core's cache.
COUNTERS_IN_CACHE = 16_384
# Keeps -log(1 - u) finite: the largest float below 1.
LARGEST_UNIFORM = 1.0 - 2.0**-24


def gumbel_noise(seeds: Tensor, positions: Tensor, *, vocab_size: int, first_id: int = 0) -> Tensor:
    """Return fp32 noise [n, vocab_size] for n requests; the tensors are [n] int64 on one device. It
    is that of the vocab ids from first_id on, a multiple of 4.
    """
    counters = torch.arange(-(-vocab_size // WORDS_PER_COUNTER), device=seeds.device).unsqueeze(0)
    counters += first_id // WORDS_PER_COUNTER
    rows_at_once = max(1, len(seeds))
    if seeds.device.type == "cpu":
        rows_at_once = max(1, COUNTERS_IN_CACHE // counters.shape[1])
    pieces = zip(
        torch.split(seeds, rows_at_once), torch.split(positions, rows_at_once), strict=True
    )
    # Vocab id 4 c + w is word w of counter c.
    noise = [_to_gumbel(torch.stack(_draw(*piece, counters), dim=-1)) for piece in pieces]
    return torch.cat(noise).flatten(1)[:, :vocab_size]


def gumbel_noise_at(seeds: Tensor, positions: Tensor, *, vocab_ids: Tensor) -> Tensor:
    """Return the noise of some vocab ids only: fp32 [n, k] for vocab_ids int64 [n, k]; seeds and
    positions are int64 [n].
    """
    words = _draw(seeds, positions, vocab_ids // WORDS_PER_COUNTER)
    word_index = (vocab_ids % WORDS_PER_COUNTER).unsqueeze(-1)
    return _to_gumbel(torch.stack(words, dim=-1).gather(-1, word_index).squeeze(-1))


def _draw(seeds: Tensor, positions: Tensor, counters: Tensor) -> Words4:
    key_low, key_high = split_seed(seeds.unsqueeze(1))
    zero = torch.zeros_like(key_low)
    return philox4x32((counters, positions.unsqueeze(1), zero, zero), (key_low, key_high))


def _to_gumbel(bits: Tensor) -> Tensor:
    # u is (bits + 1/2) / 2^32; -log(1 - u) rather than -log(u) because floats are densest near 0,
    # where the large noise that makes unlikely tokens win comes from.
    uniform = bits.float().add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST_UNIFORM)
    return log(log_of_complement(uniform).neg_()).neg_()
