"""Scales of a KV cache in FP8: read from the checkpoint, and what they do to an answer."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve_engine.config import EngineConfig
from pdserve_engine.kv.kv_cache import KVCacheSpec
from pdserve_engine.models.config import ModelError
from pdserve_engine.models.registry import load_model, read_model_config
from pdserve_engine.runner.load.model_source import ModelSource
from support.model_driver import Driver, make_prompt, record_logits

CPU = torch.device("cpu")
K_SCALE, V_SCALE = (f"model.layers.0.self_attn.{name}_scale" for name in "kv")


@pytest.fixture
def add_weights(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Copy a model of one layer, and add weights to its checkpoint."""

    def add(**options: Any) -> Path:
        weights = options.pop("weights")
        folder = Path(shutil.copytree(make_model(num_hidden_layers=1, **options), tmp_path / "it"))
        path = folder / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        path.unlink()
        save_file(tensors | weights, path, metadata={"format": "pt"})
        return folder

    return add


def load(folder: Path, **options: Any) -> Any:
    return load_model(folder, read_model_config(folder, **options), device=CPU)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_are_those_of_the_checkpoint(
    add_weights: Callable[..., Path], shape: tuple[int, ...]
) -> None:
    weights = {K_SCALE: torch.full(shape, 0.5), V_SCALE: torch.full(shape, 2.0)}
    folder = add_weights(weights=weights)
    (layer,) = load(folder, kv_cache_dtype="fp8")._read_decoder().layers
    assert layer.attention.kv_scales == (0.5, 2.0)
    (layer,) = load(folder)._read_decoder().layers
    assert layer.attention.kv_scales == (1.0, 1.0)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({V_SCALE: torch.ones(())}, "v_scale alone, expected"),
        ({K_SCALE: torch.ones(2), V_SCALE: torch.ones(())}, "expected one positive number"),
        ({K_SCALE: torch.zeros(()), V_SCALE: torch.ones(())}, "k_scale is 0.0, expected"),
        ({K_SCALE: torch.ones(()), V_SCALE: torch.tensor(torch.nan)}, "v_scale is nan, expected"),
    ],
)
def test_wrong_scales_are_named(
    add_weights: Callable[..., Path], weights: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(add_weights(weights=weights), kv_cache_dtype="fp8")


def test_a_pool_in_fp8_takes_half_the_memory_and_the_answer_is_near(
    make_model: Callable[..., Path],
) -> None:
    folder = make_model("Qwen3ForCausalLM", dtype="bfloat16")
    specs = [
        KVCacheSpec.from_model(
            read_model_config(folder, kv_cache_dtype=kv_cache_dtype), block_size=16, device=CPU
        )
        for kv_cache_dtype in ("auto", "fp8")
    ]
    assert specs[0].block_bytes == 2 * specs[1].block_bytes
    logits = []
    for kv_cache_dtype in ("auto", "fp8"):
        driver = Driver(folder, dtype="float32", kv_cache_dtype=kv_cache_dtype)
        driver.add("it", make_prompt(75))
        recorded = record_logits(driver)
        driver.run("it", num_tokens=1, chunk=40)
        logits.append(recorded[-1])
    difference = (logits[0] - logits[1]).std()
    assert 0 < difference < 0.2 * logits[0].std()


@pytest.mark.parametrize(
    ("field", "options"),
    [("kv_cache_dtype", {"kv_cache_dtype": "fp8"}), ("quantization", {"quantization": "fp8"})],
)
def test_gpus_without_such_numbers_are_refused(
    make_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    options: dict[str, Any],
) -> None:
    def have_gpu(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = EngineConfig(model=str(make_model()), device="cuda", **options)
    have_gpu(8, 0)
    with pytest.raises(ValueError, match=rf"{field} is fp8, .* 8\.0, must have 8\.9"):
        ModelSource(config)
    ModelSource(EngineConfig(model=str(make_model()), device="cuda", quantization="int8"))
    have_gpu(9, 0)
    ModelSource(config)
