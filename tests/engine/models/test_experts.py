"""Models with experts on our own code: what is special about them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from pdserve_engine.lora.adapter import read_adapter
from pdserve_engine.lora.adapter_config import LoraError
from pdserve_engine.models.base import SupportsLora
from pdserve_engine.models.config import LlamaConfig, ModelError
from pdserve_engine.models.registry import load_model, read_model_config
from support.adapters import write_adapter
from support.engines import generate_greedily, loaded
from support.model_driver import CPU, Driver, make_prompt, record_logits, run_as_merged
from support.models import NATIVE_MODELS

NAMES = [name for name in NATIVE_MODELS if "moe" in name or name == "mixtral"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def build(make_model: Callable[..., Path], name: str, **changes: Any) -> Path:
    architecture, overrides = NATIVE_MODELS[name]
    return make_model(architecture, **overrides | changes)


def config_of(folder: Path, **options: Any) -> LlamaConfig:
    config = read_model_config(folder, model_impl="native", **options)
    assert isinstance(config, LlamaConfig)
    return config


def test_the_config_says_which_layers_have_experts(make_model: Callable[..., Path]) -> None:
    shapes = {}
    for name in NAMES:
        config = config_of(build(make_model, name))
        assert config.experts is not None
        experts = config.experts
        shapes[name] = (experts.num_experts, experts.num_experts_per_tok, experts.layers)
    assert shapes == {
        "mixtral": (4, 2, (0, 1, 2)),
        "qwen2-moe": (6, 2, (0, 1, 2)),
        "qwen2-moe-mixed": (5, 3, (3,)),
        "qwen3-moe": (6, 2, (0, 1, 2)),
        "qwen3-moe-mixed": (4, 3, (0, 2)),
    }
    sparse = config_of(build(make_model, "qwen3-moe", decoder_sparse_step=2)).experts
    assert sparse is not None
    assert sparse.layers == (1,)
    assert config_of(build(make_model, "qwen3-moe", mlp_only_layers=[0, 1, 2])).experts is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0, "num_local_experts": 0}, "experts is 0, expected int >= 1"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7, the model has 6 experts"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"decoder_sparse_step": "2"}, "decoder_sparse_step is '2', expected int"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers is 'all', expected array"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, expected bool"),
        (
            {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size is 0, expected int >= 1",
        ),
    ],
)
def test_fields_that_say_nothing_sensible_are_named(
    make_model: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    raw = json.loads((build(make_model, "qwen2-moe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(ModelError, match=message):
        config_of(tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe"])
@pytest.mark.parametrize(
    "counts", [(5, 3), (3, 5), (5, None), (None, 3)], ids=lambda pair: f"{pair[0]}-{pair[1]}"
)
def test_of_two_counts_of_experts_that_one_wins_that_wins_in_transformers(
    make_model: Callable[..., Path],
    tmp_path: Path,
    name: str,
    counts: tuple[int | None, int | None],
) -> None:
    """None: the field is not there."""
    raw = json.loads((build(make_model, name) / "config.json").read_text())
    for field, count in zip(("num_experts", "num_local_experts"), counts, strict=True):
        raw.pop(field, None)
        if count is not None:
            raw[field] = count
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if name == "qwen2-moe" and counts[0] is None:
        # transformers assumes 60.
        with pytest.raises(ModelError, match="num_experts is missing"):
            config_of(tmp_path)
        return
    experts = config_of(tmp_path).experts
    assert experts is not None
    assert experts.num_experts == AutoConfig.from_pretrained(tmp_path).num_experts


@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("name", NAMES)
def test_experts_in_one_tensor_are_those_stored_one_by_one(
    make_model: Callable[..., Path], tmp_path: Path, name: str, quantization: str | None
) -> None:
    """As transformers 5 has them in memory."""
    folder = build(make_model, name)
    fused = Path(shutil.copytree(folder, tmp_path / "fused"))
    weights = load_file(folder / "model.safetensors")
    stored = {
        key.replace("block_sparse_moe", "mlp"): weight
        for key, weight in weights.items()
        if ".experts." not in key
    }
    config = config_of(folder)
    assert config.experts is not None
    names, ids = config.experts.names, range(config.experts.num_experts)
    for layer in config.experts.layers:
        prefix = f"model.layers.{layer}."
        gates, ups, downs = (
            torch.stack(
                [weights[f"{prefix}{names.module}experts.{i}.{linear}.weight"] for i in ids]
            )
            for linear in (names.gate, names.up, names.down)
        )
        stored[f"{prefix}mlp.experts.gate_up_proj"] = torch.cat((gates, ups), 1)
        stored[f"{prefix}mlp.experts.down_proj"] = downs
    save_file(stored, fused / "model.safetensors")
    logits = []
    for each in (folder, fused):
        driver = Driver(each, dtype="bfloat16", quantization=quantization)
        seen = record_logits(driver)
        driver.add("a", make_prompt(40))
        driver.run("a", num_tokens=3)
        logits.append(torch.cat(seen))
    assert torch.equal(*logits)
    missing = f"model.layers.{config.experts.layers[0]}.mlp.experts.down_proj"
    del stored[missing]
    save_file(stored, fused / "model.safetensors")
    with pytest.raises(ModelError, match=f"lacks 1 weights: {missing}"):
        load_model(fused, config, device=CPU)


def test_a_shared_expert_is_asked_for_by_its_names(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(build(make_model, "qwen2-moe"), tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    names = sorted(name for name in weights if "layers.1.mlp.shared" in name)
    for name in names:
        del weights[name]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"lacks 4 weights: {', '.join(names[:3])}"):
        load_model(folder, config_of(folder), device=CPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_request_has_its_bits_alone_and_in_any_batch(
    make_model: Callable[..., Path], name: str, dtype: str
) -> None:
    folder = build(make_model, name)
    prompts = {str(length): make_prompt(length, seed=length) for length in (90, 3, 40, 17)}
    driver = Driver(folder, dtype=dtype)
    if not driver.runner.model.is_row_independent:
        pytest.skip("this processor's products depend on the batch")
    seen = record_logits(driver)
    for request_id, prompt in prompts.items():
        driver.add(request_id, prompt)
    together = [driver.step(dict.fromkeys(prompts, 200)), driver.step(dict.fromkeys(prompts, 1))]
    expected = [seen[step][output.request_ids.index("90")] for step, output in enumerate(together)]
    alone = Driver(folder, dtype=dtype)
    seen = record_logits(alone)
    alone.add("90", prompts["90"])
    alone.run("90", num_tokens=2, chunk=13)
    assert torch.equal(torch.cat(seen), torch.stack(expected))


def test_adapters_change_attention_and_no_experts(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], tmp_path: Path
) -> None:
    folder = build(make_model, "qwen3-moe-mixed")
    adapters: list[Path | None] = [
        write_adapter(folder, tmp_path / "a", seed=1, target_modules=ATTENTION),
        write_adapter(folder, tmp_path / "b", seed=2, target_modules=["q_proj"], r=3),
        None,
    ]
    model = run_as_merged(folder, adapters, (40, 75, 17), hf_greedy).runner.model
    assert isinstance(model, SupportsLora)
    # The MLP of the layer that has one, too.
    others = {name for name in model.lora_targets if "self_attn" not in name}
    assert others == {f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")}
    whole = write_adapter(folder, tmp_path / "c", target_modules="all-linear")
    with pytest.raises(LoraError, match=r"target_parameters is .*gate_up_proj"):
        read_adapter(whole, model.lora_targets, dtype=torch.float32, max_rank=64)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen2-moe", "target_modules has 'gate_proj', which is no linear of the model's layers"),
        # Some layers have an MLP whose linears are called the same.
        ("qwen2-moe-mixed", r"no place for, as .*layers.3.mlp.shared_expert.gate_proj.lora_A"),
    ],
)
def test_adapters_of_a_shared_expert_are_refused(
    make_model: Callable[..., Path], tmp_path: Path, name: str, message: str
) -> None:
    folder = build(make_model, name)
    model = Driver(folder).runner.model
    assert isinstance(model, SupportsLora)
    adapter = write_adapter(folder, tmp_path / "a", target_modules=["q_proj", "gate_proj"])
    with pytest.raises(LoraError, match=message):
        read_adapter(adapter, model.lora_targets, dtype=torch.float32, max_rank=64)


@pytest.mark.parametrize("name", NAMES)
def test_a_preempted_request_says_what_transformers_does(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], name: str
) -> None:
    folder = build(make_model, name)
    driver = Driver(folder)
    for request_id, length in (("a", 70), ("b", 20)):
        driver.add(request_id, make_prompt(length))
    driver.run("a", "b", num_tokens=4)
    driver.preempt("a")
    driver.run("b", num_tokens=8)
    driver.run("a", num_tokens=10, chunk=16)
    assert driver.sequences["a"].output == hf_greedy(folder, make_prompt(70), 10)
    assert driver.sequences["b"].output == hf_greedy(folder, make_prompt(20), 8)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_a_whole_engine_hits_prefixes_and_says_what_transformers_does(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], name: str
) -> None:
    folder = build(make_model, name)
    prompts = {str(n): make_prompt(n) for n in (20, 90, 150)}
    expected = {name: hf_greedy(folder, prompt, 10) for name, prompt in prompts.items()}
    with loaded(folder, max_model_len=400, max_num_batched_tokens=64, num_blocks=200) as engine:
        for attempt in ("first", "again"):
            assert generate_greedily(engine, prompts, 10) == expected
            assert (engine.core.scheduler.kv.prefix_cache_hits > 0) == (attempt == "again")
