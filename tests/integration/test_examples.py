"""The examples, as a reader runs them. Those for JavaScript run with `make clients`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
INTERPRETERS = {".py": sys.executable, ".sh": "sh"}
TIMEOUT_S = 180


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.[ps][yh]")), ids=lambda path: path.name)
def test_it_shows_an_answer(path: Path, stack) -> None:
    environment = {
        **os.environ,
        "PDSERVE_URL": f"http://127.0.0.1:{stack.http_port}",
        "PDSERVE_ADDRESS": stack.grpc_address,
        "PDSERVE_MODEL": stack.served_model.name,
    }
    run = subprocess.run(
        [INTERPRETERS[path.suffix], str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    end = "data: [DONE]" if path.suffix == ".sh" else ""
    assert run.stdout.strip().endswith(end)
    assert len(run.stdout.strip()) > len(end)
