"""A model's name, and which models are the hub's."""

import sys
from pathlib import Path

import pytest

from pdserve_common.model_files.model_folder import find_model, is_hub_id, model_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_folder_gives_its_name_to_its_model(tmp_path: Path) -> None:
    (tmp_path / "some-model").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "some-model")
    assert model_name(tmp_path / "link" / ".") == "some-model"


def test_a_folder_of_the_hubs_cache_gives_its_model_the_hubs_name(tmp_path: Path) -> None:
    for cached, name in (("models--Qwen--Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("models--gpt2", "gpt2")):
        snapshot = tmp_path / cached / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (tmp_path / "link").symlink_to(snapshot)
        assert model_name(snapshot) == model_name(f"{snapshot}/") == name
        assert model_name(tmp_path / "link") == name
        (tmp_path / "link").unlink()
    # The cache's own folder may be a link.
    (tmp_path / "models--a--b").symlink_to(tmp_path / "models--gpt2")
    assert model_name(tmp_path / "models--a--b" / "snapshots" / COMMIT) == "a/b"


@pytest.mark.parametrize("folder", [f"snapshots/{COMMIT}", "models--a--b/snapshots/main"])
def test_other_folders_are_none_of_the_hubs_cache(tmp_path: Path, folder: str) -> None:
    assert model_name(tmp_path / folder) == Path(folder).name


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "a/b", "_a/b.c-d_e", "a/" + 94 * "b"])
def test_names_of_the_hub_are_known(model: str) -> None:
    assert is_hub_id(model)


@pytest.mark.parametrize(
    "model",
    [
        *("", "a", "a/", "/b", "./a/b", "a/b/c", "/a/b", "../b", "a/b ", "a/ü", "a/b\n"),
        *("-a/b", "a-/b", "a/.b", "a/b.", "a--b/c", "a/b--c", "a/b..c", "a/b.git"),
        *("models/pdserve-tiny", "datasets/a", "spaces/a", "a/" + 95 * "b"),
    ],
)
def test_what_cannot_be_a_name_of_the_hub_is_none(model: str) -> None:
    assert not is_hub_id(model)


def test_a_folder_is_itself_even_if_the_hub_could_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some-owner" / "model").mkdir(parents=True)
    assert find_model("some-owner/model") == "some-owner/model"
    assert find_model("nowhere") == "nowhere"
    assert "huggingface_hub" not in sys.modules or "transformers" in sys.modules


def test_a_revision_is_of_models_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"revision is 'v1', but .* is no model of the Hugging"):
        find_model(str(tmp_path), revision="v1")
    for revision in ("../../x", "", "-x", "a b"):
        with pytest.raises(ValueError, match="must be a branch, a tag or a commit"):
            find_model("a/b", revision=revision)


def test_without_the_library_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="without huggingface_hub it cannot be downloaded"):
        find_model("some-owner/model")
