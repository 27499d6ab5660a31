"""Whether this process can reach peers by RDMA."""

import os
from fnmatch import fnmatchcase
from pathlib import Path

RDMA_DEVICES = Path("/sys/class/infiniband")
RDMA_VERBS = Path("/dev/infiniband")


def has_rdma_device(devices: Path = RDMA_DEVICES, verbs: Path = RDMA_VERBS) -> bool:
    """Is there an RDMA device that this process may open, and UCX_NET_DEVICES does not leave out?

    A container sees all devices of its machine in `devices`, and in `verbs` those it was given.
    """
    return any(_is_allowed(device.name) for device in devices.glob("*")) and any(
        os.access(path, os.R_OK | os.W_OK) for path in verbs.glob("uverbs*")
    )


def _is_allowed(device: str) -> bool:
    """Names in the setting are like mlx5_0:1."""
    allowed = os.environ.get("UCX_NET_DEVICES", "all")
    if allowed in ("", "all") or allowed.startswith("^"):
        return True  # a list of those that are left out mostly leaves some
    return any(fnmatchcase(device, name.partition(":")[0]) for name in allowed.split(","))
