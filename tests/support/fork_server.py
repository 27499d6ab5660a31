"""Forks services out of processes that have imported what these need: an import of torch takes
several times the CPU of all the rest of a small worker's start.

From its module's `__main__` on a fork does what a service does that was started by itself. It has
the fork server's command line, though, and is the fork server's child.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from pdserve_common.confined import die_with_parent

SERVICE_MODULES = ("pdserve_prefill.__main__", "pdserve_decode.__main__")
ENGINE_MODULES = ("pdserve_engine.clients.loading", "pdserve_engine.executor.build")
ROUTER_MODULES = ("pdserve_router.__main__", "pdserve_router.server")
# A process id, then a status as `waitpid` returns it.
NUMBER = struct.Struct("!q")
MAX_JOB_BYTES = 1 << 17
# For a fork server's imports, however busy the machine is, and for its end.
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 60.0
# Where `ip netns` keeps network namespaces.
NAMESPACES = Path("/run/netns")
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_SLAVE, MS_REC, MNT_DETACH = 1 << 19, 1 << 14, 2


class Job(NamedTuple):
    """What a fork becomes."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    # Of networks; "" is ours.
    namespace: str

    @property
    def imported(self) -> Sequence[str]:
        """The modules that it finds imported; torch is with the engine."""
        if self.module == "pdserve_router":
            return ROUTER_MODULES
        if "--engine-process=subprocess" in self.arguments:
            return SERVICE_MODULES
        return (*SERVICE_MODULES, *ENGINE_MODULES)


class ForkedProcess(subprocess.Popen[bytes]):
    """A service as if it had been started by `subprocess.Popen`, in a session of its own. It is
    killed when the fork server ends, and that ends with us.
    """

    def __init__(self, job: Job, *, log: IO[bytes], has_stdin: bool = False) -> None:
        """It writes to `log`. With `has_stdin` there is a pipe to it, else it reads nothing."""
        self.args = [job.module, *job.arguments]
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._status, theirs = socket.socketpair()
        self._status.settimeout(START_TIMEOUT_S)
        if has_stdin:
            stdin, ours = os.pipe()
            self.stdin = os.fdopen(ours, "wb", buffering=0)
        else:
            stdin = os.open(os.devnull, os.O_RDONLY)
        with theirs:
            try:
                _server(job.imported).send(job, (stdin, log.fileno(), theirs.fileno()))
            finally:
                os.close(stdin)
        self.pid = self._receive()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self._end()
        assert self.returncode is not None
        return self.returncode

    def _end(self) -> None:
        self.returncode = os.waitstatus_to_exitcode(self._receive())
        self._status.close()
        if self.stdin is not None:
            self.stdin.close()

    def _receive(self) -> int:
        data = self._status.recv(NUMBER.size)
        assert data, "the fork server has ended"
        (number,) = NUMBER.unpack(data)
        return int(number)


class _Server:
    def __init__(self, modules: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.fork_server", str(theirs.fileno()), *modules],
                # numpy's BLAS would start a thread at its import.
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path),
                    "OPENBLAS_NUM_THREADS": "1",
                },
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        """Wait for its end, so that its time is counted as ours."""
        self._control.close()
        self._process.wait(END_TIMEOUT_S)

    def send(self, job: Job, fds: Sequence[int]) -> None:
        socket.send_fds(self._control, [json.dumps(job).encode()], fds)


@functools.cache
def _server(modules: Sequence[str]) -> _Server:
    """Return the one with these modules, which the first who needs it starts."""
    server = _Server(modules)
    atexit.register(server.close)
    return server


# ---- in the fork server


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    control = socket.socket(fileno=int(sys.argv[1]))
    modules = tuple(sys.argv[2:])
    if modules == ROUTER_MODULES:
        from pdserve_router.api.no_torch import hide_torch

        hide_torch()
    for module in modules:
        importlib.import_module(module)
    # A library's threads would not be there in a fork.
    assert len(os.listdir("/proc/self/task")) == threading.active_count() == 1
    gc.collect()
    gc.freeze()
    job = _serve(control)
    if job is not None:
        _become(job)


def _serve(control: socket.socket) -> Job | None:
    """Fork for each job, and tell how each fork has ended. Return the job in the fork; None when
    nobody asks any more.
    """
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    forks: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            _tell_ended(forks)
        if control not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(control, MAX_JOB_BYTES, 3)
        if not data:
            return None
        stdin, log, status = fds
        forks_status = socket.socket(fileno=status)
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for each in (control, wake, woken, forks_status, *forks.values()):
                each.close()
            for number, fd in enumerate((stdin, log, log)):
                os.dup2(fd, number)
            os.close(stdin)
            os.close(log)
            return Job(*json.loads(data))
        forks[pid] = forks_status
        forks_status.send(NUMBER.pack(pid))
        os.close(stdin)
        os.close(log)


def _tell_ended(forks: dict[int, socket.socket]) -> None:
    for pid in list(forks):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            continue
        # Maybe nobody asks for it any more.
        with forks.pop(pid) as connection, contextlib.suppress(OSError):
            connection.send(NUMBER.pack(status))


def _become(job: Job) -> None:
    """Run the service, as an interpreter does that starts with this environment."""
    os.setsid()
    die_with_parent()
    if job.namespace:
        _enter(job.namespace)
    os.environ.clear()
    os.environ.update(job.environment)
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    importlib.invalidate_caches()
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    sys.argv = [job.module, *job.arguments]
    del sys.modules[f"{job.module}.__main__"]  # its imports are what it was imported for
    runpy.run_module(job.module, run_name="__main__", alter_sys=True)


def _enter(namespace: str) -> None:
    """Do what `ip netns exec` does: /sys shows the devices of the namespace that mounts it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: object) -> None:
        if getattr(libc, function)(*arguments):
            raise OSError(ctypes.get_errno(), function)

    with (NAMESPACES / namespace).open() as file:
        call("setns", file.fileno(), CLONE_NEWNET)
    call("unshare", CLONE_NEWNS)
    call("mount", b"", b"/", None, MS_SLAVE | MS_REC, None)
    call("umount2", b"/sys", MNT_DETACH)
    call("mount", namespace.encode(), b"/sys", b"sysfs", 0, None)


if __name__ == "__main__":
    main()
