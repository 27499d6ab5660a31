"""Requests with adapters: the tokens of merged weights, and the bits of being alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve_engine.models.registry import load_model
from support.adapters import ALL_PROJECTIONS, write_adapter
from support.model_driver import Driver, make_prompt, record_logits, run_as_merged
from support.models import NATIVE_MODELS

RANKS = (8, 16, 24, 32, 40, 48, 56, 64)
MODELS = ("llama-tied-sharded", "llama-biases", "mistral-window", "qwen2", "qwen3", "qwen3-window")


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_merged_weights(
    make_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
    tmp_path: Path,
    name: str,
) -> None:
    architecture, overrides = NATIVE_MODELS[name]
    model_dir = make_model(architecture, **overrides)
    adapters: list[Path | None] = [
        write_adapter(model_dir, tmp_path / "all", seed=1),
        write_adapter(model_dir, tmp_path / "few", seed=2, target_modules=["q_proj", "up_proj"]),
        write_adapter(
            model_dir,
            tmp_path / "mixed",
            seed=3,
            use_rslora=True,
            layers_to_transform=[0, 2],
            rank_pattern={"o_proj": 3, "v_proj": 20},
            alpha_pattern={"down_proj": 5},
        ),
        None,
    ]
    sequences = run_as_merged(model_dir, adapters, (5, 40, 75, 17), hf_greedy).sequences.values()
    assert len({tuple(sequence.output) for sequence in sequences}) == len(adapters)


@pytest.fixture(scope="module")
def adapters(
    make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """One of each rank, those of low ones with few linears."""
    model_dir, folder = make_model("Qwen3ForCausalLM"), tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(
            model_dir,
            folder / str(rank),
            seed=rank,
            r=rank,
            lora_alpha=4,
            target_modules=list(ALL_PROJECTIONS[: 1 + rank // 8]),
        )
        for rank in RANKS
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_request_has_its_bits_beside_eight_adapters(
    make_model: Callable[..., Path], adapters: list[Path], dtype: str
) -> None:
    model_dir = make_model("Qwen3ForCausalLM")
    wanted: dict[str, Path | None] = {
        "base": None,
        **{str(rank): folder for rank, folder in zip(RANKS, adapters, strict=True)},
        "base again": None,
        "8 again": adapters[0],
    }
    prompts = {name: make_prompt(20 + 7 * i) for i, name in enumerate(wanted)}

    def logits_alone(name: str, chunk: int) -> torch.Tensor:
        folder = wanted[name]
        driver = Driver(model_dir, dtype=dtype, adapters=[folder] if folder is not None else [])
        seen = record_logits(driver)
        driver.add(name, prompts[name], adapter=folder)
        driver.run(name, num_tokens=6, chunk=chunk)
        driver.cache.close()
        return torch.cat(seen)

    together = Driver(model_dir, dtype=dtype, adapters=adapters)
    seen = record_logits(together)
    steps = []
    for name, prompt in prompts.items():
        together.add(name, prompt, adapter=wanted[name])
    found: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    while unfinished := [i for i in prompts if len(together.sequences[i].output) < 6]:
        before = len(seen)
        output = together.step(dict.fromkeys(unfinished, 13))
        steps.append(output)
        if len(output.request_ids) == len(prompts) and len(steps) == 4:
            together.preempt("32")
        rows = [
            request_id
            for request_id, tokens in zip(output.request_ids, output.sampled_token_ids, strict=True)
            if tokens
        ]
        for logits in seen[before:]:
            for request_id, row in zip(rows, logits, strict=True):
                found[request_id].append(row)
    for name in prompts:
        for chunk in (10_000, 9):
            assert torch.equal(torch.stack(found[name]), logits_alone(name, chunk)), name


def test_bfloat16_logits_are_near_those_of_merged_weights(
    make_model: Callable[..., Path], adapters: list[Path]
) -> None:
    from support.adapters import merged_model

    model_dir, prompt = make_model("Qwen3ForCausalLM"), make_prompt(75)
    for folder in (adapters[0], adapters[-1]):
        driver = Driver(model_dir, dtype="bfloat16", adapters=[folder])
        seen = record_logits(driver)
        driver.add("a", prompt, adapter=folder)
        driver.run("a", num_tokens=1, chunk=40)
        with torch.inference_mode():
            expected = merged_model(model_dir, folder)(torch.tensor([prompt])).logits[0, -1]
        assert float((seen[0][0] - expected).abs().max() / expected.std()) < 0.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_adapter_outlives_the_model_in_a_sleep(
    make_model: Callable[..., Path], adapters: list[Path], dtype: str
) -> None:
    model_dir, prompt = make_model("Qwen3ForCausalLM"), make_prompt(40)
    driver = Driver(model_dir, dtype=dtype, adapters=adapters[-1:])
    texts = []
    for name in ("before", "after"):
        driver.add(name, prompt, adapter=adapters[-1])
        driver.run(name, num_tokens=8)
        texts.append(driver.sequences[name].output)
        driver.finish(name)
        driver.runner.model = load_model(
            model_dir, driver.config, device=driver.runner.model.device
        )
    assert texts[0] == texts[1]
