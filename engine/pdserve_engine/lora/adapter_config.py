"""What `adapter_config.json` of a peft folder says, checked against what is served."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
ALL_LINEAR = "all-linear"
MAX_SHOWN = 60

# The (out_features, in_features) by a linear's full name: what adapters may change.
Targets = Mapping[str, tuple[int, int]]

# Names and patterns are looked up as they are, not as regular expressions: a folder may come from
# anywhere, and a pattern that takes hours is easily written.
_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
_LAYER = re.compile(r"\.(\d+)\.")

# Keys that say nothing about what the adapter computes, as fan_in_fan_out, which is about how the
# base model stores its weights.
_IGNORED = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    )
)
# Some ways to begin a training change the base model as well: its weights are not those served.
_INITS = (True, False, "gaussian", "eva", "orthogonal")
# The only values, besides none at all, of keys that would mean another computation.
_ONLY: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "layers_pattern": ("layers", ["layers"]),
    "init_lora_weights": _INITS,
}


class LoraError(ValueError):
    """The adapter cannot be served; the message names the file or field, and its value."""


class Scaled(NamedTuple):
    """How one linear is adapted."""

    rank: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Which linears an adapter changes, and how."""

    rank: int
    alpha: float
    has_root_scale: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    # Names, or parts of names from a dot on; None: all.
    target_modules: tuple[str, ...] | None
    # None: all.
    layers: frozenset[int] | None = field(default=None)

    def scaled(self, targets: Targets) -> dict[str, Scaled]:
        """Return the linears that the adapter changes. Raises LoraError for names that none has."""
        if not targets:
            raise LoraError("the model has no linears that adapters may change")
        self._check_names(targets)
        names = [name for name in targets if self._changes(name)]
        if not names:
            raise LoraError("target_modules and layers_to_transform leave no linear to change")
        return {name: self._scale(name) for name in names}

    def _changes(self, name: str) -> bool:
        if self.layers is not None and _layer_of(name) not in self.layers:
            return False
        return self.target_modules is None or any(_ends(name, end) for end in self.target_modules)

    def _scale(self, name: str) -> Scaled:
        rank = _by_pattern(self.rank_pattern, name, self.rank)
        alpha = _by_pattern(self.alpha_pattern, name, self.alpha)
        return Scaled(rank, alpha / (math.sqrt(rank) if self.has_root_scale else rank))

    def _check_names(self, targets: Targets) -> None:
        for end in self.target_modules or ():
            if not any(_ends(name, end) for name in targets):
                known = ", ".join(sorted({name.rpartition(".")[2] for name in targets}))
                raise LoraError(
                    f"target_modules has {end[:MAX_SHOWN]!r}, which is no linear of the model's "
                    f"layers; served are {known}"
                )
        num_layers = 1 + max(map(_layer_of, targets))
        for layer in self.layers or ():
            if layer >= num_layers:
                raise LoraError(
                    f"layers_to_transform has {layer}, the model has {num_layers} layers"
                )


def parse_adapter_config(text: bytes, *, max_rank: int) -> AdapterConfig:
    """Read the file's content. Raises LoraError for what is not served, with field and value."""
    raw = _parse(text)
    _check_values(raw)
    rank = _rank("r", raw.get("r"), max_rank)
    return AdapterConfig(
        rank=rank,
        alpha=_alpha("lora_alpha", raw.get("lora_alpha")),
        has_root_scale=_flag(raw, "use_rslora"),
        rank_pattern={
            name: _rank(f"rank_pattern[{name!r}]", value, max_rank)
            for name, value in _pattern(raw, "rank_pattern").items()
        },
        alpha_pattern={
            name: _alpha(f"alpha_pattern[{name!r}]", value)
            for name, value in _pattern(raw, "alpha_pattern").items()
        },
        target_modules=_target_modules(raw.get("target_modules")),
        layers=_layers(raw.get("layers_to_transform")),
    )


def _parse(text: bytes) -> Mapping[str, Any]:
    try:
        raw = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise LoraError(f"adapter_config.json is no JSON: {error}") from error
    if not isinstance(raw, dict):
        raise LoraError("adapter_config.json holds no object")
    return raw


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    known = dict(pairs)
    if len(known) < len(pairs):
        raise ValueError("a key stands there twice")
    return known


_SERVED = frozenset(
    (
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "layers_to_transform",
    )
)


def _check_values(raw: Mapping[str, Any]) -> None:
    if "peft_type" not in raw:
        raise LoraError("adapter_config.json has no peft_type, served is LORA")
    for key, value in raw.items():
        if key in _ONLY:
            if value is not None and not any(_is_same(value, other) for other in _ONLY[key]):
                raise _refusal(key, value, "served is " + " or ".join(map(repr, _ONLY[key])))
        elif key not in _SERVED and key not in _IGNORED and value not in (None, False, [], {}, ""):
            # A key of later versions that is set may mean anything.
            raise _refusal(key, value, "this is not served")


def _is_same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other  # 1 is not true


def _refusal(key: str, value: object, why: str) -> LoraError:
    shown = repr(value)
    if len(shown) > MAX_SHOWN:
        shown = shown[:MAX_SHOWN] + "..."
    return LoraError(f"{key[:MAX_SHOWN]} is {shown}: {why}")


def _rank(key: str, value: object, max_rank: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= max_rank:
        raise _refusal(key, value, f"must be 1 to {max_rank} (max_lora_rank)")
    return value


def _alpha(key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _refusal(key, value, "must be a number")
    try:
        alpha = float(value)
    except OverflowError:
        alpha = math.inf
    if not math.isfinite(alpha):
        raise _refusal(key, value, "must be finite")
    return alpha


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise _refusal(key, value, "must be true or false")
    return bool(value)


def _pattern(raw: Mapping[str, Any], key: str) -> Mapping[str, object]:
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _refusal(key, value, "must be an object of names")
    for name in value:
        _check_name(key, name)
    return value


def _target_modules(value: object) -> tuple[str, ...] | None:
    if value == ALL_LINEAR:
        return None
    if not isinstance(value, list) or not value:
        raise _refusal("target_modules", value, f"must be a list of names, or {ALL_LINEAR!r}")
    for name in value:
        _check_name("target_modules", name)
    return tuple(sorted(set(value)))


def _check_name(key: str, name: object) -> None:
    if not isinstance(name, str) or len(name) > 200 or not _NAME.fullmatch(name):
        raise _refusal(key, name, "served are names of linears, no regular expressions")


def _layers(value: object) -> frozenset[int] | None:
    if value is None:
        return None
    layers: Iterable[object] = value if isinstance(value, list) else [value]
    for layer in layers:
        if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
            raise _refusal("layers_to_transform", value, "must be numbers of layers")
    return frozenset(layer for layer in layers if isinstance(layer, int))


def _layer_of(name: str) -> int:
    found = _LAYER.search(name)
    return int(found[1]) if found else 0


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith("." + end)


def _by_pattern(pattern: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first key that the name ends in. A pattern may have many keys, a name
    has few ends.
    """
    parts = name.split(".")
    known = pattern.keys() & {".".join(parts[first:]) for first in range(len(parts))}
    return next((pattern[end] for end in pattern if end in known), default) if known else default
