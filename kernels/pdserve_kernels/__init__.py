"""Kernels as plain functions; `select` picks the set that runs on a device.

Every set (`reference`, `triton`) has the same functions with the same contracts, documented in
`pdserve_kernels.reference`.
"""

from types import ModuleType

import torch


def select(device: torch.device) -> ModuleType:
    """Return the kernel set for `device`: Triton on CUDA, torch reference elsewhere."""
    if device.type == "cuda":
        from pdserve_kernels import triton

        return triton
    from pdserve_kernels import reference

    return reference
