"""What LoRA adapters add to the linears of a decoder (Hu et al. 2021, arXiv:2106.09685)."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class LoraPart(NamedTuple):
    """What an adapter adds to some outputs of a linear, from `first_output` on: scale * B (A x)."""

    first_output: int
    # [rank, in_features]
    a: torch.Tensor
    # [num_outputs, rank]
    b: torch.Tensor
    scale: float


# The linears of a layer that adapters may change, in the order in which tables have them.
LINEARS = ("qkv", "attention_output", "gate_up", "down")

# An adapter's part in a layer: by the names of linears what `pack_lora` made. Of linears that it
# leaves alone, or that the layer does not have, there is none, or None.
LoraLayer = Mapping[str, Any]


class LoraSegment(NamedTuple):
    """Rows [begin, end) of a step and their adapter, as `pack_adapter` of the set made it."""

    begin: int
    end: int
    adapter: Any


class LoraRows(NamedTuple):
    """Rows [begin, end) of a linear, and what `pack_lora` made for them."""

    begin: int
    end: int
    weight: Any
