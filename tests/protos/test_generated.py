"""The committed generated code is what the .proto files say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROTOS = sorted((ROOT / "protos/pdserve/v1").glob("*.proto"))


def test_regenerating_changes_nothing(tmp_path: Path) -> None:
    flags = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *flags]
    subprocess.run([*command, *map(str, PROTOS)], check=True)
    committed = [path for path in (ROOT / "protos/pdserve/v1").iterdir() if "_pb2" in path.name]
    assert len(committed) == 3 * len(PROTOS) - 1  # engine_core.proto has no service
    for path in committed:
        assert path.read_text() == (tmp_path / "pdserve/v1" / path.name).read_text(), path.name
