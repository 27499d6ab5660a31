"""Whether this process can reach peers by RDMA."""

import os
from pathlib import Path

RDMA_DEVICES = Path("/sys/class/infiniband")
RDMA_VERBS = Path("/dev/infiniband")


def has_rdma_device(devices: Path = RDMA_DEVICES, verbs: Path = RDMA_VERBS) -> bool:
    """Is there an RDMA device that this process may open?

    A container sees all devices of its machine in `devices`, and in `verbs` those it was given.
    """
    return any(devices.glob("*")) and any(
        os.access(path, os.R_OK | os.W_OK) for path in verbs.glob("uverbs*")
    )
