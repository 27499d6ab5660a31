"""Which instruction sets the C++ kernels are compiled for, and which of them this machine runs."""

import os
import platform
import sys
from pathlib import Path

# Best first, with what the compiler and what /proc/cpuinfo calls them.
COMPILER_FLAGS = {
    "avx512bf16": ("-march=x86-64-v4", "-mavx512bf16"),
    "avx2": ("-mavx2", "-mfma"),
}
_CPU_FLAGS = {
    "avx512bf16": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16"},
    "avx2": {"avx2", "fma"},
}
# Names one of the above, or "reference" for none.
ISA_VARIABLE = "PDSERVE_CPU_ISA"
# What Linux says of the processor.
CPUINFO = Path("/proc/cpuinfo")


class KernelsUnavailable(Exception):
    """There are no compiled kernels for this machine; the message says why, and what helps."""


def wanted_isas(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """Return the instruction sets to try, best first: all that this machine has kernels for, or the
    one it is told to use.

    None of them if PDSERVE_CPU_ISA is "reference". Raises ValueError if that variable names what is
    unknown or what the processor lacks.
    """
    supported = supported_isas(cpuinfo)
    wanted = os.environ.get(ISA_VARIABLE)
    if wanted is None:
        return supported
    if wanted == "reference":
        return ()
    if wanted not in COMPILER_FLAGS:
        known = ", ".join((*COMPILER_FLAGS, "reference"))
        raise ValueError(f"{ISA_VARIABLE} is {wanted!r}, must be one of {known}")
    if wanted not in supported:
        has = ", ".join(supported) or "none of them"
        raise ValueError(f"{ISA_VARIABLE} is {wanted}, this processor has {has}")
    return (wanted,)


def supported_isas(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """Return those of COMPILER_FLAGS that this processor and system run, best first."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return ()
    flags = _processor_flags(cpuinfo)
    return tuple(isa for isa, needed in _CPU_FLAGS.items() if needed <= flags)


def _processor_flags(cpuinfo: Path) -> set[str]:
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()
