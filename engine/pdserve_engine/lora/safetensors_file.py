"""Reads safetensors without a copy of the whole.

The format: the header's length in 8 bytes, little-endian; the header, JSON that says of each tensor
dtype, shape and where its bytes begin and end; the bytes of all, without gaps
(https://huggingface.co/docs/safetensors). The format's own library copies a file from memory in one
call that keeps the GIL, 40 ms and more for an adapter: steps would wait.
"""

import json
import math
from collections.abc import Iterable
from typing import Any

import torch

# It is parsed in one piece, for which steps wait, and takes many times its size in memory. Names of
# some thousand tensors take less.
MAX_HEADER_BYTES = 1 << 20
# Adapters have two. Sizes of as many as a header has room for would be multiplied for seconds.
MAX_DIMS = 8
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_SHOWN = 120


def parse_safetensors(content: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, most of them views of its bytes (uint8 [size]). Raises
    ValueError for what is no such file, has another dtype than those of DTYPES, a tensor of more
    than MAX_DIMS dimensions, or a header of more than MAX_HEADER_BYTES.
    """
    header_end = _LENGTH_BYTES + int.from_bytes(_bytes(content[:_LENGTH_BYTES]), "little")
    if len(content) < _LENGTH_BYTES or header_end > len(content):
        raise ValueError("the header is longer than the file")
    if header_end > MAX_HEADER_BYTES:
        raise ValueError(f"the header has more than {MAX_HEADER_BYTES} bytes")
    header = _parse_header(_bytes(content[_LENGTH_BYTES:header_end]))
    data, tensors, places = content[header_end:], {}, []
    for name, entry in header.items():
        dtype, shape, begin, end = _parse_entry(name, entry)
        if not 0 <= begin <= end <= len(data) or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{_shown(name)} has bytes {begin} to {end}, of {len(data)}")
        places.append((begin, end))
        tensors[name] = _view(name, data[begin:end], dtype, shape)
    _check_whole(places, len(data))
    return tensors


def _bytes(part: torch.Tensor) -> bytes:
    return bytes(part.numpy())


def _parse_header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("the header is nested too deeply") from error
    if not isinstance(header, dict):
        raise ValueError("the header is no object")
    header.pop(_METADATA, None)
    return header


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the header has {_shown(key)} twice")
        found[key] = value
    return found


def _parse_entry(name: str, entry: Any) -> tuple[torch.dtype, list[int], int, int]:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise ValueError(f"{_shown(name)} must have {', '.join(sorted(_FIELDS))}")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        served = ", ".join(DTYPES)
        raise ValueError(f"{_shown(name)} is {_shown(entry['dtype'])}, served are {served}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{_shown(name)} has shape {_shown(shape)} at {_shown(offsets)}")
    if len(shape) > MAX_DIMS:
        raise ValueError(f"{_shown(name)} has {len(shape)} dimensions, at most {MAX_DIMS} are read")
    return dtype, shape, offsets[0], offsets[1]


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 48 for value in values
    )


def _view(name: str, part: torch.Tensor, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """Views have to be aligned, what is in a file need not be."""
    is_aligned = part.storage_offset() % dtype.itemsize == 0
    try:
        return (part if is_aligned else part.clone()).view(dtype).view(shape)
    except RuntimeError as error:  # sizes of nothing may be too large for torch
        raise ValueError(f"{_shown(name)} has shape {_shown(shape)}: {error}") from error


def _check_whole(places: list[tuple[int, int]], num_bytes: int) -> None:
    at = 0
    for begin, end in sorted(places):
        if begin != at:
            raise ValueError(f"bytes {min(at, begin)} to {max(at, begin)} are nobody's, or two's")
        at = end
    if at != num_bytes:
        raise ValueError(f"bytes {at} to {num_bytes} are nobody's")


def _shown(value: object) -> str:
    return repr(value)[:_MAX_SHOWN]
