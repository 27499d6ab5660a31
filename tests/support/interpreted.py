"""Tests of Triton kernels without a GPU, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

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
