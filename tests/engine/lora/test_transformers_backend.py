"""Adapters on the transformers backend: the tokens of merged weights, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve_common.types.lora import LoRARequest
from pdserve_engine.lora.adapter import LoraAdapter, read_adapter
from pdserve_engine.lora.adapter_config import LoraError
from pdserve_engine.models.base import SupportsLora
from pdserve_engine.models.registry import load_model, read_model_config
from support.adapters import ALL_PROJECTIONS, merged_greedy, write_adapter
from support.engines import generate, loaded
from support.model_driver import CPU, Driver, make_prompt, record_logits, run_as_merged
from support.models import BACKEND_MODELS
from support.requests import greedy, make_request

UNFUSED = [*ALL_PROJECTIONS]
PHI3 = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
# Experts are not served.
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# The linears of each model's layers, as peft calls them.
LINEARS = {
    "gemma2": UNFUSED,
    "gemma3": UNFUSED,
    "phi3": PHI3,
    "phi3-window": PHI3,
    "olmo2": UNFUSED,
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt-bigcode": ["c_attn", "c_proj", "c_fc"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "hunyuan-moe": ATTENTION,
    "gpt-neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "granite": UNFUSED,
    "olmoe": ATTENTION,
}
# Of the expert that all tokens pass, and the router: served, but peft adapts all experts with them.
WITH_EXPERTS = {"hunyuan-moe": ["gate_proj", "up_proj", "down_proj", "wg"]}


def build(make_model: Callable[..., Path], name: str) -> Path:
    architecture, fields = BACKEND_MODELS[name]
    return make_model(architecture, **fields)


@pytest.mark.parametrize("name", LINEARS)
def test_greedy_text_is_that_of_merged_weights(
    make_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
    tmp_path: Path,
    name: str,
) -> None:
    folder, linears = build(make_model, name), LINEARS[name]
    adapters: list[Path | None] = [
        write_adapter(folder, tmp_path / "all", seed=1, target_modules=linears),
        write_adapter(
            folder,
            tmp_path / "some",
            seed=2,
            r=24,
            target_modules=linears[:2],
            layers_to_transform=[0, 2],
            rank_pattern={linears[1]: 3},
        ),
        write_adapter(
            folder,
            tmp_path / "linear",
            seed=3,
            r=5,
            target_modules=ATTENTION if linears is ATTENTION else "all-linear",
        ),
        None,
    ]
    run_as_merged(folder, adapters, (5, 40, 75, 17), hf_greedy)


def test_linears_of_layers_are_known_by_the_names_that_peft_has(
    make_model: Callable[..., Path],
) -> None:
    for name, linears in LINEARS.items():
        folder = build(make_model, name)
        config = read_model_config(folder)
        model = load_model(folder, config, device=CPU)
        assert isinstance(model, SupportsLora)
        targets = model.lora_targets
        names = [*linears, *WITH_EXPERTS.get(name, ())]
        assert {target.rpartition(".")[2] for target in targets} == set(names), name
        # GPT-2 and GPTBigCode call two of them `c_proj`.
        assert len(targets) == config.num_layers * (len(names) + ("c_proj" in names))
        assert model.max_adapter_bytes(3) == 3 * 4 * sum(map(sum, targets.values()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_without_an_adapter_keep_their_bits(
    make_model: Callable[..., Path], tmp_path: Path, dtype: str
) -> None:
    """In batches of one shape: some of torch's functions have other bits in others."""
    folder = build(make_model, "phi3")
    adapter = write_adapter(folder, tmp_path / "a", target_modules=PHI3)
    found: list[list[torch.Tensor]] = []
    for beside in (None, adapter):
        driver = Driver(folder, dtype=dtype, adapters=[adapter])
        seen = record_logits(driver)
        driver.add("base", make_prompt(30))
        driver.add("beside", make_prompt(31), adapter=beside)
        driver.run("base", "beside", num_tokens=6, chunk=16)
        driver.cache.close()
        found.append(seen)
    base, beside_it = (torch.stack([logits[row] for logits in found[0]]) for row in (0, 1))
    assert torch.equal(base, torch.stack([logits[0] for logits in found[1]]))
    assert not torch.equal(beside_it, torch.stack([logits[1] for logits in found[1]]))


def test_an_adapter_outlives_the_model_in_a_sleep(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder, prompt = build(make_model, "phi3"), make_prompt(40)
    adapter = write_adapter(folder, tmp_path / "a", target_modules=PHI3)
    driver = Driver(folder, dtype="bfloat16", adapters=[adapter])
    texts = []
    for name in ("before", "after"):
        driver.add(name, prompt, adapter=adapter)
        driver.run(name, num_tokens=8)
        texts.append(driver.sequences[name].output)
        driver.finish(name)
        driver.runner.model = load_model(folder, driver.config, device=CPU)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("phi3", "q_proj", "target_modules has 'q_proj', .* served are down_proj, gate_up_proj, "),
        ("phi3", "lm_head", "target_modules has 'lm_head', which is no linear of the"),
        ("olmo2", "qkv_proj", "target_modules has 'qkv_proj', .* served are down_proj, gate_proj"),
        ("olmoe", "experts", "target_modules has 'experts', which is no linear of the"),
    ],
)
def test_linears_that_a_model_does_not_have_are_named(
    make_model: Callable[..., Path], tmp_path: Path, name: str, target: str, message: str
) -> None:
    folder = build(make_model, name)
    write_adapter(folder, tmp_path / "a", target_modules=["o_proj"])
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(path.read_text().replace('"o_proj"', f'"{target}"'))
    with pytest.raises(LoraError, match=message):
        read(folder, tmp_path / "a")


def test_adapters_of_experts_are_refused(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = build(make_model, "olmoe")
    adapter = write_adapter(folder, tmp_path / "a", target_modules="all-linear")
    with pytest.raises(LoraError, match=r"target_parameters is .*gate_up_proj"):
        read(folder, adapter)


def read(model_dir: Path, adapter: Path) -> LoraAdapter:
    model = load_model(model_dir, read_model_config(model_dir), device=CPU)
    assert isinstance(model, SupportsLora)
    return read_adapter(adapter, model.lora_targets, dtype=torch.float32, max_rank=64)


def test_a_whole_engine_hits_no_prefix_of_another_adapter(
    make_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    folder, prompt = build(make_model, "phi3"), make_prompt(90)
    paths = {
        name: write_adapter(folder, tmp_path / name, seed=seed, r=rank, target_modules=PHI3)
        for seed, (name, rank) in enumerate((("one", 8), ("other", 20)))
    }
    expected = {name: merged_greedy(folder, path, prompt, 20) for name, path in paths.items()}
    expected[""] = hf_greedy(folder, prompt, 20)
    settings = {"max_model_len": 400, "max_num_batched_tokens": 64, "num_blocks": 200}
    lora = tuple(f"{name}={path}" for name, path in paths.items())
    with loaded(folder, lora=lora, **settings) as engine:
        adapters = {each.name: each.digest for each in engine.control.adapters.adapters}
        assert set(adapters) == {"one", "other"}
        asked = [
            make_request(
                name,
                prompt,
                greedy(20),
                lora_request=LoRARequest(lora_name=name, digest=adapters[name]) if name else None,
            )
            for name in expected
        ]
        for num_hits in (0, 3 * 80):  # whole blocks of each prompt
            assert generate(engine.core, asked) == expected
            assert engine.core.scheduler.kv.prefix_cache_hits == num_hits
