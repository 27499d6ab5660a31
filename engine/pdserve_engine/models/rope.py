"""Rotary position embeddings: the variant a checkpoint wants, and its cosines and sines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions become angles. The last three fields matter to llama3 only."""

    rope_type: Literal["default", "linear", "llama3"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


def read_rope(raw: Mapping[str, Any], default_theta: float) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Raise ValueError that names what is not supported.
    """
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    field = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ValueError(f"{field} differs by layer type ({', '.join(parameters)}), not supported")
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"{field}.rope_type is {rope_type}, supported are {', '.join(ROPE_TYPES)}")
    rotary_share = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if rotary_share != 1.0:
        raise ValueError(f"partial_rotary_factor is {rotary_share}, supported is 1.0")
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or default_theta)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = float(_require(parameters, field, "factor"))
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=factor)
    original = "original_max_position_embeddings"
    return RopeConfig(
        rope_type="llama3",
        theta=theta,
        factor=factor,
        low_freq_factor=float(_require(parameters, field, "low_freq_factor")),
        high_freq_factor=float(_require(parameters, field, "high_freq_factor")),
        original_max_position_embeddings=int(_require(parameters, field, original)),
    )


def _require(parameters: Mapping[str, Any], field: str, name: str) -> Any:
    if name not in parameters:
        raise ValueError(f"{field}.{name} is missing, the rope_type in {dict(parameters)} needs it")
    return parameters[name]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the fp32 angles per position, [head_dim / 2], computed as transformers does."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        return _stretch_low_frequencies(inv_freq, rope)
    return inv_freq


def _stretch_low_frequencies(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    length = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / inv_freq
    # 1 where a wave turns often within the original length (kept), 0 where rarely (slowed down).
    kept_share = (length / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - kept_share) * inv_freq / rope.factor + kept_share * inv_freq
    is_low = wavelengths > length / rope.low_freq_factor
    is_high = wavelengths < length / rope.high_freq_factor
    return torch.where(is_low, inv_freq / rope.factor, torch.where(is_high, inv_freq, blended))


def build_cos_sin_cache(
    rope: RopeConfig, *, head_dim: int, max_positions: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return [max_positions, head_dim]: the first half cosines, the second half sines."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
