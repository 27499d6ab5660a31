"""What must be equal before D may use P's blocks: each of it, changed alone, is seen."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from pdserve_common.types.kv import KVGroup, KVGroupKind, KVLayout
from pdserve_engine.kv_transfer import compatibility
from pdserve_engine.kv_transfer.compatibility import (
    TOKENIZER_FILES,
    compatibility_hash,
    model_digest,
)
from pdserve_engine.kv_transfer.connectors.links import find_mismatch, make_hello
from pdserve_engine.models.config import LlamaConfig, ModelConfig, PoolerConfig, VisionConfig
from pdserve_engine.models.experts import ExpertNames, ExpertsConfig
from pdserve_engine.models.quantization import IntQuantization
from pdserve_engine.models.rope import RopeConfig
from support.handoff import make_identity

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    num_attention_heads=4,
    num_kv_heads=2,
    head_dim=16,
    attention_windows=(None, 8),
    max_model_len=512,
    dtype=torch.bfloat16,
    eos_token_ids=(2,),
)
DENSE = LlamaConfig(
    **{field.name: getattr(CONFIG, field.name) for field in fields(CONFIG)},
    intermediate_size=128,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_word_embeddings=False,
    has_qkv_bias=False,
    has_attention_output_bias=False,
    has_mlp_bias=False,
    has_qk_norm=False,
)
EXPERTS = ExpertsConfig(
    num_experts=4,
    num_experts_per_tok=2,
    intermediate_size=128,
    norm_topk_prob=True,
    layers=(0, 1),
    names=ExpertNames(),
)
# Computed by workers that knew of no shared expert.
EXPERTS_HASH = "9dd0e93eada203cc9d0b4ef7fa1e21d0a8d78e5e1ec074f589fe4179666dd8bd"
# Computed by workers that knew of neither experts nor pictures.
DENSE_HASH = "c45d0835ac3713f950e35792bff2ad2fd70a7284d02e251dafcc0d1b4b5168e8"
LAYOUT = KVLayout(
    groups=(KVGroup(id=0, layers=(0, 1), kind=KVGroupKind.FULL, window=0),),
    block_size=16,
    block_bytes=4096,
    tile_format="row_major",
    num_kv_heads=2,
    head_bytes=2048,
)
OTHER_LAYOUTS: dict[str, Any] = {
    "groups": (KVGroup(id=0, layers=(0, 1), kind=KVGroupKind.SLIDING, window=8),),
    "block_size": 32,
    "block_bytes": 8192,
    "tile_format": "vnni16",
    "num_kv_heads": 1,
    "head_bytes": 4096,
}
# The model's shape implies them.
NOT_IN_THE_HASH = ("num_kv_heads", "head_bytes")
OTHER_CONFIGS: dict[str, Any] = {
    "architecture": "Qwen2ForCausalLM",
    "vocab_size": 257,
    "hidden_size": 128,
    "num_layers": 3,
    "num_attention_heads": 8,
    "num_kv_heads": 1,
    "head_dim": 32,
    "attention_windows": (None, None),
    "dtype": torch.float32,
    "eos_token_ids": (2, 3),
    "vision": VisionConfig(
        image_token_id=5,
        num_image_tokens=4,
        image_size=16,
        rescale_factor=1 / 255,
        image_mean=(0.5,) * 3,
        image_std=(0.5,) * 3,
    ),
    "quantization": IntQuantization(method="load", bits=8, group_size=None),
}


class Setup(NamedTuple):
    """What the hash is made of."""

    folder: Path
    config: ModelConfig = CONFIG
    layout: KVLayout = LAYOUT
    processors: tuple[str, ...] = ("a",)

    def hash(self) -> str:
        return compatibility_hash(
            self.folder, self.config, self.layout, logits_processors=self.processors
        )

    def model(self) -> str:
        return model_digest(self.folder, self.config, logits_processors=self.processors)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    write_weights(tmp_path, 0.0)
    (tmp_path / "config.json").write_text("{}")
    for name in TOKENIZER_FILES:
        (tmp_path / name).write_text(json.dumps({"name": name}))
    return Setup(tmp_path)


def write_weights(folder: Path, value: float) -> None:
    save_file({"weight": torch.full((64,), value)}, folder / "model.safetensors")


def rewrite(name: str) -> Callable[[Setup], Setup]:
    def change(setup: Setup) -> Setup:
        (setup.folder / name).write_text('{"x": 1}')
        return setup

    return change


def retrain(setup: Setup) -> Setup:
    write_weights(setup.folder, 1.0)
    return setup


CHANGES: dict[str, Callable[[Setup], Setup]] = {
    **{
        name: lambda setup, name=name: setup._replace(
            config=replace(CONFIG, **{name: OTHER_CONFIGS[name]})
        )
        for name in OTHER_CONFIGS
    },
    **{
        name: lambda setup, name=name: setup._replace(
            layout=replace(LAYOUT, **{name: OTHER_LAYOUTS[name]})
        )
        for name in OTHER_LAYOUTS
        if name not in NOT_IN_THE_HASH
    },
    **{name: rewrite(name) for name in (*TOKENIZER_FILES, "config.json")},
    "weights": retrain,
    "logits_processors": lambda setup: setup._replace(processors=("a", "b")),
}


def test_the_changes_below_are_all() -> None:
    # What the second does, the layout tells; what pools hands nothing over.
    left_out = {"max_model_len", "has_fp8_kv", "pooler"}
    assert OTHER_CONFIGS.keys() | left_out == {field.name for field in fields(ModelConfig)}
    assert set(OTHER_LAYOUTS) == {field.name for field in fields(KVLayout)}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_differs_changes_the_hash(setup: Setup, name: str) -> None:
    before = setup.hash()
    assert setup.hash() == before
    assert CHANGES[name](setup).hash() != before


def test_what_may_differ_does_not_change_it(setup: Setup) -> None:
    longer = setup._replace(config=replace(CONFIG, max_model_len=1024))
    assert longer.hash() == setup.hash()
    assert (
        setup._replace(processors=("b", "a")).hash() == setup._replace(processors=("a", "b")).hash()
    )


def test_dense_models_hash_as_before_there_were_experts(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of two builds serve together while one replaces the other."""
    monkeypatch.setattr(compatibility, "xgrammar_version", lambda: "0.1.0")
    assert setup._replace(config=DENSE).hash() == DENSE_HASH


def test_experts_change_it(setup: Setup) -> None:
    hashes = {setup._replace(config=DENSE).hash()}
    for change in (
        EXPERTS,
        replace(EXPERTS, num_experts_per_tok=1),
        replace(EXPERTS, shared_size=128),
        replace(EXPERTS, shared_size=64),
    ):
        hashes.add(setup._replace(config=replace(DENSE, experts=change)).hash())
    assert len(hashes) == 5


def test_experts_hash_as_before_there_were_shared_ones(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compatibility, "xgrammar_version", lambda: "0.1.0")
    assert setup._replace(config=replace(DENSE, experts=EXPERTS)).hash() == EXPERTS_HASH


@pytest.mark.parametrize("version", ["0.0.1", None])
def test_another_version_of_what_enforces_grammars_changes_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    before, model = setup.hash(), setup.model()
    monkeypatch.setattr(compatibility, "xgrammar_version", lambda: version)
    assert setup.hash() != before
    assert setup.model() == model


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_a_layout_that_differs_is_refused_by_name(name: str) -> None:
    p = make_identity("p0", layout=LAYOUT)
    d = make_identity("d0", layout=replace(LAYOUT, **{name: OTHER_LAYOUTS[name]}))
    assert find_mismatch(p, "local", make_hello(p, "local")) is None
    mismatch = find_mismatch(p, "local", make_hello(d, "local"))
    assert mismatch is not None
    assert mismatch.startswith(f"layout.{name} differs: ")


def test_workers_that_say_differently_why_sessions_end_are_refused_for_their_version() -> None:
    identity = make_identity("p0", layout=LAYOUT)
    hello = make_hello(identity, "local")
    older = replace(hello, min_protocol_version=2, max_protocol_version=2)
    mismatch = find_mismatch(identity, "local", older)
    assert mismatch is not None
    assert mismatch.startswith("protocol versions differ: ")


MODEL_CHANGES = ("dtype", "eos_token_ids", "quantization", "config.json", "weights")


@pytest.mark.parametrize("name", [name for name in CHANGES if name in OTHER_LAYOUTS])
def test_where_kv_lies_makes_no_other_model(setup: Setup, name: str) -> None:
    """Such workers cannot exchange KV, and compute the same tokens."""
    before = setup.model()
    assert CHANGES[name](setup).model() == before


def test_the_same_weights_that_pool_are_another_model(setup: Setup) -> None:
    pooler = PoolerConfig(
        tasks=("embed",), pooling_type="last", activation="normalize", use_activation=True
    )
    models = {setup.model()}
    for change in (pooler, replace(pooler, pooling_type="mean")):
        models.add(setup._replace(config=replace(CONFIG, pooler=change)).model())
    assert len(models) == 3


@pytest.mark.parametrize("name", [*MODEL_CHANGES, "logits_processors"])
def test_what_changes_tokens_makes_another_model(setup: Setup, name: str) -> None:
    before = setup.model()
    assert setup.model() == before
    assert CHANGES[name](setup).model() != before


def test_how_it_is_computed_makes_no_other_model(setup: Setup) -> None:
    """Another code or a shorter limit describes the same checkpoint differently."""
    config = replace(CONFIG, max_model_len=CONFIG.max_model_len // 2, attention_windows=(8, None))
    assert setup._replace(config=config).model() == setup.model()
