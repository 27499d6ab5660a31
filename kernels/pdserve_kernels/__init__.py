"""Kernels as plain functions; `select` picks the set that runs on a device.

Every set (`reference`, `cpu`, `triton`, `triton.deterministic`) is a KernelSet: the same functions
with the same contracts, documented in `pdserve_kernels.reference`.
"""

import os
import sys
from pathlib import Path

import torch

from pdserve_kernels.kernel_set import KernelSet


def _make_mkl_strict() -> None:
    """On Intel's processors MKL, behind torch's fp32 products, sums a row in an order that depends
    on how many rows there are, unless it is told otherwise before its first product. On others,
    where it runs other code, it does not, and strict would be slow.
    """
    if sys.platform == "linux" and "GenuineIntel" in Path("/proc/cpuinfo").read_text():
        os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")


_make_mkl_strict()

__all__ = ["KernelSet", "name_of", "select", "use_deterministic"]


_is_deterministic = False


def use_deterministic(is_wanted: bool) -> None:
    """Have `select` return, on CUDA, the set whose rows' bits do not depend on their batch. For the
    whole process, before its model is loaded.
    """
    global _is_deterministic
    _is_deterministic = is_wanted


def select(device: torch.device) -> KernelSet:
    """Return the kernel set for `device`: Triton on CUDA, C++ on a CPU that has it, else torch.

    The first call compiles the C++, if that was not done before; a log line says why it cannot.
    """
    if device.type == "cuda":
        from pdserve_kernels import triton
        from pdserve_kernels.triton import deterministic

        return deterministic if _is_deterministic else triton
    from pdserve_kernels import cpu, reference
    from pdserve_kernels.cpu.compiled import library
    from pdserve_kernels.cpu.isa import KernelsUnavailable

    try:
        library()
    except KernelsUnavailable:
        return reference
    return cpu


def name_of(kernels: KernelSet) -> str:
    """Return what a set from `select` is called: triton, triton.deterministic, reference,
    cpu/avx512bf16 or cpu/avx2.
    """
    from pdserve_kernels.cpu.compiled import loaded_isa

    name = kernels.__name__.removeprefix("pdserve_kernels.")
    return f"{name}/{loaded_isa()}" if name == "cpu" else name
