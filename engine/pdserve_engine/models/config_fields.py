"""The fields of a model's JSON files: their types and ranges, checked before any is used."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypedDict, TypeVar

import msgspec
from msgspec import Meta

# No tensor of a model has more in one dimension.
Size = Annotated[int, Meta(gt=0, lt=2**31)]
# Some checkpoints have -1, which ends nothing.
TokenId = Annotated[int, Meta(ge=-1, lt=2**31)]
# No model has more.
MAX_LAYERS = 10_000
# Far more than any file needs, and far less than what Python's stack holds.
MAX_NESTING = 100


class ModelFields(TypedDict, total=False):
    """What is read of every model's `config.json`, whatever code runs it."""

    architectures: list[str] | None
    dtype: str | None
    torch_dtype: str | None
    eos_token_id: TokenId | list[TokenId] | None


class GenerationFields(TypedDict, total=False):
    """What is read of `generation_config.json`."""

    eos_token_id: TokenId | list[TokenId] | None


class IndexFields(TypedDict):
    """What is read of `model.safetensors.index.json`."""

    # The file of each weight.
    weight_map: dict[str, str]


class _Required(TypedDict):
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Meta(gt=0, le=MAX_LAYERS)]
    num_attention_heads: Size
    max_position_embeddings: Size


class NativeFields(_Required, total=False):
    """What our own code reads of a `config.json`, but for rope, experts and quantization.

    Null says nothing, also where transformers refuses it; of a window it says that there is none.
    """

    num_key_value_heads: Size | None
    head_dim: Size | None
    hidden_act: str | None
    rms_norm_eps: Annotated[float, Meta(gt=0, lt=1)] | None
    tie_word_embeddings: bool | None
    attention_bias: bool | None
    qkv_bias: bool | None
    mlp_bias: bool | None
    use_sliding_window: bool | None
    sliding_window: int | None
    max_window_layers: int | None
    layer_types: list[str] | None


class ExpertFields(TypedDict, total=False):
    """What is read of the `config.json` of a model with experts."""

    num_local_experts: Size | None
    num_experts: Size | None
    num_experts_per_tok: Size | None
    intermediate_size: Size | None
    moe_intermediate_size: Size | None
    shared_expert_intermediate_size: Size | None
    decoder_sparse_step: Size | None
    mlp_only_layers: list[int] | None
    norm_topk_prob: bool | None


class PoolerFields(TypedDict, total=False):
    """What is read of the `config.json` of a model that pools."""

    architectures: list[str] | None
    num_labels: Size | None
    id2label: dict[str, Any] | None
    problem_type: str | None
    sbert_ce_default_activation_function: str | None
    sentence_transformers: dict[str, Any] | None


Scale = Annotated[float, Meta(gt=0, le=1e30)]


class VisionTowerFields(TypedDict):
    """What is read of the config of a vision tower, whose pictures are squares."""

    image_size: Size
    patch_size: Size


class ImageProcessorFields(TypedDict, total=False):
    """What is read of an image processor's settings."""

    do_rescale: bool | None
    rescale_factor: Scale
    do_normalize: bool | None
    image_mean: tuple[float, float, float]
    image_std: tuple[Scale, Scale, Scale]


FieldsT = TypeVar("FieldsT")


def parse_json(text: str) -> Any:
    """Return what the text holds; raise ValueError if it is no JSON, or is nested so deep that code
    which goes through it might not come to its end.
    """
    try:
        content = json.loads(text)
    except RecursionError:
        content = None
    else:
        level = [content]
        for _ in range(MAX_NESTING):
            level = [child for value in level for child in _children(value)]
            if not level:
                return content
    raise ValueError(f"it is nested deeper than {MAX_NESTING} levels")


def _children(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_fields(fields: type[FieldsT], raw: Mapping[str, Any]) -> FieldsT:
    """Return those of the fields that raw has; raise ValueError that names the first one that is
    missing, or whose value has another type or is out of range. Only integers become floats.
    """
    try:
        return msgspec.convert(raw, fields)
    except msgspec.ValidationError as error:
        if missing := re.search(r"missing required field `(\w+)`", str(error)):
            raise ValueError(f"{missing[1]} is missing") from None
        # "Expected `int | null`, got `str` - at `$.head_dim`"
        expected, _, path = str(error).partition(" - at `$.")
        name = re.split(r"\W", path)[0]
        expected = expected.partition(", got")[0].replace("`", "").lower()
        raise ValueError(f"{name} is {raw[name]!r:.200}, {expected}") from None
