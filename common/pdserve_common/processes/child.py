"""A child process, as its parent sees it."""

import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Union

from pdserve_common.processes import lifecycle

logger = logging.getLogger(__name__)

# A process that was killed has so long to end.
EXIT_TIMEOUT_S = 5.0
# A process whose socket has closed is on its way out.
DESCRIBE_TIMEOUT_S = 1.0


class _Fork:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """However long it takes: it is killed before it is waited for."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


Process = Union["subprocess.Popen[bytes]", _Fork]


class ChildProcess:
    """A child, and our ends of the sockets to it. Where the system can tell, it dies with the
    thread that has started it.
    """

    def __init__(self, name: str, process: Process, sockets: Sequence[socket.socket]) -> None:
        """`name` is for logs; `start` and `fork` have the rest."""
        self._name = name
        self._process = process
        self.sockets = sockets

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End it now. Any thread: one that waits for it hears of it."""
        self._process.kill()

    def end(self, timeout_s: float) -> int:
        """Wait for its end, which it was asked for, and kill it after so long; return its exit
        status.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        logger.warning("%s does not end and is killed", self._name)
        self._process.kill()
        return self._process.wait()

    def close(self) -> None:
        """Kill it, if it has not ended, and close the sockets. Where others take all of the
        processor it may take its time to die: it is not waited for longer, and reaped with the
        start of another process.
        """
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_TIMEOUT_S)
        for each in self.sockets:
            each.close()

    def describe_end(self) -> str:
        """Say how it has ended, to stand behind its name; nothing if it has not."""
        try:
            status = self._process.wait(DESCRIBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return ""
        if status >= 0:
            return f"ended with status {status}"
        return f"was ended by {signal.Signals(-status).name}"


def start(
    module: str,
    arguments: Sequence[str] = (),
    *,
    num_sockets: int = 1,
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> tuple[Process, list[socket.socket]]:
    """Start `python -m module FD... ARGUMENT...`, with the descriptors of its ends of sockets in
    front; return it and our ends. It inherits `pass_fds`, too, and this environment or ours. Raises
    OSError.
    """
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        pairs = [socket.socketpair() for _ in range(num_sockets)]
        sockets = [ours.enter_context(pair[0]) for pair in pairs]
        fds = [theirs.enter_context(pair[1]).fileno() for pair in pairs]
        process = spawn(module, [*map(str, fds), *arguments], pass_fds=[*fds, *pass_fds], env=env)
        ours.pop_all()
    return process, sockets


def fork(run: Callable[[socket.socket], object]) -> tuple[Process, list[socket.socket]]:
    """Start a copy of this process, which runs a function with its end of a socket and ends with
    that. This process must have no thread besides, no connection and no port that it listens on.
    """
    ours, theirs = socket.socketpair()

    def run_child() -> None:
        ours.close()
        run(theirs)

    # What is there already is not copied when a collection looks at it.
    gc.freeze()
    with theirs:
        pid = lifecycle.fork(run_child)
    gc.unfreeze()
    return _Fork(pid), [ours]


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
