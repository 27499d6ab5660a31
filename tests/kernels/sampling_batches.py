"""Batches for the samplers of all kernel sets."""

from typing import Any

import numpy as np
import torch

from pdserve_kernels.sampling_batch import SamplingBatch


def make_sampling_batch(n: int, **columns: Any) -> SamplingBatch:
    """n rows; each column is one value for all or a list, positions count up."""

    def column(name: str, default: Any, dtype: Any) -> Any:
        return np.broadcast_to(np.array(columns.get(name, default), dtype=dtype), (n,)).copy()

    return SamplingBatch(
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", 0, np.int64),
        top_p=column("top_p", 1.0, np.float64),
        min_p=column("min_p", 0.0, np.float32),
        seeds=column("seeds", 42, np.int64),
        positions=column("positions", np.arange(n), np.int64),
    )


def make_logits(n: int, vocab_size: int, *, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(1)) * scale


def pack_mask(is_allowed: torch.Tensor, *, past_end: bool = False) -> torch.Tensor:
    """Return the mask of bool [n, vocab_size]; `past_end` are the bits behind the vocabulary."""
    n, vocab_size = is_allowed.shape
    bits = np.full((n, -(-vocab_size // 32) * 32), past_end)
    bits[:, :vocab_size] = is_allowed.numpy()
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
