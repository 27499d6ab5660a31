# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Adapters on CUDA: one product with A and one with B for all rows, whichever adapter they have.

Rows with one adapter come in tiles, and each tile finds its adapter's matrices by their addresses
in a table (as the SGMV of Punica finds its segments', Chen et al. 2023, arXiv:2310.18547).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from pdserve_kernels.groups import NUM_SUMS
from pdserve_kernels.lora import LINEARS, LoraLayer, LoraPart

# Rows of a tile, and the ranks that a program multiplies at a time.
TILE_ROWS = 16
BLOCK_RANKS = 16
# Inputs at a time. Of an adapter's there are NUM_SUMS parts, each of which programs of its own add
# up, so that few rows keep many of them busy.
BLOCK_K = 128
# Outputs of a program.
BLOCK_OUT = 128

# What a table has of each linear: the addresses of A, B and the scales, and the number of ranks.
NUM_FIELDS = 4
# Kernels are not compiled anew for these.
OF_A_STEP = ("num_rows", "max_ranks")


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
class LinearLora:
    """What the adapters of a step add to one linear."""

    # int32 [tiles, TILE_ROWS] and [tiles], as of StepLora.
    rows: torch.Tensor
    slots: torch.Tensor
    # int64 [slots, NUM_FIELDS], or a view of as many.
    table: torch.Tensor
    # No adapter has more.
    num_ranks: int

    def add(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Add to out [n, out_features] what adapters add to a linear of x [n, in_features], of one
        dtype.
        """
        self.expand(out, self.shrink(x))

    def shrink(self, x: torch.Tensor, num_parts: int = NUM_SUMS) -> torch.Tensor:
        """Return scale * A x of x [n, in_features], fp32 [num_parts, n, ranks], of so many equal
        parts of the inputs. What no tile has is not written.
        """
        num_rows, num_inputs = x.shape
        rank_blocks = triton.cdiv(self.num_ranks, BLOCK_RANKS)
        shape = (num_parts, num_rows, rank_blocks * BLOCK_RANKS)
        shrunk = torch.empty(shape, dtype=torch.float32, device=x.device)
        shrink_kernel[(len(self.slots), rank_blocks, num_parts)](
            x,
            *self._common(shrunk),
            NUM_INPUTS=num_inputs,
            PART_INPUTS=triton.cdiv(num_inputs, num_parts),
            TILE_ROWS=TILE_ROWS,
            BLOCK_RANKS=BLOCK_RANKS,
            BLOCK_K=BLOCK_K,
            enable_fp_fusion=True,
        )
        return shrunk

    def expand(self, out: torch.Tensor, shrunk: torch.Tensor) -> None:
        """Add B shrunk to out [n, out_features]; shrunk is fp32 [1, 2, 4 or 8 parts, n, ranks], of
        which a tree adds up the parts.
        """
        num_outputs = out.shape[1]
        expand_kernel[(len(self.slots), triton.cdiv(num_outputs, BLOCK_OUT))](
            out,
            *self._common(shrunk),
            NUM_OUTPUTS=num_outputs,
            NUM_PARTS=len(shrunk),
            TILE_ROWS=TILE_ROWS,
            BLOCK_RANKS=BLOCK_RANKS,
            BLOCK_OUT=BLOCK_OUT,
            enable_fp_fusion=True,
        )

    def _common(self, shrunk: torch.Tensor) -> tuple[Any, ...]:
        _, num_rows, max_ranks = shrunk.shape
        return self.rows, self.slots, self.table, shrunk, self.table.stride(0), num_rows, max_ranks


def pack_lora(parts: Sequence[LoraPart], packed: Any) -> LoraWeight | None:
    """See the reference's contract; of a weight of any of Triton's sets."""
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
    weights = [[layer.get(name) for name in LINEARS] for layer in layers]
    found = [weight for of_layer in weights for weight in of_layer if weight is not None]
    table = torch.tensor(
        [[_fields(weight) for weight in of_layer] for of_layer in weights], dtype=torch.int64
    )
    device = found[0].a.device if found else table.device
    return PackedAdapter(
        tuple(layers), table.to(device), max((len(weight.a) for weight in found), default=0)
    )


def _fields(weight: LoraWeight | None) -> tuple[int, ...]:
    return (0,) * NUM_FIELDS if weight is None else weight.fields()


@triton.jit(do_not_specialize=OF_A_STEP)
def shrink_kernel(
    x_ptr,
    rows_ptr,
    slots_ptr,
    addresses_ptr,
    shrunk_ptr,
    stride_table,
    num_rows,
    max_ranks,
    NUM_INPUTS: tl.constexpr,
    PART_INPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """shrunk[part, row, rank] = scale * x[row] . a[rank], over the part's inputs."""
    tile, part = tl.program_id(0), tl.program_id(2)
    first_rank = tl.program_id(1) * BLOCK_RANKS
    slot = tl.load(slots_ptr + tile)
    if slot < 0:
        return
    fields = addresses_ptr + slot.to(tl.int64) * stride_table
    if first_rank >= tl.load(fields + 3):
        return
    rows = tl.load(rows_ptr + tile * TILE_ROWS + tl.arange(0, TILE_ROWS))
    is_row = (rows >= 0)[:, None]
    ranks = first_rank + tl.arange(0, BLOCK_RANKS)
    # Tensors begin at multiples of 16 bytes, so loads may be as wide.
    a_ptr = tl.multiple_of(tl.load(fields).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    scales_ptr = tl.load(fields + 2).to(tl.pointer_type(tl.float32))
    x_rows = x_ptr + rows[:, None].to(tl.int64) * NUM_INPUTS
    a_rows = a_ptr + ranks[None, :] * NUM_INPUTS
    sums = tl.zeros((TILE_ROWS, BLOCK_RANKS), dtype=tl.float32)
    for start in range(0, PART_INPUTS, BLOCK_K):
        place = start + tl.arange(0, BLOCK_K)
        inputs = part * PART_INPUTS + place
        inside = (place < PART_INPUTS) & (inputs < NUM_INPUTS)
        x = tl.load(x_rows + inputs[None, :], mask=is_row & inside[None, :], other=0.0)
        a = tl.load(a_rows + inputs[:, None], mask=inside[:, None], other=0.0)
        sums = tl.dot(x, a, sums, input_precision="ieee")
    sums *= tl.load(scales_ptr + ranks)[None, :]
    row = part.to(tl.int64) * num_rows + rows
    tl.store(shrunk_ptr + row[:, None] * max_ranks + ranks[None, :], sums, mask=is_row)


@triton.jit
def _sum_parts(shrunk, stride_part, is_row, first: tl.constexpr, COUNT: tl.constexpr):
    """COUNT parts, added up as `groups.tree_sum` does."""
    if COUNT == 1:
        return tl.load(shrunk + first * stride_part, mask=is_row, other=0.0)
    else:
        left = _sum_parts(shrunk, stride_part, is_row, first, COUNT // 2)
        right = _sum_parts(shrunk, stride_part, is_row, first + COUNT // 2, COUNT // 2)
        return left + right


@triton.jit(do_not_specialize=OF_A_STEP)
def expand_kernel(
    output_ptr,
    rows_ptr,
    slots_ptr,
    addresses_ptr,
    shrunk_ptr,
    stride_table,
    num_rows,
    max_ranks,
    NUM_OUTPUTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """output[row, out] += shrunk[row] . b[out], the parts of which a tree adds up."""
    tile = tl.program_id(0)
    slot = tl.load(slots_ptr + tile)
    if slot < 0:
        return
    fields = addresses_ptr + slot.to(tl.int64) * stride_table
    num_ranks = tl.load(fields + 3)
    if num_ranks == 0:
        return
    rows = tl.load(rows_ptr + tile * TILE_ROWS + tl.arange(0, TILE_ROWS))
    is_row = (rows >= 0)[:, None]
    outputs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_output = (outputs < NUM_OUTPUTS)[None, :]
    b_ptr = tl.load(fields + 1).to(tl.pointer_type(output_ptr.dtype.element_ty))
    b_ptr = tl.multiple_of(b_ptr, 16)
    shrunk_rows = shrunk_ptr + rows[:, None].to(tl.int64) * max_ranks
    stride_part = num_rows.to(tl.int64) * max_ranks
    sums = tl.zeros((TILE_ROWS, BLOCK_OUT), dtype=tl.float32)
    for first_rank in range(0, num_ranks, BLOCK_RANKS):
        ranks = first_rank + tl.arange(0, BLOCK_RANKS)
        shrunk = _sum_parts(shrunk_rows + ranks[None, :], stride_part, is_row, 0, NUM_PARTS)
        b = tl.load(
            b_ptr + outputs[None, :].to(tl.int64) * num_ranks + ranks[:, None],
            mask=is_output,
            other=0.0,
        )
        sums = tl.dot(shrunk, b.to(tl.float32), sums, input_precision="ieee")
    mask = is_row & is_output
    place = output_ptr + rows[:, None].to(tl.int64) * NUM_OUTPUTS + outputs[None, :]
    base = tl.load(place, mask=mask, other=0.0)
    tl.store(place, (base.to(tl.float32) + sums).to(base.dtype), mask=mask)
