"""The process that downloads an adapter: two files of one commit, neither larger than allowed.

    python -m pdserve_engine.lora.hub_download FD

It is started by HubFetch alone. Folders are kept, one for each commit. The environment says where
the hub is (HF_ENDPOINT), who asks (HF_TOKEN) and where folders lie (HF_HOME).
"""

import errno
import os
import resource
import socket
import sys
from pathlib import Path

from pdserve_common.model_files.hub_path import is_commit
from pdserve_common.processes.connection import Connection, answer_calls
from pdserve_common.processes.lifecycle import die_with_parent
from pdserve_engine.lora.adapter_config import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    WEIGHTS_FILE,
    LoraError,
)
from pdserve_engine.lora.hub import CODEC, Download

FOLDER = "pdserve-adapters"


def main() -> None:
    die_with_parent()
    # Before the library reads it: files of its other protocol come from other hosts, uncounted.
    os.environ["HF_HUB_DISABLE_XET"] = "1"
    connection = Connection(socket.socket(fileno=int(sys.argv[1])), CODEC)
    answer_calls(connection, dict([Download.handled_by(_download)]), None)


def _download(_: None, call: Download) -> str:
    return str(download(call.repository, call.revision, call.max_weights_bytes))


def download(repository: str, revision: str, max_weights_bytes: int) -> Path:
    """Return the folder of a commit. Raises LoraError, and ConnectionError if the hub may have what
    it does not bring.
    """
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        commit = revision if is_commit(revision) else _commit_of(repository, revision)
        folder = Path(constants.HF_HOME) / FOLDER / repository.replace("/", "--") / commit
        _bring(repository, commit, folder, CONFIG_FILE, MAX_CONFIG_BYTES)
        _bring(repository, commit, folder, WEIGHTS_FILE, max_weights_bytes)
    except (errors.EntryNotFoundError, errors.HTTPError, OSError, RuntimeError) as error:
        raise _explained(error, repository, revision) from error
    return folder


def _commit_of(repository: str, revision: str) -> str:
    """Ask the hub what a branch or a tag is now."""
    from huggingface_hub import constants, model_info

    info = model_info(repository, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    # It becomes a part of a path.
    if not is_commit(info.sha or ""):
        raise LoraError(f"{constants.ENDPOINT} says that {revision} is {info.sha!r}, no commit")
    return str(info.sha)


def _bring(repository: str, commit: str, folder: Path, name: str, max_bytes: int) -> None:
    """Download a file, unless it is there. The library puts it there when it is whole."""
    from huggingface_hub import constants, errors, hf_hub_download

    if (folder / name).is_file():
        return
    try:
        found = hf_hub_download(repository, name, revision=commit, local_dir=folder, dry_run=True)
        if found.file_size is not None and found.file_size > max_bytes:
            raise _too_large(name, max_bytes)
        # A hub may say one thing and send another.
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, resource.RLIM_INFINITY))
        hf_hub_download(repository, name, revision=commit, local_dir=folder)
    except errors.RemoteEntryNotFoundError as error:
        raise LoraError(f"{constants.ENDPOINT} has no {name} in it at {commit}") from error
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise _too_large(name, max_bytes) from error


def _too_large(name: str, max_bytes: int) -> LoraError:
    return LoraError(f"{name} has more than {max_bytes} bytes, which its model leaves room for")


def _explained(error: Exception, repository: str, revision: str) -> LoraError | ConnectionError:
    """Say in a sentence why there is no folder."""
    from huggingface_hub import constants, errors

    where = constants.ENDPOINT
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # what happened; the library's own text is a paragraph of advice
    if isinstance(error, errors.GatedRepoError):
        return LoraError(f"{repository} is gated on {where}: accept its terms, and set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        return LoraError(f"{where} has no {repository} that is open to all, see HF_TOKEN")
    if isinstance(error, errors.RevisionNotFoundError):
        return LoraError(f"{where} has no revision {revision!r} of {repository}")
    if constants.HF_HUB_OFFLINE:
        return ConnectionError(
            "HF_HUB_OFFLINE is set, and only commits that were loaded before are here"
        )
    why = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        why = error.strerror or type(error).__name__  # its text has a path
    return ConnectionError(f"{where} did not bring it: {' '.join(why.split())[:300]}")


if __name__ == "__main__":
    main()
