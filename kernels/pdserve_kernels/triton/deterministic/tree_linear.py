# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Linears whose bits depend on a row alone: one tile for any number of rows, and inputs added up in
one order, which is that of `groups.NUM_SUMS` where ranks share them.

cuBLAS chooses its algorithm by the number of rows. One that is fixed may still not be used: it is
not valid for all of them, and in which order it adds up is not documented.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pdserve_kernels.groups import NUM_SUMS, Group, check_num_sums, tree_sum
from pdserve_kernels.lora import LoraRows
from pdserve_kernels.reference.quantization import QuantizedWeight
from pdserve_kernels.sampling_batch import Argmax
from pdserve_kernels.triton.layers import silu_and_mul
from pdserve_kernels.triton.linears.lora import LinearLora
from pdserve_kernels.triton.linears.quantized import (
    QuantizedLinearWeight,
    dequantize,
    pack_quantized,
)
from pdserve_kernels.triton.linears.step_lora import add_rows
from pdserve_kernels.triton.sampling.sample import argmax

BLOCK_ROWS = 64
BLOCK_OUT = 64
# With fewer, the sums of a tree do not all fit into registers.
NUM_WARPS = 8
# Blocks of rows that share what they read of a weight.
GROUP_BLOCKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLinearWeight:
    """A weight [out_features, in_features] whose inputs are added up in num_sums equal parts."""

    weight: torch.Tensor | QuantizedLinearWeight
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    num_sums: int

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device


def pack_linear(
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    num_parts: int = 1,
    num_sums: int = 1,
) -> TreeLinearWeight:
    """See the reference's contract. Shares the memory of a dense weight; others become dense,
    rounded to their dtype, at every product.
    """
    del num_parts
    out_features, in_features = weight.shape
    check_num_sums(num_sums, in_features)
    packed: torch.Tensor | QuantizedLinearWeight
    if isinstance(weight, QuantizedWeight):
        packed = pack_quantized(weight, None)
    else:
        packed = weight.detach().contiguous()
    return TreeLinearWeight(
        weight=packed,
        bias=None if bias is None else bias.detach(),
        out_features=out_features,
        in_features=in_features,
        num_sums=num_sums,
    )


def linear(x: torch.Tensor, packed: TreeLinearWeight) -> torch.Tensor:
    """x [..., in_features] @ weight^T + bias -> [..., out_features]; see the reference."""
    return _multiply(x, packed, packed.bias, x.dtype)


def linear_sums(x: torch.Tensor, packed: TreeLinearWeight) -> torch.Tensor:
    """x [..., in_features] @ weight^T -> fp32 [..., out_features], without the bias."""
    return _multiply(x, packed, None, torch.float32)


def linear_of_ranks(
    x: torch.Tensor, packed: TreeLinearWeight, group: Group, lora: LinearLora | None = None
) -> torch.Tensor:
    """Return linear(x, packed) and what adapters add to it. Each rank has a part of the inputs; for
    any number of ranks it is the same: between them the sums go on in the tree's order.
    """
    sums = tree_sum(list(group.gather(linear_sums(x, packed))))
    out = (sums if packed.bias is None else sums + packed.bias).to(x.dtype)
    if lora is not None:
        shrunk = group.gather(lora.shrink(x, NUM_SUMS // group.size))
        lora.expand(out, shrunk.flatten(0, 1))
    return out


def linear_silu_mul(x: torch.Tensor, packed: TreeLinearWeight) -> torch.Tensor:
    """x [T, in_features] -> silu(gate) * up; see the reference."""
    return silu_and_mul(linear(x, packed))


def linear_argmax(
    x: torch.Tensor, packed: TreeLinearWeight, *, mask: torch.Tensor | None = None
) -> Argmax:
    """See the reference."""
    return argmax(linear(x, packed), mask=mask)


def linear_lora(
    x: torch.Tensor, packed: TreeLinearWeight, rows: Sequence[LoraRows]
) -> torch.Tensor:
    """See the reference's contract."""
    return add_rows(linear(x, packed), x, rows)


def _multiply(
    x: torch.Tensor, packed: TreeLinearWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    weight = packed.weight
    dense = weight if isinstance(weight, torch.Tensor) else dequantize(weight)
    rows = x.reshape(-1, packed.in_features).contiguous()
    out = torch.empty(len(rows), packed.out_features, dtype=dtype, device=x.device)
    row_blocks = triton.cdiv(len(rows), BLOCK_ROWS)
    if row_blocks:
        tree_linear_kernel[(row_blocks * triton.cdiv(packed.out_features, BLOCK_OUT),)](
            rows,
            dense,
            out if bias is None else bias,
            out,
            len(rows),
            packed.out_features,
            NUM_INPUTS=packed.in_features,
            NUM_SUMS=packed.num_sums,
            HAS_BIAS=bias is not None,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_OUT=BLOCK_OUT,
            BLOCK_K=32 if rows.dtype == torch.float32 else 64,
            GROUP_BLOCKS=GROUP_BLOCKS,
            num_warps=NUM_WARPS,
            num_stages=3,
            enable_fp_fusion=False,
        )
    return out.view(*x.shape[:-1], packed.out_features)


@triton.jit
def _sum_part(
    x_rows, weight_rows, is_row, is_output, part: tl.constexpr, NUM_PART: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product of a part of the inputs, fp32 [BLOCK_ROWS, BLOCK_OUT]."""
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
    for start in tl.range(0, NUM_PART, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inputs = part * NUM_PART + column
        if NUM_PART % BLOCK_K == 0:
            x = tl.load(x_rows + inputs[None, :], mask=is_row[:, None], other=0.0)
            w = tl.load(weight_rows + inputs[None, :], mask=is_output[:, None], other=0.0)
        else:
            inside = (column < NUM_PART)[None, :]
            x = tl.load(x_rows + inputs[None, :], mask=is_row[:, None] & inside, other=0.0)
            w = tl.load(weight_rows + inputs[None, :], mask=is_output[:, None] & inside, other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    return total


@triton.jit
def _sum_parts(
    x_rows, weight_rows, is_row, is_output, first: tl.constexpr, COUNT: tl.constexpr,
    NUM_PART: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The products of COUNT parts, added up as `groups.tree_sum` does."""
    if COUNT == 1:
        return _sum_part(
            x_rows, weight_rows, is_row, is_output, first, NUM_PART, BLOCK_ROWS, BLOCK_OUT, BLOCK_K
        )
    else:
        left = _sum_parts(
            x_rows, weight_rows, is_row, is_output, first, COUNT // 2, NUM_PART, BLOCK_ROWS,
            BLOCK_OUT, BLOCK_K,
        )  # fmt: skip
        right = _sum_parts(
            x_rows, weight_rows, is_row, is_output, first + COUNT // 2, COUNT // 2, NUM_PART,
            BLOCK_ROWS, BLOCK_OUT, BLOCK_K,
        )  # fmt: skip
        return left + right


@triton.jit(do_not_specialize=["num_rows"])
def tree_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    output_ptr,
    num_rows,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
):
    """output[row, out] = x[row] . weight[out] + bias[out]."""
    row_blocks, output_blocks = tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(num_outputs, BLOCK_OUT)
    group = tl.program_id(0) // (GROUP_BLOCKS * output_blocks)
    first_block = group * GROUP_BLOCKS
    group_blocks = tl.minimum(row_blocks - first_block, GROUP_BLOCKS)
    place = tl.program_id(0) % (GROUP_BLOCKS * output_blocks)
    rows = (first_block + place % group_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outputs = place // group_blocks * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    x_rows = x_ptr + rows[:, None].to(tl.int64) * NUM_INPUTS
    weight_rows = weight_ptr + outputs[:, None].to(tl.int64) * NUM_INPUTS
    total = _sum_parts(
        x_rows, weight_rows, is_row, is_output, 0, NUM_SUMS, NUM_INPUTS // NUM_SUMS, BLOCK_ROWS,
        BLOCK_OUT, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs, mask=is_output, other=0.0)
        total += bias.to(tl.float32)[None, :]
    output_rows = output_ptr + rows[:, None].to(tl.int64) * num_outputs
    mask = is_row[:, None] & is_output[None, :]
    tl.store(output_rows + outputs[None, :], total.to(output_ptr.dtype.element_ty), mask=mask)
