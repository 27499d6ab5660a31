"""The loader: strict about names and shapes, indifferent to sharding; and the weights digest."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model

from pdserve_engine.models.config import ModelError
from pdserve_engine.models.registry import load_model, read_model_config
from pdserve_engine.models.stage import ALL_LAYERS, Stage
from pdserve_engine.models.weights import loader
from pdserve_engine.models.weights.loader import Checkpoint, weights_digest
from pdserve_kernels.fp8 import FP8
from support.model_driver import Driver, make_prompt

CPU = torch.device("cpu")


@pytest.fixture
def editable(make_model: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(make_model(num_hidden_layers=1), tmp_path / "model"))


def load(folder: Path, **kwargs: Any) -> Any:
    return load_model(folder, read_model_config(folder), device=CPU, **kwargs)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    # The new file replaces the old one: tensors still point into that.
    change(tensors)
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def test_missing_weights_are_named(editable: Path) -> None:
    rewrite(editable, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelError, match=r"lacks 1 weights: model\.norm\.weight"):
        load(editable)


def test_unexpected_weights_are_named(editable: Path) -> None:
    extra = "model.layers.0.self_attn.q_proj.bias"
    rewrite(editable, lambda tensors: tensors.update({extra: torch.zeros(64)}))
    with pytest.raises(ModelError, match=r"no place for: model.layers.0.self_attn.q_proj.bias"):
        load(editable)


def test_wrong_shapes_are_named(editable: Path) -> None:
    rewrite(editable, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}))
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \(3,\), .* asks \(64,\)"):
        load(editable)


def test_rotary_buffers_of_old_checkpoints_are_ignored(editable: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(editable, lambda tensors: tensors.update({name: torch.zeros(8)}))
    load(editable)


def test_a_folder_without_weights_and_missing_shards_are_named(
    editable: Path, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    (editable / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model.safetensors nor"):
        load(editable)
    sharded = Path(shutil.copytree(make_model(shard_size="100KB"), tmp_path / "sharded"))
    next(sharded.glob("model-00002-of-*")).unlink()
    with pytest.raises(ModelError, match="shards that do not exist: model-00002"):
        load(sharded)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds a JSON list, expected an object"),
        ("null", "holds a JSON NoneType"),
        ("1", "holds a JSON int"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON: it is nested deeper than 100"),
        ("{}", "weight_map is missing"),
        *(
            (json.dumps({"weight_map": value}), "weight_map is .*, expected ")
            for value in (None, [], {"a": 1}, {"a": None}, {"a" * 5000: 1})
        ),
        *(
            (json.dumps({"weight_map": {"a": shard}}), f"shards that do not exist: {shard[:200]}$")
            for shard in ("", ".", "..", "a" * 5000, "a\0b")
        ),
    ],
    ids=lambda text: text[:20],
)
def test_an_index_that_holds_anything_is_refused_by_name(
    editable: Path, text: str, message: str
) -> None:
    (editable / INDEX).write_text(text)
    for read in (Checkpoint, weights_digest):
        with pytest.raises(ModelError, match=rf"{re.escape(INDEX)}\W.*{message}") as raised:
            read(editable)
        assert len(str(raised.value)) < 600


def test_a_shard_that_is_none_or_lacks_a_weight_is_named(editable: Path) -> None:
    config = read_model_config(editable)
    with safe_open(editable / "model.safetensors", framework="pt") as file:
        weight_map = dict.fromkeys(file.keys(), "model.safetensors")
    first, *others = sorted(weight_map)
    (editable / "config.safetensors").write_bytes((editable / "config.json").read_bytes())
    (editable / INDEX).write_text(
        json.dumps({"weight_map": weight_map | {first: "config.safetensors"}})
    )
    for read in (weights_digest, lambda folder: load_model(folder, config, device=CPU)):
        with pytest.raises(ModelError, match=r"config\.safetensors is damaged"):
            read(editable)
    (editable / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    rewrite(editable, lambda tensors: tensors.pop(first))
    checkpoint, reading = Checkpoint(editable), {"dtype": torch.float32, "device": CPU}
    for use in (
        lambda: checkpoint.check(dict.fromkeys(weight_map, (64, 64))),
        lambda: checkpoint.is_same(others[0], first, dtype=torch.float32),
        lambda: checkpoint.map(first, **reading),
        lambda: checkpoint.read(first, **reading),
        lambda: checkpoint.read_as_stored(first),
    ):
        with pytest.raises(ModelError, match=rf"model\.safetensors lacks {first}, which .*index"):
            use()


def test_a_folder_in_the_place_of_a_file_is_named(editable: Path) -> None:
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        shutil.rmtree(editable / name, ignore_errors=True)
        (editable / name).unlink(missing_ok=True)
        (editable / name).mkdir()
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or no safetensors file"):
        Checkpoint(editable)
    with pytest.raises(ModelError, match=r"/config\.json cannot be read: Is a directory"):
        read_model_config(editable)


def test_a_truncated_file_is_named(editable: Path) -> None:
    path = editable / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model.safetensors is damaged"):
        load(editable)


def test_shards_hold_the_same_weights_as_one_file(make_model: Callable[..., Path]) -> None:
    whole, sharded = make_model(), make_model(shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    for name in index["weight_map"]:
        a, b = (
            Checkpoint(folder).read(name, dtype=torch.bfloat16, device=CPU)
            for folder in (whole, sharded)
        )
        assert a.dtype == torch.bfloat16
        assert torch.equal(a, b)


@pytest.mark.parametrize("is_tied", [False, True])
def test_progress_counts_each_weight_and_ends_at_the_total(
    make_model: Callable[..., Path], is_tied: bool
) -> None:
    calls: list[tuple[int, int]] = []
    load(
        make_model(tie_word_embeddings=is_tied),
        progress=lambda done, total: calls.append((done, total)),
    )
    total = 2 + 3 * 9 + (not is_tied)
    assert calls == [(i + 1, total) for i in range(total)]


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_a_head_beside_a_tied_embedding_is_one_if_it_differs(
    make_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
    tmp_path: Path,
    architecture: str,
    is_own: bool,
) -> None:
    """As transformers reads such a file."""
    tied = make_model(architecture, tie_word_embeddings=True)
    folder = Path(shutil.copytree(tied, tmp_path / "model"))

    def store_head(tensors: dict[str, torch.Tensor]) -> None:
        table = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = table.roll(1, 0) if is_own else table.clone()

    rewrite(folder, store_head)
    assert is_said_as_transformers_says(folder, hf_greedy)


def is_said_as_transformers_says(folder: Path, hf_greedy: Callable[..., list[int]]) -> bool:
    driver = Driver(folder, dtype="float32")
    prompt = make_prompt(20)
    driver.add("a", prompt)
    driver.run("a", num_tokens=8)
    return driver.sequences["a"].output == hf_greedy(folder, prompt, 8)


@pytest.mark.parametrize("stage", [ALL_LAYERS, Stage(1, 2)], ids=["whole", "last"])
def test_a_tied_head_that_is_stored_alone_is_the_embedding(
    make_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
    tmp_path: Path,
    stage: Stage,
) -> None:
    """As `safetensors.torch.save_model` writes a tied model. All parts of a model have it so."""
    tied = make_model(tie_word_embeddings=True)
    folder = Path(shutil.copytree(tied, tmp_path / "model"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    names = Checkpoint(folder).names
    assert "lm_head.weight" in names
    assert "model.embed_tokens.weight" not in names
    assert is_said_as_transformers_says(folder, hf_greedy)
    states = torch.randn(3, 64)
    config = read_model_config(folder)
    logits = [
        load_model(each, config, device=CPU, stage=stage).compute_logits(states)
        for each in (tied, folder)
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_head_in_another_dtype_is_the_embedding_if_their_numbers_are_equal(
    make_model: Callable[..., Path],
    hf_greedy: Callable[..., list[int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    is_same: bool,
) -> None:
    """In the dtype that is served, as in transformers."""
    folder = Path(shutil.copytree(make_model(tie_word_embeddings=True), tmp_path / "model"))

    def store_head(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].bfloat16()
        tensors["lm_head.weight"] = head
        if is_same:
            tensors["model.embed_tokens.weight"] = head.float()

    rewrite(folder, store_head)
    assert is_said_as_transformers_says(folder, hf_greedy)
    assert ("they are not tied" in caplog.text) is not is_same
    caplog.clear()
    model = load_model(folder, read_model_config(folder, dtype="bfloat16"), device=CPU)
    assert model.config.tie_word_embeddings
    assert not caplog.text


def test_a_head_in_fp8_beside_a_tied_embedding_is_not_read(
    make_model: Callable[..., Path], hf_greedy: Callable[..., list[int]], tmp_path: Path
) -> None:
    """Tools quantize it, whether a scale is beside it or not."""
    tied = make_model(tie_word_embeddings=True)
    folder = Path(shutil.copytree(tied, tmp_path / "model"))
    head = torch.ones(load_file(tied / "model.safetensors")["model.embed_tokens.weight"].shape)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": head.to(FP8)}))
    driver, prompt = Driver(folder), make_prompt(20)
    driver.add("a", prompt)
    driver.run("a", num_tokens=8)
    assert driver.sequences["a"].output == hf_greedy(tied, prompt, 8)
    rewrite(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(ModelError, match=r"lacks 1 weights: model\.embed_tokens\.weight"):
        load(folder)


def test_weights_survive_their_file(editable: Path) -> None:
    weight = Checkpoint(editable).read("model.norm.weight", dtype=torch.float32, device=CPU)
    before = weight.clone()
    with (editable / "model.safetensors").open("r+b") as file:
        file.write(bytes((editable / "model.safetensors").stat().st_size))
    assert torch.equal(weight, before)


def test_scalars_and_whole_numbers_are_read_as_stored(editable: Path) -> None:
    extra = {"scalar": torch.tensor(7), "counts": torch.arange(300), "none": torch.zeros(0, 4)}
    rewrite(editable, lambda tensors: tensors.update(extra))
    checkpoint = Checkpoint(editable)
    for name, expected in extra.items():
        found = checkpoint.read_as_stored(name)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_the_digest_is_stable_and_sees_changed_weights(editable: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(editable, tmp_path / "copy"))
    before = weights_digest(editable)
    assert weights_digest(copy) == before
    rewrite(editable, lambda tensors: tensors["lm_head.weight"].add_(1.0))
    assert weights_digest(editable) != before


def test_a_file_is_not_opened_for_every_weight(
    editable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But again for every KEPT_BYTES of it, so that its pages leave the process."""
    opened: list[Path] = []

    def open_file(path: Path, **options: Any) -> Any:
        opened.append(path)
        return safe_open(path, **options)

    monkeypatch.setattr(loader, "safe_open", open_file)
    checkpoint = Checkpoint(editable)
    names = sorted(checkpoint.names)
    assert len(names) > 9
    for name in names:
        checkpoint.read(name, dtype=torch.float32, device=CPU)
    assert len(opened) == 2  # for the names, and for the weights
    monkeypatch.setattr(loader, "KEPT_BYTES", 1)
    for name in names:
        checkpoint.read(name, dtype=torch.float32, device=CPU)
    assert len(opened) >= 2 + len(names) - 1
