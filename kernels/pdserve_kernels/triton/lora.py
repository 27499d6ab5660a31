# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Adapters on CUDA: one product with A and one with B for all rows, whichever adapter they have.

Rows come in segments, and each segment finds its adapter's matrices by their addresses in a table
(the SGMV of Punica, Chen et al. 2023, arXiv:2310.18547).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pdserve_kernels.lora import LoraLayer, LoraPart, LoraRows, LoraSegment
from pdserve_kernels.triton.linear import AnyLinearWeight, linear
from pdserve_kernels.triton.staging import pinned

# Rows of a program, and the ranks that it multiplies at a time.
BLOCK_ROWS = 16
BLOCK_RANKS = 16
# Inputs at a time, and of a program: the others are added up by other programs, so that few rows
# keep many of them busy.
BLOCK_K = 128
SPLIT_K = 1024
# Outputs of a program.
BLOCK_OUT = 128

# A layer's linears, in the order of the table, and what it has of each: the addresses of A, B and
# the scales, and the number of ranks.
LINEARS = ("qkv", "attention_output", "gate_up", "down")
NUM_FIELDS = 4
# Kernels are not compiled anew for these.
OF_A_STEP = ("row_blocks", "num_rows", "max_ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraWeight:
    """What an adapter adds to a linear's outputs: scales * (x A^T) B^T. a: [ranks, in_features], b:
    [out_features, ranks], scales: fp32 [ranks]; ranks are a multiple of BLOCK_RANKS, zeros fill up.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor

    def fields(self) -> tuple[int, ...]:
        """Return its entries in a table."""
        tensors = (self.a, self.b, self.scales)
        return (*(tensor.data_ptr() for tensor in tensors), len(self.a))


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter's layers; table: int64 [layers, linears, NUM_FIELDS] on the device."""

    layers: tuple[LoraLayer, ...]
    table: torch.Tensor
    # The most that it has in a linear.
    num_ranks: int

    def __getitem__(self, layer: int) -> LoraLayer:
        return self.layers[layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLora:
    """The adapters of a step. rows: int32 [segments, 2] on the device, begins and ends; tables:
    int64 [segments, layers, linears, NUM_FIELDS], or with another number of dimensions between.
    """

    rows: torch.Tensor
    tables: torch.Tensor
    # Of the longest segment.
    num_rows: int
    # The most of any adapter in a linear.
    num_ranks: int

    @classmethod
    def of(cls, segments: Sequence[LoraSegment], device: torch.device) -> "StepLora | None":
        """Return what a step has; None if it has no adapters."""
        if not segments:
            return None
        return cls(
            rows=_rows(segments, device),
            tables=torch.stack([segment.adapter.table for segment in segments]),
            num_rows=max(segment.end - segment.begin for segment in segments),
            num_ranks=max(segment.adapter.num_ranks for segment in segments),
        )

    def add(self, out: torch.Tensor, x: torch.Tensor, layer: int, name: str) -> None:
        """Add to out [n, out_features] what the adapters add to a layer's linear of x [n, k]."""
        _add(out, x, self, self.tables[:, layer, LINEARS.index(name)])


def pack_lora(parts: Sequence[LoraPart], packed: AnyLinearWeight) -> LoraWeight | None:
    """See the reference's contract."""
    if not parts:
        return None
    device, dtype = packed.device, packed.dtype
    ranks = [len(part.a) for part in parts]
    num_ranks = -(-sum(ranks) // BLOCK_RANKS) * BLOCK_RANKS
    a = torch.zeros(num_ranks, packed.in_features, dtype=dtype, device=device)
    b = torch.zeros(packed.out_features, num_ranks, dtype=dtype, device=device)
    scales = torch.zeros(num_ranks, dtype=torch.float32)
    first = 0
    for part, rank in zip(parts, ranks, strict=True):
        a[first : first + rank] = part.a
        b[part.first_output : part.first_output + len(part.b), first : first + rank] = part.b
        scales[first : first + rank] = part.scale
        first += rank
    return LoraWeight(a=a, b=b, scales=scales.to(device))


def pack_adapter(layers: Sequence[LoraLayer]) -> PackedAdapter:
    """See the reference's contract."""
    weights = [[getattr(layer, name) for name in LINEARS] for layer in layers]
    found = [weight for of_layer in weights for weight in of_layer if weight is not None]
    table = torch.tensor(
        [[_fields(weight) for weight in of_layer] for of_layer in weights], dtype=torch.int64
    )
    device = found[0].a.device if found else table.device
    return PackedAdapter(
        tuple(layers), table.to(device), max((len(weight.a) for weight in found), default=0)
    )


def linear_lora(x: torch.Tensor, packed: AnyLinearWeight, rows: Sequence[LoraRows]) -> torch.Tensor:
    """See the reference's contract. The linear's sums are rounded to x's dtype before an adapter's
    are added, as cuBLAS writes no others.
    """
    return add_rows(linear(x, packed), x, rows)


def add_rows(out: torch.Tensor, x: torch.Tensor, rows: Sequence[LoraRows]) -> torch.Tensor:
    """Add to out [n, out_features] what adapters add to a linear of x [n, in_features]; return
    it.
    """
    found = [each for each in rows if each.weight is not None]
    if found:
        table = torch.tensor([each.weight.fields() for each in found], dtype=torch.int64)
        step = StepLora(
            rows=_rows(found, x.device),
            tables=table.to(x.device),
            num_rows=max(each.end - each.begin for each in found),
            num_ranks=max(len(each.weight.a) for each in found),
        )
        _add(out, x, step, step.tables)
    return out


def _fields(weight: LoraWeight | None) -> tuple[int, ...]:
    return (0,) * NUM_FIELDS if weight is None else weight.fields()


def _rows(segments: Sequence[LoraSegment | LoraRows], device: torch.device) -> torch.Tensor:
    rows = torch.tensor([(each.begin, each.end) for each in segments], dtype=torch.int32)
    host = pinned(rows.nbytes, device).view(rows.dtype).view(rows.shape)
    return host.copy_(rows).to(device, non_blocking=True)


def _add(out: torch.Tensor, x: torch.Tensor, step: StepLora, table: torch.Tensor) -> None:
    """`table` is int64 [segments, NUM_FIELDS], of one linear."""
    num_inputs, num_outputs = x.shape[1], out.shape[1]
    num_splits = triton.cdiv(num_inputs, SPLIT_K)
    rank_blocks = triton.cdiv(step.num_ranks, BLOCK_RANKS)
    row_blocks = triton.cdiv(step.num_rows, BLOCK_ROWS)
    num_segments = len(step.rows)
    shape = (num_splits, len(x), rank_blocks * BLOCK_RANKS)
    shrunk = torch.empty(shape, dtype=torch.float32, device=x.device)
    common = (step.rows, table, shrunk, table.stride(0), row_blocks, len(x), shape[2])
    _shrink_kernel[(num_segments * row_blocks, rank_blocks, num_splits)](
        x,
        *common,
        NUM_INPUTS=num_inputs,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_RANKS=BLOCK_RANKS,
        BLOCK_K=BLOCK_K,
        SPLIT_K=SPLIT_K,
        enable_fp_fusion=True,
    )
    _expand_kernel[(num_segments * row_blocks, triton.cdiv(num_outputs, BLOCK_OUT))](
        out,
        *common,
        NUM_OUTPUTS=num_outputs,
        NUM_SPLITS=num_splits,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_RANKS=BLOCK_RANKS,
        BLOCK_OUT=BLOCK_OUT,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize=OF_A_STEP)
def _shrink_kernel(
    x_ptr,
    segments_ptr,
    addresses_ptr,
    shrunk_ptr,
    stride_table,
    row_blocks,
    num_rows,
    max_ranks,
    NUM_INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """shrunk[split, row, rank] = scale * x[row] . a[rank], over the split's inputs."""
    segment, split = tl.program_id(0) // row_blocks, tl.program_id(2)
    fields = addresses_ptr + segment * stride_table
    end = tl.load(segments_ptr + 2 * segment + 1)
    first_row = tl.load(segments_ptr + 2 * segment)
    first_row += tl.program_id(0) % row_blocks * BLOCK_ROWS
    first_rank = tl.program_id(1) * BLOCK_RANKS
    if (first_row >= end) | (first_rank >= tl.load(fields + 3)):
        return
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    ranks = first_rank + tl.arange(0, BLOCK_RANKS)
    # Tensors begin at multiples of 16 bytes, so loads may be as wide.
    a_ptr = tl.multiple_of(tl.load(fields).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    scales_ptr = tl.load(fields + 2).to(tl.pointer_type(tl.float32))
    x_rows = x_ptr + rows[:, None].to(tl.int64) * NUM_INPUTS
    a_rows = a_ptr + ranks[None, :] * NUM_INPUTS
    sums = tl.zeros((BLOCK_ROWS, BLOCK_RANKS), dtype=tl.float32)
    for start in range(0, SPLIT_K, BLOCK_K):
        inputs = split * SPLIT_K + start + tl.arange(0, BLOCK_K)
        inside = inputs < NUM_INPUTS
        x = tl.load(
            x_rows + inputs[None, :], mask=(rows < end)[:, None] & inside[None, :], other=0.0
        )
        a = tl.load(a_rows + inputs[:, None], mask=inside[:, None], other=0.0)
        sums = tl.dot(x, a, sums, input_precision="ieee")
    sums *= tl.load(scales_ptr + ranks)[None, :]
    row = (split * num_rows + rows).to(tl.int64)
    tl.store(
        shrunk_ptr + row[:, None] * max_ranks + ranks[None, :], sums, mask=(rows < end)[:, None]
    )


@triton.jit(do_not_specialize=OF_A_STEP)
def _expand_kernel(
    output_ptr,
    segments_ptr,
    addresses_ptr,
    shrunk_ptr,
    stride_table,
    row_blocks,
    num_rows,
    max_ranks,
    NUM_OUTPUTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """output[row, out] += shrunk[row] . b[out], the splits of which are added in order."""
    segment = tl.program_id(0) // row_blocks
    fields = addresses_ptr + segment * stride_table
    end = tl.load(segments_ptr + 2 * segment + 1)
    first_row = tl.load(segments_ptr + 2 * segment)
    first_row += tl.program_id(0) % row_blocks * BLOCK_ROWS
    num_ranks = tl.load(fields + 3)
    if (first_row >= end) | (num_ranks == 0):
        return
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    outputs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    mask = (rows < end)[:, None] & (outputs < NUM_OUTPUTS)[None, :]
    b_ptr = tl.load(fields + 1).to(tl.pointer_type(output_ptr.dtype.element_ty))
    b_ptr = tl.multiple_of(b_ptr, 16)
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
    for first_rank in range(0, num_ranks, BLOCK_RANKS):
        ranks = first_rank + tl.arange(0, BLOCK_RANKS)
        shrunk = tl.zeros((BLOCK_ROWS, BLOCK_RANKS), dtype=tl.float32)
        for split in tl.static_range(NUM_SPLITS):
            row = (split * num_rows + rows).to(tl.int64)
            shrunk += tl.load(
                shrunk_ptr + row[:, None] * max_ranks + ranks[None, :],
                mask=(rows < end)[:, None],
                other=0.0,
            )
        b = tl.load(
            b_ptr + outputs[None, :].to(tl.int64) * num_ranks + ranks[:, None],
            mask=(outputs < NUM_OUTPUTS)[None, :],
            other=0.0,
        )
        sums = tl.dot(shrunk, b.to(tl.float32), sums, input_precision="ieee")
    place = output_ptr + rows[:, None].to(tl.int64) * NUM_OUTPUTS + outputs[None, :]
    base = tl.load(place, mask=mask, other=0.0)
    tl.store(place, (base.to(tl.float32) + sums).to(base.dtype), mask=mask)
