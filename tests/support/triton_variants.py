"""What Triton would compile for a GPU: the variants of kernels that are launched, none of which is
computed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.triton_kernels import triton_kernels

# By kernel what it is compiled for: its arguments' types and what is known of them, and options.
Variants = dict[str, set[str]]


class Recorder:
    """The variants that were launched."""

    def __init__(self) -> None:
        self._launched: Variants = defaultdict(set)

    def add(self, name: str, variant: str) -> None:
        self._launched[name].add(variant)

    def of(self, work: Callable[[], object]) -> Variants:
        """Return what a function's launches need."""
        self._launched.clear()
        work()
        return dict(self._launched)


@contextmanager
def recorded_variants() -> Iterator[Recorder]:
    """Within, launches of Triton's kernels are recorded as an H100 would compile them, and leave
    their outputs as they are. Not for the interpreter.
    """
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    recorder = Recorder()

    def record(name: str, kernel: Any) -> Callable[..., None]:
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)

        def run(*args: object, grid: object, warmup: bool, **options: object) -> None:
            _, specialization, rest = binder(*args, **options)
            recorder.add(name, str((specialization, rest)))

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name, kernel in triton_kernels():
            patch.setattr(kernel, "run", record(name, kernel))
        yield recorder
