"""What a model is called, and where its folder is: on this machine, or brought from the Hugging
Face hub.
"""

import contextlib
import importlib.util
import json
import logging
import os
import re
import sys
from functools import partial
from pathlib import Path

logger = logging.getLogger(__name__)

# The hub's own names: letters, digits, `-`, `_`, `.`, which neither begin nor end with `-` or `.`.
_HUB_ID = re.compile(r"\w([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)
MAX_HUB_ID_CHARS = 96
# Pages of the hub, which are nobody's names: models/... is a folder that is not there.
_NO_OWNERS = ("models", "datasets", "spaces")
_REVISION = re.compile(r"\w[\w./+-]*", re.ASCII)
# The hub's cache: .../models--OWNER--NAME/snapshots/COMMIT, whose files are links.
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/[0-9a-f]{40}")
# Never pickles, which run code as they are read.
_TEXT_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHTS = "*.safetensors"
# Folders but those of Sentence-Transformers' modules (1_Pooling), whose weights are not served, and
# Mistral's second copy of the weights: none is read.
_IGNORED_PATTERNS = ("[!0-9]*/*", "*/*.safetensors", "consolidated*")
# How names of architectures end.
_WITHOUT_LM_HEAD = ("ForSequenceClassification", "Model")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def model_name(folder: str | Path) -> str:
    """Return what clients call the model in `folder`, unless they are told another name: OWNER/NAME
    for a folder of the hub's cache, the folder's own name for others.
    """
    resolved = Path(folder).resolve()
    # A cache may be a link itself.
    for path in (Path(os.path.abspath(folder)), resolved):
        if match := _SNAPSHOT.fullmatch(path.as_posix()):
            return match[1].replace("--", "/")
    return resolved.name


def pools(folder: str | Path) -> bool:
    """Return whether workers pool with the model in `folder` by themselves: it has no head that
    tells tokens, or Sentence-Transformers' files say how. False if it has no config. Raises
    ValueError for one that is no JSON.
    """
    if (Path(folder) / "modules.json").is_file():
        return True
    config = Path(folder) / "config.json"
    names = json.loads(config.read_text()).get("architectures") if config.is_file() else None
    return any(str(name).endswith(_WITHOUT_LM_HEAD) for name in names or ())


def is_hub_id(model: str) -> bool:
    """May `model` be a model's name on the hub, OWNER/NAME?"""
    return (
        _HUB_ID.fullmatch(model) is not None
        and len(model) <= MAX_HUB_ID_CHARS
        and not any(part in model for part in ("--", ".."))
        and not model.endswith(".git")
        and model.split("/")[0] not in _NO_OWNERS
    )


def is_revision(revision: str) -> bool:
    """May it be a branch, a tag or a commit?"""
    return ".." not in revision and _REVISION.fullmatch(revision) is not None


def find_model(model: str, *, revision: str | None = None, weights: bool = True) -> str:
    """Return the folder of a model: `model`, if it is one or no name of the hub's; else that of the
    hub's cache, downloaded if it is not complete there. `weights` says whether they are needed
    besides the tokenizer. Blocks, and draws a bar on a terminal.

    Raises ValueError for a model that cannot be had, with a sentence that says what to do.
    """
    if revision is not None and not is_revision(revision):
        raise ValueError(f"revision is {revision!r}, must be a branch, a tag or a commit")
    if Path(model).is_dir() or not is_hub_id(model):
        if revision is not None:
            raise ValueError(
                f"revision is {revision!r}, but {model!r} is no model of the Hugging Face hub"
            )
        return model
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ValueError(
            f"{model!r} is no folder, and without huggingface_hub it cannot be downloaded: install "
            "that, or pass a folder"
        )
    return str(_find_on_hub(model, revision, weights))


def _find_on_hub(model: str, revision: str | None, weights: bool) -> Path:
    # Takes half a second to import, and most models are folders.
    from huggingface_hub import constants, errors, model_info, snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    patterns = [*_TEXT_PATTERNS, *([_WEIGHTS] if weights else [])]
    fetch = partial(
        snapshot_download, model, revision=revision, ignore_patterns=list(_IGNORED_PATTERNS)
    )

    def look_up(patterns: list[str]) -> Path | None:
        with contextlib.suppress(errors.LocalEntryNotFoundError):
            folder = Path(fetch(allow_patterns=patterns, local_files_only=True))
            return None if _missing_file(folder, weights) else folder
        return None

    if (folder := look_up(patterns)) is not None:
        return folder
    if not sys.stderr.isatty():
        disable_progress_bars()  # logs are lines
    try:
        # Where no hub is reached, a download returns a folder that is not complete.
        model_info(model, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        logger.info("downloading %s from %s", model, constants.ENDPOINT)
        folder = Path(fetch(allow_patterns=patterns))
    except (errors.EntryNotFoundError, errors.HTTPError, OSError, RuntimeError) as error:
        # Other tools may have brought all but a file that is not needed.
        if (folder := look_up(["config.json"])) is not None:
            return folder
        raise ValueError(_reason(error, model, revision)) from error
    if (missing := _missing_file(folder, weights)) is not None:
        raise ValueError(f"{model} has no {missing} on {constants.ENDPOINT}: it cannot be served")
    return folder


def _reason(error: Exception, model: str, revision: str | None) -> str:
    """Say in a sentence why a model was not downloaded."""
    from huggingface_hub import constants, errors

    where = constants.ENDPOINT
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # what happened; the library's own text is a paragraph of advice
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{model} is gated on {where}: accept its terms at {where}/{model} and set HF_TOKEN to "
            "a token of that account"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{model} is neither a folder here nor a model on {where} that is open to all: check "
            "the name, or set HF_TOKEN if it is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model} has no revision {revision or 'main'!r} on {where}"
    is_refused = isinstance(error, errors.HfHubHTTPError)
    if not is_refused and isinstance(error, (errors.HTTPError, errors.OfflineModeIsEnabled)):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _one_line(error)
        return (
            f"{model} is neither a folder here nor complete in {constants.HF_HUB_CACHE}, and the "
            f"hub at {where} was not reached ({why}): run `hf download {model}` on a machine with "
            "network and pass the folder that it prints, or set HF_ENDPOINT to a mirror"
        )
    return (
        f"the download of {model} from {where} failed, what is there is kept for the next try: "
        f"{_one_line(error)}"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _missing_file(folder: Path, weights: bool) -> str | None:
    """Return a file that the model lacks, of those without which it cannot be served; other tools
    and downloads that were cut off leave folders that are not complete.
    """
    if not (folder / "config.json").is_file():
        return "config.json"
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return _TOKENIZERS[0]
    return (_missing_pooling(folder) or _missing_weights(folder)) if weights else None


def _missing_pooling(folder: Path) -> str | None:
    """Return the config of a Pooling module that Sentence-Transformers' files name."""
    modules = folder / "modules.json"
    try:
        entries = json.loads(modules.read_bytes()) if modules.is_file() else []
        paths = [str(each["path"]) for each in entries if each["type"].endswith(".Pooling")]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # who loads it says what is wrong with it
    names = (f"{path}/config.json" for path in paths)
    return next((name for name in names if not (folder / name).is_file()), None)


def _missing_weights(folder: Path) -> str | None:
    single = folder / "model.safetensors"
    index = folder / f"{single.name}.index.json"
    if not index.is_file():
        return None if single.is_file() else single.name
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # who loads it says what is wrong with it
    return next((name for name in sorted(names) if not (folder / name).is_file()), None)
