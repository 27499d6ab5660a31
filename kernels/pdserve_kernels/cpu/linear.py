"""Dense layers in bf16, with weights packed once into panels that a thread streams in order."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from pdserve_kernels import reference
from pdserve_kernels.cpu.compiled import address, library
from pdserve_kernels.cpu.linear_int import PANEL, IntegerPanels, pack_integers
from pdserve_kernels.cpu.memory import empty_on_huge_pages
from pdserve_kernels.groups import check_num_sums
from pdserve_kernels.reference.quantization import QuantizedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearWeight:
    """A weight [out_features, in_features] for bf16 rows, as csrc/packed_linear.h describes it.

    panels: [num_parts * ceil(out_features / num_parts / 64), ceil(in_features / 2), 64, 2], zeros
    where the weight has nothing; or integers. bias: contiguous bf16 [out_features] or None.
    """

    panels: torch.Tensor | IntegerPanels
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    num_parts: int
    num_sums: int


class PackedLinear(ctypes.Structure):
    """The struct of this name of csrc/packed_linear.h. It points into the weight's tensors."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("num_parts", ctypes.c_int64),
        ("num_sums", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("group_size", ctypes.c_int64),
        ("has_fp32_scales", ctypes.c_int64),
    )

    @classmethod
    def of(cls, weight: LinearWeight) -> "PackedLinear":
        n, k = weight.out_features, weight.in_features + weight.in_features % 2
        shape = (address(weight.bias), n, k, weight.num_parts, weight.num_sums)
        panels = weight.panels
        if isinstance(panels, torch.Tensor):
            return cls(panels.data_ptr(), *shape, bits=16)
        return cls(
            panels.values.data_ptr(),
            *shape,
            panels.bits,
            panels.scales.data_ptr(),
            address(panels.zeros),
            panels.group_size,
            int(panels.scales.dtype == torch.float32),
        )


# What `pack_linear` returns for dtypes that have no C++ kernel.
AnyLinearWeight = LinearWeight | reference.LinearWeight


def pack_linear(
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    num_parts: int = 1,
    num_sums: int = 1,
) -> AnyLinearWeight:
    """Prepare weight [out_features, in_features] and bias [out_features] for `linear`.

    A weight is copied and not kept; drop yours to free its memory. A gate and an up projection
    in one weight are two parts: `linear_silu_mul` wants that. The inputs are added up in num_sums
    equal parts, 1, 2, 4 or 8, and these as `groups.tree_sum` adds them. FP8 becomes dense here.
    Other dtypes go to the reference. Raises ValueError for numbers that do not fit together.
    """
    if isinstance(weight, QuantizedWeight) and weight.is_fp8:
        weight = weight.dequantize()
    if weight.dtype != torch.bfloat16:
        return reference.pack_linear(weight, bias, num_parts=num_parts, num_sums=num_sums)
    _check_weight(weight, bias, num_parts)
    check_num_sums(num_sums, weight.shape[1])
    return LinearWeight(
        panels=pack_integers(weight, num_parts=num_parts)
        if isinstance(weight, QuantizedWeight)
        else _pack_bf16(weight.detach(), num_parts),
        bias=None if bias is None else bias.detach().contiguous(),
        out_features=weight.shape[0],
        in_features=weight.shape[1],
        num_parts=num_parts,
        num_sums=num_sums,
    )


def linear(x: torch.Tensor, packed: AnyLinearWeight) -> torch.Tensor:
    """x [..., in_features] @ weight^T + bias -> [..., out_features], in x's dtype; fp32 sums.

    A bf16 row's bits depend neither on the number of rows nor on the number of threads.
    """
    if isinstance(packed, reference.LinearWeight):
        return reference.linear(x, packed)
    x = rows_for(x, packed)
    out = x.new_empty(*x.shape[:-1], packed.out_features)
    library().pds_linear(*kernel_arguments(x, packed), out.data_ptr())
    return out


def linear_sums(x: torch.Tensor, packed: AnyLinearWeight) -> torch.Tensor:
    """x [..., in_features] @ weight^T -> fp32 [..., out_features], without the bias.

    `linear` is this and the bias, rounded. A bf16 row's bits depend on the row alone.
    """
    if isinstance(packed, reference.LinearWeight):
        return reference.linear_sums(x, packed)
    x = rows_for(x, packed)
    out = x.new_empty(*x.shape[:-1], packed.out_features, dtype=torch.float32)
    library().pds_linear_sums(*kernel_arguments(x, packed), out.data_ptr())
    return out


def linear_silu_mul(x: torch.Tensor, packed: AnyLinearWeight) -> torch.Tensor:
    """silu(gate) * up, where linear(x, packed) = [gate | up] -> [..., out_features / 2].

    The same bits as `linear` and then `silu_and_mul`, in one pass. Raises ValueError unless the
    weight was packed in two parts.
    """
    if isinstance(packed, reference.LinearWeight):
        gate_up = reference.linear(x, packed)
        activated = reference.silu_and_mul(gate_up.reshape(-1, packed.out_features))
        return activated.reshape(*x.shape[:-1], packed.out_features // 2)
    if packed.num_parts != 2:
        raise ValueError(f"the weight has {packed.num_parts} parts; gate and up are 2")
    x = rows_for(x, packed)
    out = x.new_empty(*x.shape[:-1], packed.out_features // 2)
    library().pds_linear_silu_mul(*kernel_arguments(x, packed), out.data_ptr())
    return out


def is_row_independent(dtype: torch.dtype) -> bool:
    """Whether a row of `dtype` gets the same bits in any batch: bf16 does, by construction."""
    return dtype == torch.bfloat16 or reference.is_row_independent(dtype)


def is_shard_independent(dtype: torch.dtype) -> bool:
    """See the reference: bf16 is, by construction."""
    return dtype == torch.bfloat16 or reference.is_shard_independent(dtype)


def _pack_bf16(weight: torch.Tensor, num_parts: int) -> torch.Tensor:
    shape = panels_shape(weight.shape[0], weight.shape[1], num_parts)
    panels = empty_on_huge_pages(shape.numel(), weight.dtype).view(shape)
    pack_into(panels, weight, num_parts)
    return panels


def panels_shape(out_features: int, in_features: int, num_parts: int) -> torch.Size:
    panels_of_part = -(-out_features // num_parts // PANEL)
    return torch.Size((num_parts * panels_of_part, -(-in_features // 2), PANEL, 2))


def pack_into(panels: torch.Tensor, weight: torch.Tensor, num_parts: int) -> None:
    """Write a bf16 weight [out_features, in_features] to panels of its `panels_shape`."""
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    library().pds_pack_linear(
        weight.data_ptr(), weight.stride(0), *weight.shape, num_parts, panels.data_ptr()
    )


def kernel_arguments(x: torch.Tensor, packed: LinearWeight) -> tuple[Any, ...]:
    """Return what the kernels take first: x, bf16 [..., in_features] as `rows_for` gives it, and
    the weight.
    """
    num_rows = x.numel() // max(1, x.shape[-1])
    return x.data_ptr(), num_rows, ctypes.byref(PackedLinear.of(packed))


def rows_for(x: torch.Tensor, packed: LinearWeight) -> torch.Tensor:
    """Return x, bf16 [..., in_features], with rows that follow each other, and an odd number of
    features padded with a zero. Raises TypeError for another dtype or device, ValueError for
    another size.
    """
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        raise TypeError(f"x is {x.dtype} on {x.device}; the weight is torch.bfloat16 on cpu")
    if x.shape[-1] != packed.in_features:
        raise ValueError(f"x has {x.shape[-1]} features; the weight takes {packed.in_features}")
    if packed.in_features % 2:
        x = F.pad(x, (0, 1))
    return x.contiguous()


def _check_weight(
    weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, num_parts: int
) -> None:
    if weight.device.type != "cpu" or len(weight.shape) != 2 or 0 in weight.shape:
        raise ValueError(
            f"weight is {list(weight.shape)} on {weight.device}; "
            "it must be [out_features, in_features] on cpu, neither 0"
        )
    if num_parts < 1 or weight.shape[0] % num_parts:
        raise ValueError(f"num_parts is {num_parts}; it must divide {weight.shape[0]} outputs")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(
            f"bias is {bias.dtype} {list(bias.shape)}; "
            f"it must be {weight.dtype} [{weight.shape[0]}]"
        )
