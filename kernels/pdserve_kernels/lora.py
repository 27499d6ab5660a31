"""What LoRA adapters add to the linears of a decoder (Hu et al. 2021, arXiv:2106.09685)."""

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLayer:
    """An adapter's part in a layer: for each linear what `pack_lora` made of it, or None."""

    qkv: Any
    attention_output: Any
    gate_up: Any
    down: Any


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
