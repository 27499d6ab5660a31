"""A vendor's attention is refused, by name, where it cannot run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve_engine.config import EngineConfig
from pdserve_engine.runner.load.model_source import ModelSource
from support.flash_attn import installed, make_flash_attn


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with installed(make_flash_attn()):
        yield


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "refusal"),
    [
        ("bfloat16", 64, None),
        ("float32", 64, r"dtype is torch\.float32"),
        ("bfloat16", 12, "head_dim is 12, must be a multiple of 8 up to 256"),
    ],
)
def test_a_model_that_it_does_not_take_is_refused_at_start(
    make_model: Callable[..., Path], dtype: Any, head_dim: int, refusal: str | None
) -> None:
    config = EngineConfig(
        model=str(make_model("Qwen3ForCausalLM", head_dim=head_dim)),
        device="cuda",
        dtype=dtype,
        attention_backend="flash_attn",
    )
    if refusal is None:
        ModelSource(config)
        return
    with pytest.raises(ValueError, match=f"attention_backend is flash_attn: the model's {refusal}"):
        ModelSource(config)
