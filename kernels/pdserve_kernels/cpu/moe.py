"""Experts in C++ for bf16, as csrc/moe.h describes it."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice

import torch

from pdserve_kernels import reference
from pdserve_kernels.cpu.compiled import library
from pdserve_kernels.cpu.linear import (
    LinearWeight,
    PackedLinear,
    pack_into,
    pack_linear,
    panels_shape,
    rows_for,
)
from pdserve_kernels.cpu.linear_int import IntegerPanels, integers_shape, pack_integers
from pdserve_kernels.cpu.memory import empty_on_huge_pages
from pdserve_kernels.reference import moe as reference_moe
from pdserve_kernels.reference.moe import (
    ExpertWeight,
    SharedExpert,
    check_shared,
    check_top_k,
    checked_experts,
    with_gate,
)
from pdserve_kernels.reference.quantization import QuantizedWeight

_INT = ctypes.c_int64


class _SharedExpert(ctypes.Structure):
    """`SharedExpert` of csrc/moe.h."""

    _fields_ = (("gate_up", PackedLinear), ("down", PackedLinear))


class _Moe(ctypes.Structure):
    """`Moe` of csrc/moe.h."""

    _fields_ = (
        ("router", PackedLinear),
        ("gate_up", ctypes.POINTER(PackedLinear)),
        ("down", ctypes.POINTER(PackedLinear)),
        ("shared", ctypes.POINTER(_SharedExpert)),
        ("top_k", _INT),
        ("renormalize", _INT),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeight:
    """Experts for bf16 rows, in the order of their ids, and the router of as many outputs, or of
    one more, the gate of a shared expert. Experts' weights of a kind lie in one piece of memory.
    """

    router: LinearWeight
    # In two parts.
    gate_up: tuple[LinearWeight, ...]
    down: tuple[LinearWeight, ...]
    # Gate and up, in two parts, and down, or None.
    shared: tuple[LinearWeight, LinearWeight] | None
    top_k: int
    renormalize: bool
    native: _Moe = field(init=False)

    def __post_init__(self) -> None:
        native = _Moe(
            PackedLinear.of(self.router),
            _described(self.gate_up),
            _described(self.down),
            self.shared and ctypes.pointer(_SharedExpert(*map(PackedLinear.of, self.shared))),
            self.top_k,
            self.renormalize,
        )
        object.__setattr__(self, "native", native)

    @property
    def address(self) -> int:
        """Of the struct that the C++ reads, for as long as this is there."""
        return ctypes.addressof(self.native)

    @property
    def shape(self) -> tuple[int, ...]:
        """What a workspace depends on: the numbers of experts and of chosen ones, and the sizes of
        rows, of experts and of the shared one, 0 if there is none.
        """
        down = self.down[0]
        shared_size = 0 if self.shared is None else self.shared[1].in_features
        return len(self.down), self.top_k, down.out_features, down.in_features, shared_size


# What `pack_moe` returns for dtypes and sizes that have no C++ kernel.
AnyMoeWeight = MoeWeight | reference_moe.MoeWeight


def pack_moe(
    router: torch.Tensor,
    experts: Iterable[tuple[ExpertWeight, ExpertWeight]],
    *,
    top_k: int,
    renormalize: bool,
    shared: SharedExpert | None = None,
) -> AnyMoeWeight:
    """See the reference's contract. Dtypes but bf16, and odd sizes, go to the reference. Integers
    are multiplied as such; FP8 becomes dense here.
    """
    check_top_k(top_k, len(router))
    first, experts = _peeked(experts)
    weights = (router, *first, *(shared or ()))
    if not all(w.dtype == torch.bfloat16 and w.shape[1] % 2 == 0 for w in weights):
        return reference.pack_moe(
            router, experts, top_k=top_k, renormalize=renormalize, shared=shared
        )
    check_shared(router, shared)
    gate_up, down = _Stack(len(router), num_parts=2), _Stack(len(router), num_parts=1)
    for gate_up_weight, down_weight in checked_experts(router, experts):
        gate_up.add(gate_up_weight)
        down.add(down_weight)
    return MoeWeight(
        router=_packed(with_gate(router, shared)),
        gate_up=tuple(gate_up.weights),
        down=tuple(down.weights),
        shared=shared and (_packed(shared.gate_up, num_parts=2), _packed(shared.down)),
        top_k=top_k,
        renormalize=renormalize,
    )


def fused_moe(x: torch.Tensor, packed: AnyMoeWeight) -> torch.Tensor:
    """See the reference's contract. A bf16 row's bits depend neither on other rows nor on the
    number of threads.
    """
    if isinstance(packed, reference_moe.MoeWeight):
        return reference.fused_moe(x, packed)
    x = rows_for(x, packed.router)
    out, size, kernels = torch.empty_like(x), _INT(), library()
    num_rows = x.numel() // packed.router.in_features
    kernels.pds_moe_workspace_size(packed.address, num_rows, ctypes.byref(size))
    workspace = empty_on_huge_pages(size.value, torch.uint8)
    kernels.pds_fused_moe(
        x.data_ptr(), num_rows, packed.address, workspace.data_ptr(), out.data_ptr()
    )
    return out


class _Stack:
    """Weights of one shape, packed one by one into one piece of memory. Experts that are stored in
    other bits than the first one have memory of their own.
    """

    def __init__(self, count: int, *, num_parts: int) -> None:
        self._count = count
        self._num_parts = num_parts
        self._memory: torch.Tensor | None = None
        self.weights: list[LinearWeight] = []

    def add(self, weight: ExpertWeight) -> None:
        out_features, in_features = weight.shape
        self.weights.append(
            LinearWeight(
                panels=self._pack(weight),
                bias=None,
                out_features=out_features,
                in_features=in_features,
                num_parts=self._num_parts,
                num_sums=1,
            )
        )

    def _pack(self, weight: ExpertWeight) -> torch.Tensor | IntegerPanels:
        if isinstance(weight, QuantizedWeight):
            if not weight.is_fp8:
                values = self._place(integers_shape(weight, self._num_parts), torch.uint8)
                return pack_integers(weight, num_parts=self._num_parts, values=values)
            weight = weight.dequantize()
        out_features, in_features = weight.shape
        shape = panels_shape(out_features, in_features, self._num_parts)
        panels = self._place(shape, weight.dtype)
        pack_into(panels, weight.detach(), self._num_parts)
        return panels

    def _place(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if self._memory is None:
            memory = empty_on_huge_pages(self._count * shape.numel(), dtype)
            self._memory = memory.view(self._count, *shape)
        place = self._memory[len(self.weights)]
        if place.shape == shape and place.dtype == dtype:
            return place
        return empty_on_huge_pages(shape.numel(), dtype).view(shape)


def _packed(weight: ExpertWeight, *, num_parts: int = 1) -> LinearWeight:
    packed = pack_linear(weight, num_parts=num_parts)
    assert isinstance(packed, LinearWeight)
    return packed


def _described(weights: tuple[LinearWeight, ...]) -> "ctypes.Array[PackedLinear]":
    return (PackedLinear * len(weights))(*map(PackedLinear.of, weights))


def _peeked(
    experts: Iterable[tuple[ExpertWeight, ExpertWeight]],
) -> tuple[tuple[ExpertWeight, ...], Iterable[tuple[ExpertWeight, ExpertWeight]]]:
    """Return the first expert's weights, none if there is no expert, and all experts."""
    remaining = iter(experts)
    first = list(islice(remaining, 1))
    return tuple(weight for weights in first for weight in weights), chain(first, remaining)
