"""Dense layers on CUDA: cuBLAS through torch."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearWeight:
    """A weight ready for `linear`: [out_features, in_features]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
    """Prepare weight [out_features, in_features] and bias [out_features]; shares their memory."""
    return LinearWeight(
        weight=weight.detach(),
        bias=None if bias is None else bias.detach(),
        out_features=weight.shape[0],
        in_features=weight.shape[1],
    )


def linear(x: torch.Tensor, packed: LinearWeight) -> torch.Tensor:
    """x [..., in_features] @ weight^T + bias -> [..., out_features]; see the reference."""
    return F.linear(x, packed.weight, packed.bias)


def is_row_independent(dtype: torch.dtype) -> bool:
    """False: cuBLAS picks its kernel by the number of rows."""
    del dtype
    return False
