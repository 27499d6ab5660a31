"""What a process runs. An engine and its ranks have to run the same."""

from collections.abc import Mapping, Sequence

import torch

from pdserve_common.version import VERSION
from pdserve_kernels.cpu.compiled import library_file
from pdserve_kernels.cpu.isa import KernelsUnavailable


def this_build() -> dict[str, str]:
    """Return what may differ between two processes that are started one after the other: packages
    may be installed anew meanwhile, kernels compiled anew. All else a rank has from its engine.
    """
    try:
        kernels = library_file()
    except KernelsUnavailable:
        kernels = "none"
    return {"pdserve": VERSION, "torch": str(torch.__version__), "CPU kernels": kernels}


def check_equal(
    owner: str, expected: Mapping[str, object], ranks: Sequence[Mapping[str, object]]
) -> None:
    """Raises ValueError, with the difference, for a rank that has another mapping than `expected`,
    the owner's.
    """
    for rank, found in enumerate(ranks):
        for name in sorted(expected.keys() | found.keys()):
            theirs, ours = found.get(name), expected.get(name)
            if theirs != ours:
                raise ValueError(f"{name} of rank {rank} is {theirs}, {owner}'s is {ours}")
