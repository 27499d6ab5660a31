"""The threads with which this process computes, and the cores they are on."""

import contextlib

import torch

from pdserve_common.processes.cores import cpu_limit
from pdserve_engine.config import EngineConfig
from pdserve_kernels.cpu.compiled import pin_threads
from pdserve_kernels.cpu.isa import KernelsUnavailable


def use_threads(config: EngineConfig) -> None:
    """Compute with as many threads as the config says, each on a core of its own if it has any."""
    torch.set_num_threads(config.num_threads or _default_num_threads(config))
    if config.cores and config.device == "cpu":
        # Without compiled kernels nothing can place the threads: they share the process's cores.
        with contextlib.suppress(KernelsUnavailable):
            pin_threads(config.cores)


def _default_num_threads(config: EngineConfig) -> int:
    """One for each core, but no more than the container has time for."""
    num_threads, limit = len(config.cores) or torch.get_num_threads(), cpu_limit()
    return num_threads if limit is None else max(1, min(num_threads, int(limit)))
