"""Tests of Triton kernels without a GPU, in Triton's interpreter."""

import os
import subprocess
import sys
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
