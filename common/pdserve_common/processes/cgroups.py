"""The control groups of this process, whose files say how much it may use."""

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def group_folders(
    controller: str = "", *, proc: Path = PROC, cgroups: Path = CGROUPS
) -> Iterator[Path]:
    """Yield the folders of this process's group and those above it: each may have a limit.

    `controller` is one of cgroup v1, "" stands for v2, which has them all in one place. In a
    container the group's path may be the host's, and only the mount itself, which comes first,
    exists. Raises OSError where there is no /proc.
    """
    mount = cgroups / controller
    yield mount
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller not in controllers.split(","):
            continue
        folder = mount / path.lstrip("/")
        while folder != mount:
            yield folder
            folder = folder.parent
