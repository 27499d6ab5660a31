"""How services start processes of their own."""

import subprocess
import sys
from collections.abc import Mapping, Sequence


def spawn(
    module: str,
    arguments: Sequence[str],
    *,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start `python -m module` with these arguments, and in this environment or in ours. It reads
    nothing, writes where we do, and inherits the descriptors. Raises OSError.
    """
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=pass_fds, env=env)
