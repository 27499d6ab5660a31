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
from typing import Protocol

from pdserve_common.processes import lifecycle

logger = logging.getLogger(__name__)


class Process(Protocol):
    """What `subprocess.Popen` and a fork have in common."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class ChildProcess:
    """A child, and our ends of the sockets to it. Where the system can tell, it dies with the
    thread that has started it.
    """

    def __init__(self, name: str, process: Process, sockets: Sequence[socket.socket]) -> None:
        """`name` is for logs."""
        self._name = name
        self._process = process
        self.sockets = sockets

    @classmethod
    def start(
        cls,
        name: str,
        module: str,
        arguments: Sequence[str] = (),
        *,
        num_sockets: int = 1,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
    ) -> "ChildProcess":
        """Start `python -m module FD... ARGUMENT...`, with the descriptors of its ends in front. It
        inherits `pass_fds`, too, and this environment or ours. Raises OSError.
        """
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            pairs = [socket.socketpair() for _ in range(num_sockets)]
            sockets = [ours.enter_context(pair[0]) for pair in pairs]
            fds = [theirs.enter_context(pair[1]).fileno() for pair in pairs]
            process = spawn(
                module, [*map(str, fds), *arguments], pass_fds=[*fds, *pass_fds], env=env
            )
            ours.pop_all()
        return cls(name, process, sockets)

    @classmethod
    def fork(cls, name: str, run: Callable[[socket.socket], object]) -> "ChildProcess":
        """Start a copy of this process, which runs a function with its end and ends with that. This
        process must have no thread besides, no connection and no port that it listens on.
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
        return cls(name, _Fork(pid), [ours])

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End it now. Any thread: one that waits for it hears of it."""
        self._process.kill()

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit status; None if it has not ended after so long."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, timeout_s: float) -> int:
        """Wait for its end, which it was asked for, and kill it after so long; return its exit
        status.
        """
        status = self.wait(timeout_s)
        if status is not None:
            return status
        logger.warning("%s does not end and is killed", self._name)
        self._process.kill()
        return self._process.wait()

    def close(self) -> None:
        """Close the sockets."""
        for each in self.sockets:
            each.close()


class _Fork:
    """Implements Process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """However long it takes: it is killed before it is waited for."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


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


def describe_end(status: int) -> str:
    """Say how a process has ended, to stand behind its name."""
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by {signal.Signals(-status).name}"
