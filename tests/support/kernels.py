"""Which kernels the CPU runs on."""

from typing import NoReturn

import pytest

from pdserve_kernels.cpu import compiled
from pdserve_kernels.cpu.isa import KernelsUnavailable


def without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no compiler: the reference kernels are selected."""

    def library() -> NoReturn:
        raise KernelsUnavailable("not in this test")

    monkeypatch.setattr(compiled, "library", library)
