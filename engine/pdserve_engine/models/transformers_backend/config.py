"""What transformers says about a model that we run on its code; refuses what that code cannot do.

What cannot be seen here is seen by the backend, which watches one forward pass after loading.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pdserve_engine.models.config import (
    ModelConfig,
    ModelError,
    cut_windows,
    read_json,
    read_max_model_len,
    windows_of_types,
)
from pdserve_engine.models.config_fields import MAX_LAYERS
from pdserve_engine.models.rope import ORIGINAL_LENGTH, RopeSettings, check_rope

# Characters of what transformers has to say.
MAX_REASON = 1000


def read_transformers_config(
    model_dir: Path,
    raw: Mapping[str, Any],
    max_model_len: int | None,
    facts: Mapping[str, Any],
) -> ModelConfig:
    """Return the shape that transformers reads from the folder; raise ModelError for the rest.

    `facts` are the fields that do not depend on who runs the model.
    """
    hf_config = load_hf_config(model_dir)
    model_class = causal_lm_class(hf_config, raw.get("architectures"))
    refuse_unsupported(hf_config, model_class)
    num_layers = _require_int(hf_config, "num_hidden_layers")
    # Some classes have other names for it.
    _refuse_many_layers({"num_hidden_layers": num_layers})
    num_heads = _require_int(hf_config, "num_attention_heads")
    hidden_size = _require_int(hf_config, "hidden_size")
    length = read_max_model_len(getattr(hf_config, "max_position_embeddings", None), max_model_len)
    head_dim = getattr(hf_config, "head_dim", None) or hidden_size // num_heads
    _check_rope(hf_config, head_dim, length)
    return ModelConfig(
        architecture=model_class.__name__,
        vocab_size=_require_int(hf_config, "vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_attention_heads=num_heads,
        num_kv_heads=getattr(hf_config, "num_key_value_heads", None) or num_heads,
        head_dim=head_dim,
        attention_windows=cut_windows(_windows(hf_config, num_layers), length),
        max_model_len=length,
        **facts,
    )


def load_hf_config(model_dir: Path) -> PreTrainedConfig:
    """Return the folder's config. Code that comes with a model is never run."""
    raw = read_json(model_dir / "config.json")
    for fields in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        _refuse_many_layers(fields)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
        return config
    # Some 500 config classes check their fields, each with the exceptions its author liked.
    except Exception as error:
        raise ModelError(
            f"transformers cannot read {model_dir}/config.json: {error!s:.{MAX_REASON}}"
        ) from error


def _refuse_many_layers(raw: Mapping[str, Any]) -> None:
    """Raise ModelError where a field that counts layers is high: config classes make lists of it.
    It is called num_hidden_layers, n_layer, num_layers, num_decoder_layers, ...
    """
    for name, value in raw.items():
        is_count = name.startswith("n") and "layer" in name and isinstance(value, int)
        if is_count and value > MAX_LAYERS:
            raise ModelError(f"{name:.200} is {value!s:.200}, expected at most {MAX_LAYERS}")


def causal_lm_class(
    hf_config: PreTrainedConfig, architectures: list[str] | None
) -> type[PreTrainedModel]:
    """Return transformers' class for the config, which must be one that config.json names."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    if model_class is None or model_class.__name__ not in (architectures or ()):
        runs = "none" if model_class is None else model_class.__name__
        raise ModelError(
            f"architectures is {architectures!s:.200}, transformers' decoder-only model for"
            f" {hf_config.model_type} is {runs}"
        )
    found: type[PreTrainedModel] = model_class
    return found


def refuse_unsupported(hf_config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> None:
    """Raise ModelError for what a config says that our attention has not."""
    name = model_class.__name__
    if getattr(hf_config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder, supported are decoders")
    if model_class._is_stateful:
        raise ModelError(f"{name} has state-space or recurrent layers, supported is attention")
    if not model_class._supports_attention_backend:
        raise ModelError(f"{name} does not let its attention be replaced (ALiBi, for one)")
    if getattr(hf_config, "kv_lora_rank", None):
        raise ModelError(f"{name} has latent attention (kv_lora_rank), supported are K/V heads")
    if getattr(hf_config, "num_kv_shared_layers", None):
        raise ModelError(f"{name} shares KV between layers (num_kv_shared_layers), not supported")


def _check_rope(hf_config: PreTrainedConfig, head_dim: int, max_model_len: int) -> None:
    """Raise ModelError for settings that angles cannot be computed from, or that give all tokens
    of a step other angles as soon as one request is long, as longrope does.
    """
    if not getattr(hf_config, "rope_parameters", None):
        return
    # Models' code does it before it computes: original_max_position_embeddings of the config wins.
    hf_config.standardize_rope_params()
    parameters: dict[str, Any] = hf_config.rope_parameters
    by_layer_type = {
        f"rope_parameters.{name:.200}": value
        for name, value in parameters.items()
        if isinstance(value, dict)
    }
    for field, rope in (by_layer_type or {"rope_parameters": parameters}).items():
        settings = RopeSettings(field, rope)
        try:
            check_rope(settings, head_dim)
        except ValueError as error:
            raise ModelError(str(error)) from error
        if settings.rope_type == "longrope" and max_model_len > rope[ORIGINAL_LENGTH]:
            raise ModelError(
                f"{field}.rope_type is longrope, supported up to a max_model_len of"
                f" {rope[ORIGINAL_LENGTH]}"
            )


def _windows(hf_config: PreTrainedConfig, num_layers: int) -> tuple[int | None, ...]:
    # A field that the class does not have was kept from the file, but no model looks at it.
    is_known = hasattr(type(hf_config), "sliding_window")
    window = getattr(hf_config, "sliding_window", None) if is_known else None
    layer_types = getattr(hf_config, "layer_types", None)
    if layer_types is None:
        return (window,) * num_layers
    return windows_of_types(layer_types, window, num_layers)


def _require_int(hf_config: PreTrainedConfig, field: str) -> int:
    value = getattr(hf_config, field, None)
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"{field} is {value!s:.200}, expected a positive integer")
    return value
