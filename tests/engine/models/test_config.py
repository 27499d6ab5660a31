"""ModelConfig: what is read from config.json, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pdserve_engine.models.config import FAMILIES, LlamaConfig, ModelError
from pdserve_engine.models.registry import read_model_config
from support.models import EXPERTS

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
        return tmp_path

    return write


def test_reads_the_shape_and_derives_the_rest(write_config: Callable[..., Path]) -> None:
    config = read_model_config(write_config())
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert config.dtype == torch.bfloat16
    assert config.max_model_len == 8192
    assert config.eos_token_ids == (2,)
    assert config.rope.theta == 500000.0
    assert not config.tie_word_embeddings
    assert not config.has_qkv_bias


def test_reads_what_transformers_saves(make_model: Callable[..., Path]) -> None:
    rope = {"rope_theta": 20000.0, "rope_type": "linear", "factor": 2.0}
    config = read_model_config(make_model("Qwen3ForCausalLM", rope_parameters=rope))
    assert config.has_qk_norm
    assert (config.rope.rope_type, config.rope.theta, config.rope.factor) == (
        "linear",
        20000.0,
        2.0,
    )
    assert config.dtype == torch.float32


@pytest.mark.parametrize("architecture", FAMILIES)
def test_missing_fields_are_what_transformers_assumes(tmp_path: Path, architecture: str) -> None:
    left_out = {"num_key_value_heads", "rms_norm_eps", "rope_theta"}
    raw = {name: value for name, value in LLAMA.items() if name not in left_out}
    raw |= {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    raw |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    raw |= {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_model_config(tmp_path)
    theirs = getattr(transformers, architecture).config_class.from_pretrained(tmp_path)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_reads_llama3_rope_from_either_field(write_config: Callable[..., Path], field: str) -> None:
    rope = read_model_config(write_config(**{field: LLAMA3_ROPE})).rope
    assert (rope.rope_type, rope.factor, rope.theta) == ("llama3", 8.0, 500000.0)


def test_llama_attention_bias_covers_the_output_projection(
    write_config: Callable[..., Path],
) -> None:
    config = read_model_config(write_config(attention_bias=True, mlp_bias=True))
    assert config.has_qkv_bias
    assert config.has_attention_output_bias
    assert config.has_mlp_bias


def test_qwen2_has_qkv_bias_only(write_config: Callable[..., Path]) -> None:
    config = read_model_config(
        write_config(architectures=["Qwen2ForCausalLM"], sliding_window=4096)
    )
    assert config.has_qkv_bias
    assert not config.has_attention_output_bias


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "max_window_layers": 3},
        {"use_sliding_window": True, "max_window_layers": 0, "qkv_bias": False},
        {
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"] * 3,
        },
    ],
)
def test_qwen2_moe_is_read_as_transformers_does(
    write_config: Callable[..., Path], changes: dict[str, Any]
) -> None:
    experts = EXPERTS | {"num_experts": 4, "num_hidden_layers": 6, "sliding_window": 100}
    folder = write_config(
        **experts, model_type="qwen2_moe", architectures=["Qwen2MoeForCausalLM"], **changes
    )
    config = read_model_config(folder, model_impl="native")
    assert isinstance(config, LlamaConfig)
    theirs = transformers.AutoConfig.from_pretrained(folder)
    is_sliding = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert config.attention_windows == tuple(100 if slides else None for slides in is_sliding)
    assert config.has_qkv_bias == theirs.qkv_bias
    assert not config.has_attention_output_bias


def test_a_window_of_qwen2_moe_without_a_size_is_refused(
    write_config: Callable[..., Path],
) -> None:
    folder = write_config(
        **EXPERTS,
        num_experts=4,
        architectures=["Qwen2MoeForCausalLM"],
        sliding_window=None,
        use_sliding_window=True,
    )
    with pytest.raises(ModelError, match=r"layer_types is \['sliding.*, attention has the window"):
        read_model_config(folder)


def test_generation_config_wins_for_eos(write_config: Callable[..., Path]) -> None:
    folder = write_config()
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_model_config(folder).eos_token_ids == (7, 9)


def test_a_requested_dtype_wins(write_config: Callable[..., Path]) -> None:
    assert read_model_config(write_config(), dtype="float32").dtype == torch.float32


def test_float16_is_served_as_bfloat16_with_a_warning(
    write_config: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    config = read_model_config(write_config(torch_dtype="float16"))
    assert config.dtype == torch.bfloat16
    assert "float16" in caplog.text


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, (None,) * 4),
        ({"layer_types": ["full_attention"] * 4}, (None,) * 4),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["sliding_attention"] * 4},
            (100,) * 4,
        ),
        ({"architectures": ["MistralForCausalLM"]}, (100,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"]}, (None,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 0}, (None,) * 4),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (None, None, None, 100),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (100, None, 100, None),
        ),
    ],
)
def test_reads_each_layers_window(
    write_config: Callable[..., Path], changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    folder = write_config(**{"num_hidden_layers": 4, "sliding_window": 100} | changes)
    assert read_model_config(folder).attention_windows == windows
    never_slides = read_model_config(folder, max_model_len=100)
    assert never_slides.attention_windows == (None,) * 4


def test_a_window_that_the_family_has_not_is_named(
    write_config: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert read_model_config(write_config(sliding_window=100)).attention_windows == (None,) * 32
    assert "sliding_window is 100" in caplog.text


def test_a_model_that_we_do_not_run_ourselves_runs_on_transformers(
    make_model: Callable[..., Path],
) -> None:
    windows = {"sliding_window": 64, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
    folder = make_model("Gemma2ForCausalLM", **windows)
    config = read_model_config(folder)
    assert not isinstance(config, LlamaConfig)
    assert config.architecture == "Gemma2ForCausalLM"
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (3, 2, 16)
    assert config.attention_windows == (64, 64, None)
    assert read_model_config(folder, max_model_len=64).attention_windows == (None,) * 3
    with pytest.raises(ModelError, match=r"architectures is .*Gemma2.*, native are Llama"):
        read_model_config(folder, model_impl="native")


def test_longrope_is_served_as_long_as_it_does_not_switch(make_model: Callable[..., Path]) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 32.0}
    folder = make_model(
        "Phi3ForCausalLM",
        pad_token_id=0,
        original_max_position_embeddings=64,
        rope_parameters=rope | factors | {"original_max_position_embeddings": 64},
    )
    assert read_model_config(folder, max_model_len=64).max_model_len == 64
    with pytest.raises(ModelError, match="longrope, supported up to a max_model_len of 64"):
        read_model_config(folder)


def test_longrope_switches_where_transformers_switches(make_model: Callable[..., Path]) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 10000.0}
    rope = factors | {"rope_type": "longrope", "original_max_position_embeddings": 64}
    # What stands beside the settings wins.
    folder = make_model(rope_parameters=rope, original_max_position_embeddings=32)
    assert read_model_config(folder, max_model_len=32).max_model_len == 32
    with pytest.raises(ModelError, match="longrope, supported up to a max_model_len of 32"):
        read_model_config(folder, max_model_len=64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_factor": [1.0] * 7}, r"short_factor is \[.*\], expected 8 numbers above 0"),
        ({"long_factor": [1.0] * 7 + ["2"]}, r"long_factor is .*, expected 8 numbers above 0"),
        ({"attention_factor": "1"}, "attention_factor is '1', expected a number above 0"),
        ({"factor": 0}, "factor is 0, expected a number above 0"),
        (
            {"original_max_position_embeddings": 1},
            "original_max_position_embeddings is 1, expected",
        ),
    ],
)
def test_longrope_settings_without_angles_are_named(
    make_model: Callable[..., Path], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    raw = json.loads((make_model() / "config.json").read_text())
    rope = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_type": "longrope"}
    raw["rope_parameters"] = {**rope, "original_max_position_embeddings": 64, **changes}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path, max_model_len=64)


def test_what_our_llama_lacks_runs_on_transformers(write_config: Callable[..., Path]) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    folder = write_config(model_type="llama", rope_parameters=yarn)
    assert not isinstance(read_model_config(folder), LlamaConfig)
    with pytest.raises(ModelError, match=r"rope_parameters.rope_type is yarn"):
        read_model_config(folder, model_impl="native")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures is .*Mamba.*native are Llama"),
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
            "MambaForCausalLM has state-space or recurrent layers",
        ),
        (
            {"architectures": ["BloomForCausalLM"], "model_type": "bloom"},
            "BloomForCausalLM does not let its attention be replaced",
        ),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
            "DeepseekV3ForCausalLM has latent attention",
        ),
        (
            {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"},
            "layer_types has chunked_attention, supported are full_attention, sliding_attention",
        ),
        (
            {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
            "architectures is .*, transformers' decoder-only model for t5 is none",
        ),
        ({"architectures": ["MyForCausalLM"], "model_type": "my"}, "transformers cannot read"),
        ({"architectures": None}, "architectures is"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu, supported is silu"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method is bitsandbytes"),
        ({"torch_dtype": "float64"}, "float64, supported are bfloat16, float32"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type is yarn"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {}}}, "differs by layer type"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            "sliding_window is 0, expected a positive integer or null",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": "64"},
            "sliding_window is '64', expected int | null",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": -1,
                "max_window_layers": 3,
            },
            "sliding_window is -1, expected a positive integer or null",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": 0}
            | {"pad_token_id": 0},
            "sliding_window is 0, expected a positive integer or null",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 32},
            "layer_types is .*sliding_attention.*, attention has the window None",
        ),
        (
            {"sliding_window": 64, "layer_types": ["sliding_attention"] * 32},
            "layer_types is .*sliding_attention.*, attention has the window None",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 32},
            "layer_types is .*full_attention.*, attention has the window 4096",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] * 5,
            },
            "layer_types names 5 layers, the model has 32",
        ),
    ],
)
def test_refuses_what_it_cannot_run(
    write_config: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read_model_config(write_config(**changes))


LONG = "x" * 5000
# A group of weights in FP8, in which a value is changed.
GROUP = {"weights": {"type": "float", "num_bits": 8, "strategy": "tensor"}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": [LONG]},
        {"architectures": [LONG] * 50},
        {"hidden_act": LONG},
        {"dtype": LONG},
        {"layer_types": [LONG]},
        {"layer_types": ["sliding_attention"] * 5000},
        {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 32},
        {"architectures": ["MistralForCausalLM"], "sliding_window": -(10**4000)},
        {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": LONG},
        {"architectures": ["MyForCausalLM"], "model_type": LONG},
        {"is_causal": LONG},
        {"use_bidirectional_attention": [LONG]},
        {"rope_scaling": {"rope_type": LONG}},
        {"rope_scaling": {"rope_type": LONG}, "partial_rotary_factor": 0.5},
        {"rope_scaling": {"rope_type": [LONG]}},
        {"rope_parameters": {LONG: {}}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": LONG, "factor": 2.0}},
        *(
            {"quantization_config": value}
            for value in (
                LONG,
                {"quant_method": LONG},
                {"quant_method": "fp8", "fmt": LONG},
                {"quant_method": "awq", "bits": 4, "zero_point": True, "group_size": LONG},
                COMPRESSED | {"config_groups": LONG},
                COMPRESSED | {"sparsity_config": LONG},
                COMPRESSED | {"config_groups": {LONG: GROUP | {"weights": LONG}}},
                COMPRESSED | {"config_groups": {"a": GROUP | {"format": LONG}}},
            )
        ),
        {"architectures": ["LlamaModel"], "matryoshka_dimensions": LONG},
        {"architectures": ["LlamaModel"], "is_matryoshka": LONG},
        {"architectures": ["LlamaForSequenceClassification"], "problem_type": LONG},
        {
            "architectures": ["LlamaForSequenceClassification"],
            "sentence_transformers": {"activation_fn": LONG},
        },
        {"architectures": [LONG], "vision_config": {}},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_a_long_value_is_cut_in_the_message(
    write_config: Callable[..., Path], changes: dict[str, Any]
) -> None:
    folder = write_config(**changes)
    for model_impl in ("auto", "native", "transformers"):
        with pytest.raises(ModelError) as raised:
            read_model_config(folder, model_impl=model_impl)
        assert len(str(raised.value)) < 2500
        assert "x" * 1001 not in str(raised.value)


def test_refuses_a_longer_model_len_than_the_model_has(write_config: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="max_model_len is 9000, the model supports 1 to 8192"):
        read_model_config(write_config(), max_model_len=9000)


def test_names_a_missing_folder_and_a_missing_or_broken_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config.json does not exist"):
        read_model_config(tmp_path)
    for text in ("{", "[" * 100_000, '{"a":' * 50_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"/config\.json is not valid JSON"):
            read_model_config(tmp_path)


@pytest.mark.parametrize("depth", [100, 101, *range(800, 1000, 7)])
def test_a_value_of_any_depth_is_refused_or_shown(
    write_config: Callable[..., Path], depth: int
) -> None:
    """Also where Python's stack has just enough room to read it."""
    folder = write_config(vocab_size="it")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"it"', "[" * depth + "]" * depth))
    with pytest.raises(ModelError, match=r"vocab_size is \[|nested deeper than 100 levels"):
        read_model_config(folder)


def test_a_broken_generation_config_is_named(write_config: Callable[..., Path]) -> None:
    path = write_config() / "generation_config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"generation_config\.json is not valid JSON: it is"):
        read_model_config(path.parent)
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read: Is a dir"):
        read_model_config(path.parent)
