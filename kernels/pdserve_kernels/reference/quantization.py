"""Weights in 4 or 8 bits: what they mean, and how they are made from a dense weight."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from pdserve_kernels.fp8 import FP8, FP8_MAX

BITS = (4, 8)
# Weights that are dequantized or rounded at a time: their fp32 copies stay in the cache.
WEIGHTS_AT_A_TIME = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight [n, k] whose entry is (value - zero) * scale, by groups of `group_size` inputs.

    values: int8 [n, k], in the range of `bits` (4: -8 to 7), or FP8, which has 8. scales: fp32 or
    bf16 [n, groups], the last group may be shorter. zeros: int8 [n, groups] in the same range, or
    None if all are 0, as those of FP8 are. dtype: of the activations it is for. Raises ValueError
    for shapes and dtypes that do not fit.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits is {self.bits}, must be one of {', '.join(map(str, BITS))}")
        if self.group_size < 2 or self.group_size % 2:
            raise ValueError(f"group_size is {self.group_size}, must be even and at least 2")
        if self.values.dtype not in (torch.int8, FP8) or self.values.dim() != 2:
            raise ValueError(f"values is {_describe(self.values)}, must be int8 or {FP8} [n, k]")
        if self.is_fp8 and (self.bits != 8 or self.zeros is not None):
            raise ValueError(f"values is {FP8}, which has 8 bits and no zeros")
        rows, columns = self.values.shape
        grid = (rows, -(-columns // self.group_size))
        if self.scales.dtype not in (torch.float32, torch.bfloat16) or self.scales.shape != grid:
            raise ValueError(
                f"scales is {_describe(self.scales)}, must be fp32 or bf16 {list(grid)}"
            )
        if self.zeros is not None and (self.zeros.dtype != torch.int8 or self.zeros.shape != grid):
            raise ValueError(f"zeros is {_describe(self.zeros)}, must be int8 {list(grid)}")

    @property
    def is_fp8(self) -> bool:
        return self.values.dtype == FP8

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """The same on a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(
            self, values=self.values.to(device), scales=self.scales.to(device), zeros=zeros
        )

    def rows(self, part: slice) -> "QuantizedWeight":
        """Some rows, which share this weight's memory."""
        zeros = None if self.zeros is None else self.zeros[part]
        return replace(self, values=self.values[part], scales=self.scales[part], zeros=zeros)

    def columns(self, part: slice) -> "QuantizedWeight":
        """Some inputs, which share this weight's memory. Raises ValueError if they begin or end
        within a group, unless there is one for the whole row.
        """
        begin, end, step = part.indices(self.shape[1])
        size = self.group_size
        assert step == 1, part
        if self.scales.shape[1] == 1:
            return replace(self, values=self.values[:, part], group_size=end - begin)
        if begin % size or (end % size and end != self.shape[1]):
            raise ValueError(
                f"inputs {begin} to {end} of {self.shape[1]} are not whole groups of {size}"
            )
        groups = slice(begin // size, -(-end // size))
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return replace(
            self, values=self.values[:, part], scales=self.scales[:, groups], zeros=zeros
        )

    def dequantize(self) -> torch.Tensor:
        """Return the dense weight [n, k], computed in fp32 and rounded to `dtype`."""
        dense = torch.empty(self.shape, dtype=self.dtype, device=self.values.device)
        for part in _row_slices(*self.shape):
            dense[part] = _dequantize(self.rows(part))
        return dense


def quantize(weight: torch.Tensor, *, bits: int, group_size: int | None) -> QuantizedWeight:
    """Round a weight [n, k] to the nearest integers, symmetrically; group_size None: a whole row.

    A group's largest magnitude becomes 127, or for 4 bits 7. Scales of 8 bits are fp32, those of 4
    bits are rounded to bf16 first: with them, 32 inputs take 18 bytes.
    """
    rows, columns = weight.shape
    group_size = group_size or columns + columns % 2
    groups = -(-columns // group_size)
    scale_dtype = torch.float32 if bits == 8 else torch.bfloat16
    values = torch.empty(rows, columns, dtype=torch.int8, device=weight.device)
    scales = torch.empty(rows, groups, dtype=scale_dtype, device=weight.device)
    limit = 2 ** (bits - 1) - 1
    for part in _row_slices(rows, columns):
        # Zeros fill the last group up.
        dense = weight.new_zeros(len(weight[part]), groups * group_size, dtype=torch.float32)
        dense[:, :columns] = weight[part]
        grouped = dense.view(-1, groups, group_size)
        scales[part] = grouped.abs().amax(-1) / limit
        divisor = scales[part, :, None].float()
        grouped.div_(torch.where(divisor == 0, 1.0, divisor)).round_().clamp_(-limit, limit)
        values[part] = dense[:, :columns]
    return QuantizedWeight(
        values=values,
        scales=scales,
        zeros=None,
        bits=bits,
        group_size=group_size,
        dtype=weight.dtype,
    )


def quantize_fp8(weight: torch.Tensor) -> QuantizedWeight:
    """Round a weight [n, k] to the nearest numbers in FP8, halves to even, with a scale in fp32 for
    each row: its largest magnitude becomes FP8_MAX.
    """
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=FP8, device=weight.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=weight.device)
    for part in _row_slices(rows, columns):
        dense = weight[part].float()
        scales[part] = dense.abs().amax(-1, keepdim=True) / FP8_MAX
        divisor = torch.where(scales[part] == 0, 1.0, scales[part])
        values[part] = (dense / divisor).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return QuantizedWeight(
        values=values,
        scales=scales,
        zeros=None,
        bits=8,
        group_size=columns + columns % 2,
        dtype=weight.dtype,
    )


def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return weights of the same inputs as one, by rows. Raises ValueError if they do not match."""
    first = weights[0]
    kinds = {
        (w.bits, w.group_size, w.dtype, w.values.dtype, w.scales.dtype, w.zeros is None)
        for w in weights
    }
    if len(kinds) > 1:
        raise ValueError(
            "weights differ in bits, group_size, dtypes or in having zeros: "
            + ", ".join(sorted(map(str, kinds)))
        )
    if len(weights) == 1:
        return first
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    return replace(
        first,
        values=torch.cat([weight.values for weight in weights]),
        scales=torch.cat([weight.scales for weight in weights]),
        zeros=torch.cat(zeros) if zeros else None,
    )


def _row_slices(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, WEIGHTS_AT_A_TIME // max(1, columns))
    return (slice(begin, begin + step) for begin in range(0, rows, step))


def _dequantize(weight: QuantizedWeight) -> torch.Tensor:
    dense = weight.values.float()
    if weight.zeros is not None:
        dense -= _spread(weight.zeros, weight)
    return dense.mul_(_spread(weight.scales.float(), weight))


def _spread(of_groups: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    return of_groups.repeat_interleave(weight.group_size, 1)[:, : weight.shape[1]]


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
