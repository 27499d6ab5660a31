"""The transformers backend against transformers' own generation, and what it refuses."""

import dataclasses
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pdserve_engine.models.config import FAMILIES, LlamaConfig, ModelError
from pdserve_engine.models.registry import load_model, read_model_config
from pdserve_engine.models.transformers_backend.model import CHECKED_ARCHITECTURES
from support.engines import generate_greedily, loaded
from support.model_driver import Driver, make_prompt, record_logits
from support.models import BACKEND_MODELS, EXPERTS, WINDOW

CPU = torch.device("cpu")
DOC = Path(__file__).parents[3] / "docs" / "architectures.md"


def load(folder: Path, **kwargs: Any) -> Any:
    config = read_model_config(folder, model_impl="transformers")
    return load_model(folder, config, device=CPU, **kwargs)


@pytest.mark.parametrize("name", BACKEND_MODELS)
def test_greedy_text_is_that_of_transformers(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], name: str
) -> None:
    architecture, overrides = BACKEND_MODELS[name]
    folder = make_model(architecture, **overrides)
    driver = Driver(folder)
    prompts = {str(n): make_prompt(n) for n in (1, WINDOW - 1, WINDOW, 50, 200)}
    for request_id, prompt in prompts.items():
        driver.add(request_id, prompt)
    # Chunks of 70 are cut inside blocks, and the short prompts decode beside the long one's.
    driver.run(*prompts, num_tokens=20, chunk=70)
    for request_id, prompt in prompts.items():
        expected = hf_greedy(folder, prompt, 20)
        assert driver.sequences[request_id].output == expected, request_id
        assert len(set(expected)) > 3, "degenerate text proves nothing"


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_native_models_give_the_same_text_on_either_implementation(
    make_model: Callable[..., Path], architecture: str
) -> None:
    fields = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    fields |= EXPERTS | {"num_local_experts": 4} if FAMILIES[architecture].experts else {}
    folder = make_model(architecture, **fields)
    outputs = []
    for model_impl in ("native", "transformers"):
        driver = Driver(folder, model_impl=model_impl)
        assert isinstance(driver.config, LlamaConfig) == (model_impl == "native")
        for length in (3, 100):
            driver.add(str(length), make_prompt(length))
        driver.run("3", "100", num_tokens=20, chunk=30)
        outputs.append([sequence.output for sequence in driver.sequences.values()])
    assert outputs[0] == outputs[1]


def test_all_architectures_that_are_called_checked_are_compared_here() -> None:
    compared = {architecture for architecture, _ in BACKEND_MODELS.values()} | set(FAMILIES)
    assert compared == CHECKED_ARCHITECTURES


def test_the_docs_list_what_becomes_of_each_architecture() -> None:
    text = DOC.read_text()
    assert f"transformers\n{transformers.__version__}." in text, "run tools/update_architectures.py"
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))
    for name in CHECKED_ARCHITECTURES:
        assert rows[name] == ("native" if name in FAMILIES else "transformers, tested")
    assert "DEFECT" not in text


@pytest.mark.parametrize("name", ["gemma2", "phi3", "olmoe"])
def test_bfloat16_logits_are_close_to_transformers(
    make_model: Callable[..., Path], hf_model: Callable[..., Any], name: str
) -> None:
    architecture, overrides = BACKEND_MODELS[name]
    folder = make_model(architecture, **overrides)
    driver = Driver(folder, dtype="bfloat16")
    seen = record_logits(driver)
    driver.add("a", make_prompt(75))
    driver.run("a", num_tokens=2, chunk=40)
    token_ids = torch.tensor([driver.sequences["a"].token_ids[:-1]])
    with torch.inference_mode():
        expected = hf_model(folder)(token_ids).logits[0, -2:]
    assert seen[0].dtype == torch.float32
    # A few of the 199 logits may be off where an expert was chosen by a hair.
    error = (torch.cat(seen) - expected).abs().mean() / expected.std()
    assert float(error) < 0.2


@pytest.mark.parametrize(
    ("architecture", "overrides", "message"),
    [
        (
            "GptOssForCausalLM",
            EXPERTS | {"num_local_experts": 4, "rope_parameters": {"rope_type": "default"}},
            "attention of layer 0 has s_aux, not supported",
        ),
        (
            "NemotronForCausalLM",
            {},
            "NemotronAttention does not get what .* its layers pass no arguments on to attention",
        ),
    ],
)
def test_refuses_what_only_a_forward_pass_shows(
    make_model: Callable[..., Path], architecture: str, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(make_model(architecture, **overrides))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 32}, r"layer 0 has queries, keys and values of shapes .*16.*supported"),
        ({"attention_windows": (None, 64, None)}, r"layer 1 has a window of \{None\}"),
        ({"num_layers": 4, "attention_windows": (None,) * 4}, "attends in layers .0, 1, 2., supp"),
    ],
)
def test_refuses_layers_that_are_not_as_their_config_says(
    make_model: Callable[..., Path], changes: dict[str, Any], message: str
) -> None:
    folder = make_model("Olmo2ForCausalLM")
    config = dataclasses.replace(read_model_config(folder), **changes)
    with pytest.raises(ModelError, match=message):
        load_model(folder, config, device=CPU)


@pytest.mark.parametrize("count", [10_001, 2**31, 2**63, 10**4000], ids=["low", "31", "63", "long"])
@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        ("GPT2LMHeadModel", "n_layer"),
        ("GPT2LMHeadModel", "num_hidden_layers"),
        ("Qwen2ForCausalLM", "num_hidden_layers"),
        ("Gemma3ForCausalLM", "num_hidden_layers"),
    ],
)
def test_a_number_of_layers_that_no_model_has_is_refused(
    tmp_path: Path, architecture: str, field: str, count: int
) -> None:
    """Before transformers makes a list of so many."""
    model_type = getattr(transformers, architecture).config_class.model_type
    raw = {"architectures": [architecture], "model_type": model_type, field: count}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=f"{field} is 1?[0-9]*, expected at most 10000"):
        read_model_config(tmp_path, model_impl="transformers")


def test_weights_that_do_not_fit_are_named(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_model("Olmo2ForCausalLM"), tmp_path / "model"))
    path = folder / "model.safetensors"
    whole = load_file(path)
    for change, message in (
        ({"model.norm.weight": None}, r"lacks 1 weights: model\.norm\.weight"),
        ({"model.layers.7.mlp.up": torch.zeros(3)}, "no place for: model.layers.7.mlp.up"),
        ({"model.norm.weight": torch.zeros(3)}, r"model.norm.weight has shape \(3,\), .*\(64,\)"),
    ):
        changed = {k: v.clone() for k, v in (whole | change).items() if v is not None}
        path.unlink()
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=message):
            load(folder)


def test_progress_counts_each_weight_and_ends_at_the_total(
    make_model: Callable[..., Path],
) -> None:
    folder = make_model("MixtralForCausalLM", num_local_experts=4, shard_size="100KB")
    calls: list[tuple[int, int]] = []
    load(folder, progress=lambda done, total: calls.append((done, total)))
    total = 3 + 3 * (4 + 2 + 1 + 3 * 4)
    assert calls == [(i + 1, total) for i in range(total)]


def test_says_which_implementation_runs_a_model_and_why(
    make_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pdserve_engine")
    read_model_config(make_model("Olmo2ForCausalLM"))
    assert "Olmo2ForCausalLM runs on the transformers backend: architectures is" in caplog.text
    read_model_config(make_model())
    assert "LlamaForCausalLM runs natively" in caplog.text


def test_a_hybrid_model_runs_in_a_whole_engine_with_prefix_hits(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]]
) -> None:
    architecture, overrides = BACKEND_MODELS["gemma3"]
    folder = make_model(architecture, **overrides)
    with loaded(folder, max_model_len=400, max_num_batched_tokens=64, num_blocks=200) as engine:
        for _ in range(2):
            prompts = {str(n): make_prompt(n) for n in (20, 90, 300)}
            expected = {name: hf_greedy(folder, prompt, 40) for name, prompt in prompts.items()}
            assert generate_greedily(engine, prompts, 40) == expected
