"""Many small arrays in one buffer of bytes, so that one copy brings them to the device."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

# Each array's first byte is so aligned: a kernel's loads are as wide.
ALIGNMENT = 16

Arrays = Mapping[str, npt.NDArray[np.generic]]


class Field(NamedTuple):
    """An array of a layout."""

    dtype: npt.DTypeLike
    shape: tuple[int, ...]


class _Place(NamedTuple):
    """Which bytes are a field's."""

    start: int
    end: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Layout:
    """Where each of some named arrays lies."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self._places: dict[str, _Place] = {}
        self.num_bytes = 0
        for name, field in fields.items():
            dtype = np.dtype(field.dtype)
            end = self.num_bytes + math.prod(field.shape) * dtype.itemsize
            self._places[name] = _Place(self.num_bytes, end, dtype, field.shape)
            self.num_bytes = -(-end // ALIGNMENT) * ALIGNMENT

    def start_of(self, name: str) -> int:
        """Return the index of an array's first byte."""
        return self._places[name].start

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arrays in buffer, uint8 [num_bytes]."""
        return {
            name: buffer[place.start : place.end].view(_torch_dtype(place.dtype)).view(place.shape)
            for name, place in self._places.items()
        }

    def fill(self, buffer: torch.Tensor, arrays: Arrays) -> None:
        """Write arrays to those of the same names in buffer, uint8 [num_bytes], which is in host
        memory. A smaller one leaves the rest as it is.
        """
        memory = buffer.numpy()
        for name, array in arrays.items():
            start, end, dtype, shape = self._places[name]
            view = memory[start:end].view(dtype).reshape(shape)
            view[tuple(map(slice, array.shape))] = array

    def to_device(self, arrays: Arrays, device: torch.device) -> dict[str, torch.Tensor]:
        """Return copies of all arrays on a device, of the shapes [...] and dtypes of the layout,
        without waiting for it.
        """
        host = pinned(self.num_bytes, device)
        self.fill(host, arrays)
        return self.views(host.to(device, non_blocking=True))


def pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory, uint8 [num_bytes], from which copies to `device` need not be waited for: the
    allocator hands it out again only when they are over.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
