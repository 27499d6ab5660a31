"""Reading projections in 4 or 8 bits: those of quantized checkpoints, or dense ones, rounded.

FP8 is in `fp8.py`. Formats of integers differ in how they pack them into int32. All store
unsigned ones; ours are signed, and so are our zero points: half of the range is taken off both.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from pdserve_engine.models.config import ModelError
from pdserve_engine.models.quantization import Fp8Quantization, IntQuantization, Quantization
from pdserve_engine.models.weights.fp8 import (
    ACTIVATION_SCALES,
    WEIGHT,
    read_fp8,
    scale_name,
    scales_shape,
)
from pdserve_engine.models.weights.loader import Checkpoint, WeightPart
from pdserve_kernels.reference.quantization import QuantizedWeight, quantize, quantize_fp8, stack

BIAS = ".bias"
# The 4 bits of an int32 that hold its 8 outputs in turn, lowest first.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

# What a checkpoint stores for one weight, by the last part of its name.
Tensors = Mapping[str, torch.Tensor]


class _Integers(NamedTuple):
    """Unsigned integers [n, k], scales [n, groups], and unsigned zero points [n, groups]."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None


class StoredWeights(NamedTuple):
    """What a checkpoint must have: by name the shapes, and which are in FP8; and what it may have
    besides that nobody reads.
    """

    shapes: Mapping[str, tuple[int, ...]]
    in_fp8: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()


def stored_weights(
    expected: Mapping[str, tuple[int, ...]],
    names: frozenset[str],
    quantization: Quantization | None,
    *,
    tables: Collection[str] = (),
) -> StoredWeights:
    """Return the weights a checkpoint with these names must have, given those of a dense one, of
    which `tables` are never quantized: what rows are looked up in, and what chooses experts.

    Tools for GPTQ may write a bias beside every `qweight`: it is among them if it is there, though
    the dense model may have none (`check_unused_biases`).
    """
    if quantization is None or quantization.method == "load":
        return StoredWeights(expected)
    if isinstance(quantization, Fp8Quantization):
        linears = {
            name: shape
            for name, shape in expected.items()
            if len(shape) == 2 and name not in tables
        }
        return _stored_fp8(expected, linears, names, quantization)
    return StoredWeights(_stored_integers(expected, {*names, *tables}, quantization))


def _stored_fp8(
    expected: Mapping[str, tuple[int, ...]],
    linears: Mapping[str, tuple[int, ...]],
    names: frozenset[str],
    quantization: Fp8Quantization,
) -> StoredWeights:
    shapes, in_fp8, unused = dict(expected), set(), set()
    for name, shape in linears.items():
        stem = name.removesuffix(WEIGHT)
        scales = scale_name(stem, names, quantization)
        if scales is not None:
            shapes[scales] = scales_shape(quantization, shape)
            in_fp8.add(name)
            unused |= {stem + suffix for suffix in ACTIVATION_SCALES}
    return StoredWeights(shapes, frozenset(in_fp8), frozenset(unused))


def _stored_integers(
    expected: Mapping[str, tuple[int, ...]], names: Collection[str], quantization: IntQuantization
) -> dict[str, tuple[int, ...]]:
    """Names has what is dense, too, where it is missing."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in expected.items():
        if name in names or len(shape) != 2:
            shapes[name] = shape
        else:
            stem = name.removesuffix(WEIGHT)
            parts = _shapes_of(quantization, *shape)
            shapes |= {f"{stem}.{part}": part_shape for part, part_shape in parts.items()}
            if "qweight" in parts and (bias := stem + BIAS) in names:
                shapes[bias] = shape[:1]
    return shapes


def check_unused_biases(checkpoint: Checkpoint, used: Collection[str]) -> None:
    """Raise ModelError unless all biases beside those that a model has a use for are zero."""
    for name in sorted(checkpoint.names.difference(used)):
        if name.endswith(BIAS) and checkpoint.read_as_stored(name).any():
            raise ModelError(f"{name:.200} is not zero, and the model has no place for it")


def read_projection(
    checkpoint: Checkpoint,
    weights: Sequence[tuple[WeightPart, tuple[int, int]]],
    quantization: Quantization | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | QuantizedWeight:
    """Return parts of weights, named without `.weight` and given with the whole weight's shape,
    stacked by rows, [out_features, in_features] for activations of `dtype`.

    Quantized if the checkpoint's are or if they are to be rounded at load time: by whole rows, so
    that no cut changes them. Raises ModelError if some of the weights are quantized and others are
    not, for numbers that do not fit their shape, groups that a cut divides, or weights that differ
    in how they are quantized.
    """
    names = [part.name for part, _ in weights]
    dense = [part._replace(name=part.name + WEIGHT) for part, _ in weights]
    is_stored = [_is_stored(name, checkpoint.names, quantization) for name in names]
    is_rounded = quantization is not None and quantization.method == "load"
    if quantization is None or not (any(is_stored) or is_rounded):
        return checkpoint.read(*dense, dtype=dtype, device=device)
    if any(is_stored) and not all(is_stored):
        raise ModelError(f"of {', '.join(names)}, which are one product, only some are quantized")
    try:
        if is_rounded:
            rows = checkpoint.read(
                *(part._replace(columns=slice(None)) for part in dense), dtype=dtype, device=device
            )
            (columns,) = {(part.columns.start, part.columns.stop) for part, _ in weights}
            return _round(rows, quantization).columns(slice(*columns))
        stored = [
            _read_stored(checkpoint, part.name, quantization, dtype, shape)
            .rows(part.rows)
            .columns(part.columns)
            for part, shape in weights
        ]
        return _without_idle_zeros(stack(stored)).to(device)
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{', '.join(names)}: {error}") from error


def round_at_load(
    weight: torch.Tensor, quantization: Quantization | None
) -> torch.Tensor | QuantizedWeight:
    """Return a dense weight [out_features, in_features], bf16 or fp32, rounded if that is to be
    done at load time, for activations of its dtype.
    """
    if quantization is None or quantization.method != "load":
        return weight
    return _round(weight, quantization)


def _is_stored(name: str, names: frozenset[str], quantization: Quantization | None) -> bool:
    """Does a checkpoint with these names have a weight, given without `.weight`, quantized?"""
    if quantization is None or quantization.method == "load":
        return False
    if isinstance(quantization, Fp8Quantization):
        return scale_name(name, names, quantization) is not None
    return name + WEIGHT not in names


def _round(weight: torch.Tensor, quantization: Quantization) -> QuantizedWeight:
    if isinstance(quantization, Fp8Quantization):
        return quantize_fp8(weight)
    return quantize(weight, bits=quantization.bits, group_size=quantization.group_size)


def _read_stored(
    checkpoint: Checkpoint,
    name: str,
    quantization: Quantization,
    dtype: torch.dtype,
    shape: tuple[int, int],
) -> QuantizedWeight:
    if isinstance(quantization, Fp8Quantization):
        return read_fp8(checkpoint, name, quantization, dtype)
    return _read_integers(checkpoint, name, quantization, dtype, shape)


def _read_integers(
    checkpoint: Checkpoint,
    name: str,
    quantization: IntQuantization,
    dtype: torch.dtype,
    shape: tuple[int, int],
) -> QuantizedWeight:
    parts = _shapes_of(quantization, *shape)
    tensors = {part: checkpoint.read_as_stored(f"{name}.{part}") for part in parts}
    try:
        integers = _DECODERS[quantization.method](tensors, quantization)
        weight = _signed(integers, quantization, dtype)
    except ValueError as error:
        raise ModelError(f"{name}: {error}") from error
    if weight.shape != shape:
        raise ModelError(f"{name}: shape is {tuple(weight.shape)}, the config asks {shape}")
    return weight


def _signed(
    integers: _Integers, quantization: IntQuantization, dtype: torch.dtype
) -> QuantizedWeight:
    bits, columns = quantization.bits, integers.values.shape[1]
    zeros = None if integers.zeros is None else _less_half(integers.zeros, bits).contiguous()
    scales = integers.scales.contiguous()
    if not scales.is_floating_point():
        raise ValueError(f"scales are {scales.dtype}, must be of floating point")
    if not scales.isfinite().all():
        raise ValueError("scales have numbers that are not finite")
    return QuantizedWeight(
        values=_less_half(integers.values, bits),
        scales=scales if scales.dtype == torch.bfloat16 else scales.float(),
        zeros=zeros,
        bits=bits,
        group_size=quantization.group_size or columns,
        dtype=dtype,
    )


def _without_idle_zeros(weight: QuantizedWeight) -> QuantizedWeight:
    """Without zero points if all are at the middle of the range, as symmetric formats store them.

    Only of a whole product: its parts must agree in having some.
    """
    if weight.zeros is None or weight.zeros.any():
        return weight
    return replace(weight, zeros=None)


def _less_half(unsigned: torch.Tensor, bits: int) -> torch.Tensor:
    return (unsigned - (1 << (bits - 1))).view(torch.int8)  # uint8 wraps around as int8 reads it


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [r, c] -> uint8 [r, c * 32 / bits]: the integers in each int32, lowest bits first."""
    if packed.dtype != torch.int32:
        raise ValueError(f"packed integers are {packed.dtype}, must be int32")
    octets = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def _shapes_of(
    quantization: IntQuantization, rows: int, columns: int
) -> dict[str, tuple[int, ...]]:
    per_int32 = 32 // quantization.bits
    groups = -(-columns // (quantization.group_size or columns))
    packed_rows, packed_columns = -(-rows // per_int32), -(-columns // per_int32)
    if quantization.method == "compressed-tensors":
        shapes: dict[str, tuple[int, ...]] = {
            "weight_packed": (rows, packed_columns),
            "weight_scale": (rows, groups),
            "weight_shape": (2,),
        }
        return shapes | (
            {"weight_zero_point": (packed_rows, groups)} if quantization.has_zeros else {}
        )
    shapes = {"scales": (groups, rows), "qzeros": (groups, packed_rows)}
    if quantization.method == "awq":
        return shapes | {"qweight": (columns, packed_rows)}
    return shapes | {"qweight": (packed_columns, rows), "g_idx": (columns,)}


def _decode_compressed_tensors(tensors: Tensors, quantization: IntQuantization) -> _Integers:
    rows, columns = tensors["weight_shape"].tolist()
    if rows != len(tensors["weight_packed"]):
        raise ValueError(f"weight_shape has {rows} rows, there are {len(tensors['weight_packed'])}")
    zeros = None
    if quantization.has_zeros:
        zeros = _unpack(tensors["weight_zero_point"].T, quantization.bits)[:, :rows].T
    values = _unpack(tensors["weight_packed"], quantization.bits)[:, :columns]
    return _Integers(values, tensors["weight_scale"], zeros)


def _decode_awq(tensors: Tensors, quantization: IntQuantization) -> _Integers:
    values, zeros = (_unpack_awq(tensors[name]) for name in ("qweight", "qzeros"))
    return _Integers(values.T.contiguous(), tensors["scales"].T, zeros.T)


def _unpack_awq(packed: torch.Tensor) -> torch.Tensor:
    shuffled = _unpack(packed, 4)
    return shuffled.view(len(packed), -1, 8)[:, :, AWQ_ORDER].flatten(1)


def _decode_gptq(tensors: Tensors, quantization: IntQuantization) -> _Integers:
    values = _unpack(tensors["qweight"].T, quantization.bits)
    columns = values.shape[1]
    size = quantization.group_size or columns
    if not torch.equal(tensors["g_idx"].long(), torch.arange(columns) // size):
        raise ValueError(
            "g_idx scatters a group's inputs over the row (desc_act), which is not supported"
        )
    stored = _unpack(tensors["qzeros"], quantization.bits)
    zeros = (stored + quantization.zero_offset) & ((1 << quantization.bits) - 1)
    return _Integers(values, tensors["scales"].T, zeros.T)


_DECODERS: Mapping[str, Callable[[Tensors, IntQuantization], _Integers]] = {
    "compressed-tensors": _decode_compressed_tensors,
    "awq": _decode_awq,
    "gptq": _decode_gptq,
}
