"""Adapters for bf16 rows, as csrc/lora.h describes them."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from pdserve_kernels import reference
from pdserve_kernels.cpu.compiled import library
from pdserve_kernels.cpu.linear import (
    AnyLinearWeight,
    LinearWeight,
    PackedLinear,
    kernel_arguments,
    rows_for,
)
from pdserve_kernels.cpu.linear_int import PANEL
from pdserve_kernels.cpu.memory import empty_on_huge_pages
from pdserve_kernels.lora import LINEARS, LoraLayer, LoraPart, LoraRows, LoraSegment
from pdserve_kernels.reference import lora as reference_lora

PAIRS = 32  # inputs that are multiplied at a time, two a lane
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class _Weight(ctypes.Structure):
    """`LoraWeight` of csrc/lora.h."""

    _fields_ = (
        ("a", _POINTER),
        ("scales", _POINTER),
        ("panels", _POINTER),
        ("num_ranks", _INT),
    )

    @classmethod
    def of(cls, weight: "LoraWeight | None") -> "_Weight":
        if weight is None:
            return cls()
        arrays = (weight.a, weight.scales, weight.panels)
        return cls(*(array.data_ptr() for array in arrays), len(weight.a))


class _Layer(ctypes.Structure):
    """`LoraLayer` of csrc/lora.h."""

    _fields_ = tuple((name, _Weight) for name in LINEARS)

    @classmethod
    def of(cls, layer: LoraLayer) -> "_Layer":
        return cls(*(_Weight.of(layer.get(name)) for name in LINEARS))


class Segment(ctypes.Structure):
    """`LoraSegment` of csrc/lora.h."""

    _fields_ = (("begin", _INT), ("end", _INT), ("layers", ctypes.POINTER(_Layer)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeight:
    """What an adapter adds to a LinearWeight. a: bf16 [ranks, num_sums of the weight, in_features /
    num_sums, rounded up to PAIRS]; scales: fp32 [ranks]; b: bf16 [.., PANEL], for each panel of the
    weight a row for each rank that it has outputs of. panels: int64 [panels, 3], each a `LoraPanel`
    of csrc/lora.h: the address of its rows, the first of its ranks, and how many.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    panels: torch.Tensor

    def moved(self, memory: torch.Tensor) -> "LoraWeight":
        """Return the same in the first elements of `memory`, bf16 [num_elements or more]."""
        a = memory[: self.a.numel()].view(self.a.shape)
        b = memory[self.a.numel() : self.num_elements].view(self.b.shape)
        a.copy_(self.a)
        b.copy_(self.b)
        panels = self.panels.clone()
        panels[:, 0] += b.data_ptr() - self.b.data_ptr()
        return LoraWeight(a=a, b=b, scales=self.scales, panels=panels)

    @property
    def num_elements(self) -> int:
        return self.a.numel() + self.b.numel()


class _Piece(NamedTuple):
    """Where a part's B goes."""

    # The panels with outputs of it.
    touched: slice
    # In each of them, the ranks before it.
    offsets: torch.Tensor
    # The lane of each output: those of the first such panel are 0 to PANEL - 1.
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter's layers, and how the C++ sees them (None: it cannot run them)."""

    layers: tuple[LoraLayer, ...]
    native: Any
    # The most ranks that it has in a weight.
    num_ranks: int

    def __getitem__(self, layer: int) -> LoraLayer:
        return self.layers[layer]


def pack_lora(parts: Sequence[LoraPart], packed: AnyLinearWeight) -> Any:
    """See the reference's contract."""
    if isinstance(packed, reference.LinearWeight):
        return reference.pack_lora(parts, packed)
    if not parts:
        return None
    ranks = [len(part.a) for part in parts]
    num_sums, num_inputs = packed.num_sums, packed.in_features // packed.num_sums
    a = torch.zeros(sum(ranks), num_sums, -(-num_inputs // PAIRS) * PAIRS, dtype=torch.bfloat16)
    a[..., :num_inputs] = torch.cat([part.a for part in parts]).view(-1, num_sums, num_inputs)
    scales = torch.tensor([part.scale for part in parts]).repeat_interleave(torch.tensor(ranks))
    b, panels = _panels(parts, packed)
    return LoraWeight(a=a, b=b, scales=scales, panels=panels)


def pack_adapter(layers: Sequence[LoraLayer]) -> PackedAdapter:
    """See the reference's contract."""
    weights = [weight for layer in layers for _, weight in _weights_of(layer)]
    if not all(isinstance(weight, LoraWeight) for weight in weights):
        return PackedAdapter(tuple(layers), None, 0)
    # In one piece, in the order in which steps read it: each alone is too small for huge pages.
    memory = empty_on_huge_pages(sum(weight.num_elements for weight in weights), torch.bfloat16)
    starts = accumulate((weight.num_elements for weight in weights), initial=0)
    moved = iter(
        [weight.moved(memory[start:]) for weight, start in zip(weights, starts, strict=False)]
    )
    layers = [{name: next(moved) for name, _ in _weights_of(layer)} for layer in layers]
    native = (_Layer * len(layers))(*map(_Layer.of, layers))
    return PackedAdapter(tuple(layers), native, max((len(w.a) for w in weights), default=0))


def _weights_of(layer: LoraLayer) -> Iterator[tuple[str, Any]]:
    return ((name, weight) for name in LINEARS if (weight := layer.get(name)) is not None)


def linear_lora(x: torch.Tensor, packed: AnyLinearWeight, rows: Sequence[LoraRows]) -> torch.Tensor:
    """See the reference's contract."""
    if isinstance(packed, reference.LinearWeight):
        return reference.linear_lora(x, packed, rows)
    x = rows_for(x, packed)
    row_ranks = _num_row_ranks(rows)
    shrunk = torch.empty(len(x), row_ranks)
    out = x.new_empty(len(x), packed.out_features)
    library().pds_linear_lora(
        *kernel_arguments(x, packed),
        *_described(rows),
        shrunk.data_ptr(),
        row_ranks,
        out.data_ptr(),
    )
    return out


def shrink_lora(x: torch.Tensor, packed: AnyLinearWeight, rows: Sequence[LoraRows]) -> torch.Tensor:
    """Return A x of x [n, in_features], fp32 [n, ranks]; see the reference's contract. The inputs
    are added up in as many parts as the weight's.
    """
    if isinstance(packed, reference.LinearWeight):
        return reference_lora.shrink_lora(x, packed, rows)
    x = rows_for(x, packed)
    shrunk = torch.zeros(len(x), _num_row_ranks(rows))
    library().pds_shrink_lora(
        *kernel_arguments(x, packed), *_described(rows), shrunk.data_ptr(), shrunk.shape[1]
    )
    return shrunk


def expand_lora(
    sums: torch.Tensor, shrunk: torch.Tensor, packed: AnyLinearWeight, rows: Sequence[LoraRows]
) -> None:
    """Add scale * B shrunk to sums, fp32 [n, out_features]; shrunk is fp32 [n, ranks]. See the
    reference's contract.
    """
    if isinstance(packed, reference.LinearWeight):
        return reference_lora.expand_lora(sums, shrunk, packed, rows)
    scaled = shrunk.clone()
    for begin, end, weight in rows:
        scaled[begin:end, : len(weight.a)] *= weight.scales
    library().pds_expand_lora(
        sums.data_ptr(),
        len(sums),
        ctypes.byref(PackedLinear.of(packed)),
        *_described(rows),
        scaled.data_ptr(),
        scaled.shape[1],
    )


def _num_row_ranks(rows: Sequence[LoraRows]) -> int:
    """Return the most ranks that a row has."""
    return max((len(weight.a) for _, _, weight in rows), default=0)


def _described(rows: Sequence[LoraRows]) -> tuple[Any, int]:
    """Return what the C++ gets of one weight's rows, as a layer's qkv, and how many there are."""
    layers = [(_Layer * 1)(_Layer(qkv=_Weight.of(weight))) for _, _, weight in rows]
    segments = [
        Segment(begin, end, layer) for (begin, end, _), layer in zip(rows, layers, strict=True)
    ]
    return (Segment * len(rows))(*segments), len(rows)


def segments_of(lora: Sequence[LoraSegment], num_tokens: int) -> Any:
    """Return what the C++ gets. Raises ValueError for rows that a step does not have."""
    end = 0
    for segment in lora:
        if not end <= segment.begin < segment.end <= num_tokens:
            raise ValueError(f"lora has rows {segment.begin} to {segment.end} of {num_tokens}")
        end = segment.end
    described = (Segment(begin, end, adapter.native) for begin, end, adapter in lora)
    return (Segment * len(lora))(*described)


def _panels(parts: Sequence[LoraPart], packed: LinearWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return B, panel by panel as it is read, and `panels`, as LoraWeight has them.

    In few calls for each part, however many panels it has: each call waits for the GIL, and steps
    wait for it in turn.
    """
    outputs_of_part = packed.out_features // packed.num_parts
    panels_of_part = -(-outputs_of_part // PANEL)
    num_panels = packed.num_parts * panels_of_part
    sizes = torch.zeros(num_panels, dtype=torch.int64)
    first_ranks = torch.zeros(num_panels, dtype=torch.int64)
    pieces: list[_Piece] = []
    num_ranks = 0
    for part in parts:
        outputs = torch.arange(part.first_output, part.first_output + len(part.b))
        places = outputs // outputs_of_part * panels_of_part * PANEL + outputs % outputs_of_part
        touched = slice(int(places[0]) // PANEL, int(places[-1]) // PANEL + 1)
        # The parts before it in a panel come first.
        firsts = first_ranks[touched]
        firsts.copy_(torch.where(sizes[touched] == 0, num_ranks, firsts))
        pieces.append(_Piece(touched, sizes[touched].clone(), places - touched.start * PANEL))
        sizes[touched] += len(part.a)
        num_ranks += len(part.a)
    starts = sizes.cumsum(0) - sizes
    b = torch.zeros(int(sizes.sum()), PANEL, dtype=torch.bfloat16)
    for part, piece in zip(parts, pieces, strict=True):
        rank = len(part.a)
        lanes = torch.zeros(len(piece.offsets) * PANEL, rank, dtype=torch.bfloat16)
        lanes[piece.places] = part.b
        rows = (starts[piece.touched] + piece.offsets).unsqueeze(1) + torch.arange(rank)
        b[rows.flatten()] = lanes.view(-1, PANEL, rank).transpose(1, 2).reshape(-1, PANEL)
    addresses = b.data_ptr() + b.element_size() * PANEL * starts
    return b, torch.stack((addresses, first_ranks, sizes), dim=1)
