"""Linears on CUDA: dense ones by cuBLAS through torch, of integers by `linear_int.py`."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from pdserve_kernels.groups import Group, check_num_sums
from pdserve_kernels.reference.quantization import QuantizedWeight
from pdserve_kernels.triton.layers import silu_and_mul
from pdserve_kernels.triton.linear_int import IntLinearWeight, linear_int, pack_integers


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearWeight:
    """A weight ready for `linear`: [out_features, in_features]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device


AnyLinearWeight = LinearWeight | IntLinearWeight


def pack_linear(
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    num_parts: int = 1,
    num_sums: int = 1,
) -> AnyLinearWeight:
    """Prepare weight [out_features, in_features] and bias [out_features]; shares their memory, but
    of integers only that of scales, zeros and bias.
    """
    del num_parts
    check_num_sums(num_sums, weight.shape[1])
    if isinstance(weight, QuantizedWeight):
        return pack_integers(weight, bias)
    return LinearWeight(
        weight=weight.detach(),
        bias=None if bias is None else bias.detach(),
        out_features=weight.shape[0],
        in_features=weight.shape[1],
    )


def linear(x: torch.Tensor, packed: AnyLinearWeight) -> torch.Tensor:
    """x [..., in_features] @ weight^T + bias -> [..., out_features]; see the reference."""
    if isinstance(packed, IntLinearWeight):
        return linear_int(x, packed)
    return F.linear(x, packed.weight, packed.bias)


def linear_sums(x: torch.Tensor, packed: AnyLinearWeight) -> torch.Tensor:
    """x [..., in_features] @ weight^T -> fp32 [..., out_features], without the bias.

    The sums of bf16 are rounded to it first: cuBLAS writes its outputs in the operands' dtype, and
    a weight in fp32 would be read five times as long.
    """
    return linear(x, replace(packed, bias=None)).float()


def linear_of_ranks(x: torch.Tensor, packed: AnyLinearWeight, group: Group) -> torch.Tensor:
    """Return linear(x, packed), of which each rank has a part of the inputs."""
    # In x's dtype: in fp32 there would be twice the bytes, of products that are rounded anyway.
    sums = group.sum_rows(linear(x, replace(packed, bias=None)))
    return sums if packed.bias is None else sums.add_(packed.bias)


def linear_silu_mul(x: torch.Tensor, packed: AnyLinearWeight) -> torch.Tensor:
    """x [T, in_features] -> silu(gate) * up; see the reference."""
    return silu_and_mul(linear(x, packed))


def is_row_independent(dtype: torch.dtype) -> bool:
    """False: cuBLAS picks its kernel by the number of rows."""
    del dtype
    return False


def is_shard_independent(dtype: torch.dtype) -> bool:
    """False: cuBLAS picks its kernel by the weight's shape."""
    del dtype
    return False


def is_thread_independent(dtype: torch.dtype, block_size: int, head_dim: int) -> bool:
    """True: no kernel runs on CPU threads."""
    del dtype, block_size, head_dim
    return True
