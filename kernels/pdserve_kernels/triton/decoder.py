"""The decoder as a sequence of this set's kernels."""

from collections.abc import Sequence

import torch

from pdserve_kernels import triton
from pdserve_kernels.decoder import Decoder, run_layer_by_layer
from pdserve_kernels.metadata import AttentionMetadata


def pack_decoder(decoder: Decoder) -> Decoder:
    """Prepare a decoder for `run_decoder`; it keeps pointing to the same weights."""
    return decoder


def run_decoder(
    hidden_states: torch.Tensor,
    packed: Decoder,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Sequence[AttentionMetadata],
) -> torch.Tensor:
    """See the reference's contract."""
    return run_layer_by_layer(triton, packed, hidden_states, positions, kv_cache, metadata)
