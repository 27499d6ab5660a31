"""How much memory there is and how much is used: the host's, within its cgroup, or a GPU's."""

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from pdserve_common.processes.cgroups import CGROUPS, PROC, group_folders


class _CgroupFiles(NamedTuple):
    """What the files of a cgroup version are called."""

    controller: str  # v2 has no name
    limit: str
    usage: str
    # A line of memory.stat: page cache that is given up before anything fails.
    reclaimable: str


_V2 = _CgroupFiles("", "memory.max", "memory.current", "inactive_file")
_V1 = _CgroupFiles(
    "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)


def available_host_bytes(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return what this process could still allocate: of the machine, or of a cgroup that limits
    it. Raises OSError where there is no /proc.
    """
    available = _field(proc / "meminfo", "MemAvailable:") * 1024
    for files in (_V2, _V1):
        for folder in group_folders(files.controller, proc=proc, cgroups=cgroups):
            available = min(available, _left_in_cgroup(folder, files, available))
    return max(0, available)


def used_bytes(device: torch.device) -> int:
    """Return what is taken of the GPU by all processes, or of the host by this one."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int((PROC / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def out_of_memory_reason(error: RuntimeError) -> str | None:
    """Return the first line of what one of torch's allocators says: CUDA's, or the CPU's, whose
    error has no class of its own. None: it is not theirs.
    """
    reason = str(error).partition("\n")[0]
    is_theirs = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in reason
    return reason if is_theirs else None


def peak_growth(device: torch.device, run: Callable[[], None]) -> int:
    """Run something and return how many bytes above what was used before it went."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Sets the peak back to what is used now; without it an earlier peak hides a lower one.
    with contextlib.suppress(OSError):
        (PROC / "self" / "clear_refs").write_text("5")
    before = used_bytes(device)
    run()
    return max(0, _field(PROC / "self" / "status", "VmHWM:") * 1024 - before)


def wait_for_stream(device: torch.device) -> None:
    """Return when what this thread has begun on a GPU is done; at once on the CPU. NIXL's copies
    wait for no stream of torch's.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def release_unused(device: torch.device) -> None:
    """Collect garbage and have the allocators give back what is free. What is left is frozen: it
    lives for long, and a collection of all objects takes half a second. Who gives up some of it
    calls `gc.unfreeze` before.
    """
    gc.collect()
    gc.freeze()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if trim is not None:
            trim(0)


def _left_in_cgroup(folder: Path, files: _CgroupFiles, unlimited: int) -> int:
    try:
        limit = (folder / files.limit).read_text().strip()
        if limit == "max":
            return unlimited
        usage = int((folder / files.usage).read_text())
        reclaimable = _field(folder / "memory.stat", files.reclaimable)
    except OSError:  # the root of v2 has none of them
        return unlimited
    return int(limit) - usage + reclaimable


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    return 0
