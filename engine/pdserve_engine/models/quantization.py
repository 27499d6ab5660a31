"""How a model's projections are quantized: by its checkpoint, or while they are loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pdserve_engine.config import LoadQuantization

Method = Literal["load", "compressed-tensors", "awq", "gptq"]
Fp8Method = Literal["load", "compressed-tensors", "fp8"]
Fp8Scales = Literal["tensor", "channel", "block"]

# What `--quantization int4` takes: 18 bytes for 32 weights, and half the error of groups of 128.
INT4_GROUP_SIZE = 32
# Rows and columns of a block of weights in FP8 that has a scale.
FP8_BLOCK = [128, 128]
# Fields that may hold only these values where they are there at all, in every format's own words.
_COMPRESSED_FIELDS: Mapping[str, tuple[object, ...]] = {
    "format": ("pack-quantized", "float-quantized"),
    # The stage that a tool was at; how weights are stored is for the format to say.
    "quantization_status": ("compressed", "frozen", None),
    "kv_cache_scheme": (None,),
    "transform_config": (None, {}),
}
_COMPRESSED_SPARSITY_FIELDS: Mapping[str, tuple[object, ...]] = {"format": ("dense",)}
_COMPRESSED_INT_GROUP_FIELDS: Mapping[str, tuple[object, ...]] = {
    "format": ("pack-quantized", None),
    "input_activations": (None,),
    "output_activations": (None,),
}
_COMPRESSED_INT_FIELDS: Mapping[str, tuple[object, ...]] = {
    "type": ("int",),
    "num_bits": (4, 8),
    "strategy": ("group", "channel"),
    "dynamic": (False,),
    "block_structure": (None,),
    # Orders the quantizer's work; "group" would also scatter a group's inputs over the row.
    "actorder": (None, "weight", "static"),
}
_COMPRESSED_FP8_GROUP_FIELDS: Mapping[str, tuple[object, ...]] = {
    "format": ("float-quantized", None),
    "output_activations": (None,),
}
_COMPRESSED_FP8_FIELDS: Mapping[str, tuple[object, ...]] = {
    "type": ("float",),
    "num_bits": (8,),
    "strategy": ("tensor", "channel", "block"),
    "symmetric": (True,),
    "dynamic": (False,),
    "block_structure": (None, FP8_BLOCK),
    "actorder": (None,),
}
# How activations may be rounded to FP8 elsewhere; here they are not rounded.
_COMPRESSED_FP8_ACTIVATION_FIELDS: Mapping[str, tuple[object, ...]] = {
    "type": ("float",),
    "num_bits": (8,),
    "symmetric": (True,),
}
_FP8_FIELDS: Mapping[str, tuple[object, ...]] = {
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", "static"),
    # Whole powers of two; how they are stored is checked where they are read.
    "scale_fmt": ("float", "ue8m0", None),
    "weight_block_size": (None, FP8_BLOCK),
    "kv_cache_scheme": (None,),
    "modules_to_convert": (None, []),
    "is_checkpoint_fp8_serialized": (True,),
}
_AWQ_FIELDS: Mapping[str, tuple[object, ...]] = {
    "bits": (4,),
    "version": ("gemm", "GEMM", None),
    "format": ("gemm", None),
    "backend": ("autoawq", "auto", None),
    "zero_point": (True,),
}
_GPTQ_FIELDS: Mapping[str, tuple[object, ...]] = {
    # Not desc_act: it scatters a group's inputs over the row in some checkpoints only, which their
    # g_idx says.
    "bits": (4, 8),
    "checkpoint_format": ("gptq", "gptq_v2", None),
    "format": ("gptq", "gptq_v2", None),
    "is_marlin_format": (False, None),
    "pack_dtype": ("int32",),
    "dynamic": (None, {}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IntQuantization:
    """Integers of `bits` with a scale for each `group_size` inputs (None: for each output).

    The embedding and norms never are quantized. has_zeros: the checkpoint has zero points, stored
    less `zero_offset`.
    """

    method: Method
    bits: int
    group_size: int | None
    has_zeros: bool = False
    zero_offset: int = 0

    @property
    def of_lm_head(self) -> "IntQuantization":
        """For the lm_head. Made at load time it is int8: 4 bits would show in every logit."""
        return replace(self, bits=8, group_size=None) if self.method == "load" else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Quantization:
    """Weights in FP8 (e4m3) with one scale, one for each output, or one for each FP8_BLOCK.

    The embedding and norms never are quantized, nor are activations.
    """

    method: Fp8Method
    scales: Fp8Scales

    @property
    def of_lm_head(self) -> "Fp8Quantization":
        """For the lm_head."""
        return self


Quantization = IntQuantization | Fp8Quantization


def read_quantization(
    raw: Mapping[str, Any], requested: LoadQuantization | None
) -> Quantization | None:
    """Return what `config.json` says, or what is requested for a checkpoint that is not quantized.

    Raises ValueError that names the field, for all that is not served.
    """
    stored = raw.get("quantization_config")
    if not stored:
        return None if requested is None else _at_load(requested)
    if not isinstance(stored, dict):
        raise ValueError(f"quantization_config is {stored!r:.200}, must be an object")
    method = stored.get("quant_method")
    if requested is not None:
        raise ValueError(
            f"quantization is {requested}, but the checkpoint is quantized already "
            f"(quant_method {method!s:.200}): leave it unset"
        )
    if not isinstance(method, str) or method not in _READERS:
        supported = ", ".join(_READERS)
        raise ValueError(
            f"quantization_config.quant_method is {method!s:.200}, supported are {supported}"
        )
    return _READERS[method](stored)


def _at_load(requested: LoadQuantization) -> Quantization:
    if requested == "fp8":
        return Fp8Quantization(method="load", scales="channel")
    if requested == "int8":
        return IntQuantization(method="load", bits=8, group_size=None)
    return IntQuantization(method="load", bits=4, group_size=INT4_GROUP_SIZE)


def _read_compressed_tensors(raw: Mapping[str, Any]) -> Quantization:
    place = "quantization_config"
    _check(raw, place, _COMPRESSED_FIELDS)
    _check(
        raw.get("sparsity_config") or {}, f"{place}.sparsity_config", _COMPRESSED_SPARSITY_FIELDS
    )
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ValueError(f"{place}.config_groups is {groups!s:.200}, supported is one group")
    ((name, group),) = groups.items()
    place = f"{place}.config_groups.{name:.200}"
    if raw.get("format") == "float-quantized":
        return _read_compressed_fp8(group, place)
    return _read_compressed_integers(group, place)


def _read_compressed_integers(group: Any, place: str) -> IntQuantization:
    _check(group, place, _COMPRESSED_INT_GROUP_FIELDS)
    weights, place = group.get("weights") or {}, f"{place}.weights"
    _check(weights, place, _COMPRESSED_INT_FIELDS)
    is_grouped = _require(weights, place, "strategy") == "group"
    return IntQuantization(
        method="compressed-tensors",
        bits=int(_require(weights, place, "num_bits")),
        group_size=_read_group_size(weights, place) if is_grouped else None,
        has_zeros=not weights.get("symmetric", True),
    )


def _read_compressed_fp8(group: Any, place: str) -> Fp8Quantization:
    _check(group, place, _COMPRESSED_FP8_GROUP_FIELDS)
    weights, activations = group.get("weights") or {}, group.get("input_activations") or {}
    _check(activations, f"{place}.input_activations", _COMPRESSED_FP8_ACTIVATION_FIELDS)
    place = f"{place}.weights"
    _check(weights, place, _COMPRESSED_FP8_FIELDS)
    for field in ("type", "num_bits"):
        _require(weights, place, field)
    scales = _require(weights, place, "strategy")
    if scales == "block":
        _check({"block_structure": None} | weights, place, {"block_structure": (FP8_BLOCK,)})
    return Fp8Quantization(method="compressed-tensors", scales=scales)


def _read_fp8(raw: Mapping[str, Any]) -> Fp8Quantization:
    """As DeepSeek and Qwen3 have it, with blocks; without, as vLLM and AutoFP8 have it."""
    _check(raw, "quantization_config", _FP8_FIELDS)
    scales: Fp8Scales = "tensor" if raw.get("weight_block_size") is None else "block"
    return Fp8Quantization(method="fp8", scales=scales)


def _read_awq(raw: Mapping[str, Any]) -> IntQuantization:
    place = "quantization_config"
    _check(raw, place, _AWQ_FIELDS)
    return IntQuantization(
        method="awq",
        bits=int(_require(raw, place, "bits")),
        group_size=_read_group_size(raw, place),
        has_zeros=True,
    )


def _read_gptq(raw: Mapping[str, Any]) -> IntQuantization:
    place = "quantization_config"
    _check(raw, place, _GPTQ_FIELDS)
    version = raw.get("checkpoint_format") or raw.get("format") or "gptq"
    return IntQuantization(
        method="gptq",
        bits=int(_require(raw, place, "bits")),
        group_size=_read_group_size(raw, place),
        has_zeros=True,
        zero_offset=1 if version == "gptq" else 0,
    )


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "compressed-tensors": _read_compressed_tensors,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "fp8": _read_fp8,
}


def _check(raw: object, place: str, allowed: Mapping[str, tuple[object, ...]]) -> None:
    if not isinstance(raw, dict):
        raise ValueError(f"{place} is {raw!r:.200}, must be an object")
    for field, values in allowed.items():
        if field in raw and raw[field] not in values:
            supported = ", ".join(map(str, values))
            raise ValueError(f"{place}.{field} is {raw[field]!s:.200}, supported is {supported}")


def _require(raw: Mapping[str, Any], place: str, field: str) -> Any:
    if field not in raw:
        raise ValueError(f"{place} has no {field}")
    return raw[field]


def _read_group_size(raw: Mapping[str, Any], place: str) -> int | None:
    """Even, so that a group is made of pairs of inputs; -1 means the whole row."""
    size = _require(raw, place, "group_size")
    if size == -1:
        return None
    if not isinstance(size, int) or size < 2 or size % 2:
        raise ValueError(f"{place}.group_size is {size!s:.200}, must be -1 or even and at least 2")
    return size
