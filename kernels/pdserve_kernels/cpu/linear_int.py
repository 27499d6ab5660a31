"""Integer weights in panels, as csrc/packed_linear.h describes them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pdserve_kernels.cpu.memory import empty_on_huge_pages
from pdserve_kernels.reference.quantization import QuantizedWeight

PANEL = 64  # outputs of a panel, as in csrc/packed_linear.h
# Outputs that are packed at a time: what lies in between stays in the cache.
OUTPUTS_AT_A_TIME = 8 * PANEL


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerPanels:
    """A weight's integers, and what makes numbers of them.

    values: uint8 [panels, ceil(k / 2), 128 * bits / 8]. scales: fp32 or bf16 [panels, groups, 64].
    zeros: int8 [panels, groups, 64, 2], each twice, plus 8 for 4 bits; or None.
    """

    bits: int
    group_size: int
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None


def integers_shape(weight: QuantizedWeight, num_parts: int) -> torch.Size:
    """Return the shape of the `values` of a weight [n, k]."""
    panels_of_part = -(-weight.shape[0] // num_parts // PANEL)
    num_pairs, num_bytes = -(-weight.shape[1] // 2), PANEL * 2 * weight.bits // 8
    return torch.Size((num_parts * panels_of_part, num_pairs, num_bytes))


def pack_integers(
    weight: QuantizedWeight, *, num_parts: int, values: torch.Tensor | None = None
) -> IntegerPanels:
    """Return a copy of a weight [n, k] in panels; the outputs of each part are padded to whole
    panels with zeros.

    values: where the integers go, uint8 of their `integers_shape`; None: into memory of their own.
    """
    rows_of_part = weight.shape[0] // num_parts
    if values is None:
        shape = integers_shape(weight, num_parts)
        values = empty_on_huge_pages(shape.numel(), torch.uint8).view(shape)
    done = 0
    for part in _pieces(weight.values, rows_of_part):
        for rows in _pieces(part, OUTPUTS_AT_A_TIME):
            packed = _pack_values(rows, weight.bits)
            values[done : done + len(packed)] = packed
            done += len(packed)
    zeros = None
    if weight.zeros is not None:
        stored = weight.zeros + (8 if weight.bits == 4 else 0)
        zeros = _pack_groups(stored, rows_of_part)[..., None].expand(-1, -1, -1, 2).contiguous()
    return IntegerPanels(
        bits=weight.bits,
        group_size=weight.group_size,
        values=values,
        scales=_pack_groups(weight.scales, rows_of_part),
        zeros=zeros,
    )


def _pack_values(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [n, k] -> uint8 [ceil(n / 64), ceil(k / 2), bytes for two inputs]."""
    panels = _pad_to_panels(F.pad(rows, (0, rows.shape[1] % 2)))
    # Two inputs of an output travel together.
    pairs = panels.view(torch.int16).transpose(1, 2).contiguous().view(torch.uint8)
    if bits == 8:
        return pairs
    quarters = (pairs + 8).view(*pairs.shape[:2], 4, -1)  # as int8 reads the sum, -8 becomes 0
    low = quarters[:, :, 0] | (quarters[:, :, 1] << 4)
    high = quarters[:, :, 2] | (quarters[:, :, 3] << 4)
    return torch.stack((low, high), dim=-1).flatten(2)


def _pack_groups(of_groups: torch.Tensor, rows_of_part: int) -> torch.Tensor:
    """[n, groups] -> [panels, groups, 64]."""
    parts = [_pad_to_panels(part) for part in _pieces(of_groups, rows_of_part)]
    return torch.cat(parts).transpose(1, 2).contiguous()


def _pad_to_panels(rows: torch.Tensor) -> torch.Tensor:
    return F.pad(rows, (0, 0, 0, -len(rows) % PANEL)).view(-1, PANEL, rows.shape[1])


def _pieces(rows: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    return (rows[begin : begin + size] for begin in range(0, len(rows), size))
