"""All kernel sets have the same functions, with the same parameters."""

import importlib
import inspect
from types import ModuleType

import pytest
import torch

from pdserve_kernels import cpu, reference, select


@pytest.fixture(params=["cpu", "triton", "triton.deterministic", "triton.flash_attn"])
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    if request.param.startswith("triton"):
        pytest.importorskip("triton")
    return importlib.import_module(f"pdserve_kernels.{request.param}")


def test_they_export_what_the_reference_does(kernels: ModuleType) -> None:
    # Nobody needs its name of a set.
    names = {*kernels.__all__, "LinearWeight"}
    assert names == set(reference.__all__)


def test_their_functions_take_what_the_reference_s_take(kernels: ModuleType) -> None:
    for name in set(reference.__all__) - {"LinearWeight"}:
        expected = inspect.signature(getattr(reference, name)).parameters
        actual = inspect.signature(getattr(kernels, name)).parameters
        assert list(actual) == list(expected), name
        kinds = [(p.kind, p.default) for p in actual.values()]
        assert kinds == [(p.kind, p.default) for p in expected.values()], name


def test_a_cpu_has_one_of_two_sets() -> None:
    assert select(torch.device("cpu")) in (cpu, reference)
