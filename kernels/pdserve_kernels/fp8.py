"""Numbers in 8 bits: of weights and of a KV cache."""

import torch

# Four bits of exponent and three of mantissa, no infinities (Micikevicius et al. 2022,
# arXiv:2209.05433).
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
