# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The weights of experts on CUDA: dense, or integers or FP8 that a tile makes dense as it reads
them, rounded to the activations' dtype. So a product has the bits of that of the dense weight.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from pdserve_kernels.reference.moe import ExpertWeight
from pdserve_kernels.triton.linears.linear_int import BLOCK_K, pack_integers

# The inputs that `pack_integers` packs together.
PACKED_K = tl.constexpr(BLOCK_K)
# What `bits` is of weights that are numbers of the activations' dtype.
DENSE_BITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStack:
    """Weights of one shape [out_features, in_features], one for each expert.

    values: [num_experts, out_features, in_features], or of 8 and 4 bits as those of an
    `IntLinearWeight`, of FP8 its bytes. scales: fp32 or bf16 [num_experts, out_features, groups];
    zeros: int8 of the same shape, or None if all are 0.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    bits: int = DENSE_BITS
    is_fp8: bool = False
    group_size: int = 1
    in_features: int

    @property
    def num_experts(self) -> int:
        return len(self.values)

    @property
    def out_features(self) -> int:
        return self.values.shape[1]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a kernel takes: values, scales and zeros, of the shapes and dtypes that they have
        above, or values again, [num_experts, ...], where there are none.
        """
        scales = self.values if self.scales is None else self.scales
        return self.values, scales, self.values if self.zeros is None else self.zeros

    @property
    def constants(self) -> dict[str, int | bool]:
        """Of a kernel: what the weights are."""
        return {
            "NUM_INPUTS": self.in_features,
            "NUM_GROUPS": 1 if self.scales is None else self.scales.shape[2],
            "GROUP_SIZE": self.group_size,
            "BITS": self.bits,
            "IS_FP8": self.is_fp8,
            "HAS_ZEROS": self.zeros is not None,
        }

    @property
    def kind(self) -> str:
        """How the weights are stored."""
        if self.scales is None:
            return f"{self.values.dtype}"
        name = "FP8" if self.is_fp8 else f"int{self.bits}"
        return f"{name} in groups of {self.group_size} with scales in {self.scales.dtype}"


class ExpertStacker:
    """Copies weights one by one into one piece of memory."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._count = 0
        self._first: ExpertStack | None = None
        # By what a stack calls them.
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, weight: ExpertWeight) -> None:
        """Take a weight [out_features, in_features], bf16, fp32 or quantized. Raises ValueError for
        one that is stored otherwise than the first one.
        """
        one = stack_of_one(weight)
        first = self._first = self._first or one
        if one.kind != first.kind:
            raise ValueError(f"expert {self._count} is {one.kind}, the first one is {first.kind}")
        for name in ("values", "scales", "zeros"):
            tensor = getattr(one, name)
            if tensor is None:
                continue
            if name not in self._tensors:  # zeros of those before this one are 0
                self._tensors[name] = tensor.new_zeros(self._num_experts, *tensor.shape[1:])
            self._tensors[name][self._count].copy_(tensor[0])
        self._count += 1

    def finish(self) -> ExpertStack:
        """Return the stack of all, of which there is one at least."""
        assert self._first is not None
        tensors = self._tensors
        return replace(
            self._first,
            values=tensors["values"],
            scales=tensors.get("scales"),
            zeros=tensors.get("zeros"),
        )


def stack_of_one(weight: ExpertWeight) -> ExpertStack:
    """Return a weight [out_features, in_features], bf16, fp32 or quantized, as that of one expert.
    It shares the memory of a dense one.
    """
    if isinstance(weight, torch.Tensor):
        return ExpertStack(values=weight.detach().contiguous()[None], in_features=weight.shape[1])
    is_fp8 = weight.is_fp8
    if is_fp8:
        weight = replace(weight, values=weight.values.view(torch.int8))
    packed = pack_integers(weight, None)
    return ExpertStack(
        values=(packed.values.view(torch.uint8) if is_fp8 else packed.values)[None],
        scales=packed.scales[None],
        zeros=None if packed.zeros is None else packed.zeros[None],
        bits=packed.bits,
        is_fp8=is_fp8,
        group_size=packed.group_size,
        in_features=packed.in_features,
    )


@triton.jit
def multiply_expert(
    x_rows, values_ptr, scales_ptr, zeros_ptr, outputs, is_row, is_output,
    NUM_INPUTS: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr, IS_FP8: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product of rows and some outputs, counted through all experts, of a stack: fp32
    [BLOCK_ROWS, BLOCK_OUT].
    """
    if BITS == 16:
        weight_rows = values_ptr + outputs[:, None] * NUM_INPUTS
        return multiply_dense(
            x_rows, weight_rows, is_row, is_output, NUM_INPUTS, BLOCK_ROWS, BLOCK_OUT, BLOCK_K
        )
    else:
        total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
        for start in tl.range(0, NUM_INPUTS, BLOCK_K):
            weight = _load_dense(
                values_ptr, scales_ptr, zeros_ptr, outputs, is_output, start,
                NUM_INPUTS, NUM_GROUPS, GROUP_SIZE, BITS, IS_FP8, HAS_ZEROS, BLOCK_K,
            )  # fmt: skip
            inputs = start + tl.arange(0, BLOCK_K)
            mask = is_row[:, None] & (inputs < NUM_INPUTS)[None, :]
            x = tl.load(x_rows + inputs[None, :], mask=mask, other=0.0)
            total = tl.dot(x, tl.trans(weight.to(x.dtype)), total, input_precision="ieee")
        return total


@triton.jit
def _load_dense(
    values_ptr, scales_ptr, zeros_ptr, outputs, is_output, start,
    NUM_INPUTS: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr, IS_FP8: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load BLOCK_K inputs of some outputs and make them dense: fp32 [outputs, inputs]."""
    NUM_BYTES: tl.constexpr = (NUM_INPUTS + PACKED_K - 1) // PACKED_K * PACKED_K * BITS // 8
    HALF: tl.constexpr = PACKED_K // 2
    inputs = start + tl.arange(0, BLOCK_K)
    # Of 4 bits the first and the second half of PACKED_K inputs lie in the same bytes.
    columns = inputs if BITS == 8 else inputs - (start + HALF) // PACKED_K * HALF
    stored = tl.load(
        values_ptr + outputs[:, None] * NUM_BYTES + columns[None, :],
        mask=is_output[:, None],
        other=0,
    )
    values = stored.to(tl.float8e4nv, bitcast=True) if IS_FP8 else stored.to(tl.int32)
    if BITS == 4:
        values = ((values >> (start // HALF % 2 * 4)) & 15) - 8
    if NUM_GROUPS == 1 or GROUP_SIZE % BLOCK_K == 0:  # all inputs are of one group
        place, mask = (outputs * NUM_GROUPS + start // GROUP_SIZE)[:, None], is_output[:, None]
    else:
        place = outputs[:, None] * NUM_GROUPS + (inputs // GROUP_SIZE)[None, :]
        mask = is_output[:, None] & (inputs < NUM_INPUTS)[None, :]
    if HAS_ZEROS:
        values -= tl.load(zeros_ptr + place, mask=mask, other=0).to(tl.int32)
    return values.to(tl.float32) * tl.load(scales_ptr + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def multiply_dense(
    x_rows, weight_rows, is_row, is_output, NUM_INPUTS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product of rows and outputs of a weight, fp32 [BLOCK_ROWS, BLOCK_OUT]."""
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
    for start in tl.range(0, NUM_INPUTS, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        if NUM_INPUTS % BLOCK_K == 0:
            x = tl.load(x_rows + inputs[None, :], mask=is_row[:, None], other=0.0)
            w = tl.load(weight_rows + inputs[None, :], mask=is_output[:, None], other=0.0)
        else:
            inside = (inputs < NUM_INPUTS)[None, :]
            x = tl.load(x_rows + inputs[None, :], mask=is_row[:, None] & inside, other=0.0)
            w = tl.load(weight_rows + inputs[None, :], mask=is_output[:, None] & inside, other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    return total
