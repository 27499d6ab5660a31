"""All kernels in Triton, and where they run in tests: on a GPU, or interpreted on the CPU."""

import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import pytest
import torch

from pdserve_kernels.kv_scales import KVScales

T = TypeVar("T", bound=Callable[..., Any])

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# A suite of kernels.
ON_GPU_OR_INTERPRETED = [
    pytest.mark.gpu,
    pytest.mark.interpreted,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="needs an NVIDIA GPU, or TRITON_INTERPRET=1",
    ),
]
# The interpreter truncates to bf16 where a GPU rounds, and its bf16 tl.dot returns nonsense.
DTYPES = [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def in_the_interpreter(test: T) -> T:
    """Mark a test that stands in for a GPU."""
    skip = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
    marked: T = pytest.mark.interpreted(skip(test))
    return marked


def triton_kernels() -> Iterator[tuple[str, Any]]:
    """Yield each kernel's name and the kernel; needs Triton."""
    import pdserve_kernels.triton as package

    for module in pkgutil.walk_packages(package.__path__, prefix=f"{package.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if name.endswith("_kernel"):
                yield name, value


def num_compiled() -> dict[str, int]:
    """Return how many variants of each kernel this process has compiled."""
    return {
        name: sum(len(compiled) for compiled, *_ in kernel.device_caches.values())
        for name, kernel in triton_kernels()
    }


def on_device(value: Any) -> Any:
    """Return the same with all its tensors where kernels run."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.init]
        return replace(value, **{name: on_device(getattr(value, name)) for name in names})
    if isinstance(value, tuple) and not isinstance(value, KVScales):
        return tuple(map(on_device, value))
    return value


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare what a kernel brought in this dtype."""
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)
