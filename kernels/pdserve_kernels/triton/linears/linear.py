"""Linears on CUDA: dense ones by cuBLAS through torch, others by `quantized.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from pdserve_kernels.groups import Group, check_num_sums
from pdserve_kernels.lora import LoraRows
from pdserve_kernels.reference.quantization import QuantizedWeight
from pdserve_kernels.triton.layers import silu_and_mul
from pdserve_kernels.triton.linears.lora import LinearLora
from pdserve_kernels.triton.linears.quantized import (
    QuantizedLinearWeight,
    linear_quantized,
    pack_quantized,
)
from pdserve_kernels.triton.linears.step_lora import add_rows


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


AnyLinearWeight = LinearWeight | QuantizedLinearWeight


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
        return pack_quantized(weight, bias)
    return LinearWeight(
        weight=weight.detach(),
        bias=None if bias is None else bias.detach(),
        out_features=weight.shape[0],
        in_features=weight.shape[1],
    )


def linear(x: torch.Tensor, packed: AnyLinearWeight) -> torch.Tensor:
    """x [..., in_features] @ weight^T + bias -> [..., out_features]; see the reference."""
    if isinstance(packed, LinearWeight):
        return F.linear(x, packed.weight, packed.bias)
    return linear_quantized(x, packed)


def linear_sums(x: torch.Tensor, packed: AnyLinearWeight) -> torch.Tensor:
    """x [..., in_features] @ weight^T -> fp32 [..., out_features], without the bias.

    The sums of bf16 are rounded to it first: cuBLAS writes its outputs in the operands' dtype, and
    a weight in fp32 would be read five times as long.
    """
    return linear(x, replace(packed, bias=None)).float()


def linear_of_ranks(
    x: torch.Tensor, packed: AnyLinearWeight, group: Group, lora: LinearLora | None = None
) -> torch.Tensor:
    """Return linear(x, packed) and what adapters add to it; each rank has a part of the inputs."""
    # In x's dtype: in fp32 there would be twice the bytes, of products that are rounded anyway.
    sums = linear(x, replace(packed, bias=None))
    if lora is not None:
        lora.add(sums, x)  # the rank's part of it, so that there is no exchange more
    sums = group.sum_rows(sums)
    return sums if packed.bias is None else sums.add_(packed.bias)


def linear_lora(x: torch.Tensor, packed: AnyLinearWeight, rows: Sequence[LoraRows]) -> torch.Tensor:
    """See the reference's contract. The linear's sums are rounded to x's dtype before an adapter's
    are added, as cuBLAS writes no others.
    """
    return add_rows(linear(x, packed), x, rows)


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
