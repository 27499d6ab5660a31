"""The ranks of one model as processes of one machine, which exchange through shared memory."""

import ctypes
import mmap
import os
from collections.abc import Callable

import torch

from pdserve_kernels.cpu.compiled import library
from pdserve_kernels.groups import NUM_SUMS

# A cache line: what a flag has to itself, and slots are multiples of.
_LINE = 64
_FLAGS_BYTES = 4096
_SLOTS_PER_RANK = 2


class NativeGroup(ctypes.Structure):
    """`Group` of csrc/group.h."""

    _fields_ = (
        ("flags", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("timeout_ns", ctypes.c_int64),
        ("exchange", ctypes.c_int64),
        ("missing", ctypes.c_int64),
    )


class SharedGroup:
    """A `groups.Group` of 1, 2, 4 or 8 ranks over memory of `create_memory`, for tensors on CPUs.

    A memory serves one group: its flags count. Tensors that exceed a slot go in pieces. A rank that
    waits longer than a few microseconds leaves its core to others. No call holds the GIL.
    """

    @staticmethod
    def create_memory(size: int, slot_bytes: int) -> int:
        """Return the descriptor of memory for so many ranks, without a name: it is gone with the
        last process that has it. Whoever starts the ranks hands it down to them.

        slot_bytes: what a rank says at once; a multiple of 64. Raises ValueError, OSError.
        """
        num_bytes = _memory_bytes(size, slot_bytes)
        fd = os.memfd_create("pdserve-group")
        try:
            os.ftruncate(fd, num_bytes)
        except OSError:
            os.close(fd)
            raise
        return fd

    def __init__(
        self, fd: int, *, rank: int, size: int, slot_bytes: int, timeout_s: float = 60.0
    ) -> None:
        """Join as `rank`. The descriptor stays the caller's, who may close it at once.

        Raises ValueError if the memory is smaller than that of `create_memory`, or rank is none of
        the size's; KernelsUnavailable.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; it must be one of {size}")
        self._functions = library()
        self._mapping: mmap.mmap | None = mmap.mmap(fd, _memory_bytes(size, slot_bytes))
        self._timeout_s = timeout_s
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._native = NativeGroup(
            start,
            start + _FLAGS_BYTES,
            slot_bytes,
            rank,
            size,
            int(timeout_s * 1e9),
            0,
            -1,
        )

    @property
    def rank(self) -> int:
        return int(self._native.rank)

    @property
    def size(self) -> int:
        return int(self._native.size)

    @property
    def slot_bytes(self) -> int:
        return int(self._native.slot_bytes)

    @property
    def native(self) -> NativeGroup:
        """What the C++ works with: `check` before and after each use."""
        return self._native

    def check(self) -> None:
        """Raise RuntimeError if the group is closed, or a rank has not come."""
        if self._mapping is None:
            raise RuntimeError("the group is closed")
        if self._native.missing >= 0:
            raise RuntimeError(
                f"rank {self._native.missing} of {self.size} did not come "
                f"within {self._timeout_s:g} s"
            )

    def sum_rows(self, partial: torch.Tensor) -> torch.Tensor:
        """See `groups.Group`."""
        _check_tensor(partial)
        if partial.dtype != torch.float32:
            raise TypeError(f"partial sums are {partial.dtype}, must be torch.float32")
        total = torch.empty_like(partial)
        self._call(
            self._functions.pds_group_sum, partial.data_ptr(), total.data_ptr(), partial.numel()
        )
        return total

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """See `groups.Group`."""
        _check_tensor(part)
        parts = part.new_empty(self.size, *part.shape)
        self._call(self._functions.pds_group_gather, part.data_ptr(), parts.data_ptr(), part.nbytes)
        return parts

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See `groups.Group`."""
        _check_tensor(tensor)
        self._call(self._functions.pds_group_broadcast, tensor.data_ptr(), tensor.nbytes)

    def close(self) -> None:
        """Leave the memory, in which no call may be running; later calls raise RuntimeError."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def _call(self, function: Callable[..., None], *arguments: int) -> None:
        self.check()
        function(ctypes.byref(self._native), *arguments)
        self.check()


def _memory_bytes(size: int, slot_bytes: int) -> int:
    if size not in (1, 2, 4, NUM_SUMS):
        raise ValueError(f"size is {size}; it must be 1, 2, 4 or {NUM_SUMS}")
    if slot_bytes < _LINE or slot_bytes % _LINE:
        raise ValueError(f"slot_bytes is {slot_bytes}; it must be a multiple of {_LINE}")
    return _FLAGS_BYTES + size * _SLOTS_PER_RANK * slot_bytes


def _check_tensor(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"the tensor is on {tensor.device} with strides {tensor.stride()}, must be dense on cpu"
        )
