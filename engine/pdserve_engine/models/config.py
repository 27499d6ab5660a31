"""What a checkpoint's `config.json` says about the model, checked against what we can run."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pdserve_engine.models.rope import RopeConfig, read_rope

logger = logging.getLogger(__name__)


class ModelError(ValueError):
    """The model cannot be served; the message names the file or field, and what is supported."""


class _Family(NamedTuple):
    """How an architecture differs where its `config.json` does not say so."""

    # None: the config's attention_bias decides, for output as well as q, k and v.
    qkv_bias: bool | None = None
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    # Applies when the field is missing, as in transformers.
    default_sliding_window: int | None = None
    # The window is in force only when use_sliding_window is true.
    is_window_optional: bool = False
    default_head_dim: int | None = None


FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(has_mlp_bias=True),
    "MistralForCausalLM": _Family(qkv_bias=False, default_sliding_window=4096),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, is_window_optional=True),
    "Qwen3ForCausalLM": _Family(has_qk_norm=True, is_window_optional=True, default_head_dim=128),
}

DTYPES: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only model and the dtype it is served in."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_attention_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    # Positions 0 to max_model_len - 1 can be computed.
    max_model_len: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @classmethod
    def from_dir(
        cls, model_dir: str | Path, *, dtype: str = "auto", max_model_len: int | None = None
    ) -> "ModelConfig":
        """Read `config.json` and `generation_config.json`; raise ModelError for what we cannot run.

        dtype is "auto" (the checkpoint's), "bfloat16" or "float32"; max_model_len defaults to the
        model's own limit and may only lower it.
        """
        raw = _read_json(Path(model_dir) / "config.json")
        architecture = _read_architecture(raw)
        family = FAMILIES[architecture]
        _refuse_unsupported(raw)
        length = _read_max_model_len(raw, max_model_len)
        _refuse_sliding_window(raw, family, length)
        num_heads = _require_int(raw, "num_attention_heads")
        hidden_size = _require_int(raw, "hidden_size")
        has_attention_bias = bool(raw.get("attention_bias", False))
        try:
            rope = read_rope(raw)
        except ValueError as error:
            raise ModelError(str(error)) from error
        return cls(
            architecture=architecture,
            vocab_size=_require_int(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_require_int(raw, "intermediate_size"),
            num_layers=_require_int(raw, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_kv_heads=_read_num_kv_heads(raw, num_heads),
            head_dim=raw.get("head_dim") or family.default_head_dim or hidden_size // num_heads,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=rope,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            has_qkv_bias=has_attention_bias if family.qkv_bias is None else family.qkv_bias,
            has_attention_output_bias=has_attention_bias and family.qkv_bias is None,
            has_mlp_bias=family.has_mlp_bias and bool(raw.get("mlp_bias", False)),
            has_qk_norm=family.has_qk_norm,
            max_model_len=length,
            dtype=_read_dtype(raw, dtype),
            eos_token_ids=_read_eos_token_ids(Path(model_dir), raw),
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise ModelError(f"model folder {path.parent} does not exist")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: {path.parent} is no model folder") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content


def _read_architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return str(name)
    raise ModelError(f"architectures is {names}, supported are {', '.join(FAMILIES)}")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"quantization_config has quant_method {method}, supported is none")
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"hidden_act is {activation}, supported is silu")


def _require_int(raw: Mapping[str, Any], field: str) -> int:
    value = raw.get(field)
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"{field} is {value}, expected a positive integer")
    return value


def _read_num_kv_heads(raw: Mapping[str, Any], num_heads: int) -> int:
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ModelError(
            f"num_key_value_heads is {num_kv_heads}, must divide num_attention_heads {num_heads}"
        )
    return int(num_kv_heads)


def _read_max_model_len(raw: Mapping[str, Any], requested: int | None) -> int:
    limit = _require_int(raw, "max_position_embeddings")
    if requested is None:
        return limit
    if not 0 < requested <= limit:
        raise ModelError(f"max_model_len is {requested}, the model supports 1 to {limit}")
    return requested


def _refuse_sliding_window(raw: Mapping[str, Any], family: _Family, max_model_len: int) -> None:
    if family.is_window_optional and not raw.get("use_sliding_window", False):
        return
    window = raw.get("sliding_window", family.default_sliding_window)
    if window is not None and window < max_model_len:
        raise ModelError(
            f"sliding_window is {window}, supported is none or at least max_model_len"
            f" ({max_model_len}); a max_model_len of {window} would do"
        )


def _read_dtype(raw: Mapping[str, Any], requested: str) -> torch.dtype:
    if requested != "auto":
        if requested not in DTYPES:
            raise ModelError(f"dtype is {requested}, supported are auto, {', '.join(DTYPES)}")
        return DTYPES[requested]
    # transformers 5 writes dtype, older ones torch_dtype.
    stored = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if stored == "float16":
        logger.warning("model is stored as float16, which is not supported: serving bfloat16")
        stored = "bfloat16"
    if stored not in DTYPES:
        raise ModelError(f"dtype in config.json is {stored}, supported are {', '.join(DTYPES)}")
    return DTYPES[stored]


def _read_eos_token_ids(model_dir: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    generation_path = model_dir / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    # As in transformers: generation_config.json wins.
    value = generation.get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
