"""Tests of Triton kernels without a GPU, in Triton's interpreter."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

TIMEOUT_S = 900.0


def run_interpreted(suite: Path) -> str:
    """Run a file of tests in a process of its own, as Triton reads its variable when a kernel is
    defined; return what pytest printed. Fails if one of the tests does.
    """
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
    return result.stdout


def convert_fp8_as_gpus_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch convert numbers from and to FP8 in the interpreter, whose own conversion drops a
    carry into the exponent, rounds halves up, and has no NaN.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
    }
    convert = interpreter._convert_float

    def convert_by_torch(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if tl.float8e4nv not in (source, target):
            return convert(values, source, target, rounding_mode)
        bits = torch.frombuffer(bytearray(values.tobytes()), dtype=torch.uint8)
        converted = bits.view(dtypes[source]).to(dtypes[target]).view(torch.uint8)
        unsigned = np.dtype(f"uint{target.primitive_bitwidth}")
        return converted.numpy().view(unsigned).reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert_by_torch)


class _Event:
    """Of a device that is never behind."""

    def __init__(self, **options: object) -> None:
        self.num_queries = 0

    def record(self) -> None: ...

    def query(self) -> bool:
        """Say once that it is not over, as a step that runs would."""
        self.num_queries += 1
        return self.num_queries > 1

    def synchronize(self) -> None: ...


@contextmanager
def prompt_events() -> Iterator[None]:
    """Within, CUDA's events are over at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", _Event)
        yield


@contextmanager
def interpreted_kernels(kernels: Any = None) -> Iterator[None]:
    """A Driver that is made within has the kernels, the model and the runner of CUDA, on the CPU:
    for the interpreter. Unless other kernels are given they are Triton's.
    """
    from pdserve_engine.models import llama
    from pdserve_engine.runner.runner_class import cuda_runner_class
    from pdserve_engine.sampling import state
    from pdserve_kernels import triton
    from support import model_driver

    with pytest.MonkeyPatch.context() as patch:
        for module in (llama, state):
            patch.setattr(module, "select", lambda device: kernels or triton)
        patch.setattr(llama, "is_mapped", lambda device: False)
        patch.setattr(model_driver, "runner_class", cuda_runner_class)
        yield
