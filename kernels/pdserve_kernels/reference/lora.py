"""Linears whose rows have adapters, each its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pdserve_kernels.lora import LoraLayer, LoraPart, LoraRows
from pdserve_kernels.reference.linear import LinearWeight, linear, linear_sums, pack_linear


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    first_output: int
    # [rank, in_features], in fp32.
    a: LinearWeight
    # [rank, num_outputs], in fp32.
    b: torch.Tensor
    scale: float


def pack_lora(parts: Sequence[LoraPart], packed: LinearWeight) -> Any:
    """Prepare what an adapter adds to a packed linear; None if that is nothing.

    The parts lie one after another, in ascending order of outputs.
    """
    del packed
    if not parts:
        return None
    return tuple(
        _Part(
            first_output=part.first_output,
            a=pack_linear(part.a.float()),
            b=part.b.float().t().contiguous(),
            scale=part.scale,
        )
        for part in parts
    )


def pack_adapter(layers: Sequence[LoraLayer]) -> Any:
    """Prepare an adapter for `run_decoder`: its part in each of the decoder's layers, in order."""
    return tuple(layers)


def linear_lora(x: torch.Tensor, packed: LinearWeight, rows: Sequence[LoraRows]) -> torch.Tensor:
    """x [n, in_features] -> linear(x, packed) + scale * B (A x) for the rows that have an adapter.

    A x is in fp32 and so is what it makes, which is added to the linear's sums rank by rank,
    ascending; they are rounded once. A row's bits depend on the row and its adapter alone; those
    of rows without one are `linear`'s.
    """
    out = linear(x, packed)
    for begin, end, parts in rows:
        sums = _sums(x[begin:end], packed) if x.dtype != torch.float32 else out[begin:end]
        _expand(sums, _shrink(x[begin:end], parts), parts)
        out[begin:end] = sums
    return out


def shrink_lora(x: torch.Tensor, packed: LinearWeight, rows: Sequence[LoraRows]) -> torch.Tensor:
    """x [n, in_features] -> A x in fp32 [n, ranks], zeros where a row has fewer ranks.

    Ranks that have a part of the inputs each add theirs up for `expand_lora`.
    """
    del packed
    shrunk = [_shrink(x[begin:end], parts) for begin, end, parts in rows]
    out = torch.zeros(len(x), max((part.shape[1] for part in shrunk), default=0))
    for (begin, end, _), part in zip(rows, shrunk, strict=True):
        out[begin:end, : part.shape[1]] = part
    return out


def expand_lora(
    sums: torch.Tensor, shrunk: torch.Tensor, packed: LinearWeight, rows: Sequence[LoraRows]
) -> None:
    """Add scale * B shrunk to sums, fp32 [n, out_features], rank by rank, ascending."""
    del packed
    for begin, end, parts in rows:
        _expand(sums[begin:end], shrunk[begin:end], parts)


def _shrink(x: torch.Tensor, parts: Sequence[_Part]) -> torch.Tensor:
    """Return the ranks of all parts side by side."""
    return torch.cat([linear(x.float(), part.a) for part in parts], 1)


def _expand(sums: torch.Tensor, shrunk: torch.Tensor, parts: Sequence[_Part]) -> None:
    first = 0
    for part in parts:
        target = sums[:, part.first_output :][:, : part.b.shape[1]]
        scaled = shrunk[:, first : first + len(part.b)] * part.scale
        for rank, direction in enumerate(part.b):
            target += scaled[:, rank : rank + 1] * direction
        first += len(part.b)


def _sums(x: torch.Tensor, packed: LinearWeight) -> torch.Tensor:
    """Row by row: products in fp32 have other bits among other rows."""
    sums = torch.cat([linear_sums(row, packed) for row in x.unsqueeze(1)])
    return sums if packed.bias is None else sums + packed.bias
