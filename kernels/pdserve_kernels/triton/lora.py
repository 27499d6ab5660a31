"""Adapters on CUDA: not served yet."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from pdserve_kernels.lora import LoraLayer, LoraPart, LoraRows


def pack_lora(parts: Sequence[LoraPart], packed: Any) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError("LoRA adapters are not served on cuda yet")


def pack_adapter(layers: Sequence[LoraLayer]) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError("LoRA adapters are not served on cuda yet")


def linear_lora(x: torch.Tensor, packed: Any, rows: Sequence[LoraRows]) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError("LoRA adapters are not served on cuda yet")
