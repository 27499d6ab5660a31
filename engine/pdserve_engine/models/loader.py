"""Reading safetensors checkpoints: names and shapes checked first, then tensor by tensor."""

import hashlib
import json
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from pdserve_engine.models.config import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Left in old Llama checkpoints; computed from the config instead.
IGNORED_SUFFIX = ".rotary_emb.inv_freq"
MAX_NAMES_IN_ERROR = 8
DIGEST_SAMPLES = 64
DIGEST_SAMPLE_BYTES = 4096

# Called as progress(weights_read, weights_total).
Progress = Callable[[int, int], None]


class Checkpoint:
    """The weights of one model folder, read one by one: a caller holds only what it asked for."""

    def __init__(self, model_dir: str | Path, *, progress: Progress | None = None) -> None:
        self._files = _map_names_to_files(Path(model_dir))
        self._progress = progress
        self._num_read = 0
        self._num_expected = len(self._files)

    def check(
        self, expected: Mapping[str, tuple[int, ...]], *, optional: Iterable[str] = ()
    ) -> None:
        """Raise ModelError unless the folder has exactly the expected weights, in their shapes."""
        names = {name for name in self._files if not name.endswith(IGNORED_SUFFIX)}
        if missing := sorted(expected.keys() - names):
            raise ModelError(f"checkpoint lacks {len(missing)} weights: {_shorten(missing)}")
        if unexpected := sorted(names - expected.keys() - set(optional)):
            raise ModelError(
                f"checkpoint has {len(unexpected)} weights the model has no place for:"
                f" {_shorten(unexpected)}"
            )
        for path in sorted({self._files[name] for name in expected}):
            with _open(path) as file:
                for name in file.keys() & expected.keys():
                    shape = tuple(file.get_slice(name).get_shape())
                    if shape != expected[name]:
                        raise ModelError(
                            f"{name} has shape {shape}, the config asks {expected[name]}"
                        )
        self._num_expected = len(expected)

    def read(self, *names: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a copy of some weights, stacked by rows; nothing keeps pointing into the files.

        Files are mapped for this one read: the pages go straight into the new tensor and leave the
        process at once.
        """
        parts = [self._map(name) for name in names]
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        stacked = torch.empty(shape, dtype=dtype, device=device)
        for part, target in zip(
            parts, torch.split_with_sizes(stacked, [len(p) for p in parts]), strict=True
        ):
            target.copy_(part)
            self._num_read += 1
            if self._progress is not None:
                self._progress(self._num_read, self._num_expected)
        return stacked

    def _map(self, name: str) -> torch.Tensor:
        with _open(self._files[name]) as file:
            mapped: torch.Tensor = file.get_tensor(name)
        return mapped


def tty_progress() -> Progress | None:
    """Return a progress bar on stderr, or None where nobody would see it."""
    if not sys.stderr.isatty():
        return None
    bar = tqdm(desc="loading weights", unit="tensor", leave=False)

    def show(num_read: int, total: int) -> None:
        bar.total = total
        bar.update(num_read - bar.n)

    return show


def weights_digest(model_dir: str | Path) -> str:
    """Return a digest that tells checkpoints apart without reading them whole.

    SHA-256 over `config.json` and, for each safetensors file in name order, its name, size, header
    and DIGEST_SAMPLES pages spread evenly over its data. So it changes with any shape, dtype, name
    or sharding and with any retraining; a change of a few single weights may go unseen.
    """
    folder = Path(model_dir)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(set(_map_names_to_files(folder).values())):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            digest.update(file.read(header_bytes))
            start = 8 + header_bytes
            last = max(start, size - DIGEST_SAMPLE_BYTES)
            for i in range(DIGEST_SAMPLES):
                file.seek(start + (last - start) * i // (DIGEST_SAMPLES - 1))
                digest.update(file.read(DIGEST_SAMPLE_BYTES))
    return digest.hexdigest()


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged or no safetensors file: {error}") from error


def _map_names_to_files(folder: Path) -> dict[str, Path]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if index.exists():
        weight_map = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index} has no weight_map")
        files = {name: folder / file for name, file in weight_map.items()}
        if absent := sorted({path.name for path in files.values() if not path.exists()}):
            raise ModelError(f"{index} names shards that do not exist: {_shorten(absent)}")
        return files
    if not single.exists():
        raise ModelError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    with _open(single) as file:
        return dict.fromkeys(file.keys(), single)


def _shorten(names: list[str]) -> str:
    more = len(names) - MAX_NAMES_IN_ERROR
    return ", ".join(names[:MAX_NAMES_IN_ERROR]) + (f" and {more} more" if more > 0 else "")
