"""Folders that peft writes are read as they are meant; anything else is refused by name."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from pdserve_engine.lora.adapter import CONFIG_FILE, WEIGHTS_FILE, LoraAdapter, read_adapter
from pdserve_engine.lora.adapter_config import LoraError, parse_adapter_config
from support.adapters import ALL_PROJECTIONS
from support.samples import seeds

LAYER = {"self_attn.q_proj": (32, 16), "self_attn.o_proj": (16, 32), "mlp.down_proj": (16, 24)}
TARGETS = {
    f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER.items()
}
CONFIG = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "o_proj"],
    "bias": "none",
}
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def weights(
    rank: int = 4, names: tuple[str, ...] = ("q_proj", "o_proj")
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (rows, columns) in TARGETS.items():
        if name.endswith(names):
            prefix = f"base_model.model.{name}."
            tensors[prefix + "lora_A.weight"] = torch.randn(rank, columns, generator=generator)
            tensors[prefix + "lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    return tensors


def write(
    folder: Path, config: object = CONFIG, tensors: dict[str, torch.Tensor] | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / CONFIG_FILE).write_bytes(text)
    save_file(weights() if tensors is None else tensors, folder / WEIGHTS_FILE)
    return folder


def read(folder: Path, dtype: torch.dtype = torch.float32) -> LoraAdapter:
    return read_adapter(folder, TARGETS, dtype=dtype, max_rank=64)


def test_it_has_the_weights_and_the_scale(tmp_path: Path) -> None:
    adapter = read(write(tmp_path / "a"))
    assert adapter.rank == 4
    assert set(adapter.modules) == {name for name in TARGETS if name.endswith(("q_proj", "o_proj"))}
    module = adapter.modules["model.layers.0.self_attn.q_proj"]
    assert module.scale == 2.0
    assert torch.equal(module.a, weights()[Q0 + ".lora_A.weight"])
    assert torch.equal(module.b, weights()[Q0 + ".lora_B.weight"])


def test_the_digest_is_of_what_is_computed(tmp_path: Path) -> None:
    plain = read(write(tmp_path / "plain")).digest
    said_otherwise = CONFIG | {
        "target_modules": ["o_proj", "self_attn.q_proj"],
        "layers_to_transform": [1, 0],
        "lora_dropout": 0.3,
        "base_model_name_or_path": "elsewhere",
        "fan_in_fan_out": True,
        "a_later_key": None,
    }
    assert read(write(tmp_path / "same", said_otherwise)).digest == plain
    assert read(tmp_path / "same", torch.bfloat16).digest == plain
    changed = weights()
    changed[Q0 + ".lora_A.weight"][0, 0] += 1
    others = (
        (CONFIG | {"lora_alpha": 9}, None),
        (CONFIG | {"use_rslora": True}, None),
        (CONFIG, changed),
        (CONFIG, {name: tensor.half() for name, tensor in weights().items()}),
    )
    digests = [
        read(write(tmp_path / str(index), config, tensors)).digest
        for index, (config, tensors) in enumerate(others)
    ]
    assert len({plain, *digests}) == 1 + len(others)


@pytest.mark.parametrize(
    "config",
    [
        {"r": 4},
        {"r": 4, "lora_alpha": 3, "use_rslora": True},
        {"r": 4, "target_modules": "all-linear"},
        {"r": 4, "layers_to_transform": [1]},
        {"r": 4, "layers_to_transform": 2, "target_modules": ["self_attn.q_proj", "down_proj"]},
        {"r": 4, "rank_pattern": {"q_proj": 8, "layers.1.mlp.up_proj": 2}},
        {"r": 4, "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"o_proj": 32, "k_proj": 1}},
    ],
    ids=repr,
)
def test_it_is_what_peft_merges(
    make_model: Callable[..., Path], tmp_path: Path, config: dict[str, Any]
) -> None:
    from pdserve_engine.models.registry import read_model_config
    from pdserve_engine.models.weights.llama import lora_targets
    from support.adapters import merged_model, write_adapter

    model_dir = make_model("Qwen3ForCausalLM")
    folder = write_adapter(model_dir, tmp_path, **config)
    model_config = read_model_config(model_dir)
    targets = lora_targets(model_config)
    adapter = read_adapter(folder, targets, dtype=torch.float32, max_rank=64)
    before = load_file(model_dir / "model.safetensors")
    after = merged_model(model_dir, folder).state_dict()
    for name in targets:
        change = torch.zeros_like(before[f"{name}.weight"])
        if (module := adapter.modules.get(name)) is not None:
            change = module.scale * module.b @ module.a
        torch.testing.assert_close(before[f"{name}.weight"] + change, after[f"{name}.weight"])
    assert {name.rpartition(".")[2] for name in targets} == set(ALL_PROJECTIONS)


REFUSED_CONFIGS: dict[str, tuple[object, str]] = {
    "empty": (b"", "no JSON"),
    "cut off": (json.dumps(CONFIG).encode()[:-1], "no JSON"),
    "bytes": (b"\xff\xfe\x00", "no JSON"),
    "deep": (b"[" * 100_000, "no JSON"),
    "large number": (b'{"r": ' + b"9" * 5000 + b"}", "no JSON"),
    "list": ([CONFIG], "no object"),
    "twice": (b'{"peft_type": "LORA", "r": 4, "r": 8}', "twice"),
    "no type": ({"r": 4}, "peft_type"),
    "other type": (CONFIG | {"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "lower case": (CONFIG | {"peft_type": "lora"}, "peft_type is 'lora'"),
    "no rank": ({k: v for k, v in CONFIG.items() if k != "r"}, "r is None"),
    "rank 0": (CONFIG | {"r": 0}, "r is 0: must be 1 to 64"),
    "rank below 0": (CONFIG | {"r": -4}, "r is -4"),
    "rank 65": (CONFIG | {"r": 65}, "r is 65: must be 1 to 64"),
    "rank true": (CONFIG | {"r": True}, "r is True"),
    "rank 4.0": (CONFIG | {"r": 4.0}, "r is 4.0"),
    "rank text": (CONFIG | {"r": "4"}, "r is '4'"),
    "no alpha": ({k: v for k, v in CONFIG.items() if k != "lora_alpha"}, "lora_alpha is None"),
    "alpha nan": (CONFIG | {"lora_alpha": float("nan")}, "lora_alpha is nan"),
    "alpha inf": (CONFIG | {"lora_alpha": float("inf")}, "lora_alpha is inf"),
    "alpha text": (CONFIG | {"lora_alpha": "8"}, "lora_alpha is '8'"),
    "alpha huge": (CONFIG | {"lora_alpha": 10**400}, "lora_alpha is 1000"),
    "rslora 1": (CONFIG | {"use_rslora": 1}, "use_rslora is 1"),
    "dora": (CONFIG | {"use_dora": True}, "use_dora is True"),
    "bias": (CONFIG | {"bias": "all"}, "bias is 'all'"),
    "bias of lora": (CONFIG | {"lora_bias": True}, "lora_bias is True"),
    "modules_to_save": (
        CONFIG | {"modules_to_save": ["lm_head"]},
        "modules_to_save is ['lm_head']",
    ),
    "tokens": (CONFIG | {"trainable_token_indices": [1]}, "trainable_token_indices is [1]"),
    "experts": (CONFIG | {"target_parameters": ["experts.up"]}, "target_parameters is ['experts"),
    "replicated": (CONFIG | {"layer_replication": [[0, 2]]}, "layer_replication is [[0, 2]]"),
    "invoked": (CONFIG | {"alora_invocation_tokens": [3]}, "alora_invocation_tokens is [3]"),
    "excluded": (CONFIG | {"exclude_modules": ["q_proj"]}, "exclude_modules is ['q_proj']"),
    "qalora": (CONFIG | {"use_qalora": True}, "use_qalora is True"),
    "megatron": (CONFIG | {"megatron_config": {"a": 1}}, "megatron_config is {'a': 1}"),
    "other base": (CONFIG | {"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    "later key": (CONFIG | {"use_what_comes": {"a": 1}}, "use_what_comes is {'a': 1}"),
    "other layers": (CONFIG | {"layers_pattern": "blocks"}, "layers_pattern is 'blocks'"),
    "embedding": (CONFIG | {"target_modules": ["embed_tokens"]}, "target_modules has 'embed_tok"),
    "head": (CONFIG | {"target_modules": ["q_proj", "lm_head"]}, "target_modules has 'lm_head'"),
    "no target": (CONFIG | {"target_modules": []}, "target_modules is []"),
    "null target": (CONFIG | {"target_modules": None}, "target_modules is None"),
    "regex target": (CONFIG | {"target_modules": "(.*)+q_proj"}, "target_modules is '(.*)+q_proj'"),
    "path target": (CONFIG | {"target_modules": ["../q_proj"]}, "target_modules is '../q_proj'"),
    "number target": (CONFIG | {"target_modules": [1]}, "target_modules is 1"),
    "regex rank": (CONFIG | {"rank_pattern": {"(a+)+$": 4}}, "rank_pattern is '(a+)+$'"),
    "rank of pattern": (CONFIG | {"rank_pattern": {"q_proj": 65}}, "rank_pattern['q_proj'] is 65"),
    "list pattern": (CONFIG | {"rank_pattern": ["q_proj"]}, "rank_pattern is ['q_proj']"),
    "alpha of pattern": (CONFIG | {"alpha_pattern": {"q_proj": None}}, "alpha_pattern['q_proj']"),
    "layer 2": (CONFIG | {"layers_to_transform": [2]}, "layers_to_transform has 2"),
    "layer -1": (CONFIG | {"layers_to_transform": -1}, "layers_to_transform is -1"),
    "no layer": (CONFIG | {"layers_to_transform": []}, "no linear to change"),
    "layer text": (CONFIG | {"layers_to_transform": "0"}, "layers_to_transform is '0'"),
    "large": (CONFIG | {"revision": "x" * (1 << 20)}, "more than 1048576 bytes"),
}


@pytest.mark.parametrize("seed", seeds(30))
def test_the_first_pattern_that_a_name_ends_in_counts(seed: int) -> None:
    rng = random.Random(seed)
    parts = [name.split(".") for name in TARGETS]
    ends = {".".join(each[first:]) for each in parts for first in range(len(each))}
    keys = rng.sample(sorted(ends | {"proj", "_proj", "other"}), rng.randint(0, 6))
    pattern = {key: rank for rank, key in enumerate(keys, 5)}
    fields = CONFIG | {"target_modules": "all-linear", "rank_pattern": pattern}
    config = parse_adapter_config(json.dumps(fields).encode(), max_rank=64)
    for name, scaled in config.scaled(TARGETS).items():
        found = (rank for end, rank in pattern.items() if f".{name}".endswith(f".{end}"))
        assert scaled.rank == next(found, 4)


@pytest.mark.parametrize("case", REFUSED_CONFIGS)
def test_a_config_that_is_not_served_is_refused_by_name(tmp_path: Path, case: str) -> None:
    config, message = REFUSED_CONFIGS[case]
    folder = write(tmp_path / "a", config)
    with pytest.raises(LoraError) as refusal:
        read(folder)
    assert message in str(refusal.value)
    assert str(folder) in str(refusal.value)
    assert len(str(refusal.value)) < 600


def with_one(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors = weights()
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[f"{Q0}.lora_{name}.weight"]
        else:
            tensors[f"{Q0}.lora_{name}.weight"] = tensor
    return tensors


REFUSED_WEIGHTS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "none": ({}, "lacks 8 weights"),
    "a missing": (with_one(A=None), f"lacks 1 weights, as {Q0}.lora_A.weight"),
    "b missing": (with_one(B=None), f"lacks 1 weights, as {Q0}.lora_B.weight"),
    "rank": (weights(rank=3), "has shape (3, 16), must be (4, 16)"),
    "transposed": (with_one(A=torch.ones(16, 4)), "has shape (16, 4), must be (4, 16)"),
    "flat": (with_one(B=torch.ones(128)), "has shape (128,), must be (32, 4)"),
    "empty": (with_one(B=torch.ones(32, 0)), "has shape (32, 0)"),
    "other module": (weights(names=("q_proj", "o_proj", "down_proj")), "4 weights that the config"),
    "nan": (with_one(A=torch.full((4, 16), torch.nan)), "has NaN or infinity"),
    "infinity": (with_one(B=torch.full((32, 4), torch.inf)), "has NaN or infinity"),
    "integers": (
        with_one(A=torch.ones(4, 16, dtype=torch.int32)),
        "is 'I32', served are",
    ),
    "fp64": (with_one(A=torch.ones(4, 16, dtype=torch.float64)), "is 'F64', served are"),
    "dora": (
        weights() | {f"{Q0}.lora_magnitude_vector.weight": torch.ones(32)},
        "lora_magnitude_vector",
    ),
    "bias": (weights() | {f"{Q0}.lora_B.bias": torch.ones(32)}, "lora_B.bias"),
    "embedding": (weights() | {"base_model.model.lora_embedding_A": torch.ones(4, 4)}, "embedding"),
    "head": (weights() | {"base_model.model.lm_head.weight": torch.ones(4, 4)}, "lm_head"),
}


@pytest.mark.parametrize("case", REFUSED_WEIGHTS)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, case: str) -> None:
    tensors, message = REFUSED_WEIGHTS[case]
    with pytest.raises(LoraError) as refusal:
        read(write(tmp_path / "a", tensors=tensors))
    assert message in str(refusal.value)


def test_what_the_served_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", tensors=with_one(A=torch.full((4, 16), 3.4e38)))
    read(folder)
    with pytest.raises(LoraError, match="infinity in bfloat16"):
        read(folder, torch.bfloat16)


def test_files_that_are_no_plain_files_are_refused(tmp_path: Path) -> None:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        for kind in ("link", "pipe", "folder", "gone", "device"):
            folder = write(tmp_path / f"{name} {kind}")
            (folder / name).rename(tmp_path / f"{name} {kind} elsewhere")
            if kind == "link":
                (folder / name).symlink_to(tmp_path / f"{name} {kind} elsewhere")
            elif kind == "pipe":
                os.mkfifo(folder / name)
            elif kind == "folder":
                (folder / name).mkdir()
            elif kind == "device":
                (folder / name).symlink_to("/dev/zero")
            with pytest.raises(LoraError, match=name):
                read(folder)
    with pytest.raises(LoraError, match="no such folder"):
        read(tmp_path / "nowhere")


def test_a_pickle_is_not_touched(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")
    with pytest.raises(LoraError, match=r"adapter_model\.bin is a pickle"):
        read(folder)


def test_an_adapter_in_shards_is_refused_as_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model-00001-of-00001.safetensors")
    (folder / f"{WEIGHTS_FILE}.index.json").write_text("{}")
    with pytest.raises(LoraError, match=r"index\.json says it is in shards: served is one file"):
        read(folder)


def test_a_file_that_its_config_leaves_no_room_for_is_not_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    with open(folder / WEIGHTS_FILE, "ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(LoraError, match="has more than"):
        read(folder)


@pytest.mark.parametrize("seed", seeds(60))
def test_a_broken_file_is_refused_whole(tmp_path: Path, seed: int) -> None:
    """Cut off, with bits turned, with bytes put in or left out, or anything at all."""
    generator = random.Random(seed)
    folder = write(tmp_path / "a")
    content = bytearray(save(weights()))
    header = 8 + int.from_bytes(content[:8], "little")
    kind = seed % 6
    if kind == 0:
        content = content[: generator.randrange(len(content))]
    elif kind == 1:
        content[:8] = generator.randbytes(8)
    elif kind == 2:
        content[8:header] = generator.randbytes(header - 8)
    elif kind == 3:
        at = generator.randrange(header)
        content[at:at] = generator.randbytes(generator.randrange(1, 9))
    elif kind == 4:
        at = generator.randrange(len(content))
        del content[at : at + generator.randrange(1, 9)]
    else:
        content = bytearray(generator.randbytes(generator.randrange(4000)))
    (folder / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(LoraError, match="adapter_model"):
        read(folder)
