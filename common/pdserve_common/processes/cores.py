"""Processor cores: lists like "0-3,8", what this machine has, and how services share it."""

import contextlib
import os
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from pdserve_common.processes.cgroups import CGROUPS, PROC, group_folders

SYSTEM = Path("/sys/devices/system")
# More than any kernel is built for; keeps "0-999999999" from filling the memory.
MAX_CORE = 8191


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the cores of a list like "0-3,8", ascending. Raises ValueError if it is not one."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"cpu_cores is {text!r}, must be a list of cores like 0-3,8")
        begin, end = int(first), int(last or first)
        if not begin <= end <= MAX_CORE:
            raise ValueError(
                f"cpu_cores is {text!r}: {part.strip()} must ascend and end at most at {MAX_CORE}"
            )
        cores.update(range(begin, end + 1))
    return tuple(sorted(cores))


def format_cores(cores: Iterable[int]) -> str:
    """The list that `parse_cores` reads, as short as possible."""
    runs = groupby(enumerate(sorted(cores)), key=lambda item: item[1] - item[0])
    return ",".join(_format_run([core for _, core in run]) for _, run in runs)


def usable_cores() -> frozenset[int]:
    """Return the cores that this process may run on; all of them where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_limit(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Return how many cores' time this process may use, None if no cgroup (v2 or v1) limits it.

    Threads over it do not help: the kernel stops them all for the rest of each period.
    """
    limits: list[float] = []
    with contextlib.suppress(OSError):  # not Linux
        for controller in ("", "cpu"):
            folders = group_folders(controller, proc=proc, cgroups=cgroups)
            limits += filter(None, map(_group_limit, folders))
    return min(limits, default=None)


def confine_process(cores: Collection[int]) -> None:
    """Let all threads of this process, now and later, run on `cores` only.

    Raises ValueError for cores that this process may not use, or if the system has no such call.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("cpu_cores is set, this system does not let processes choose their cores")
    if unknown := set(cores) - usable_cores():
        raise ValueError(
            f"cpu_cores has {format_cores(unknown)}, must be among {format_cores(usable_cores())}"
        )
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def share_cores(
    cores: Collection[int], num_shares: int, *, min_size: int = 1, system: Path = SYSTEM
) -> list[tuple[int, ...]] | None:
    """Split cores into equal shares, each within one NUMA node; None if one would be too small.

    Of a core's hardware threads only the first counts, as two would share its vector units, unless
    there are too few cores. What is left over belongs to no share.
    """
    first = {core: min(_siblings(core, system) & set(cores)) for core in cores}
    for candidates in (set(first.values()), cores):
        nodes = _by_node(sorted(candidates, key=lambda core: (first[core], core)), system)
        if (shares := _equal_shares(nodes, num_shares, min_size)) is not None:
            return shares
    return None


def _group_limit(folder: Path) -> float | None:
    """The cores' time of a group alone."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        cores = int(quota) / int(period)
    except (OSError, ValueError):  # "max", or no such files
        return None
    return cores if cores > 0 else None  # -1 in v1: no limit


def _equal_shares(
    nodes: Sequence[tuple[int, ...]], num_shares: int, min_size: int
) -> list[tuple[int, ...]] | None:
    """The largest there are."""
    for size in range(max(map(len, nodes), default=0), min_size - 1, -1):
        shares = [node[i : i + size] for node in nodes for i in range(0, len(node), size)]
        shares = [share for share in shares if len(share) == size]
        if len(shares) >= num_shares:
            return shares[:num_shares]
    return None


def _by_node(cores: Sequence[int], system: Path) -> list[tuple[int, ...]]:
    """Return the cores of each node in their order; all as one node if nothing tells."""
    lists = sorted(
        system.glob("node/node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:])
    )
    texts = (path.read_text().strip() for path in lists)  # empty for a node of memory alone
    members = [set(parse_cores(text)) for text in texts if text]
    nodes = [tuple(core for core in cores if core in node) for node in members]
    return [node for node in nodes if node] or [tuple(cores)]


def _siblings(core: int, system: Path) -> set[int]:
    """The hardware threads of a core, itself included."""
    path = system / f"cpu/cpu{core}/topology/thread_siblings_list"
    return {core, *parse_cores(path.read_text().strip())} if path.exists() else {core}


def _format_run(run: list[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
