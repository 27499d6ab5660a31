"""A machine without a compiler: the models in bf16 on reference kernels, against transformers."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve_engine.models.weights.llama import EMBEDDING
from pdserve_kernels import name_of, select
from pdserve_kernels.reference.quantization import quantize
from support.kernels import without_compiled_kernels
from support.model_driver import CPU, Driver, make_prompt

NUM_TOKENS = 20


@pytest.fixture(autouse=True)
def _no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiled_kernels(monkeypatch)
    assert name_of(select(CPU)) == "reference"


def round_weights(source: Path, folder: Path) -> Path:
    """Copy a model with all matrices but the embedding as `--quantization int8` rounds them."""
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and name != EMBEDDING:
            tensor.copy_(quantize(tensor, bits=8, group_size=None).dequantize())
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def greedy(folder: Path, quantization: Any = None) -> list[int]:
    driver = Driver(folder, dtype="bfloat16", quantization=quantization)
    request = driver.add("it", make_prompt(75))
    driver.run("it", num_tokens=NUM_TOKENS, chunk=40)
    driver.cache.close()
    return request.token_ids


def assert_likeliest(model: Any, token_ids: list[int]) -> None:
    """Each token that was generated has the highest logit, but for what bf16 rounds away."""
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids[:-1]])).logits[0, -NUM_TOKENS:]
    chosen = logits.gather(1, torch.tensor(token_ids[-NUM_TOKENS:])[:, None])[:, 0]
    assert ((logits.amax(1) - chosen) < 0.25 * logits.std(1)).all()
    assert len(set(token_ids[-NUM_TOKENS:])) > 5, "degenerate text proves nothing"


def test_greedy_text_is_what_transformers_finds_likeliest(
    make_model: Callable[..., Path], hf_model: Callable[..., Any]
) -> None:
    folder = make_model("Qwen3ForCausalLM", dtype="bfloat16")
    assert_likeliest(hf_model(folder), greedy(folder))


def test_int8_is_the_dense_model_of_rounded_weights(
    make_model: Callable[..., Path], hf_model: Callable[..., Any], tmp_path: Path
) -> None:
    folder = make_model("Qwen3ForCausalLM", dtype="bfloat16")
    rounded = round_weights(folder, tmp_path / "rounded")
    token_ids = greedy(folder, quantization="int8")
    assert token_ids == greedy(rounded)
    assert_likeliest(hf_model(rounded), token_ids)
