# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Linears of integer weights on CUDA: few rows multiply them as they are read, for many rows they
are made dense first, and cuBLAS multiplies.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pdserve_kernels.reference.quantization import QuantizedWeight
from pdserve_kernels.triton.split_sums import add_splits

# More are multiplied by cuBLAS: then reading the weight thrice, in all, is the smaller part.
MAX_ROWS = 64
BLOCK_ROWS = 16
BLOCK_OUT = 64
# Inputs at a time: of 4 bits the first and the second half lie in the same bytes.
BLOCK_K = 128
# Inputs of a program, where whole rows of the weight would leave multiprocessors idle.
SPLIT_K = 1024
MIN_PROGRAMS = 256
# Outputs of a program that makes a weight dense.
BLOCK_DENSE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class IntLinearWeight:
    """An integer weight ready for `linear`: its entry is (value - zero) * scale, in fp32, rounded
    to `dtype`.

    values: int8 [out_features, k], or of 4 bits uint8 [out_features, k / 2], k being in_features
    rounded up to BLOCK_K. A byte has value + 8 of an input in its low bits, and of that BLOCK_K / 2
    farther on in its high ones. scales: fp32 or bf16 [out_features, groups], zeros: int8 of the
    same shape, or None if all are 0.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bias: torch.Tensor | None
    bits: int
    group_size: int
    dtype: torch.dtype
    out_features: int
    in_features: int

    @property
    def device(self) -> torch.device:
        return self.values.device


def pack_integers(weight: QuantizedWeight, bias: torch.Tensor | None) -> IntLinearWeight:
    """Copy the integers as the kernels read them; scales, zeros and bias, [out_features] in the
    weight's dtype, share their memory if they are dense: a rank's part of the inputs is not.
    """
    out_features, in_features = weight.shape
    values = F.pad(weight.values, (0, -in_features % BLOCK_K)).contiguous()
    if weight.bits == 4:
        halves = (values + 8).to(torch.uint8).view(out_features, -1, 2, BLOCK_K // 2)
        values = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    return IntLinearWeight(
        values=values,
        scales=weight.scales.contiguous(),
        zeros=None if weight.zeros is None else weight.zeros.contiguous(),
        bias=None if bias is None else bias.detach(),
        bits=weight.bits,
        group_size=weight.group_size,
        dtype=weight.dtype,
        out_features=out_features,
        in_features=in_features,
    )


def linear_int(x: torch.Tensor, packed: IntLinearWeight) -> torch.Tensor:
    """x [..., in_features] @ weight^T + bias -> [..., out_features], in x's dtype; fp32 sums."""
    rows = x.reshape(-1, packed.in_features)
    if len(rows) > MAX_ROWS:
        out = F.linear(rows, dequantize_integers(packed), packed.bias)
    else:
        out = _multiply(rows.contiguous(), packed)
    return out.view(*x.shape[:-1], packed.out_features)


def dequantize_integers(packed: IntLinearWeight) -> torch.Tensor:
    """Return the dense weight [out_features, in_features] in its dtype."""
    shape = (packed.out_features, packed.in_features)
    dense = torch.empty(shape, dtype=packed.dtype, device=packed.device)
    grid = (triton.cdiv(packed.out_features, BLOCK_DENSE), triton.cdiv(packed.in_features, BLOCK_K))
    dequantize_kernel[grid](
        *_tensors(packed),
        dense,
        packed.out_features,
        **_constants(packed),
        BLOCK_OUT=BLOCK_DENSE,
        enable_fp_fusion=True,
    )
    return dense


def _multiply(x: torch.Tensor, packed: IntLinearWeight) -> torch.Tensor:
    num_rows, num_outputs = len(x), packed.out_features
    if not num_rows:
        return x.new_empty(0, num_outputs)
    programs = triton.cdiv(num_outputs, BLOCK_OUT)
    # By shapes alone: two replicas compute the same.
    split = SPLIT_K if programs < MIN_PROGRAMS else packed.values.shape[1] * (8 // packed.bits)
    num_splits = triton.cdiv(packed.in_features, split)
    shape = (num_splits, num_rows, num_outputs)
    sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    block_rows = max(BLOCK_ROWS, triton.next_power_of_2(num_rows))
    linear_int_kernel[(programs, num_splits)](
        x,
        *_tensors(packed),
        sums,
        num_rows,
        num_outputs,
        **_constants(packed),
        SPLIT_K=split,
        BLOCK_ROWS=block_rows,
        BLOCK_OUT=BLOCK_OUT,
        num_stages=num_stages(x.dtype),
        enable_fp_fusion=True,
    )
    return add_splits(sums, packed.bias, x.dtype)


def num_stages(dtype: torch.dtype) -> int:
    """Return how many tiles of activations are loaded ahead: those of fp32 take twice the bytes,
    which have to fit into the 99 KiB of smaller GPUs.
    """
    return 2 if dtype == torch.float32 else 3


def _tensors(packed: IntLinearWeight) -> tuple[torch.Tensor, ...]:
    zeros = packed.values if packed.zeros is None else packed.zeros
    return packed.values, packed.scales, zeros


def _constants(packed: IntLinearWeight) -> dict[str, int | bool]:
    return {
        "NUM_INPUTS": packed.in_features,
        "NUM_GROUPS": packed.scales.shape[1],
        "GROUP_SIZE": packed.group_size,
        "BITS": packed.bits,
        "HAS_ZEROS": packed.zeros is not None,
        "BLOCK_K": BLOCK_K,
    }


@triton.jit
def _load_bytes(
    values_ptr,
    outputs,
    is_output,
    block,
    half: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the bytes that half a block of inputs lies in: [outputs, BLOCK_K / 2]."""
    columns = tl.arange(0, BLOCK_K // 2)
    if BITS == 8:
        columns += block * BLOCK_K + half * (BLOCK_K // 2)
    else:
        columns += block * (BLOCK_K // 2)
    NUM_BLOCKS: tl.constexpr = (NUM_INPUTS + BLOCK_K - 1) // BLOCK_K
    NUM_BYTES: tl.constexpr = NUM_BLOCKS * BLOCK_K * BITS // 8
    place = outputs[:, None].to(tl.int64) * NUM_BYTES + columns[None, :]
    return tl.load(values_ptr + place, mask=is_output[:, None], other=0)


@triton.jit
def _dense_half(
    stored,
    scales_ptr,
    zeros_ptr,
    outputs,
    is_output,
    inputs,
    half: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    """Return the weights fp32 [outputs, inputs] of bytes of the same shape."""
    values = stored.to(tl.int32)
    if BITS == 4:
        values = ((values >> (4 * half)) & 15) - 8
    if NUM_GROUPS == 1:
        mask, place = is_output[:, None], outputs[:, None]
    else:
        mask = is_output[:, None] & (inputs < NUM_INPUTS)[None, :]
        place = outputs[:, None].to(tl.int64) * NUM_GROUPS + (inputs // GROUP_SIZE)[None, :]
    if HAS_ZEROS:
        values -= tl.load(zeros_ptr + place, mask=mask, other=0).to(tl.int32)
    return values.to(tl.float32) * tl.load(scales_ptr + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def linear_int_kernel(
    x_ptr,
    integers_ptr,
    scales_ptr,
    zeros_ptr,
    sums_ptr,
    num_rows,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """sums[split, row, output] = x[row] . weight[output], over the split's inputs."""
    split = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_output = outputs < num_outputs
    rows = tl.arange(0, BLOCK_ROWS)
    x_rows = x_ptr + rows[:, None].to(tl.int64) * NUM_INPUTS
    sums = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
    first_block = split * (SPLIT_K // BLOCK_K)
    end_block = tl.minimum(first_block + SPLIT_K // BLOCK_K, (NUM_INPUTS + BLOCK_K - 1) // BLOCK_K)
    for block in range(first_block, end_block):
        stored = _load_bytes(integers_ptr, outputs, is_output, block, 0, NUM_INPUTS, BITS, BLOCK_K)
        for half in tl.static_range(2):
            if BITS == 8 and half == 1:
                stored = _load_bytes(
                    integers_ptr, outputs, is_output, block, 1, NUM_INPUTS, BITS, BLOCK_K
                )
            inputs = block * BLOCK_K + half * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
            weight = _dense_half(
                stored, scales_ptr, zeros_ptr, outputs, is_output, inputs, half,
                NUM_INPUTS, NUM_GROUPS, GROUP_SIZE, BITS, HAS_ZEROS,
            )  # fmt: skip
            x = tl.load(
                x_rows + inputs[None, :],
                mask=(rows < num_rows)[:, None] & (inputs < NUM_INPUTS)[None, :],
                other=0.0,
            )
            sums = tl.dot(x, tl.trans(weight.to(x.dtype)), sums, input_precision="ieee")
    place = (split * num_rows + rows)[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    tl.store(sums_ptr + place, sums, mask=(rows < num_rows)[:, None] & is_output[None, :])


@triton.jit
def dequantize_kernel(
    integers_ptr,
    scales_ptr,
    zeros_ptr,
    dense_ptr,
    num_outputs,
    NUM_INPUTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """dense[output, input] = (value - zero) * scale, of a block of inputs."""
    outputs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_output, block = outputs < num_outputs, tl.program_id(1)
    for half in tl.static_range(2):
        stored = _load_bytes(
            integers_ptr, outputs, is_output, block, half, NUM_INPUTS, BITS, BLOCK_K
        )
        inputs = block * BLOCK_K + half * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        weight = _dense_half(
            stored, scales_ptr, zeros_ptr, outputs, is_output, inputs, half,
            NUM_INPUTS, NUM_GROUPS, GROUP_SIZE, BITS, HAS_ZEROS,
        )  # fmt: skip
        place = outputs[:, None].to(tl.int64) * NUM_INPUTS + inputs[None, :]
        mask = is_output[:, None] & (inputs < NUM_INPUTS)[None, :]
        tl.store(dense_ptr + place, weight.to(dense_ptr.dtype.element_ty), mask=mask)
