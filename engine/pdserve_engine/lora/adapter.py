"""LoRA adapters in peft's format: a folder with adapter_config.json and safetensors."""

import hashlib
import io
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from pdserve_engine.lora.adapter_config import (
    CONFIG_FILE,
    MAX_CONFIG_BYTES,
    MAX_SHOWN,
    WEIGHTS_FILE,
    LoraError,
    Scaled,
    Targets,
    parse_adapter_config,
)
from pdserve_engine.lora.safetensors_file import MAX_HEADER_BYTES, parse_safetensors

PICKLE_FILE = "adapter_model.bin"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
# The most that a number takes in the weights' file.
_BYTES = 4
MAX_PATH_CHARS = 1024
PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraModule:
    """What an adapter adds to a linear's output: scale * (x @ a^T) @ b^T."""

    # [rank, in_features]
    a: torch.Tensor
    # [out_features, rank]
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """An adapter's weights on the CPU, in the dtype that the model is served in."""

    # SHA-256 of all that it computes with, in hex: the folder's name and where it is say nothing.
    digest: str
    # The largest of its modules.
    rank: int
    # By the linear's full name.
    modules: Mapping[str, LoraModule]


def folder_below(root: str, path: str) -> Path:
    """Return a folder below another one, which `path` names from there. Raises LoraError for one
    that leads elsewhere, over a link also.
    """
    shown = f"lora_path is {path[:MAX_SHOWN]!r}"
    if len(path) > MAX_PATH_CHARS:
        raise LoraError(f"{shown}... ({len(path)} characters), at most {MAX_PATH_CHARS} are served")
    if not path.isprintable() or Path(path).is_absolute() or ".." in Path(path).parts:
        raise LoraError(f"{shown}, must be the path of a folder below lora_root")
    folder = Path(root) / path
    if Path(os.path.realpath(root)) not in Path(os.path.realpath(folder)).parents:
        raise LoraError(f"{shown}, which does not lead below lora_root")
    return folder


def max_weights_bytes(targets: Targets, max_rank: int) -> int:
    """Return the size of the largest file of weights: all linears at the highest rank, in fp32."""
    return MAX_HEADER_BYTES + sum(
        _BYTES * max_rank * (rows + columns) for rows, columns in targets.values()
    )


def read_adapter(
    folder: str | Path, targets: Targets, *, dtype: torch.dtype, max_rank: int
) -> LoraAdapter:
    """Read a folder whose files may be anything. Raises LoraError, with the folder's name."""
    try:
        return _read(Path(folder), targets, dtype, max_rank)
    except LoraError as error:
        raise LoraError(f"adapter {folder}: {error}") from error
    except OSError as error:
        raise LoraError(f"adapter {folder} cannot be read: {error.strerror}") from error


def _read(folder: Path, targets: Targets, dtype: torch.dtype, max_rank: int) -> LoraAdapter:
    if not folder.is_dir():
        raise LoraError("there is no such folder")
    config = parse_adapter_config(
        bytes(_read_file(folder, CONFIG_FILE, MAX_CONFIG_BYTES).numpy()), max_rank=max_rank
    )
    scaled = config.scaled(targets)
    shapes = _shapes(scaled, targets)
    num_bytes = sum(_BYTES * rows * columns for rows, columns in shapes.values())
    if not (folder / WEIGHTS_FILE).exists() and (folder / PICKLE_FILE).exists():
        raise LoraError(f"{PICKLE_FILE} is a pickle, which may run code: served is {WEIGHTS_FILE}")
    if not (folder / WEIGHTS_FILE).exists() and (folder / INDEX_FILE).exists():
        raise LoraError(f"{INDEX_FILE} says it is in shards: served is one file, {WEIGHTS_FILE}")
    weights = _parse_weights(_read_file(folder, WEIGHTS_FILE, MAX_HEADER_BYTES + num_bytes))
    stored = {_as_with_head(name): weight for name, weight in weights.items()}
    _check_weights(stored, shapes)
    return LoraAdapter(
        digest=_digest(scaled, stored),
        rank=max(rank for rank, _ in scaled.values()),
        modules={
            name: LoraModule(
                a=_converted(stored, _name_of_a(name), dtype),
                b=_converted(stored, _name_of_b(name), dtype),
                scale=scale,
            )
            for name, (_, scale) in scaled.items()
        },
    )


def _as_with_head(name: str) -> str:
    """Return what a weight is called in an adapter of the same model with a head: one that was
    trained without has the layers at the top.
    """
    if name.startswith(f"{PREFIX}layers."):
        return f"{PREFIX}model.{name.removeprefix(PREFIX)}"
    return name


def _name_of_a(module: str) -> str:
    return f"{PREFIX}{module}.lora_A.weight"


def _name_of_b(module: str) -> str:
    return f"{PREFIX}{module}.lora_B.weight"


def _shapes(scaled: Mapping[str, Scaled], targets: Targets) -> dict[str, tuple[int, int]]:
    """Return the weights that there have to be, with their shapes."""
    shapes = {}
    for name, (rank, _) in scaled.items():
        out_features, in_features = targets[name]
        shapes[_name_of_a(name)] = (rank, in_features)
        shapes[_name_of_b(name)] = (out_features, rank)
    return shapes


def _read_file(folder: Path, name: str, max_bytes: int) -> torch.Tensor:
    """Return a regular file's bytes; no link is followed, and no pipe is waited for."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with open(os.open(folder / name, flags), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise LoraError(f"{name} is no regular file")
            if status.st_size > max_bytes:
                raise LoraError(
                    f"{name} has more than {max_bytes} bytes, which its config leaves room for"
                )
            # Memory that nobody fills first: steps wait for the GIL meanwhile.
            content = torch.empty(status.st_size, dtype=torch.uint8)
            return content[: _read_into(file, content.numpy().data)]
    except OSError as error:
        link = ", links are not followed" if (folder / name).is_symlink() else ""
        raise LoraError(f"{name} cannot be read: {error.strerror}{link}") from error


def _read_into(file: io.FileIO, memory: memoryview) -> int:
    """Return the number of bytes; fewer than there is room for if the file has become shorter."""
    at = 0
    while at < len(memory) and (num := file.readinto(memory[at:])):
        at += num
    return at


def _parse_weights(content: torch.Tensor) -> dict[str, torch.Tensor]:
    try:
        return parse_safetensors(content)
    except ValueError as error:
        raise LoraError(f"{WEIGHTS_FILE} is broken: {str(error)[:200]}") from error


def _check_weights(
    stored: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, int]]
) -> None:
    if missing := sorted(shapes.keys() - stored.keys()):
        raise LoraError(f"{WEIGHTS_FILE} lacks {len(missing)} weights, as {missing[0]}")
    if unknown := sorted(stored.keys() - shapes.keys()):
        raise LoraError(
            f"{WEIGHTS_FILE} has {len(unknown)} weights that the config has no place for, as "
            f"{unknown[0][: 2 * MAX_SHOWN]!r}"
        )
    for name, shape in shapes.items():
        if (stored_shape := tuple(stored[name].shape)) != shape:
            raise LoraError(f"{name} has shape {stored_shape}, must be {shape}")


def _converted(stored: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype) -> torch.Tensor:
    tensor = stored[name].to(dtype).contiguous()
    # In the served dtype: large numbers of another one may not be in it.
    if not torch.isfinite(tensor).all():
        raise LoraError(f"{name} has NaN or infinity in {str(dtype).removeprefix('torch.')}")
    return tensor


def _digest(scaled: Mapping[str, Scaled], stored: Mapping[str, torch.Tensor]) -> str:
    """Hash what is computed with: equal for configs that say the same in other words."""
    digest = hashlib.sha256()
    for name in sorted(scaled):
        digest.update(f"{name} {scaled[name].rank} {scaled[name].scale!r}\n".encode())
    for name in sorted(stored):
        tensor = stored[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
