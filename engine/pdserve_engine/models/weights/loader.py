"""Reading safetensors checkpoints: names and shapes checked first, then tensor by tensor."""

import ctypes
import hashlib
import logging
import math
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from pdserve_engine.models.config import ModelError, read_json
from pdserve_engine.models.config_fields import IndexFields, read_fields

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The weights whose names never have a prefix.
HEADS = ("lm_head.", "score.")
# Left in old Llama checkpoints; computed from the config instead.
IGNORED_SUFFIX = ".rotary_emb.inv_freq"
MAX_NAMES_IN_ERROR = 8
# What safetensors call e4m3.
FP8_KIND = "F8_E4M3"
DENSE_KINDS = ("BF16", "F16", "F32", "F64")
# A line about progress in the log at most this often.
PROGRESS_LOG_S = 1.0
# Bytes of a weight that are mapped at a time.
PIECE_BYTES = 16 << 20
# Bytes that may stay mapped until the next weight is read.
KEPT_BYTES = 4 << 20
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


class _LastFile(threading.local):
    """The file that a thread has read from last, open for the next weight: to open one parses the
    names of all its weights. After KEPT_BYTES it is closed, so that the pages leave the process.
    """

    path: Path | None = None
    file: Any = None
    num_bytes = 0

    def open(self, path: Path) -> Any:
        if path != self.path:
            self.close()
            self.path, self.file = path, _open(path)
        return self.file

    def note_read(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > KEPT_BYTES:
            self.close()

    def close(self) -> None:
        self.path, self.file, self.num_bytes = None, None, 0


class Checkpoint:
    """The weights of one model folder, read one by one: a caller holds only what it asked for.

    A model that was saved without its head may lack `prefix` before all its names there; here they
    have it. Of a model of several parts it may be one: `part` says what a stored weight is called
    here, or None for those of the others.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        progress: Progress | None = None,
        prefix: str = "",
        part: Callable[[str], str | None] = str,
    ) -> None:
        self.folder = Path(model_dir)
        files = _map_names_to_files(self.folder)
        if any(name.startswith(prefix) for name in files):
            prefix = ""
        # The file of each weight, and what it is called there.
        self._files: dict[str, Path] = {}
        self._stored: dict[str, str] = {}
        for stored, path in files.items():
            name = part(stored if stored.startswith(HEADS) else prefix + stored)
            if name is not None:
                self._files[name], self._stored[name] = path, stored
        self._progress = progress
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._last_file = _LastFile()
        self._read_names: set[str] = set()
        self._lock = threading.Lock()
        # All weights but those that are computed from the config. A model of many experts has many
        # names, and asks for each whether it is among them.
        self.names = frozenset(name for name in self._files if not name.endswith(IGNORED_SUFFIX))
        self._num_expected = len(self.names)

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        *,
        in_fp8: Collection[str] = (),
        optional: Iterable[str] = (),
    ) -> None:
        """Raise ModelError unless the folder has exactly the expected weights, in their shapes, and
        has those alone in FP8 that are expected to be.

        A shape of one number is any such shape: tools differ in how they store scales.
        """
        names = self.names
        if missing := sorted(expected.keys() - names):
            raise ModelError(f"checkpoint lacks {len(missing)} weights: {name_some(missing)}")
        if unexpected := sorted(names - expected.keys() - set(optional)):
            raise ModelError(
                f"checkpoint has {len(unexpected)} weights the model has no place for:"
                f" {name_some(unexpected)}"
            )
        by_path: dict[Path, list[str]] = {}
        for name in expected:
            by_path.setdefault(self._files[name], []).append(name)
        for path, in_file in sorted(by_path.items()):
            with _open(path) as file:
                for name in in_file:
                    stored = self._slice(file, name)
                    self._shapes[name] = tuple(stored.get_shape())
                    _check_shape(name, self._shapes[name], expected[name])
                    _check_kind(name, stored.get_dtype(), name in in_fp8)
        self._num_expected = len(expected)

    def read(
        self, *weights: str | WeightPart, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a copy of some weights, stacked by rows, [rows, ...] in `dtype`; nothing keeps
        pointing into the files.

        Files are mapped for a piece at a time: the pages go straight into the new tensor and leave
        the process at once, but for KEPT_BYTES.
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
        """Return a weight, [rows, ...] in `dtype`, for reading here and there: on the CPU the file
        itself, mapped, of which only pages that are looked at take memory; a copy if it is stored
        in another dtype.
        """
        with _open(self._files[name]) as file:
            if device.type == "cpu" and self._slice(file, name)[:0].dtype == dtype:
                self._count_read(name)
                return file.get_tensor(self._stored[name])  # type: ignore[no-any-return]
        return self.read(name, dtype=dtype, device=device)

    def is_same(self, name: str, other: str, *, dtype: torch.dtype) -> bool:
        """Have two weights one shape, and equal numbers once they are in `dtype`?"""
        weight, twin = self._mapped(name), self._mapped(other)
        # In pieces, as another dtype is a copy.
        num_numbers = PIECE_BYTES // dtype.itemsize
        pieces = (torch.split(whole.flatten(), num_numbers) for whole in (weight, twin))
        return weight.shape == twin.shape and all(
            torch.equal(part.to(dtype), other_part.to(dtype))
            for part, other_part in zip(*pieces, strict=True)
        )

    def is_dense_float(self, name: str) -> bool:
        """Is a weight stored in numbers that need no scale?"""
        with _open(self._files[name]) as file:
            return self._slice(file, name).get_dtype() in DENSE_KINDS

    def rename(self, name: str, new_name: str) -> None:
        """Let a weight have another name here."""
        self._files[new_name] = self._files.pop(name)
        self._stored[new_name] = self._stored.pop(name)
        self.names = self.names - {name} | {new_name}

    def read_as_stored(self, name: str) -> torch.Tensor:
        """Return a copy of one weight on the CPU, in the shape [...] and dtype of the file."""
        file = self._last_file.open(self._files[name])
        stored = self._slice(file, name)
        if not stored.get_shape():
            self._count_read(name)
            return file.get_tensor(self._stored[name]).clone()  # type: ignore[no-any-return]
        dtype = stored[:0].dtype
        del file, stored  # closed means unmapped
        return self.read(name, dtype=dtype, device=torch.device("cpu"))

    def _read_into(self, target: torch.Tensor, part: WeightPart) -> None:
        num_rows = max(1, PIECE_BYTES * len(target) // max(1, target.nbytes))
        first = part.rows.start or 0
        for start in range(0, len(target), num_rows):
            piece = target[start : start + num_rows]
            rows = slice(first + start, first + start + len(piece))
            wanted = (rows, part.columns)[: target.dim()]
            file = self._last_file.open(self._files[part.name])
            piece.copy_(self._slice(file, part.name)[wanted])
            del file  # closed means unmapped
            self._last_file.note_read(piece.nbytes)

    def _count_read(self, name: str) -> None:
        with self._lock:  # transformers reads on several threads
            if name in self._read_names:  # a tied embedding is read twice
                return
            self._read_names.add(name)
            if self._progress is not None:
                self._progress(len(self._read_names), self._num_expected)

    def _mapped(self, name: str) -> torch.Tensor:
        """Return a weight as it is stored, mapped."""
        with _open(self._files[name]) as file:
            self._slice(file, name)
            return file.get_tensor(self._stored[name])  # type: ignore[no-any-return]

    def _slice(self, file: Any, name: str) -> Any:
        """Return a weight of its open file, for reading it or parts of it."""
        try:
            return file.get_slice(self._stored[name])
        except SafetensorError as error:
            raise ModelError(
                f"{self._files[name]} lacks {self._stored[name]:.200}, which {INDEX_FILE} names"
            ) from error

    def _shape(self, name: str) -> tuple[int, ...]:
        if (shape := self._shapes.get(name)) is None:
            file = self._last_file.open(self._files[name])
            shape = self._shapes[name] = tuple(self._slice(file, name).get_shape())
        return shape


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
        _open(path)  # refuses what is no safetensors file
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


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected and not math.prod(shape) == math.prod(expected) == 1:
        raise ModelError(f"{name} has shape {shape}, the config asks {expected}")


def _check_kind(name: str, kind: str, is_fp8: bool) -> None:
    if is_fp8 and kind != FP8_KIND:
        raise ModelError(f"{name} is stored as {kind}, must be {FP8_KIND} as it has a scale")
    if kind.startswith("F8_") and kind != FP8_KIND:
        raise ModelError(f"{name} is stored as {kind}, which is not supported")
    if not is_fp8 and kind == FP8_KIND:
        raise ModelError(f"{name} is stored as {kind}, and nothing says what scale that has")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or no safetensors file: {error!s:.200}") from error


def _map_names_to_files(folder: Path) -> dict[str, Path]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if index.exists():
        try:
            weight_map = read_fields(IndexFields, read_json(index))["weight_map"]
        except ModelError:
            raise
        except ValueError as error:
            raise ModelError(f"{index}: {error}") from error
        # Of a name that no file can have, pathlib's `is_file` raises OSError.
        shards = set(weight_map.values())
        if absent := sorted(file for file in shards if not os.path.isfile(folder / file)):
            raise ModelError(f"{index} names shards that do not exist: {name_some(absent)}")
        return {name: folder / file for name, file in weight_map.items()}
    if not single.exists():
        raise ModelError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    with _open(single) as file:
        return dict.fromkeys(file.keys(), single)


def name_some(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = len(names) - MAX_NAMES_IN_ERROR
    some = [name[:200] for name in names[:MAX_NAMES_IN_ERROR]]
    return ", ".join(some) + (f" and {more} more" if more > 0 else "")
