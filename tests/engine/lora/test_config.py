"""What a worker with adapters refuses to start with."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve_engine.config import EngineConfig
from pdserve_engine.lora.adapter_config import LoraError
from pdserve_engine.models import llama
from pdserve_engine.models.llama import LlamaModel
from pdserve_engine.runner.load.model_source import ModelSource
from support.adapters import write_adapter

LINEARS = ("qkv", "attention_output", "gate_up", "down")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora": ("a=x", "a=y")}, "lora names 'a' twice"),
        ({"lora": ("a",)}, "lora has 'a', must be NAME=PATH"),
        ({"lora": ("a=",)}, "lora has 'a=', must be NAME=PATH"),
        ({"lora": ("=x",)}, "lora has the name ''"),
        ({"lora": ("a\n=x",)}, "lora has the name"),
        ({"max_lora_rank": 0}, "max_lora_rank is 0"),
        ({"max_loras": 0}, "max_loras is 0"),
        ({"lora": ("a=x", "b=x"), "max_loras": 1}, "lora has 2 adapters, must be at most 1"),
    ],
)
def test_settings_that_do_not_go_together(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**({"lora": ("a=x",)} | fields))  # type: ignore[arg-type]


def test_a_folder_that_is_not_there(make_model: Callable[..., Path]) -> None:
    source = ModelSource(EngineConfig(model=str(make_model()), lora=("a=/nowhere",)))
    with pytest.raises(LoraError, match="adapter /nowhere: there is no such folder"):
        source.read_adapter(Path("/nowhere"), {})


def test_room_is_left_for_as_many_adapters_as_there_may_be(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("pdserve_kernels.triton")
    folder = make_model("Qwen3ForCausalLM")
    adapter = write_adapter(folder, tmp_path / "adapter", r=16)
    source = ModelSource(
        EngineConfig(model=str(folder), lora=(f"a={adapter}",), max_lora_rank=16, max_loras=3)
    )
    monkeypatch.setattr(llama, "select", lambda device: triton)
    model = source.load()
    assert isinstance(model, LlamaModel)
    packed = model.pack_adapter(source.read_adapter(adapter, model.lora_targets))
    weights = [layer[name] for layer in packed.layers for name in LINEARS]
    taken = sum(weight.a.nbytes + weight.b.nbytes for weight in weights)
    assert source.adapter_bytes(model) == 3 * taken
