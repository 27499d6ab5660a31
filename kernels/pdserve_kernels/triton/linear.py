"""Dense layers on CUDA: cuBLAS through torch."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pdserve_kernels.triton.layers import silu_and_mul


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearWeight:
    """A weight ready for `linear`: [out_features, in_features]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, num_parts: int = 1
) -> LinearWeight:
    """Prepare weight [out_features, in_features] and bias [out_features]; shares their memory."""
    del num_parts
    return LinearWeight(
        weight=weight.detach(),
        bias=None if bias is None else bias.detach(),
        out_features=weight.shape[0],
        in_features=weight.shape[1],
    )


def linear(x: torch.Tensor, packed: LinearWeight) -> torch.Tensor:
    """x [..., in_features] @ weight^T + bias -> [..., out_features]; see the reference."""
    return F.linear(x, packed.weight, packed.bias)


def linear_silu_mul(x: torch.Tensor, packed: LinearWeight) -> torch.Tensor:
    """x [T, in_features] -> silu(gate) * up; see the reference."""
    return silu_and_mul(linear(x, packed))


def is_row_independent(dtype: torch.dtype) -> bool:
    """False: cuBLAS picks its kernel by the number of rows."""
    del dtype
    return False


def is_thread_independent(dtype: torch.dtype, block_size: int, head_dim: int) -> bool:
    """True: no kernel runs on CPU threads."""
    del dtype, block_size, head_dim
    return True
