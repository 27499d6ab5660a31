"""Reading safetensors checkpoints: names and shapes checked first, then tensor by tensor."""

import ctypes
import hashlib
import json
import logging
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from pdserve_engine.models.config import ModelError

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Left in old Llama checkpoints; computed from the config instead.
IGNORED_SUFFIX = ".rotary_emb.inv_freq"
MAX_NAMES_IN_ERROR = 8
# A line about progress in the log at most this often.
PROGRESS_LOG_S = 1.0
# Bytes of a weight that are mapped at a time.
PIECE_BYTES = 16 << 20
# Tensors of at least this many bytes count as large; smaller ones do not add up to much.
MIN_MAPPED_BYTES = 128 << 10
# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
DIGEST_SAMPLES = 64
DIGEST_SAMPLE_BYTES = 4096

# Called as progress(weights_read, weights_total).
Progress = Callable[[int, int], None]


class WeightPart(NamedTuple):
    """Some rows of a weight, and of these some columns if it has any."""

    name: str
    rows: slice = slice(None)
    columns: slice = slice(None)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the part's, given the whole's."""
        cuts = (self.rows, self.columns)[: len(whole)]
        cut = [len(range(size)[part]) for size, part in zip(whole, cuts, strict=False)]
        return (*cut, *whole[len(cut) :])


class Checkpoint:
    """The weights of one model folder, read one by one: a caller holds only what it asked for."""

    def __init__(self, model_dir: str | Path, *, progress: Progress | None = None) -> None:
        self.folder = Path(model_dir)
        self._files = _map_names_to_files(self.folder)
        self._progress = progress
        self._read_names: set[str] = set()
        self._lock = threading.Lock()
        self._num_expected = len(self.names)

    @property
    def names(self) -> frozenset[str]:
        """The names of all weights but those that are computed from the config."""
        return frozenset(name for name in self._files if not name.endswith(IGNORED_SUFFIX))

    def check(
        self, expected: Mapping[str, tuple[int, ...]], *, optional: Iterable[str] = ()
    ) -> None:
        """Raise ModelError unless the folder has exactly the expected weights, in their shapes."""
        names = self.names
        if missing := sorted(expected.keys() - names):
            raise ModelError(f"checkpoint lacks {len(missing)} weights: {name_some(missing)}")
        if unexpected := sorted(names - expected.keys() - set(optional)):
            raise ModelError(
                f"checkpoint has {len(unexpected)} weights the model has no place for:"
                f" {name_some(unexpected)}"
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

    def read(
        self, *weights: str | WeightPart, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a copy of some weights, stacked by rows; nothing keeps pointing into the files.

        Files are mapped for a piece at a time: the pages go straight into the new tensor and leave
        the process at once.
        """
        parts = [WeightPart(part) if isinstance(part, str) else part for part in weights]
        shapes = [part.shape(self._shape(part.name)) for part in parts]
        sizes = [shape[0] for shape in shapes]
        stacked = torch.empty((sum(sizes), *shapes[0][1:]), dtype=dtype, device=device)
        for part, target in zip(parts, torch.split_with_sizes(stacked, sizes), strict=True):
            self._read_into(target, part)
            self._count_read(part.name)
        return stacked

    def map(self, name: str, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a weight for reading here and there: on the CPU the file itself, mapped, of which
        only pages that are looked at take memory; a copy if it is stored in another dtype.
        """
        with _open(self._files[name]) as file:
            if device.type == "cpu" and file.get_slice(name)[:0].dtype == dtype:
                self._count_read(name)
                return file.get_tensor(name)  # type: ignore[no-any-return]
        return self.read(name, dtype=dtype, device=device)

    def read_as_stored(self, name: str) -> torch.Tensor:
        """Return a copy of one weight on the CPU, in the shape and dtype of the file."""
        with _open(self._files[name]) as file:
            if not file.get_slice(name).get_shape():
                self._count_read(name)
                return file.get_tensor(name).clone()  # type: ignore[no-any-return]
            dtype = file.get_slice(name)[:0].dtype
        return self.read(name, dtype=dtype, device=torch.device("cpu"))

    def _read_into(self, target: torch.Tensor, part: WeightPart) -> None:
        num_rows = max(1, PIECE_BYTES * len(target) // max(1, target.nbytes))
        first = part.rows.start or 0
        for start in range(0, len(target), num_rows):
            piece = target[start : start + num_rows]
            rows = slice(first + start, first + start + len(piece))
            wanted = (rows, part.columns)[: target.dim()]
            with _open(self._files[part.name]) as file:
                piece.copy_(file.get_slice(part.name)[wanted])

    def _count_read(self, name: str) -> None:
        with self._lock:  # transformers reads on several threads
            if name in self._read_names:  # a tied embedding is read twice
                return
            self._read_names.add(name)
            if self._progress is not None:
                self._progress(len(self._read_names), self._num_expected)

    def _shape(self, name: str) -> tuple[int, ...]:
        with _open(self._files[name]) as file:
            return tuple(file.get_slice(name).get_shape())


def show_progress() -> Progress:
    """Return what draws a bar on a terminal, and logs a line now and then anywhere else."""
    return _bar() if sys.stderr.isatty() else _log_lines()


def _bar() -> Progress:
    bar = tqdm(desc="loading weights", unit="tensor", leave=False)

    def show(num_read: int, total: int) -> None:
        bar.total = total
        bar.update(num_read - bar.n)

    return show


def _log_lines() -> Progress:
    last = time.monotonic()

    def show(num_read: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_LOG_S:
            last = time.monotonic()
            logger.info("loading weights: %d of %d tensors", num_read, total)

    return show


@contextmanager
def large_tensors_mapped_apart() -> Iterator[None]:
    """Within, a large tensor that is freed goes back to the system at once.

    Loading frees about as much as it keeps: weights are read, then packed or fused, and dropped.
    On its heap the allocator would keep the holes, up to a second time the size of the model. The
    thresholds set afterwards are those that it reaches by itself in time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's alone
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, MIN_MAPPED_BYTES)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 64 << 20)


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
            raise ModelError(f"{index} names shards that do not exist: {name_some(absent)}")
        return files
    if not single.exists():
        raise ModelError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    with _open(single) as file:
        return dict.fromkeys(file.keys(), single)


def name_some(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = len(names) - MAX_NAMES_IN_ERROR
    return ", ".join(names[:MAX_NAMES_IN_ERROR]) + (f" and {more} more" if more > 0 else "")
