"""Rotary position embeddings: the variant a checkpoint wants, and its cosines and sines."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

ROPE_TYPES = ("default", "linear", "llama3")
THETA, ROTARY_SHARE = "rope_theta", "partial_rotary_factor"
ORIGINAL_LENGTH = "original_max_position_embeddings"
# No setting is as high; torch takes integers below it.
HIGHEST = 2.0**63
# What may stand beside the settings instead of among them.
_BESIDE = (THETA, ROTARY_SHARE, ORIGINAL_LENGTH)


class _Fields(NamedTuple):
    """Numbers that a type is computed from; those in `optional` may be missing or null."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


# Of the types that transformers computes from fields of the same names in all models.
_FIELDS: Mapping[str, _Fields] = {
    "default": _Fields(),
    "proportional": _Fields(optional=("factor",)),
    "linear": _Fields(("factor",)),
    "dynamic": _Fields(("factor",)),
    "yarn": _Fields(
        (ORIGINAL_LENGTH,),
        ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    ),
    "longrope": _Fields((ORIGINAL_LENGTH,), ("factor", "attention_factor")),
    "llama3": _Fields(("factor", "low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions become angles. The last three fields matter to llama3 only."""

    rope_type: Literal["default", "linear", "llama3"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class RopeSettings(NamedTuple):
    """What a `config.json` says, wherever it says it, as one of the dicts of transformers 5."""

    # `rope_parameters` or `rope_scaling`.
    field: str
    parameters: Mapping[str, Any]

    @property
    def rope_type(self) -> Any:
        return self.parameters["rope_type"]


def read_rope_settings(
    raw: Mapping[str, Any], *, default_theta: float, head_dim: int
) -> RopeSettings:
    """Read `rope_parameters` (transformers 5), `rope_scaling` (before) and what stands beside them.
    Where two of them say the same, the one wins that wins in transformers.

    Raise ValueError for settings that nothing can run; the message names field and value.
    """
    for field in ("rope_scaling", "rope_parameters"):
        if not isinstance(raw.get(field), dict | None):
            raise ValueError(f"{field} is {raw[field]!r:.200}, expected an object")
    field = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    stated = raw.get(field) or {}
    if any(isinstance(value, dict) for value in stated.values()):
        raise ValueError(f"{field} differs by layer type ({', '.join(stated):.200}), not supported")
    parameters: dict[str, Any] = {
        "rope_type": stated.get("type", "default"),
        THETA: raw.get(THETA, default_theta),
    }
    if raw.get(ROTARY_SHARE) is not None:
        parameters[ROTARY_SHARE] = raw[ROTARY_SHARE]
    if "max_position_embeddings" in raw:
        parameters[ORIGINAL_LENGTH] = raw["max_position_embeddings"]
    parameters |= stated
    settings = RopeSettings(field, parameters)
    check_rope(settings, head_dim)
    if ORIGINAL_LENGTH in raw:
        # Wins in transformers, which checks the other one all the same.
        parameters[ORIGINAL_LENGTH] = raw[ORIGINAL_LENGTH]
        check_rope(settings, head_dim)
    share = parameters.get(ROTARY_SHARE, 1.0)
    # Of a type without scaling, transformers rotates whole heads whatever the share.
    if settings.rope_type != "default" and share != 1.0:
        raise ValueError(
            f"{ROTARY_SHARE} is {share}, supported is 1.0 with the rope_type "
            f"{settings.rope_type:.200}"
        )
    return settings


def check_rope(settings: RopeSettings, head_dim: int) -> None:
    """Raise ValueError for values that angles cannot be computed from."""
    parameters = settings.parameters
    if not isinstance(settings.rope_type, str):
        rope_type = f"{settings.rope_type!r:.200}"
        raise ValueError(f"{settings.field}.rope_type is {rope_type}, expected a string")
    # Code of models may know other types, which it checks by itself.
    fields = _FIELDS.get(settings.rope_type, _Fields())
    for name in (THETA, *fields.required):
        if name not in parameters:
            needs = f"the rope_type {settings.rope_type} needs it"
            raise ValueError(f"{_label(settings, name)} is missing, {needs}")
        _check_number(settings, name)
    for name in (ROTARY_SHARE, *fields.optional):
        if parameters.get(name) is not None or (name == ROTARY_SHARE and name in parameters):
            _check_number(settings, name)
    if settings.rope_type == "longrope":
        num_angles = int(head_dim * parameters.get(ROTARY_SHARE, 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            _check_factors(settings, name, num_angles)


def _check_number(settings: RopeSettings, name: str) -> None:
    value = settings.parameters[name]
    # Logarithms of both are divided by.
    lowest = 1 if name in (THETA, ORIGINAL_LENGTH) else 0
    if name == ORIGINAL_LENGTH and not isinstance(value, int):
        raise ValueError(f"{name} is {value!r:.200}, expected an integer above {lowest}")
    if not _is_number(value) or not lowest < value < HIGHEST:
        expected = f"a number above {lowest} and below 2^63"
        raise ValueError(f"{_label(settings, name)} is {value!r:.200}, expected {expected}")


def _check_factors(settings: RopeSettings, name: str, num_angles: int) -> None:
    value = settings.parameters.get(name)
    if (
        not isinstance(value, list)
        or len(value) != num_angles
        or not all(_is_number(factor) and 0 < factor < HIGHEST for factor in value)
    ):
        raise ValueError(
            f"{_label(settings, name)} is {value!r:.200}, expected {num_angles} numbers above 0"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _label(settings: RopeSettings, name: str) -> str:
    return name if name in _BESIDE else f"{settings.field}.{name}"


def native_rope(settings: RopeSettings) -> RopeConfig:
    """Return what our own code computes; raise ValueError that names what it has not."""
    field, parameters = settings.field, settings.parameters
    if settings.rope_type not in ROPE_TYPES:
        supported = ", ".join(ROPE_TYPES)
        rope_type = f"{settings.rope_type:.200}"
        raise ValueError(f"{field}.rope_type is {rope_type}, supported are {supported}")
    if (share := parameters.get(ROTARY_SHARE, 1.0)) != 1.0:
        raise ValueError(f"{ROTARY_SHARE} is {share}, supported is 1.0")
    names = _FIELDS[settings.rope_type].required
    return RopeConfig(
        rope_type=settings.rope_type,
        theta=float(parameters[THETA]),
        **{name: parameters[name] for name in names},
    )


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
    """Return the table [max_positions, head_dim] in `dtype`: cosines in the first half, sines in
    the second.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
