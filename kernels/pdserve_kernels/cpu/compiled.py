"""The compiled kernels as ctypes functions. A call releases the GIL while it runs.

Pointers are passed as integers (`Tensor.data_ptr()`); shapes, strides and dtypes are checked by the
Python functions around each call, the C++ trusts them.
"""

import ctypes
import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from pdserve_kernels.cpu.isa import KernelsUnavailable, wanted_isas

logger = logging.getLogger(__name__)

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

# The arguments of each function, in order; all return nothing.
SIGNATURES: dict[str, tuple[type, ...]] = {
    "pds_pin_threads": (POINTER, INT),
    "pds_pack_linear": (POINTER, INT, INT, INT, INT, POINTER),
    "pds_linear": (POINTER, INT, POINTER, POINTER),
    "pds_linear_lora": (POINTER, INT, POINTER, POINTER, INT, POINTER, INT, POINTER),
    "pds_shrink_lora": (POINTER, INT, POINTER, POINTER, INT, POINTER, INT),
    "pds_expand_lora": (POINTER, INT, POINTER, POINTER, INT, POINTER, INT),
    "pds_linear_sums": (POINTER, INT, POINTER, POINTER),
    "pds_linear_silu_mul": (POINTER, INT, POINTER, POINTER),
    "pds_moe_workspace_size": (POINTER, INT, POINTER),
    "pds_fused_moe": (POINTER, INT, *(POINTER,) * 3),
    "pds_argmax": (POINTER, *(INT,) * 4, *(POINTER,) * 3),
    "pds_count_nans": (POINTER, *(INT,) * 4, POINTER, POINTER),
    "pds_sample": (POINTER, *(INT,) * 4, *(POINTER,) * 8, INT, POINTER, POINTER),
    "pds_linear_argmax": (POINTER, INT, *(POINTER,) * 5),
    "pds_rms_norm": (POINTER, *(INT,) * 5, POINTER, FLOAT, POINTER),
    "pds_add_rms_norm": (POINTER, POINTER, INT, INT, POINTER, FLOAT, POINTER),
    "pds_silu_and_mul": (POINTER, INT, INT, INT, POINTER),
    "pds_rotary_embedding": (POINTER, INT, POINTER, POINTER, *(INT,) * 4),
    "pds_attention_scratch_size": (INT, *(POINTER,) * 3),
    "pds_paged_attention": (
        POINTER,
        INT,
        INT,
        POINTER,
        INT,
        POINTER,
        FLOAT,
        INT,
        FLOAT,
        POINTER,
        POINTER,
    ),
    "pds_decoder_workspace_size": (POINTER, POINTER, POINTER),
    "pds_run_decoder": (POINTER,) * 5,
    "pds_group_sum": (POINTER, POINTER, POINTER, INT),
    "pds_group_gather": (POINTER, POINTER, POINTER, INT),
    "pds_group_broadcast": (POINTER, POINTER, INT),
    "pds_reshape_and_cache": (POINTER, INT, INT, POINTER, *(INT,) * 3, POINTER, INT, POINTER),
}


class Loaded(NamedTuple):
    """The kernels that run, and the instruction set they are compiled for."""

    isa: str
    functions: ctypes.CDLL


def library() -> ctypes.CDLL:
    """Return the kernels for this machine, compiled at the first call if they have to be.

    Raises KernelsUnavailable, always if once; the first time also logs why, as a warning.
    """
    functions = _loaded().functions
    # OpenMP keeps a number of threads for each thread that calls it; this tells it torch's.
    torch.get_num_threads()
    return functions


def loaded_isa() -> str:
    """Return the instruction set of `library`: the best that there is a library for.

    Raises as `library` does.
    """
    return _loaded().isa


def library_file() -> str:
    """Return the name of the file of `library`, which has the instruction set and a digest of the
    sources in it.

    Raises as `library` does.
    """
    return Path(_loaded().functions._name).name


def pin_threads(cores: Sequence[int]) -> None:
    """Have the compute thread of each rank but 0, the caller's own, run on cores[rank] from now on.

    Raises KernelsUnavailable. No kernel may be running.
    """
    ranked = (ctypes.c_int32 * len(cores))(*cores)
    library().pds_pin_threads(ctypes.addressof(ranked), len(cores))


def address(tensor: torch.Tensor | None) -> int | None:
    """Return what the C++ gets for a tensor [...] of any dtype, or for one that is missing."""
    return None if tensor is None else tensor.data_ptr()


@cache
def load_library(isa: str) -> ctypes.CDLL:
    """Return the kernels for an instruction set. Raises KernelsUnavailable."""
    from pdserve_kernels.cpu.build import build  # here, so that it can be run with `python -m`

    try:
        path = build(isa)
        # The kernels' OpenMP calls are resolved by this: the runtime whose threads torch uses.
        ctypes.CDLL(_openmp_runtime(), mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(str(error)) from error
    for name, argtypes in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = argtypes, None
    return loaded


def _loaded() -> Loaded:
    loaded = _load_once()
    if isinstance(loaded, str):
        raise KernelsUnavailable(loaded)
    return loaded


@cache
def _load_once() -> Loaded | str:
    """Return the kernels of the first instruction set that has some, or why there are none.

    A compiler may be too old for the best one.
    """
    reasons: list[str] = []
    for isa in wanted_isas():
        try:
            loaded = Loaded(isa, load_library(isa))
        except KernelsUnavailable as error:
            reasons.append(str(error))
            continue
        if reasons:
            logger.warning(
                "the CPU runs on kernels for %s, the best that could be made: %s",
                isa,
                "; ".join(reasons),
            )
        return loaded
    reasons = reasons or ["no kernels for this processor, or told to use none"]
    reason = "; ".join(dict.fromkeys(reasons))  # without a compiler all have the same
    logger.warning("the CPU runs on reference kernels, which are several times slower: %s", reason)
    return reason


def _openmp_runtime() -> str:
    """Return the file of the OpenMP runtime that torch has loaded. Raises OSError."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if line.count("/")}
    runtimes = [p for p in paths if Path(p).name.startswith(("libgomp", "libiomp", "libomp"))]
    own = [p for p in runtimes if p.startswith(os.path.dirname(torch.__file__))]
    candidates = own or runtimes
    if len(candidates) != 1:
        raise OSError(f"torch's OpenMP runtime is not clear: {', '.join(runtimes) or 'none'}")
    return candidates[0]
