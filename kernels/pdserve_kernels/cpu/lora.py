"""Adapters for bf16 rows, as csrc/lora.h describes them."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch

from pdserve_kernels import reference
from pdserve_kernels.cpu.compiled import library
from pdserve_kernels.cpu.linear import AnyLinearWeight, LinearWeight, kernel_arguments, rows_for
from pdserve_kernels.cpu.linear_int import PANEL
from pdserve_kernels.cpu.memory import empty_on_huge_pages
from pdserve_kernels.lora import LoraLayer, LoraPart, LoraRows, LoraSegment

PAIRS = 32  # inputs that are multiplied at a time, two a lane
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class _Panel(ctypes.Structure):
    """`LoraPanel` of csrc/lora.h."""

    _fields_ = (("b", _POINTER), ("first_rank", _INT), ("num_ranks", _INT))


class _Weight(ctypes.Structure):
    """`LoraWeight` of csrc/lora.h."""

    _fields_ = (
        ("a", _POINTER),
        ("scales", _POINTER),
        ("panels", ctypes.POINTER(_Panel)),
        ("num_ranks", _INT),
    )

    @classmethod
    def of(cls, weight: "LoraWeight | None") -> "_Weight":
        if weight is None:
            return cls()
        return cls(weight.a.data_ptr(), weight.scales.data_ptr(), weight.native, len(weight.a))


class _Layer(ctypes.Structure):
    """`LoraLayer` of csrc/lora.h."""

    _fields_ = (
        ("qkv", _Weight),
        ("attention_output", _Weight),
        ("gate_up", _Weight),
        ("down", _Weight),
    )

    @classmethod
    def of(cls, layer: LoraLayer) -> "_Layer":
        parts = (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
        return cls(*map(_Weight.of, parts))


class Segment(ctypes.Structure):
    """`LoraSegment` of csrc/lora.h."""

    _fields_ = (("begin", _INT), ("end", _INT), ("layers", ctypes.POINTER(_Layer)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeight:
    """What an adapter adds to a LinearWeight. a: bf16 [ranks, in_features, rounded up to PAIRS];
    scales: fp32 [ranks]; b: bf16 [.., PANEL], for each panel of the weight a row for each rank that
    it has outputs of. `native` is what the C++ sees of the panels.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    native: Any

    @classmethod
    def of(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        scales: torch.Tensor,
        first_ranks: Sequence[int],
        sizes: Sequence[int],
    ) -> "LoraWeight":
        """`first_ranks` and `sizes` are of each panel: the first of its ranks, and how many."""
        starts = accumulate([0, *sizes[:-1]])
        addresses = [b.data_ptr() + b.element_size() * PANEL * start for start in starts]
        panels = map(_Panel, addresses, first_ranks, sizes)
        return cls(a=a, b=b, scales=scales, native=(_Panel * len(sizes))(*panels))

    def moved(self, memory: torch.Tensor) -> "LoraWeight":
        """Return the same in the first elements of `memory`."""
        a = memory[: self.a.numel()].view(self.a.shape)
        b = memory[self.a.numel() : self.num_elements].view(self.b.shape)
        a.copy_(self.a)
        b.copy_(self.b)
        first_ranks = [panel.first_rank for panel in self.native]
        sizes = [panel.num_ranks for panel in self.native]
        return LoraWeight.of(a, b, self.scales, first_ranks, sizes)

    @property
    def num_elements(self) -> int:
        return self.a.numel() + self.b.numel()


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
    num_inputs = -(-packed.in_features // PAIRS) * PAIRS
    a = torch.zeros(sum(ranks), num_inputs, dtype=torch.bfloat16)
    a[:, : packed.in_features] = torch.cat([part.a for part in parts])
    scales = torch.tensor([part.scale for part in parts]).repeat_interleave(torch.tensor(ranks))
    firsts, pieces = zip(*_panels(parts, packed), strict=True)
    # One behind the other, as they are read.
    return LoraWeight.of(a, torch.cat(pieces), scales, firsts, [len(piece) for piece in pieces])


def pack_adapter(layers: Sequence[LoraLayer]) -> PackedAdapter:
    """See the reference's contract."""
    weights = [weight for layer in layers for weight in _weights_of(layer)]
    if not all(isinstance(weight, LoraWeight) for weight in weights):
        return PackedAdapter(tuple(layers), None, 0)
    # In one piece, in the order in which steps read it: each alone is too small for huge pages.
    memory = empty_on_huge_pages(sum(weight.num_elements for weight in weights), torch.bfloat16)
    starts = accumulate((weight.num_elements for weight in weights), initial=0)
    moved = iter(
        [weight.moved(memory[start:]) for weight, start in zip(weights, starts, strict=False)]
    )
    layers = [
        LoraLayer(**{name: weight and next(moved) for name, weight in _named(layer)})
        for layer in layers
    ]
    native = (_Layer * len(layers))(*map(_Layer.of, layers))
    return PackedAdapter(tuple(layers), native, max((len(w.a) for w in weights), default=0))


def _named(layer: LoraLayer) -> list[tuple[str, Any]]:
    return [(field.name, getattr(layer, field.name)) for field in fields(layer)]


def _weights_of(layer: LoraLayer) -> Iterator[Any]:
    return (weight for _, weight in _named(layer) if weight is not None)


def linear_lora(x: torch.Tensor, packed: AnyLinearWeight, rows: Sequence[LoraRows]) -> torch.Tensor:
    """See the reference's contract."""
    if isinstance(packed, reference.LinearWeight):
        return reference.linear_lora(x, packed, rows)
    x = rows_for(x, packed)
    layers = [(_Layer * 1)(_Layer(qkv=_Weight.of(weight))) for _, _, weight in rows]
    described = [
        Segment(begin, end, layer) for (begin, end, _), layer in zip(rows, layers, strict=True)
    ]
    row_ranks = max((len(weight.a) for _, _, weight in rows), default=0)
    shrunk = torch.empty(len(x), row_ranks)
    out = x.new_empty(len(x), packed.out_features)
    library().pds_linear_lora(
        *kernel_arguments(x, packed),
        (Segment * len(rows))(*described),
        len(rows),
        shrunk.data_ptr(),
        row_ranks,
        out.data_ptr(),
    )
    return out


def segments_of(lora: Sequence[LoraSegment], num_tokens: int) -> Any:
    """Return what the C++ gets. Raises ValueError for rows that a step does not have."""
    end = 0
    for segment in lora:
        if not end <= segment.begin < segment.end <= num_tokens:
            raise ValueError(f"lora has rows {segment.begin} to {segment.end} of {num_tokens}")
        end = segment.end
    described = (Segment(begin, end, adapter.native) for begin, end, adapter in lora)
    return (Segment * len(lora))(*described)


def _panels(parts: Sequence[LoraPart], packed: LinearWeight) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield for each panel of the weight the first rank of those that it has outputs of, and B."""
    outputs_of_part = packed.out_features // packed.num_parts
    for start in range(0, packed.out_features, outputs_of_part):
        for first in range(start, start + outputs_of_part, PANEL):
            yield _panel(parts, first, min(first + PANEL, start + outputs_of_part))


def _panel(parts: Sequence[LoraPart], first: int, end: int) -> tuple[int, torch.Tensor]:
    rank, first_rank = 0, 0
    pieces: list[torch.Tensor] = []
    for part in parts:
        outputs = range(max(first, part.first_output), min(end, part.first_output + len(part.b)))
        if outputs:
            first_rank = first_rank if pieces else rank
            piece = torch.zeros(len(part.a), PANEL, dtype=torch.bfloat16)
            rows = slice(outputs.start - part.first_output, outputs.stop - part.first_output)
            piece[:, outputs.start - first : outputs.stop - first] = part.b[rows].t()
            pieces.append(piece)
        rank += len(part.a)
    return first_rank, torch.cat(pieces) if pieces else torch.zeros(0, PANEL, dtype=torch.bfloat16)
