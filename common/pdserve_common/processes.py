"""How services start processes of their own, and how processes end."""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn


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


def end_now(status: int) -> NoReturn:
    """End this process without what an interpreter does at its end: that waits for threads, which
    may hang, and takes a second of CPU with torch. The system releases all that is left.
    """
    logging.shutdown()
    os._exit(status)
