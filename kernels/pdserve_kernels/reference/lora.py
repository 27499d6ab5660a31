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
        for part in parts:
            shrunk = linear(x[begin:end].float(), part.a) * part.scale
            target = sums[:, part.first_output :][:, : part.b.shape[1]]
            for rank, direction in enumerate(part.b):
                target += shrunk[:, rank : rank + 1] * direction
        out[begin:end] = sums
    return out


def _sums(x: torch.Tensor, packed: LinearWeight) -> torch.Tensor:
    """Row by row: products in fp32 have other bits among other rows."""
    sums = torch.cat([linear_sums(row, packed) for row in x.unsqueeze(1)])
    return sums if packed.bias is None else sums + packed.bias
