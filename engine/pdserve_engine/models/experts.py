"""The experts of a model's layers: what `config.json` says of them, and what they are called."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from pdserve_engine.models.config_fields import ExpertFields, read_fields

# Fields that a model with experts must have.
_Size = Literal[
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
]


class ExpertNames(NamedTuple):
    """What an architecture's checkpoints call a layer's experts and their linears."""

    module: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """What some layers have in place of an MLP; a router chooses a few of them for each token."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    # Whether a token's weights add up to 1.
    norm_topk_prob: bool
    # The layers that have them, ascending.
    layers: tuple[int, ...]
    names: ExpertNames
    # The size of the expert that all tokens have besides, None if there is none.
    shared_size: int | None = None


def read_mixtral_experts(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    """Return what all layers have; raise ValueError with the field."""
    fields = read_fields(ExpertFields, raw)
    num_experts = _require(fields, "num_experts", "num_local_experts")
    return ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_tok=_read_top_k(fields, num_experts),
        intermediate_size=_require(fields, "intermediate_size"),
        norm_topk_prob=True,
        layers=tuple(range(num_layers)),
        names=ExpertNames("block_sparse_moe.", "w1", "w3", "w2"),
    )


def read_qwen_experts(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig | None:
    """Return what every decoder_sparse_step-th layer has that is not among mlp_only_layers, None if
    there is no such layer; raise ValueError with the field.
    """
    return _read_qwen(raw, num_layers, "num_local_experts", "num_experts")


def _read_qwen(
    raw: Mapping[str, Any], num_layers: int, *num_experts_fields: _Size
) -> ExpertsConfig | None:
    fields = read_fields(ExpertFields, raw)
    num_experts = _require(fields, *num_experts_fields)
    step = fields.get("decoder_sparse_step") or 1
    dense = fields.get("mlp_only_layers") or ()
    layers = tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    if not layers:
        return None
    return ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_tok=_read_top_k(fields, num_experts),
        intermediate_size=_require(fields, "moe_intermediate_size"),
        norm_topk_prob=fields.get("norm_topk_prob") or False,
        layers=layers,
        names=ExpertNames(),
    )


def read_qwen2_experts(raw: Mapping[str, Any], num_layers: int) -> ExpertsConfig | None:
    """Return the same with the shared expert beside the others; raise ValueError with the field."""
    experts = _read_qwen(raw, num_layers, "num_experts")
    shared_size = _require(read_fields(ExpertFields, raw), "shared_expert_intermediate_size")
    return None if experts is None else replace(experts, shared_size=shared_size)


def _read_top_k(fields: ExpertFields, num_experts: int) -> int:
    top_k = _require(fields, "num_experts_per_tok")
    if top_k > num_experts:
        raise ValueError(f"num_experts_per_tok is {top_k}, the model has {num_experts} experts")
    return top_k


def _require(fields: ExpertFields, *names: _Size) -> int:
    """Return the first that is there: of two names for one thing, the first wins in transformers,
    to which the other may be an alias.
    """
    for name in names:
        if (size := fields.get(name)) is not None:
            return size
    raise ValueError(f"{' or '.join(names)} is missing")
