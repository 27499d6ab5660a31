"""All kernels in Triton."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any


def triton_kernels() -> Iterator[tuple[str, Any]]:
    """Yield each kernel's name and the kernel; needs Triton."""
    import pdserve_kernels.triton as package

    for module in pkgutil.walk_packages(package.__path__, prefix=f"{package.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if name.endswith("_kernel"):
                yield name, value
