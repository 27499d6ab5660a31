"""Which kernels the CPU runs on."""

from typing import NoReturn

import pytest

from pdserve_kernels.cpu import compiled
from pdserve_kernels.cpu.isa import KernelsUnavailable, supported_isas

ISAS = ("avx512bf16", "avx2")


def without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no compiler: the reference kernels are selected."""

    def library() -> NoReturn:
        raise KernelsUnavailable("not in this test")

    monkeypatch.setattr(compiled, "library", library)


def use_isa(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels run on this instruction set; the test is skipped where there is none."""
    if isa not in supported_isas():
        pytest.skip(f"this processor has no {isa}")
    try:
        loaded = compiled.Loaded(isa, compiled.load_library(isa))
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setattr(compiled, "_load_once", lambda: loaded)
