# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Linears of weights in FP8 on CUDA: each tile turns them into numbers of the activations' dtype,
which holds them exactly, and scales multiply sums in fp32.

Activations are not rounded to FP8.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pdserve_kernels.reference.quantization import QuantizedWeight
from pdserve_kernels.triton.split_sums import add_splits

# Inputs at a time; blocks of scales are a multiple of it.
BLOCK_K = 128
# With fewer programs for a weight's outputs, others take parts of the inputs, of SPLIT_K at least.
MIN_PROGRAMS = 256
SPLIT_K = 1024
# Outputs of a program that makes a weight dense.
BLOCK_DENSE = 16


class Tile(NamedTuple):
    """Rows and outputs of a program. Outputs come first in its products: of 16 rows a tensor core's
    widest instructions would have too few.
    """

    block_rows: int
    block_out: int
    num_warps: int
    num_stages: int
    is_split: bool


# Up to how many rows which tile is taken. 64 rows and 256 share what is compiled.
TILES = (
    (16, Tile(16, 64, 4, 4, is_split=True)),
    (32, Tile(32, 64, 4, 4, is_split=True)),
    (256, Tile(64, 64, 4, 4, is_split=True)),
)
MANY_ROWS = Tile(128, 128, 8, 3, is_split=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8LinearWeight:
    """A weight in FP8 ready for `linear`: its entry is value * scale.

    values: FP8 [out_features, in_features]. scales: fp32 [out_features, groups], of group_size
    inputs each. dtype: what it is rounded to where it is made dense.
    """

    values: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    group_size: int
    dtype: torch.dtype
    out_features: int
    in_features: int

    @property
    def device(self) -> torch.device:
        return self.values.device


def pack_fp8(weight: QuantizedWeight, bias: torch.Tensor | None) -> Fp8LinearWeight:
    """Share the memory of what is dense: a rank's part of the inputs is not. bias is [out_features]
    in the weight's dtype. Raises ValueError for groups that a tile would have to cut.
    """
    out_features, in_features = weight.shape
    if weight.scales.shape[1] > 1 and weight.group_size % BLOCK_K:
        raise ValueError(
            f"group_size is {weight.group_size}, must be a multiple of {BLOCK_K} or a whole row"
        )
    return Fp8LinearWeight(
        values=weight.values.contiguous(),
        scales=weight.scales.float().contiguous(),
        bias=None if bias is None else bias.detach(),
        group_size=weight.group_size,
        dtype=weight.dtype,
        out_features=out_features,
        in_features=in_features,
    )


def tile_for(num_rows: int, dtype: torch.dtype) -> Tile:
    """Return the tile of so many rows of activations."""
    tile = next((tile for limit, tile in TILES if num_rows <= limit), MANY_ROWS)
    if dtype == torch.float32:
        # Twice the bytes, which have to fit into the 99 KiB of an Ada GPU.
        tile = tile._replace(block_rows=min(tile.block_rows, 64), block_out=64, num_stages=2)
    return tile


def linear_fp8(x: torch.Tensor, packed: Fp8LinearWeight) -> torch.Tensor:
    """x [..., in_features] @ weight^T + bias -> [..., out_features], in x's dtype; fp32 sums."""
    rows = x.reshape(-1, packed.in_features).contiguous()
    tile = tile_for(len(rows), x.dtype)
    split = _split_of(packed) if tile.is_split else _round_up(packed.in_features)
    num_splits = triton.cdiv(packed.in_features, split)
    shape = (len(rows), packed.out_features)
    if num_splits == 1:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        _multiply(rows, packed, out, packed.bias, tile, (1, split))
    else:
        sums = torch.empty(num_splits, *shape, dtype=torch.float32, device=x.device)
        _multiply(rows, packed, sums, None, tile, (num_splits, split))
        out = add_splits(sums, packed.bias, x.dtype)
    return out.view(*x.shape[:-1], packed.out_features)


def dequantize_fp8(packed: Fp8LinearWeight) -> torch.Tensor:
    """Return the dense weight [out_features, in_features]: a product in fp32, rounded to dtype."""
    shape = (packed.out_features, packed.in_features)
    dense = torch.empty(shape, dtype=packed.dtype, device=packed.device)
    grid = (triton.cdiv(packed.out_features, BLOCK_DENSE), triton.cdiv(packed.in_features, BLOCK_K))
    dequantize_fp8_kernel[grid](
        packed.values,
        packed.scales,
        dense,
        packed.out_features,
        **_constants(packed),
        BLOCK_OUT=BLOCK_DENSE,
    )
    return dense


def _split_of(packed: Fp8LinearWeight) -> int:
    """Return the inputs of a program: by the weight's shape alone, so that neither replicas nor
    numbers of rows differ in it.
    """
    programs = triton.cdiv(packed.out_features, TILES[0][1].block_out)
    wanted = triton.cdiv(MIN_PROGRAMS, programs)
    return _round_up(max(SPLIT_K, triton.cdiv(packed.in_features, wanted)))


def _round_up(in_features: int) -> int:
    return -(-in_features // BLOCK_K) * BLOCK_K


def _multiply(
    rows: torch.Tensor,
    packed: Fp8LinearWeight,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile,
    splits: tuple[int, int],
) -> None:
    """Write products, of all inputs or of the parts: how many there are, and of how many inputs."""
    num_splits, split_k = splits
    row_blocks = triton.cdiv(len(rows), tile.block_rows)
    if not row_blocks:
        return
    # Programs side by side share what they read of the weight.
    grid = (row_blocks, triton.cdiv(packed.out_features, tile.block_out), num_splits)
    linear_fp8_kernel[grid](
        rows,
        packed.values,
        packed.scales,
        out if bias is None else bias,
        out,
        len(rows),
        packed.out_features,
        **_constants(packed),
        SPLIT_K=split_k,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=tile.block_rows,
        BLOCK_OUT=tile.block_out,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )


def _constants(packed: Fp8LinearWeight) -> dict[str, int]:
    return {
        "NUM_INPUTS": packed.in_features,
        "NUM_GROUPS": packed.scales.shape[1],
        "GROUP_SIZE": packed.group_size,
        "BLOCK_K": BLOCK_K,
    }


@triton.jit
def _load_inputs(pointers, mask, inputs, is_input, NUM_INPUTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load a tile of inputs, zeros beyond the last."""
    if NUM_INPUTS % BLOCK_K == 0:
        return tl.load(pointers + inputs, mask=mask, other=0.0)
    else:
        return tl.load(pointers + inputs, mask=mask & is_input, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def linear_fp8_kernel(
    x_ptr,
    fp8_ptr,
    scales_ptr,
    bias_ptr,
    output_ptr,
    num_rows,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """output[split, row, out] = x[row] . weight[out] + bias[out], over the split's inputs."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outputs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    split = tl.program_id(2)
    is_row, is_output = (rows < num_rows)[None, :], outputs < num_outputs
    x_rows = x_ptr + rows[None, :].to(tl.int64) * NUM_INPUTS
    weight_rows = fp8_ptr + outputs[:, None].to(tl.int64) * NUM_INPUTS
    scale_rows = scales_ptr + outputs.to(tl.int64) * NUM_GROUPS
    sums = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    first = split * SPLIT_K
    for start in range(first, tl.minimum(first + SPLIT_K, NUM_INPUTS), BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        is_input = inputs < NUM_INPUTS
        x = _load_inputs(x_rows, is_row, inputs[:, None], is_input[:, None], NUM_INPUTS, BLOCK_K)
        weight = _load_inputs(
            weight_rows, is_output[:, None], inputs[None, :], is_input[None, :], NUM_INPUTS, BLOCK_K
        ).to(x.dtype)
        if NUM_GROUPS == 1:
            sums = tl.dot(weight, x, sums, input_precision="ieee")
        else:
            scales = tl.load(scale_rows + start // GROUP_SIZE, mask=is_output, other=0.0)
            sums += tl.dot(weight, x, input_precision="ieee") * scales[:, None]
    if NUM_GROUPS == 1:
        sums *= tl.load(scale_rows, mask=is_output, other=0.0)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    output_rows = output_ptr + (split * num_rows + rows)[None, :].to(tl.int64) * num_outputs
    tl.store(
        output_rows + outputs[:, None],
        sums.to(output_ptr.dtype.element_ty),
        mask=is_row & is_output[:, None],
    )


@triton.jit
def dequantize_fp8_kernel(
    fp8_ptr,
    scales_ptr,
    dense_ptr,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """dense[output, input] = value * scale, of a block of inputs."""
    outputs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    start = tl.program_id(1) * BLOCK_K
    inputs, is_output = start + tl.arange(0, BLOCK_K), outputs < num_outputs
    group = 0 if NUM_GROUPS == 1 else start // GROUP_SIZE
    scales = tl.load(
        scales_ptr + outputs.to(tl.int64) * NUM_GROUPS + group, mask=is_output, other=0.0
    )
    place = outputs[:, None].to(tl.int64) * NUM_INPUTS + inputs[None, :]
    mask = is_output[:, None] & (inputs < NUM_INPUTS)[None, :]
    weight = tl.load(fp8_ptr + place, mask=mask, other=0.0).to(tl.float32) * scales[:, None]
    tl.store(dense_ptr + place, weight.to(dense_ptr.dtype.element_ty), mask=mask)
