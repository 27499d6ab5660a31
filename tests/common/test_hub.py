"""Models out of the hub's cache or of a hub, by the hub's own library."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve_common.model_files.model_folder import model_name
from support.hub import FakeHub
from support.samples import sampled

FIND = """
import json, sys
from pdserve_common.model_files.model_folder import find_model
try:
    print(find_model(sys.argv[1], **json.loads(sys.argv[2])))
except ValueError as error:
    sys.exit(str(error))
"""
SERVED = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
WEIGHTS = "model.safetensors"


def find(
    hub: FakeHub, model: str = "", *, environment: dict[str, str] | None = None, **kwargs: object
) -> "subprocess.CompletedProcess[str]":
    """find_model in a process: the library reads its environment once."""
    return subprocess.run(
        [sys.executable, "-c", FIND, model or hub.model, json.dumps(kwargs)],
        env={**hub.environment, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def found(hub: FakeHub, **kwargs: object) -> Path:
    result = find(hub, **kwargs)  # type: ignore[arg-type]
    assert result.returncode == 0, result.stderr
    return Path(result.stdout.strip())


def error(result: "subprocess.CompletedProcess[str]") -> str:
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


def test_a_model_is_downloaded_once_without_what_is_not_served_from(hub: FakeHub) -> None:
    folder = found(hub)
    assert {path.name for path in folder.rglob("*")} == SERVED | {WEIGHTS}
    assert (folder / WEIGHTS).read_bytes() == (hub.files / WEIGHTS).read_bytes()
    assert model_name(folder) == hub.model
    hub.requests.clear()
    assert found(hub) == folder
    assert found(hub, environment={"HF_HUB_OFFLINE": "1"}) == folder
    assert hub.requests == []


def test_routers_download_no_weights_and_workers_the_rest(hub: FakeHub) -> None:
    folder = found(hub, weights=False)
    assert {path.name for path in folder.iterdir()} == SERVED
    assert found(hub, weights=False) == found(hub, revision=hub.COMMIT) == folder
    assert (folder / WEIGHTS).is_file()


def test_how_a_model_pools_comes_with_it(hub: FakeHub) -> None:
    pooling = "1_Pooling/config.json"
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    texts = {"modules.json": json.dumps(modules), pooling: "{}"}
    texts |= dict.fromkeys(["2_Dense/model.safetensors", "onnx/config.json"], "{}")
    for name, text in texts.items():
        (hub.files / name).parent.mkdir(exist_ok=True)
        (hub.files / name).write_text(text)
    folder = found(hub)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == SERVED | {WEIGHTS, "modules.json", pooling}
    # As a download that was cut off leaves it.
    (folder / pooling).unlink()
    assert found(hub) == folder
    assert (folder / pooling).is_file()


@pytest.mark.parametrize("name", sampled(["config.json", "tokenizer.json", WEIGHTS], WEIGHTS))
def test_what_is_not_complete_in_the_cache_is_downloaded(hub: FakeHub, name: str) -> None:
    folder = found(hub)
    shutil.rmtree(folder.parent.parent / "trees", ignore_errors=True)  # as others leave it
    (folder / name).unlink()
    offline = error(find(hub, environment={"HF_HUB_OFFLINE": "1"}))
    assert "neither a folder here nor complete in" in offline
    assert found(hub) == folder
    assert (folder / name).is_file()


def test_a_cache_that_lacks_what_nobody_needs_is_enough_without_a_hub(hub: FakeHub) -> None:
    folder = found(hub)
    (folder / "generation_config.json").unlink()
    hub.close()
    assert found(hub) == folder


def test_shards_that_an_index_names_are_needed(hub: FakeHub) -> None:
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (hub.files / WEIGHTS).rename(hub.files / shards[0])
    (hub.files / shards[1]).write_bytes(b"weights")
    index = {"weight_map": dict(zip(["a", "b"], shards, strict=True))}
    (hub.files / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    folder = found(hub)
    shutil.rmtree(folder.parent.parent / "trees", ignore_errors=True)
    (folder / shards[1]).unlink()
    assert (found(hub) / shards[1]).is_file()


def test_without_a_hub_it_says_what_to_do(hub: FakeHub) -> None:
    hub.close()
    for environment, why in (({}, "refused"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")):
        text = error(find(hub, environment=environment))
        assert text.startswith(f"{hub.model} is neither a folder here nor complete in ")
        assert f"the hub at {hub.url} was not reached (" in text
        assert why in text
        assert f"run `hf download {hub.model}` on a machine with network and pass the" in text
        assert text.endswith("or set HF_ENDPOINT to a mirror")


def test_a_model_that_the_hub_does_not_have_is_said_to_be_wrong(hub: FakeHub) -> None:
    (hub.files / "config.json").unlink()
    assert error(find(hub)) == f"{hub.model} has no config.json on {hub.url}: it cannot be served"
    text = error(find(hub, revision="v2"))
    assert text == f"{hub.model} has no revision 'v2' on {hub.url}"
    asked = "some-owner/other"
    text = error(find(hub, asked))
    assert text.startswith(
        f"{asked} is neither a folder here nor a model on {hub.url} that is open"
    )


@pytest.mark.parametrize("status", sampled([401, 403], 403))
def test_a_gated_model_says_how_to_be_let_in(hub: FakeHub, status: int) -> None:
    hub.file_status, hub.file_error = status, "GatedRepo"
    text = error(find(hub, environment={"HF_TOKEN": "hf_some"} if status == 403 else None))
    assert text == (
        f"{hub.model} is gated on {hub.url}: accept its terms at {hub.url}/{hub.model} and set "
        "HF_TOKEN to a token of that account"
    )


def test_a_hub_that_fails_in_a_download_is_named(hub: FakeHub) -> None:
    hub.file_status = 410
    assert error(find(hub)).startswith(f"the download of {hub.model} from {hub.url} failed, what")
