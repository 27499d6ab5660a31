"""Kernels as plain functions; `select` picks the set that runs on a device.

Every set (`reference`, `cpu`, `triton`, `triton.deterministic`, `triton.flash_attn`) is a
KernelSet: the same functions with the same contracts, documented in `pdserve_kernels.reference`.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Literal, cast

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

__all__ = ["CudaKernels", "KernelSet", "name_of", "select", "use_on_cuda"]

CudaKernels = Literal["triton", "triton.deterministic", "triton.flash_attn"]

_on_cuda: CudaKernels = "triton"


def use_on_cuda(kernels: CudaKernels) -> None:
    """Say which set `select` returns on CUDA: Triton's, the one in which a row's bits do not depend
    on its batch, or the one with FlashAttention 3. For the whole process, before its model is
    loaded.
    """
    global _on_cuda
    _on_cuda = kernels


def select(device: torch.device) -> KernelSet:
    """Return the kernel set for `device`: Triton on CUDA, C++ on a CPU that has it, else torch.

    The first call compiles the C++, if that was not done before; a log line says why it cannot.
    """
    if device.type == "cuda":
        return cast(KernelSet, importlib.import_module(f"pdserve_kernels.{_on_cuda}"))
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
    cpu/avx512bf16 or cpu/avx2, or triton.flash_attn/ and the version that is installed.
    """
    name = kernels.__name__.removeprefix("pdserve_kernels.")
    if name == "cpu":
        from pdserve_kernels.cpu.compiled import loaded_isa

        return f"{name}/{loaded_isa()}"
    if name == "triton.flash_attn":
        from pdserve_kernels.triton.flash_attn import vendor_version

        return f"{name}/{vendor_version()}"
    return name
