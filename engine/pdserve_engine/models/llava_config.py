"""The config of a model in LLaVA-1.5's format: a vision tower, a projector, and a text model that
is ours.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CLIPVisionConfig, PreTrainedConfig

from pdserve_engine.config import Convert, KVCacheDtype, LoadQuantization, ModelImpl, Runner
from pdserve_engine.models.config import (
    LlamaConfig,
    ModelError,
    VisionConfig,
    errors_of_fields,
    read_facts,
    read_json,
    read_native_config,
)
from pdserve_engine.models.config_fields import (
    ImageProcessorFields,
    VisionTowerFields,
    read_fields,
)
from pdserve_engine.models.pooler_config import read_pooler_config
from pdserve_engine.models.transformers_backend.config import load_hf_config

LLAVA = "LlavaForConditionalGeneration"
TEXT_MODELS: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TOWERS = ("clip_vision_model", "siglip_vision_model")
# Versions of transformers differ in where they put the image processor's settings.
PREPROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
NUM_COLOURS = 3


def read_llava_config(
    folder: Path,
    raw: Mapping[str, Any],
    *,
    max_model_len: int | None,
    model_impl: ModelImpl,
    dtype: str,
    quantization: LoadQuantization | None,
    kv_cache_dtype: KVCacheDtype,
    runner: Runner,
    convert: Convert,
    pooler_config: str | None,
) -> LlamaConfig:
    """Return the text model's shape, with how it sees pictures. Raises ModelError for what is not
    served; the arguments are those of `read_model_config`.
    """
    _refuse_unserved(raw, model_impl, runner)
    read_pooler_config(folder, raw, runner="generate", convert=convert, overrides=pooler_config)
    hf_config: Any = load_hf_config(folder)
    text = _text_fields(hf_config)
    # Published text configs say little but their type: transformers knows the rest.
    raw_facts = {"eos_token_id": text.get("eos_token_id"), **raw}
    facts = read_facts(
        folder, raw_facts, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype
    )
    config = read_native_config(text, max_model_len, facts)
    vision = _read_vision(folder, hf_config, config.vocab_size)
    if vision.num_image_tokens >= config.max_model_len:
        raise ModelError(
            f"max_model_len is {config.max_model_len}, must be above the {vision.num_image_tokens} "
            "tokens of a picture"
        )
    return dataclasses.replace(config, architecture=LLAVA, vision=vision)


def _refuse_unserved(raw: Mapping[str, Any], model_impl: ModelImpl, runner: Runner) -> None:
    architectures = raw.get("architectures") or []
    if LLAVA not in architectures:
        raise ModelError(
            f"architectures is {architectures!s:.200}, of models that take more than text supported"
            f" is {LLAVA}"
        )
    if model_impl == "transformers":
        raise ModelError(f"model_impl is transformers, must be auto or native for {LLAVA}")
    if runner == "pooling":
        raise ModelError(f"runner is pooling, must be auto or generate for {LLAVA}")
    if raw.get("quantization_config") is not None:
        raise ModelError(
            f"quantization_config is set, {LLAVA} is served from checkpoints without; "
            "--quantization rounds its text model"
        )


def _text_fields(hf_config: Any) -> dict[str, Any]:
    text: PreTrainedConfig = hf_config.text_config
    if text.model_type not in TEXT_MODELS:
        raise ModelError(
            f"text_config.model_type is {text.model_type}, supported are {', '.join(TEXT_MODELS)}"
        )
    return {
        **text.to_dict(),
        "architectures": [TEXT_MODELS[text.model_type]],
        "tie_word_embeddings": hf_config.tie_word_embeddings,
    }


def _read_vision(folder: Path, hf_config: Any, vocab_size: int) -> VisionConfig:
    tower, image_token_id = hf_config.vision_config, hf_config.image_token_index
    if tower.model_type not in TOWERS:
        raise ModelError(
            f"vision_config.model_type is {tower.model_type}, supported are {', '.join(TOWERS)}"
        )
    with errors_of_fields():
        fields = read_fields(VisionTowerFields, tower.to_dict())
    if tower.num_channels != NUM_COLOURS:
        raise ModelError(
            f"vision_config.num_channels is {tower.num_channels!s:.200}, supported are "
            f"{NUM_COLOURS} colours"
        )
    if not 0 <= image_token_id < vocab_size:
        raise ModelError(
            f"image_token_index is {image_token_id!s:.200}, must be below the vocab_size "
            f"{vocab_size}"
        )
    # CLIP has a token for the whole picture before those of its patches.
    num_states = (fields["image_size"] // fields["patch_size"]) ** 2
    num_states += isinstance(tower, CLIPVisionConfig)
    is_first_left_out = hf_config.vision_feature_select_strategy == "default"
    factor, mean, std = _read_preprocessor(folder)
    return VisionConfig(
        image_token_id=image_token_id,
        num_image_tokens=num_states - is_first_left_out,
        image_size=fields["image_size"],
        rescale_factor=factor,
        image_mean=mean,
        image_std=std,
    )


def _read_preprocessor(folder: Path) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    """Return the factor, mean and deviation that a picture's numbers are normalized by."""
    with errors_of_fields():
        fields = read_fields(ImageProcessorFields, _processor_fields(folder))
    factor = fields.get("rescale_factor", 1 / 255) if fields.get("do_rescale", True) else 1.0
    if not fields.get("do_normalize", True):
        return factor, (0.0,) * NUM_COLOURS, (1.0,) * NUM_COLOURS
    for name in ("image_mean", "image_std"):
        if name not in fields:
            raise ModelError(f"the image processor has no {name}, expected {NUM_COLOURS} numbers")
    return factor, fields["image_mean"], fields["image_std"]


def _processor_fields(folder: Path) -> Mapping[str, Any]:
    for name in PREPROCESSOR_FILES:
        if (folder / name).is_file():
            raw = read_json(folder / name)
            fields = raw.get("image_processor", raw)
            if isinstance(fields, dict) and "image_mean" in fields:
                return fields
    raise ModelError(f"{folder} has no {' or '.join(PREPROCESSOR_FILES)} with an image_mean")
