"""Fields of a model's JSON files that hold anything: refused by name, and never read otherwise than
transformers reads them.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import transformers

from pdserve_engine.models.config import FAMILIES, LlamaConfig, ModelError
from pdserve_engine.models.config_fields import (
    ExpertFields,
    ImageProcessorFields,
    ModelFields,
    NativeFields,
    PoolerFields,
)
from pdserve_engine.models.registry import read_model_config

FIELDS = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": 2,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "sliding_window": 16,
}
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
NAMES = sorted(
    get_type_hints(ModelFields).keys()
    | get_type_hints(NativeFields).keys()
    | get_type_hints(ExpertFields).keys()
    | set(ROPE)
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        -1,
        16,
        16.0,
        1.5,
        0.25,
        -0.5,
        "2",
        "0.01",
        "silu",
        "bfloat16",
        "",
    ),
    *([], [2], [2.0], [[]], [["a"]], ["full_attention"] * 4, ["full_attention", 2], {}),
    *({"rope_type": []}, {"rope_type": "linear", "factor": 10**400}, {"a": []}),
    *(10**12, 10**30, 10**400, float("nan"), float("inf")),
)


def changes_of(field: str) -> Iterator[dict[str, Any]]:
    for value in VALUES:
        if field == "num_hidden_layers" and isinstance(value, int) and value > 10_000:
            continue  # of which transformers makes a list
        yield {field: value}
        if field in WINDOWS:
            yield {"use_sliding_window": True, "max_window_layers": 2} | {field: value}


def write(folder: Path, architecture: str, changes: Mapping[str, Any]) -> None:
    config_class = getattr(transformers, architecture).config_class
    raw = {"architectures": [architecture], "model_type": config_class.model_type} | FIELDS
    (folder / "config.json").write_text(json.dumps(raw | changes))


def read_natively(folder: Path) -> LlamaConfig | None:
    """Return the shape, None if it is refused."""
    try:
        config = read_model_config(folder, model_impl="native")
    except ModelError:
        return None
    assert isinstance(config, LlamaConfig)
    return config


def read_by_transformers(folder: Path, architecture: str) -> Any:
    """Return the config, None if it is refused."""
    try:
        return getattr(transformers, architecture).config_class.from_pretrained(folder)
    except Exception:  # of any kind
        return None


@pytest.mark.parametrize("field", NAMES)
def test_a_field_that_holds_anything_is_refused_or_read_as_transformers_reads_it(
    tmp_path: Path, field: str
) -> None:
    num_read = 0
    for architecture in FAMILIES:
        for changes in changes_of(field):
            write(tmp_path, architecture, changes)
            config = read_natively(tmp_path)
            if config is None or changes[field] is None:
                continue  # null says nothing to us
            theirs = read_by_transformers(tmp_path, architecture)
            if theirs is None:
                # A hidden_size that no head divides is one where there is a head_dim.
                is_lenient = changes[field] == "" or field == "hidden_size"
                assert is_lenient, (architecture, changes)
                continue
            num_read += 1
            found = {
                "vocab_size": config.vocab_size,
                "hidden_size": config.hidden_size,
                "num_hidden_layers": config.num_layers,
                "num_attention_heads": config.num_attention_heads,
                "num_key_value_heads": config.num_kv_heads,
                "rms_norm_eps": config.rms_norm_eps,
                "tie_word_embeddings": config.tie_word_embeddings,
                "max_position_embeddings": config.max_model_len,
            }
            assert found == {name: getattr(theirs, name) for name in found}, changes
            assert config.rope.theta == theirs.rope_parameters["rope_theta"], changes
    assert num_read or field == "architectures", "no value was compared"


def check_refused_or_read(folder: Path, **settings: Any) -> None:
    """Nothing but a ModelError may come of a file that holds anything."""
    with contextlib.suppress(ModelError):
        read_model_config(folder, **settings)


@pytest.mark.parametrize(
    "field",
    [
        *get_type_hints(PoolerFields),
        *("num_labels", "matryoshka_dimensions", "is_matryoshka", "is_causal", "hidden_size"),
    ],
)
def test_a_field_of_a_model_that_pools_is_refused_or_read(tmp_path: Path, field: str) -> None:
    for architecture in ("LlamaForSequenceClassification", "LlamaModel"):
        for value in VALUES:
            raw = {"architectures": [architecture], "model_type": "llama"} | FIELDS
            (tmp_path / "config.json").write_text(json.dumps(raw | {field: value}))
            check_refused_or_read(tmp_path, runner="pooling")


def test_eos_ids_of_any_type_are_refused_or_read(tmp_path: Path) -> None:
    write(tmp_path, "LlamaForCausalLM", {})
    for value in VALUES:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        check_refused_or_read(tmp_path)


PICTURES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "rescale_factor": 0.1}


@pytest.mark.parametrize(
    ("file", "field"),
    [
        *(("config.json", name) for name in ("image_token_index", "vision_config", "text_config")),
        *(("config.json", name) for name in ("vision_feature_select_strategy", "dtype")),
        *(
            ("vision_config", name)
            for name in ("image_size", "patch_size", "num_channels", "model_type", "hidden_size")
        ),
        *(
            ("preprocessor_config.json", name)
            for name in ("image_processor", *get_type_hints(ImageProcessorFields))
        ),
    ],
)
def test_a_field_of_a_model_that_takes_pictures_is_refused_or_read(
    tmp_path: Path, file: str, field: str
) -> None:
    text = FIELDS | {"model_type": "llama"}
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
    for value in VALUES:
        raw: dict[str, Any] = {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "image_token_index": 5,
            "text_config": text,
            "vision_config": vision,
        }
        pictures: dict[str, Any] = dict(PICTURES)
        if file == "vision_config":
            raw["vision_config"] = vision | {field: value}
        else:
            (raw if file == "config.json" else pictures)[field] = value
        (tmp_path / "config.json").write_text(json.dumps(raw))
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(pictures))
        check_refused_or_read(tmp_path)
