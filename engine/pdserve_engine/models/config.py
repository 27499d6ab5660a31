"""What a checkpoint's `config.json` says about the model, checked against what we can run."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from pdserve_common.types.pooling_params import PoolingTask
from pdserve_engine.config import KVCacheDtype, LoadQuantization
from pdserve_engine.models.config_fields import (
    GenerationFields,
    ModelFields,
    NativeFields,
    parse_json,
    read_fields,
)
from pdserve_engine.models.experts import (
    ExpertsConfig,
    read_mixtral_experts,
    read_qwen2_experts,
    read_qwen_experts,
)
from pdserve_engine.models.quantization import Quantization, read_quantization
from pdserve_engine.models.rope import RopeConfig, native_rope, read_rope_settings
from pdserve_kernels.fp8 import FP8

logger = logging.getLogger(__name__)


class ModelError(ValueError):
    """The model cannot be served; the message names the file or field, and what is supported."""


class NativeUnsupportedError(ModelError):
    """Our own implementation does not run this model; the transformers backend may."""


class _Family(NamedTuple):
    """How an architecture differs where its `config.json` does not say so."""

    # None: the config's attention_bias decides, for output as well as q, k and v.
    qkv_bias: bool | None = None
    # The field `qkv_bias` may say otherwise.
    is_qkv_bias_stated: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    # "layers": the window applies to the layers named by layer_types or from max_window_layers on,
    # if use_sliding_window is true; "alternating": to those named, or to every second one before
    # max_window_layers, the first among them; "used": to all of them; "always": to all.
    window_scope: Literal["never", "always", "used", "layers", "alternating"] = "never"
    # What transformers assumes where the field is missing.
    default_window: int | None = 4096
    default_head_dim: int | None = None
    default_num_kv_heads: int | None = None
    default_rms_norm_eps: float = 1e-6
    default_theta: float = 10000.0
    # Reads what layers have in place of an MLP, given the number of layers.
    experts: Callable[[Mapping[str, Any], int], ExpertsConfig | None] | None = None


FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(has_mlp_bias=True),
    "MistralForCausalLM": _Family(qkv_bias=False, window_scope="always", default_num_kv_heads=8),
    "MixtralForCausalLM": _Family(
        qkv_bias=False,
        window_scope="always",
        default_window=None,
        default_num_kv_heads=8,
        default_rms_norm_eps=1e-5,
        default_theta=1e6,
        experts=read_mixtral_experts,
    ),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, window_scope="layers", default_num_kv_heads=32),
    "Qwen2MoeForCausalLM": _Family(
        qkv_bias=True,
        is_qkv_bias_stated=True,
        window_scope="alternating",
        default_num_kv_heads=16,
        experts=read_qwen2_experts,
    ),
    "Qwen3ForCausalLM": _Family(
        has_qk_norm=True, window_scope="layers", default_head_dim=128, default_num_kv_heads=32
    ),
    "Qwen3MoeForCausalLM": _Family(
        has_qk_norm=True, window_scope="used", default_num_kv_heads=4, experts=read_qwen_experts
    ),
}
# What architectures of one family end in: with a head that makes tokens, or labels, or none.
CAUSAL_LM, SEQUENCE_CLASSIFICATION, BASE_MODEL = "ForCausalLM", "ForSequenceClassification", "Model"
# What transformers assumes where the field is missing.
DEFAULT_MAX_WINDOW_LAYERS = 28
# In layer_types, what layers with a window are, and what others are.
SLIDING, FULL = "sliding_attention", "full_attention"

DTYPES: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}

PoolingType = Literal["last", "mean"]
Activation = Literal["normalize", "softmax", "sigmoid", "identity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """What a model that pools makes of its tokens' states."""

    tasks: tuple[PoolingTask, ...]
    # The states that are pooled: the last token's, or the mean over all.
    pooling_type: PoolingType
    # 0: the pooled states are the answer, an embedding. Else the score head makes so many of them.
    num_labels: int = 0
    # The head of its one label is the second of these tokens' rows of the lm_head less the first's:
    # the sigmoid of that is the second one's share of both. Empty: there is a score head.
    classifier_token_ids: tuple[int, ...] = ()
    # What the answer goes through, and whether it does where the request does not say so.
    activation: Activation
    use_activation: bool
    # Embeddings may be cut: to these sizes, or to any if there are none.
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """How a model sees pictures: as tokens of the prompt whose embeddings its tower makes."""

    # Stands where a picture is, as often as it has tokens.
    image_token_id: int
    num_image_tokens: int
    # Height and width in pixels.
    image_size: int
    # What is done to a picture's numbers from 0 to 255: times the factor, less the mean, by the
    # deviation of each of its colours.
    rescale_factor: float
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only model and the dtype it is served in, whatever code runs it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    # For each layer how many positions a token sees, its own included; None: all.
    attention_windows: tuple[int | None, ...]
    # Positions 0 to max_model_len - 1 can be computed.
    max_model_len: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None
    has_fp8_kv: bool = False
    # None: the model generates.
    pooler: PoolerConfig | None = None
    # None: it takes text alone.
    vision: VisionConfig | None = None

    @property
    def embedding_size(self) -> int:
        """Numbers in the answer of a model that pools; 0 for others."""
        if self.pooler is None:
            return 0
        return self.pooler.num_labels or self.hidden_size

    @property
    def kv_dtype(self) -> torch.dtype:
        return FP8 if self.has_fp8_kv else self.dtype

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """A model of the Llama family, which `LlamaModel` runs."""

    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_attention_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    # None: all layers have an MLP.
    experts: ExpertsConfig | None = None


def read_native_config(
    raw: Mapping[str, Any], max_model_len: int | None, facts: Mapping[str, Any]
) -> LlamaConfig:
    """Return the shape that our own implementation runs; raise NativeUnsupportedError if it runs
    another one, ModelError for a file that nothing can run.

    raw is what `config.json` holds, facts what `read_facts` returns.
    """
    architecture = _read_architecture(raw)
    family = FAMILIES[causal_lm_name(architecture)]
    with errors_of_fields():
        fields = read_fields(NativeFields, raw)
    if (activation := fields.get("hidden_act") or "silu") not in ("silu", "swish"):
        raise NativeUnsupportedError(f"hidden_act is {activation:.200}, supported is silu")
    length = read_max_model_len(fields["max_position_embeddings"], max_model_len)
    num_heads, num_layers = fields["num_attention_heads"], fields["num_hidden_layers"]
    head_dim = (
        fields.get("head_dim") or family.default_head_dim or fields["hidden_size"] // num_heads
    )
    has_attention_bias = fields.get("attention_bias") or False
    return LlamaConfig(
        architecture=architecture,
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_layers=num_layers,
        num_attention_heads=num_heads,
        num_kv_heads=_read_num_kv_heads(fields, family.default_num_kv_heads),
        head_dim=head_dim,
        attention_windows=cut_windows(_read_windows(fields, family), length),
        rms_norm_eps=fields.get("rms_norm_eps") or family.default_rms_norm_eps,
        rope=_read_rope(raw, family.default_theta, head_dim),
        tie_word_embeddings=fields.get("tie_word_embeddings") or False,
        has_qkv_bias=_has_qkv_bias(fields, family),
        has_attention_output_bias=has_attention_bias and family.qkv_bias is None,
        has_mlp_bias=family.has_mlp_bias and (fields.get("mlp_bias") or False),
        has_qk_norm=family.has_qk_norm,
        max_model_len=length,
        experts=_read_experts(raw, family, num_layers),
        **facts,
    )


def read_facts(
    model_dir: Path,
    raw: Mapping[str, Any],
    *,
    dtype: str,
    quantization: LoadQuantization | None,
    kv_cache_dtype: KVCacheDtype,
) -> dict[str, Any]:
    """Return the fields of ModelConfig that do not depend on who runs the model."""
    with errors_of_fields():
        return {
            "quantization": read_quantization(raw, quantization),
            "dtype": _read_dtype(read_fields(ModelFields, raw), dtype),
            "has_fp8_kv": kv_cache_dtype == "fp8",
            "eos_token_ids": _read_eos_token_ids(model_dir, read_fields(ModelFields, raw)),
        }


@contextlib.contextmanager
def errors_of_fields() -> Iterator[None]:
    """Make a ModelError of the ValueError that names a field of the model's files."""
    try:
        yield
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(str(error)) from error


def cut_windows(windows: Iterable[int | None], max_model_len: int) -> tuple[int | None, ...]:
    """Return the windows without those that no sequence outgrows; raise ModelError for what is no
    window.
    """
    windows = tuple(windows)
    for window in windows:
        if window is not None and (type(window) is not int or window <= 0):
            raise ModelError(
                f"sliding_window is {window!r:.200}, expected a positive integer or null"
            )
    return tuple(w if w is not None and w < max_model_len else None for w in windows)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of the model's folder; raise ModelError if there is none."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        folder = path.parent
        if not folder.is_dir():
            raise ModelError(f"model folder {folder} does not exist") from None
        raise ModelError(f"{path} does not exist: {folder} is no model folder") from None
    except OSError as error:
        # Files may name other files: the end of such a name is what says most.
        raise ModelError(f"{str(path)[-200:]} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


def is_multimodal(raw: Mapping[str, Any]) -> bool:
    """Does the model take more than text?"""
    return any(isinstance(raw.get(field), dict) for field in ("vision_config", "audio_config"))


def causal_lm_name(architecture: str) -> str:
    """Return what the model of the same family that generates is called."""
    for end in (SEQUENCE_CLASSIFICATION, BASE_MODEL):
        if architecture.endswith(end):
            return architecture.removesuffix(end) + CAUSAL_LM
    return architecture


def _read_architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if causal_lm_name(name) in FAMILIES:
            return str(name)
    native = ", ".join(FAMILIES)
    raise NativeUnsupportedError(f"architectures is {names!s:.200}, native are {native}")


def _read_rope(raw: Mapping[str, Any], default_theta: float, head_dim: int) -> RopeConfig:
    with errors_of_fields():
        settings = read_rope_settings(raw, default_theta=default_theta, head_dim=head_dim)
    try:
        return native_rope(settings)
    except ValueError as error:
        raise NativeUnsupportedError(str(error)) from error


def _read_experts(raw: Mapping[str, Any], family: _Family, num_layers: int) -> ExpertsConfig | None:
    if family.experts is None:
        return None
    with errors_of_fields():
        return family.experts(raw, num_layers)


def _has_qkv_bias(fields: NativeFields, family: _Family) -> bool:
    if family.qkv_bias is None:
        return fields.get("attention_bias") or False
    stated = fields.get("qkv_bias") if family.is_qkv_bias_stated else None
    return family.qkv_bias if stated is None else stated


def _read_num_kv_heads(fields: NativeFields, default: int | None) -> int:
    num_heads = fields["num_attention_heads"]
    num_kv_heads = fields.get("num_key_value_heads", default) or num_heads
    if num_heads % num_kv_heads:
        raise ModelError(
            f"num_key_value_heads is {num_kv_heads}, must divide num_attention_heads {num_heads}"
        )
    return num_kv_heads


def read_max_model_len(limit: object, requested: int | None) -> int:
    """Return the requested length or the model's own; raise ModelError where they do not fit."""
    if not isinstance(limit, int) or limit <= 0:
        raise ModelError(f"max_position_embeddings is {limit!s:.200}, expected a positive integer")
    if requested is None:
        return limit
    if not 0 < requested <= limit:
        raise ModelError(f"max_model_len is {requested}, the model supports 1 to {limit}")
    return requested


def _read_windows(fields: NativeFields, family: _Family) -> tuple[int | None, ...]:
    """Return each layer's window as transformers reads it from the same fields."""
    num_layers = fields["num_hidden_layers"]
    window = fields.get("sliding_window", family.default_window)
    if family.window_scope == "never":
        if fields.get("sliding_window") is not None:
            logger.warning(
                "sliding_window is %.200s, attention has no window in this family", window
            )
        window = None
    elif family.window_scope != "always" and not fields.get("use_sliding_window"):
        window = None
    layer_types = fields.get("layer_types")
    if layer_types is None and family.window_scope == "alternating":
        layer_types = _alternating_types(fields)
    if layer_types is None and family.window_scope == "layers":
        first = _max_window_layers(fields)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    windows = (window,) * num_layers
    if layer_types is None:
        return windows
    typed = windows_of_types(layer_types, window, num_layers)
    # In other families transformers ignores them, fails, or takes the model for another one.
    is_ignored = family.window_scope not in ("layers", "alternating") and typed != windows
    if is_ignored or (window is None and SLIDING in layer_types):
        raise ModelError(f"layer_types is {layer_types!s:.200}, attention has the window {window}")
    return typed


def _max_window_layers(fields: NativeFields) -> int:
    first = fields.get("max_window_layers")
    return DEFAULT_MAX_WINDOW_LAYERS if first is None else first


def _alternating_types(fields: NativeFields) -> list[str]:
    """Return the kinds of attention that transformers assumes where layer_types is missing."""
    is_used, end = fields.get("use_sliding_window"), _max_window_layers(fields)
    return [
        SLIDING if is_used and layer % 2 == 0 and layer < end else FULL
        for layer in range(fields["num_hidden_layers"])
    ]


def windows_of_types(
    layer_types: Sequence[str], window: int | None, num_layers: int
) -> tuple[int | None, ...]:
    """Return each layer's window, given the kind of its attention; raise ModelError for others."""
    if other := sorted(set(layer_types) - {FULL, SLIDING}):
        supported = "full_attention, sliding_attention"
        raise ModelError(f"layer_types has {', '.join(other):.200}, supported are {supported}")
    if len(layer_types) != num_layers:
        raise ModelError(f"layer_types names {len(layer_types)} layers, the model has {num_layers}")
    return tuple(window if kind == SLIDING else None for kind in layer_types)


def _read_dtype(fields: ModelFields, requested: str) -> torch.dtype:
    if requested != "auto":
        if requested not in DTYPES:
            raise ModelError(f"dtype is {requested}, supported are auto, {', '.join(DTYPES)}")
        return DTYPES[requested]
    # transformers 5 writes dtype, older ones torch_dtype.
    stored = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if stored == "float16":
        logger.warning("model is stored as float16, which is not supported: serving bfloat16")
        stored = "bfloat16"
    if stored not in DTYPES:
        supported = ", ".join(DTYPES)
        raise ModelError(f"dtype in config.json is {stored:.200}, supported are {supported}")
    return DTYPES[stored]


def _read_eos_token_ids(model_dir: Path, fields: ModelFields) -> tuple[int, ...]:
    generation_path = model_dir / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    # As in transformers: generation_config.json wins.
    value = read_fields(GenerationFields, generation).get("eos_token_id")
    if value is None:
        value = fields.get("eos_token_id")
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
