"""Reading projections in FP8: a weight, and beside it what its numbers are to be multiplied by.

Formats: compressed-tensors' `float-quantized` (github.com/vllm-project/compressed-tensors), and the
fine-grained ones of DeepSeek-V3 (arXiv:2412.19437, section 3.3.2) and Qwen3, whose
`weight_scale_inv` is a factor all the same.
"""

from collections.abc import Collection

import torch

from pdserve_engine.models.quantization import FP8_BLOCK, Fp8Quantization
from pdserve_engine.models.weights.loader import Checkpoint
from pdserve_kernels.reference.quantization import QuantizedWeight

WEIGHT = ".weight"
# What a weight's scales are called, and those of activations, which nobody reads.
SCALES = {
    "compressed-tensors": (".weight_scale",),
    "fp8": (".weight_scale_inv", ".weight_scale"),
}
ACTIVATION_SCALES = (".input_scale", ".activation_scale")


def scale_name(name: str, names: Collection[str], quantization: Fp8Quantization) -> str | None:
    """Return what a checkpoint with these names calls the scales of a weight, given without
    `.weight`; None if it has none: the weight is dense.
    """
    candidates = (name + suffix for suffix in SCALES[quantization.method])
    return next((candidate for candidate in candidates if candidate in names), None)


def scales_shape(quantization: Fp8Quantization, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which a checkpoint stores the scales of a weight of this shape."""
    rows, columns = shape
    if quantization.scales == "tensor":
        return (1,)
    if quantization.scales == "channel":
        return (rows, 1)
    return (-(-rows // FP8_BLOCK[0]), -(-columns // FP8_BLOCK[1]))


def read_fp8(
    checkpoint: Checkpoint, name: str, quantization: Fp8Quantization, dtype: torch.dtype
) -> QuantizedWeight:
    """Return a whole weight, given without `.weight`, for activations of `dtype`. Raises ValueError
    for scales that are not of floating point, negative or not finite.
    """
    scales_name = scale_name(name, checkpoint.names, quantization)
    assert scales_name is not None
    scales = checkpoint.read_as_stored(scales_name)
    if not scales.is_floating_point():
        raise ValueError(f"{scales_name} is {scales.dtype}, must be of floating point")
    scales = scales.float()
    if not (scales.isfinite() & (scales >= 0)).all():
        raise ValueError(f"{scales_name} has numbers that are negative or not finite")
    values = checkpoint.read_as_stored(name + WEIGHT)
    columns = values.shape[1]
    group_size = columns + columns % 2
    if quantization.scales == "block":
        group_size = min(group_size, FP8_BLOCK[1])
    return QuantizedWeight(
        values=values,
        scales=_of_rows(scales, quantization, values.shape),
        zeros=None,
        bits=8,
        group_size=group_size,
        dtype=dtype,
    )


def _of_rows(
    scales: torch.Tensor, quantization: Fp8Quantization, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return the scales of a weight of this shape as fp32 [rows, groups]: a block's rows have the
    same, so that products may be cut and stacked anywhere between rows. Of blocks they take 4 bytes
    for 128 weights.
    """
    # A checkpoint may store a single number in any shape.
    stored = scales.reshape(scales_shape(quantization, shape))
    if quantization.scales == "channel":
        return stored
    if quantization.scales == "tensor":
        return stored[:, None].repeat(shape[0], 1)
    return stored.repeat_interleave(FP8_BLOCK[0], 0)[: shape[0]]
