"""Memory that the kernels stream through, on huge pages where the system has them."""

import contextlib
import mmap

import torch

_HUGE_PAGE = 2 * 2**20


def empty_on_huge_pages(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor [num_elements] of a dtype, aligned to 64 bytes or more.

    The prefetchers of a CPU stop at the end of a page, so that streaming a weight from small pages
    costs a fifth of the memory's rate. Pages belong to the NUMA node of whoever writes them first.
    """
    num_bytes = num_elements * dtype.itemsize
    if num_bytes < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_elements, dtype=dtype)
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    with contextlib.suppress(OSError):  # a kernel built without them
        # Only what is used: the last huge page would otherwise be allocated whole.
        mapping.madvise(mmap.MADV_HUGEPAGE, start, num_bytes)
    return torch.frombuffer(mapping, dtype=dtype, count=num_elements, offset=start)
